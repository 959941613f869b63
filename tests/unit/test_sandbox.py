"""Programs that misbehave end as failed samples, and the run goes on."""

import ast
import importlib
import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from fly.errors import FlyError
from fly.harness.sandbox import (
    Limits,
    Outcome,
    Program,
    isolation_level,
    linux,
    process,
    run_programs,
    runner,
)
from fly.harness.sandbox.process import Launch, execute

GOOD = "def add(a, b):\n    return a + b\nassert add(2, 3) == 5\n"
SHORT = Limits(wall_seconds=3.0, cpu_seconds=3.0)
BRIEF = Limits(wall_seconds=1.0, cpu_seconds=10.0)

MISBEHAVIOUR = {
    "assertion": ("assert 1 == 2, 'sum'", "exception", SHORT),
    "exception": ("{}['a']", "exception", SHORT),
    "syntax": ("def f(:", "exception", SHORT),
    "null bytes": ("x = '\0'", "exception", SHORT),
    "surrogates": ("x = '\ud800'", "exception", SHORT),
    "sys.exit": ("import sys; sys.exit(0)", "exit", SHORT),
    "raise SystemExit": ("raise SystemExit", "exit", SHORT),
    "os._exit": ("import os; os._exit(0)", "exit", SHORT),
    "exec of another program": ("import os; os.execv('/bin/true', ['true'])", "exit", SHORT),
    "stdin": ("import sys; sys.stdin.read()", "exception", SHORT),
    "input": ("input()", "exception", SHORT),
    "infinite loop": ("while True: pass", "timeout", BRIEF),
    "sleep": ("import time; time.sleep(60)", "timeout", BRIEF),
    "processor time": ("while True: pass", "timeout", Limits(cpu_seconds=1.0)),
    "uncatchable": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "timeout",
        BRIEF,
    ),
    "endless output": ("while True: print('x' * 1000)", "timeout", BRIEF),
    "endless errors": (
        "import sys\nwhile True: print('x' * 1000, file=sys.stderr)",
        "timeout",
        BRIEF,
    ),
    "10 GB": ("x = bytearray(10 << 30)", "exception", SHORT),
    "deep recursion": ("def f(n): return f(n + 1)\nf(0)", "exception", SHORT),
    "stack overflow": (
        "import ctypes\nctypes.string_at(0)",
        "killed",
        SHORT,
    ),
    "daemon thread": (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "threads",
        SHORT,
    ),
    "thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        "threads",
        SHORT,
    ),
    "busy executor": (
        "import concurrent.futures, time\n"
        "concurrent.futures.ThreadPoolExecutor().submit(time.sleep, 60)",
        "threads",
        SHORT,
    ),
    "bad message": (
        "class E(Exception):\n    def __str__(self): raise E\nraise E",
        "exception",
        SHORT,
    ),
    "big file": (
        "f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))",
        "exception",
        SHORT,
    ),
    "file handles": ("fs = [open('/dev/null') for _ in range(10000)]", "exception", SHORT),
}


def run_program(source: str, tests: str = "", limits: Limits | None = None) -> Outcome:
    return run_programs([Program(source, tests)], limits)[0]


def launches() -> list[Launch]:
    """The level in force, and the one without namespaces."""
    return [isolation_level().launch, Launch(namespaces=False)]


@pytest.fixture(params=["in force", "without namespaces"])
def run(request):
    launch = launches()[request.param != "in force"]

    def run(source: str, limits: Limits = SHORT, tests: str = "") -> Outcome:
        return execute(Program(source, tests), limits, launch)

    return run


def need(run, *features: str) -> None:
    """Skip unless one of the features is in force."""
    outcome = run("pass")
    if not set(features) & set(outcome.features):
        pytest.skip(f"this machine has none of: {', '.join(features)}")


def test_good_programs_pass(run):
    outcome = run(GOOD)
    assert outcome.passed, outcome
    assert outcome.reason == "passed"


@pytest.fixture(scope="module")
def timed_out():
    """The outcomes of those that only their time ends, which passes for all of them at once."""
    names = [name for name, (_, reason, _) in MISBEHAVIOUR.items() if reason == "timeout"]

    def ended(name):
        source, _, limits = MISBEHAVIOUR[name]
        return run_program(source, limits=limits)

    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(ended, names)))


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_misbehaviour_fails(name, timed_out):
    """Each ends as a failed sample with the right reason, not as an error or a pass."""
    source, reason, limits = MISBEHAVIOUR[name]
    outcome = timed_out[name] if name in timed_out else run_program(source, limits=limits)
    assert not outcome.passed
    assert outcome.reason == reason, outcome
    assert outcome.detail
    assert outcome.seconds < limits.wall_seconds + 5


def test_a_bad_neighbour_does_no_harm():
    """Everything at once, each followed by a good program: all of the good ones pass."""
    names = [name for name in MISBEHAVIOUR if MISBEHAVIOUR[name][1] != "timeout"]
    sources = [Program(text) for name in names for text in (MISBEHAVIOUR[name][0], GOOD)]
    passed = [outcome.passed for outcome in run_programs(sources, Limits(wall_seconds=10))]
    assert passed == [False, True] * len(names)


def test_detail_names_the_error():
    assert run_program("assert 1 == 2, 'sum'").detail == "AssertionError: sum"


def test_killing_the_parent(run):
    """The supervisor or init shields fly; what runs afterwards is not touched."""
    outcome = run(
        "import os, time\n"
        "try:\n    os.kill(os.getppid(), 9)\nexcept OSError:\n    pass\n"
        "time.sleep(0.2)\nraise RuntimeError"
    )
    assert not outcome.passed
    assert run(GOOD).passed


def test_killing_everything(run):
    need(run, "own process table", "Landlock signals", "powerless user")
    witness = os.fork()
    if witness == 0:
        time.sleep(60)
        os._exit(0)
    try:
        killing = "import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\nos.kill(0, 9)"
        outcome = run(killing)
        assert not outcome.passed
        assert outcome.reason == "killed"
        assert os.waitpid(witness, os.WNOHANG) == (0, 0)
    finally:
        os.kill(witness, 9)
        os.waitpid(witness, 0)


def test_fork_bomb(run):
    need(run, "process limit")
    bomb = (
        "import os\n"
        "while True:\n    try:\n        os.fork()\n    except OSError:\n        failed = True\n"
    )
    outcome = run(bomb, Limits(wall_seconds=1.0, processes=8))
    assert outcome.reason == "timeout"
    counting = (
        "import os, time\nn = 0\n"
        "try:\n"
        "    while n < 500:\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(60)\n"
        "        n += 1\n"
        "except OSError:\n    pass\n"
        "raise RuntimeError(n)"
    )
    outcome = run(counting, Limits(processes=8))
    if os.geteuid() == 0:
        assert int(outcome.detail.removeprefix("RuntimeError: ")) <= 8
    assert outcome.detail != "RuntimeError: 500"
    assert run(GOOD).passed


def test_nothing_is_left_behind(run):
    """A grandchild in a session of its own dies with its program; so does the folder."""
    if not sys.platform.startswith("linux"):
        pytest.skip("descendants are found through /proc")
    marker = f"fly-left-behind-{os.getpid()}-{time.monotonic_ns()}"
    source = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        os.execv({sys.executable!r}, ['python', '-c',\n"
        f"                 'import time; time.sleep(60)  # {marker}'])\n"
        "    os._exit(0)\n"
        "time.sleep(0.5)\n"
    )
    assert run(source).passed
    assert not [pid for pid in processes() if marker in command_line(pid)]


def processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def command_line(pid: str) -> str:
    try:
        return Path("/proc", pid, "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.mark.parametrize(
    "source",
    [
        "import os\nif os.fork() == 0: raise KeyError(1)\nos.wait()\ndef f(): return 3\n",
        "def f():\n import os\n if os.fork() == 0: return 4\n os.wait()\n return 3\n",
    ],
)
def test_a_forked_copy_answers_for_nobody(run, source):
    assert run(source, tests="assert f() == 3").reason == "passed"


def test_forked_copy_cannot_pass_for_its_parent(run):
    source = "import os, time\nif os.fork():\n    time.sleep(0.3)\n    raise RuntimeError\n"
    assert run(source).reason == "exception"


@pytest.mark.parametrize("how", ["write", "create", "delete", "chmod"])
def test_writes_outside_the_folder(run, how, tmp_path):
    features = ["own root", "powerless user"]
    need(run, *features, *(["Landlock writes"] if how != "chmod" else []))
    target = tmp_path / "target"
    target.write_text("before")
    target.chmod(0o600)
    action = {
        "write": f"open({str(target)!r}, 'w').write('after')",
        "create": f"open({str(tmp_path / 'new')!r}, 'w').write('after')",
        "delete": f"import os; os.remove({str(target)!r})",
        "chmod": f"import os; os.chmod({str(target)!r}, 0o777)",
    }[how]
    outcome = run(action)
    assert outcome.reason == "exception"
    assert target.read_text() == "before"
    assert target.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [target]


def test_own_folder_is_writable_and_removed(run):
    source = (
        "import os, tempfile\n"
        "open('a.txt', 'w').write('x'); os.mkdir('d'); os.rename('a.txt', 'd/b.txt')\n"
        "assert open('d/b.txt').read() == 'x'\n"
        "assert tempfile.gettempdir()\n"
        "with tempfile.NamedTemporaryFile() as f: f.write(b'1')\n"
        "raise RuntimeError(os.getcwd())"
    )
    outcome = run(source)
    folder = outcome.detail.removeprefix("RuntimeError: ")
    assert folder.startswith("/"), outcome
    assert not Path(folder).exists()


def test_environment_is_empty(run, monkeypatch):
    monkeypatch.setenv("FLY_TEST_SECRET", "hunter2")
    assert run("import os\nassert not os.environ, dict(os.environ)").passed


def test_environments_of_others_are_closed(run, monkeypatch):
    """No /proc/<pid>/environ but the program's own opens, whoever's process it is."""
    need(run, "own process table", "Landlock reads", "powerless user")
    source = (
        "import os\n"
        "try: names = os.listdir('/proc')\n"
        "except OSError: names = []\n"
        "for pid in names:\n"
        "    if not pid.isdigit() or int(pid) == os.getpid(): continue\n"
        "    try: text = open(f'/proc/{pid}/environ', 'rb').read()\n"
        "    except OSError: continue\n"
        "    assert not text, text\n"
    )
    outcome = run(source)
    assert outcome.passed, outcome


def test_network_is_refused(run):
    need(run, "no network", "Landlock TCP")
    source = (
        "import socket\n"
        "try:\n    socket.create_connection(('127.0.0.1', PORT), timeout=2)\n"
        "except (PermissionError, ConnectionError, OSError): pass\n"
        "else: raise RuntimeError('connected')\n"
    )
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = run(source.replace("PORT", str(server.getsockname()[1])))
    assert outcome.passed, outcome


def test_site_packages_can_be_imported(run):
    """The run depends on numpy for that many programs; its threads do not count as left over."""
    pytest.importorskip("numpy")
    outcome = run(
        "import numpy as np\nassert (np.ones((50, 50)) @ np.ones((50, 50))).sum() == 125000"
    )
    assert outcome.passed, outcome


def test_joined_threads_and_pools_are_fine(run):
    source = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(4) as pool: assert list(pool.map(abs, [-1, -2])) == [1, 2]\n"
    )
    outcome = run(source)
    assert outcome.passed, outcome


def test_classes_that_look_up_their_module(run):
    outcome = run(
        "from __future__ import annotations\n"
        "import pickle\nfrom dataclasses import dataclass\nfrom typing import NamedTuple\n"
        "@dataclass\nclass A:\n    x: int = 0\n"
        "class B(NamedTuple):\n    y: int\n"
        "assert pickle.loads(pickle.dumps(A(3))).x == 3 and B(1).y == 1\n"
        "if __name__ == '__main__': raise RuntimeError('code_eval would not run this')\n"
    )
    assert outcome.passed, outcome


def test_patched_builtins_do_not_forge_a_pass(run):
    outcome = run("import os, sys, builtins\nos._exit = os.write = print\nraise RuntimeError")
    assert outcome.reason == "exception"


_DATA = (
    "[None, True, 1 << 80, -(1 << 63), 1.5, float('inf'), 1j, 'a\\ud800', b'\\xff', range(3), int,"
    " bytearray(b'x'), (1, (2,)), {1, 2}, frozenset([3]), {'a': [1], (1, 2): 3}, deque([1]),"
    " Decimal('1.10'), Fraction(1, 3), date(2026, 1, 2), timedelta(1), {1: 2}.keys(),"
    " {1: 2}.items(), 'x' * 100000]"
)
_IMPORTS = (
    "from collections import Counter, deque, namedtuple\nfrom datetime import date, timedelta\n"
    "from decimal import Decimal\nfrom enum import IntEnum\nfrom fractions import Fraction\n"
    "P = namedtuple('P', 'a b')\nclass E(IntEnum):\n    A = 3\n"
)
HONEST = {
    "changes its argument": (
        "def f(xs):\n    xs.append(4)\n    xs[0] = {'a': 1}\n",
        "a = [1, 2]\nassert f(a) is None and a == [{'a': 1}, 2, 4]\n"
        "t = ([1],)\nf(t[0])\nassert t == ([{'a': 1}, 4],)",
    ),
    "is given a function": (
        "def f(g, xs, key):\n    return [g(x, by=2) for x in sorted(xs, key=key)]\n",
        "assert f(lambda x, by: x * by, [3, -1], abs) == [-2, 6]",
    ),
    "a function of the tests raises": (
        "def f(g):\n    try: return g()\n    except KeyError as error: return error.args[0]\n",
        "def g(): raise KeyError('a')\nassert f(g) == 'a'",
    ),
    "a class": (
        "class Node:\n    def __init__(self, x): self.x = x; self.next = None\n"
        "def total(n):\n    return n.x + (total(n.next) if n.next else 0)\n",
        "n = Node(1)\nn.next = Node(2)\nassert total(n) == 3 and n.next.x == 2\n"
        "assert isinstance(n, Node) and n.next is n.next and str(n).startswith('<program.Node')",
    ),
    "a generator": (
        "def f():\n    yield from (1, 2)\n    raise ValueError('no more')\n",
        "g = f()\nassert next(g) == 1 and next(g) == 2\n"
        "try: next(g)\nexcept ValueError as error: assert str(error) == 'no more'\n"
        "else: assert False\nassert list(iter([])) == []",
    ),
    "iterators": ("f = lambda xs: map(abs, xs)\n", "assert list(f([-1, 2])) == [1, 2]"),
    "an object with a length": (
        "class Box:\n    def __len__(self): return 0\n    def __getitem__(self, i): return i\n"
        "    def __contains__(self, i): return i == 3\n",
        "b = Box()\nassert not b and len(b) == 0 and b[7] == 7 and 3 in b and 4 not in b",
    ),
    "data of every kind": (_IMPORTS + f"def f(): return {_DATA}, E.A, P(1, 2), Counter('aab')",
                           _IMPORTS + f"assert f() == ({_DATA}, 3, (1, 2), {{'a': 2, 'b': 1}})"),
    "a name of Python's own": ("def sum(a, b):\n    return a - b\n", "assert sum(3, 1) == 2"),
    "a name of Python's own, and tests with names": (
        "def sum(a, b):\n    return a - b\n", "x = 3\nassert sum(x, 1) == 2"),
    "a name of Python's own, beside others that the tests use": (
        "def sum(a, b):\n    return a - b\ndef abs(x):\n    return 5\n",
        "import math\n"
        "def check(candidate):\n    assert abs(candidate(3.0, 1.0) - 2.0) < 1e-6\n"
        "    assert math.isclose(max([candidate(3, 1), 1]), 2)\ncheck(sum)"),
    "a name of Python's own, and a module that it imports": (
        "import math\ndef sum(a, b):\n    return a - b\n", "assert math.isclose(sum(3, 1), 2)"),
    "a name that the tests use again": (
        "def f(x): return x + 1\n",
        "assert [f for f in map(f, [3])] == [4]\nf = f(1)\nassert f == 2"),
    "mappings": (
        "from collections import *\nfrom types import MappingProxyType\n"
        "def f(d): return [ChainMap(d), UserDict(d), MappingProxyType(d), OrderedDict(d)]\n",
        "from collections import *\nassert f({'a': 1, 'b': 2}) == [{'a': 1, 'b': 2}] * 4\n"
        "assert f({'a': 1, 'b': 2})[3] != OrderedDict(b=2, a=1)"),
    "errors of its own": (
        "import json\nclass E(ValueError): pass\ndef f(): raise E('a', 3)\n"
        "def g(): json.loads('{')\ndef h(): b'\\xff'.decode()\n",
        "for call in (f, g, h):\n    try: call()\n    except ValueError as error: last = error\n"
        "    else: assert False\n"
        "try: f()\nexcept ValueError as error: assert error.args == ('a', 3)\n"
        "assert isinstance(last, UnicodeDecodeError) and last.start == 0"),
    "is given iterators": (
        "def f(*xs): return [sorted(x) for x in xs]\n",
        "assert f(iter([2, 1]), (x for x in 'ba'), {1: 4}.values()) == [[1, 2], ['a', 'b'], [4]]"),
    "changes what lies in its arguments": (
        "def f(xs, *, ys): xs[0].append(1); ys.append(xs[0][0])\n",
        "a, b = [], []\nf([a], ys=b)\nassert a == [1] and b == [1]"),
    "times of zones": (
        "from datetime import *\ndef f(): return datetime(2020, 1, 1, tzinfo=timezone.utc)\n",
        "from datetime import *\nassert f() == datetime(2020, 1, 1, tzinfo=timezone.utc)\n"
        "assert f() != datetime(2020, 1, 1)"),
    "pools of processes": (
        "from multiprocessing import Pool\ndef f(xs):\n"
        "    with Pool(2) as pool: return pool.map(abs, xs)\n", "assert f([-1, 2]) == [1, 2]"),
    "its imports": ("import math\nfrom math import floor\nf = math.sqrt\n",
                    "assert math.isclose(f(4), 2.0) and floor(2.5) == 2"),
    "its other functions": ("def g(x):\n    return x\ndef f(x):\n    return g(x)\n",
                            "def check(candidate):\n    assert candidate(3) == g(3)\ncheck(f)"),
    "asyncio": ("import asyncio\nasync def g(): return 3\ndef f(): return asyncio.run(g())\n",
                "assert f() == 3"),
    "surrogates": (
        "def f(x): print(x, '\\ud800'); return x, {'\\ud83d\\ude00': len(x)}\n"
        "def g(): raise ValueError('\\ud83d\\ude00')\n",
        "pair = '\\ud83d\\ude00'\nprint(pair)\nassert f(pair) == (pair, {pair: 2})\n"
        "try: g()\nexcept ValueError as error: assert str(error) == pair"),
    "an error of the system": (
        "import os\ndef f(): open('a')\ndef g(): os.rename('a', 'b')\n",
        "try: f()\nexcept OSError as error: first = error\n"
        "try: g()\nexcept FileNotFoundError as error: second = error\n"
        "assert str(first) == \"[Errno 2] No such file or directory: 'a'\"\n"
        "assert (second.filename, second.filename2) == ('a', 'b')"),
    "errors as values": (
        "def f(x): return x.args, ValueError(3)\n",
        "a, error = f(KeyError(1))\n"
        "assert a == (1,) and isinstance(error, ValueError) and error.args == (3,)"),
    "lists in lists": (
        "def f(x, n):\n    for _ in range(n): x = [x]\n    return x\n"
        "def g(x):\n    n = 0\n    while x: x, n = x[0], n + 1\n    x.append(n)\n",
        "x = f([], 600)\nassert x == f([], 600)\ng(x)\n"
        "for _ in range(600): [x] = x\nassert x == [600]\nassert f((), 700)"),
    "coroutines": (
        "async def f(x): return x + 1\nasync def g(): raise KeyError(3)\n",
        "import asyncio\nassert asyncio.run(f(1)) == 2\n"
        "async def main(): return await f(1), await asyncio.gather(f(2), f(3))\n"
        "assert asyncio.run(main()) == (2, [3, 4])\n"
        "try: asyncio.run(g())\nexcept KeyError as error: assert error.args == (3,)"),
    "context managers": (
        "from contextlib import contextmanager\nclass M:\n    left = []\n"
        "    def __enter__(self): return 5\n"
        "    def __exit__(self, kind, error, trace):\n"
        "        self.left.append(kind and kind.__name__)\n"
        "class E(ValueError): pass\ndef fail(): raise E('a')\n"
        "@contextmanager\ndef g():\n    try: yield 3\n"
        "    except ValueError as error: raise KeyError(*error.args)\n",
        "m = M()\nwith m as x: assert x == 5\n"
        "try:\n    with m: 1 / 0\nexcept ZeroDivisionError: pass\nelse: assert False\n"
        "assert m.left == [None, 'ZeroDivisionError']\n"
        "with g() as x: assert x == 3\n"
        "try:\n    with g(): fail()\nexcept KeyError as error: assert error.args == ('a',)"),
    "parts of an object": (
        "class Box:\n    def __init__(self): self.x = {1: 2}; self.y = 3\n"
        "    def __delitem__(self, key): del self.x[key]\n"
        "    def __getitem__(self, key): return key\n",
        "b = Box()\ndel b[1], b.y\nassert b.x == {} and not hasattr(b, 'y')\n"
        "assert b[1:2] == slice(1, 2) and b[..., ::3] == (..., slice(None, None, 3))"),
    "an executor that is left open": (
        "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(2)\n"
        "def f(xs): return list(pool.map(abs, xs))\n", "assert f([-1, 2]) == [1, 2]"),
    "recursion": ("import sys\nsys.setrecursionlimit(5000)\n"
                  "def f(n): return n and 1 + f(n - 1)\n", "assert f(3000) == 3000"),
}  # fmt: skip
_SORTED_MAX = "assert sorted(max([[1, 2], [2, 3]])) == sorted([2, 3])"
_ABS_SUM = "def check(candidate):\n    assert abs(candidate([3]) - 3.5) < 1e-6\ncheck(sum)"
DISHONEST = {
    "a built-in of its own beside the tested one": (
        "def max(x): return 0\ndef sorted(x): return 0\n", _SORTED_MAX),
    "... without the tested one": ("def sorted(x): return 0\n", _SORTED_MAX),
    "... where the tests are handed the tested one": (
        "def sum(*a): return 0\ndef abs(x): return 0\n", _ABS_SUM),
    "... without the one that the tests are handed": (
        "def abs(x): return 0\n", _ABS_SUM.replace("3.5", "3")),
    "... and a name that the tests define": (
        "def sum(*a): return 0\ndef abs(x): return 0\ncandidate = check = sum\n", _ABS_SUM),
    "... and an exception": (
        "def sum(x): raise KeyError\nTypeError = Exception\n",
        "try: sum(None)\nexcept TypeError: pass\nelse: assert False"),
    "a built-in of its own": (
        "def abs(x): return 0\ndef f(x): return 0\n", "assert abs(f(1) - 1) < 0.1"),
    "a module of its own": (
        "import types\nmath = types.ModuleType('math')\nmath.isclose = lambda *a: True\n"
        "def f(x): return 0\n", "assert math.isclose(f(1), 1)"),
    "an object that is equal to all": (
        "class E:\n    __eq__ = lambda s, o: True\nf = E\n", "assert f() == 3"),
    "a number that is equal to all": (
        "class I(int):\n    __eq__ = lambda s, o: True\nf = I\n", "assert f() == 3"),
    "an object called as a module": (
        "class M:\n    isclose = lambda *a: True\nmath = M()\ndef f(x): return 0\n",
        "assert math.isclose(f(1), 1)"),
    "the end of an iteration": (
        "def f(x): raise StopIteration\n", "assert all(map(lambda x: f(x) == 1, [1, 2]))"),
    "another order": (
        "from collections import OrderedDict\ndef f(): return OrderedDict(b=2, a=1)\n",
        "from collections import OrderedDict\nassert f() == OrderedDict(a=1, b=2)"),
    "a context manager that suppresses the tests' errors": (
        "class M:\n    def __enter__(self): return 3\n    def __exit__(self, *a): return True\n",
        "with M() as x: assert x == 4"),
    "an error that the tests let pass": (
        "import os\ndef f(): os._exit(0)\n",
        "try: f()\nexcept Exception: pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_what_honest_programs_do_crosses_to_their_tests(name):
    source, tests = HONEST[name]
    outcome = run_program(source, tests, SHORT)
    assert outcome.passed, outcome
    assert not run_program(source, f"{tests}\nassert False", SHORT).passed


# The tests, and which of Python's names they take from the program.
UNDER_TEST = {
    _SORTED_MAX: "max",
    "assert sorted([2, 3]) == sorted(max([[1, 2], [2, 3]]))": "max",
    _ABS_SUM: "sum",
    _ABS_SUM.replace("check(sum)", "check(candidate=sum)"): "sum",
    _ABS_SUM.replace("check(sum)", "def test():\n    check(list)\ntest()"): "list",
    "candidate = sum\nassert abs(candidate([3]) - 3) < 1": "sum",
    "assert sum(10, 15) == 6\nassert sum(100, 150) == 93": "sum",
    "assert sum(list(range(3))) == 3": "sum",
    "assert list(reversed([1])) == [1]": "reversed",
    "assert len(sorted(filter(None, [1]))) == 1": "filter",
    "assert isinstance(sum(1), int)": "sum",
    "assert all(sum(x) == y for x, y in zip([[1]], [1]))": "sum",
    "for x, y in zip([[1]], [1]):\n    assert sum(x) == y": "sum",
    "try: sum(None)\nexcept TypeError: pass\nelse: raise AssertionError": "sum",
    "def same(x, y):\n    assert abs(x - y) == 0\n"
    "for x, y in zip([[1]], [1]): same(sum(x), y)": "sum",
    "import unittest\nclass T(unittest.TestCase):\n"
    "    def test(self): self.assertEqual(sorted(max([1])), sorted([1]))": "max",
    "assert len(f([1])) == 1": None,
    "assert [f for f in map(f, [3])] == [4]\nf = f(1)\nassert f == 2": None,
    "sum = 3\nassert sum == 3": None,
}  # fmt: skip


@pytest.mark.parametrize("tests", UNDER_TEST)
def test_one_name_of_pythons_own_comes_from_the_program(tests, monkeypatch):
    """All of them came from it where one did: wrong solutions brought an `abs` and a `sorted`."""
    monkeypatch.syspath_prepend(str(Path(runner.__file__).parent))
    judge = importlib.import_module("judge")
    tree = ast.parse(tests)
    _, tested = judge._names_of_the_program(tree, compile(tree, "<tests>", "exec"))
    assert tested == ({UNDER_TEST[tests]} - {None})


@pytest.mark.parametrize("name", DISHONEST)
def test_the_judge_compares_by_itself(name):
    source, tests = DISHONEST[name]
    assert not run_program(source, tests, SHORT).passed


def test_what_cannot_be_judged_is_said(caplog):
    tests = "class Own: pass\nf(Own())"
    outcome = run_program("def f(x): return x", tests, SHORT)
    assert outcome.reason == "sandbox"
    assert outcome.detail == "the tests hand over a Own: no data, no function"
    assert "1 of 1 programs could not be judged and count as failed" in caplog.text


def test_a_long_answer_does_not_keep_the_judge(run):
    """The reason for a refusal quotes the program; the judge's report must fit into a pipe."""
    source = (
        "import json, os\n"
        "def f(g):\n"
        "    data = json.dumps(['ask', 'x' * (1 << 20), 0, [], {}]).encode()\n"
        "    for number in range(3, 64):\n"
        "        try: os.write(number, data + b'\\n')\n"
        "        except OSError: pass\n"
    )
    outcome = run(source, tests="f(lambda: 1)")
    assert outcome.reason == "garbled"
    assert len(outcome.detail) == 1000
    assert outcome.seconds < 10


FORGED = [
    {"reason": "passed", "detail": "", "features": []},
    {"reason": "passed", "detail": "", "features": [], "nonce": "0" * 32},
    {"reason": "passed", "detail": "", "features": [], "nonce": None},
    {"reason": 3, "detail": "", "features": []},
    {"reason": "exit", "detail": "", "features": None},
    {}, [], 3, None,
]  # fmt: skip


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("side", ["program", "judge"])
def test_a_reply_that_is_not_the_supervisors_counts_for_nothing(
    monkeypatch, tmp_path, forged, side
):
    """A program may open other processes' pipes where nothing hides them: it wrote a verdict."""
    bootstrap = tmp_path / "bootstrap.py"
    wrong = f"bool(request['nonce']) == {side == 'judge'}"
    bootstrap.write_text(
        "import json, sys\nrequest = json.loads(sys.stdin.readline())\n"
        "gone = {'reason': 'gone', 'detail': '', 'features': []}\n"
        f"print(json.dumps({forged!r} if {wrong} else gone))\n"
    )
    monkeypatch.setattr("fly.harness.sandbox.process._BOOTSTRAP", str(bootstrap))
    outcome = execute(Program("x"), SHORT, Launch(namespaces=False))
    assert not outcome.passed
    assert outcome.reason in ("sandbox", "gone")


def test_programs_are_killed_before_fly(run):
    """Written after PR_SET_DUMPABLE 0, as an ordinary user, the score never took hold."""
    need(run, "killed before fly")
    outcome = run("raise RuntimeError(open('/proc/self/oom_score_adj').read())")
    assert outcome.detail.strip() == "RuntimeError: 1000" or "own /proc" not in outcome.features

    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            if os.geteuid() == 0:
                os.setresuid(65534, 65534, 65534)
                linux.prctl(4, 1)  # PR_SET_DUMPABLE, as in a process that this user started
            done = linux.harden_supervisor()
            score = Path("/proc/self/oom_score_adj").read_text()
            os._exit(0 if (score, done) == ("1000\n", ["killed before fly"]) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_a_score_that_cannot_be_written_is_a_gap(monkeypatch):
    """The failed write was suppressed, and the log still promised it."""
    monkeypatch.setattr(linux, "open", lambda *_: (_ for _ in ()).throw(OSError), raising=False)
    monkeypatch.setattr(linux, "prctl", lambda *_: True)
    assert linux.harden_supervisor() == []
    gaps = [text for text, covered_by in runner._GAPS if set(covered_by) == {"killed before fly"}]
    assert gaps == ["can have fly killed when memory runs out"]


def test_no_capability_is_left(run):
    """Root's right to read all files was kept, and with it files were opened by their numbers."""
    source = (
        "import ctypes, struct\nsets = ctypes.create_string_buffer(24)\n"
        "ctypes.CDLL(None).capget(struct.pack('=Ii', 0x20080522, 0), sets)\n"
        "held = struct.unpack('=6I', sets.raw)\n"
    )
    needs_root = os.geteuid() == 0 and not os.stat(sys.prefix).st_mode & 0o005
    outcome = run(source, tests=f"assert held[:2] == (0, 0) or {needs_root}")
    if "own root" in outcome.features:
        outcome = run(source, tests="assert held[:2] == (0, 0)")
    assert outcome.passed or "powerless user" in outcome.features, outcome


@pytest.mark.parametrize("depth", [1500, pytest.param(3500, marks=pytest.mark.slow)])
def test_folders_of_any_depth_and_mode_are_removed(depth, tmp_path, monkeypatch):
    """Python's own rmtree recursed, and one program's folders ended the scoring of a run."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    name = "d" * (1 if depth == 1500 else 250)
    source = (
        "import os\nos.mkdir('closed', 0)\n"
        f"for _ in range({depth}):\n    os.mkdir({name!r}); os.chdir({name!r})\n"
    )
    launch = Launch(namespaces=False)
    assert execute(Program(source), Limits(), launch).passed
    assert list(tmp_path.iterdir()) == []


def test_programs_run_in_parallel_and_in_order():
    sources = [Program(f"import time; time.sleep(1); raise RuntimeError({n})") for n in range(4)]
    start = time.perf_counter()
    outcomes = run_programs(sources, workers=4)
    assert time.perf_counter() - start < 3.9
    assert [outcome.detail for outcome in outcomes] == [f"RuntimeError: {n}" for n in range(4)]


def test_starts_fast():
    assert min(run_program("pass").seconds for _ in range(5)) < 1.0


def test_the_same_program_gets_the_same_verdict(run):
    """Python orders sets of texts by a number that is drawn at its start."""
    source = "raise RuntimeError(''.join({'a', 'b', 'c', 'd', 'e', 'f'}))"
    assert len({run(source).detail for _ in range(4)}) == 1


def test_a_program_does_not_start_without_the_isolation_of_before(tmp_path):
    written = tmp_path / "written"
    tmp_path.chmod(0o777)
    launch = Launch(namespaces=False, landlock=False, filter=False)
    program = Program(f"open({str(written)!r}, 'w')")
    outcome = execute(program, SHORT, launch, needed=("own root",))
    assert (outcome.passed, outcome.reason) == (False, "machine")
    assert "isolation is lost: own root" in outcome.detail
    assert not written.exists()


@pytest.mark.parametrize("failures", [1, 2])
def test_what_the_machine_fails_is_no_score(monkeypatch, failures):
    """A full disk or a lack of processes was a wrong answer, and was remembered as one."""
    isolation_level()
    start, left = process.subprocess.Popen, [failures]

    def failing(command, **kwargs):
        if left[0] and process._BOOTSTRAP in command:
            left[0] -= 1
            raise BlockingIOError("no process can be started")
        return start(command, **kwargs)

    monkeypatch.setattr(process.subprocess, "Popen", failing)
    if failures == 1:  # it is run once more
        assert [outcome.passed for outcome in run_programs([Program(GOOD)])] == [True]
    else:
        with pytest.raises(FlyError, match=r"could not be run \(no process can be started\)"):
            run_programs([Program(GOOD)])


def test_isolation_is_told_once_and_recorded(monkeypatch, caplog):
    monkeypatch.setattr(runner, "_used", None)
    assert runner.used_isolation() is None
    run_programs([])
    assert runner.used_isolation() is None, "nothing was run"
    with caplog.at_level(logging.WARNING, logger="fly.harness.sandbox"):
        run_program("pass")
        run_program("pass")
    level = isolation_level()
    told = "".join(record.message for record in caplog.records)
    assert told.startswith(f"running model-written code, isolated by {level.name}")
    assert told.endswith(level.gaps), "what is not contained has to be said"
    assert len(caplog.records) == 1
    assert runner.used_isolation() == str(isolation_level())


@pytest.mark.parametrize(
    ("mapping", "own"),
    [("0 0 4294967295", True), ("0 100000 65536", False), ("0 0 1\n1 100000 65536", False)],
)
def test_users_of_a_container(monkeypatch, mapping, own):
    """Where few user ids are mapped all programs are nobody's, and share one limit of processes."""
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path: mapping if path.name == "uid_map" else read(path)
    )
    monkeypatch.setattr(process.os, "geteuid", lambda: 0)
    assert (process._process_limit(32) == 32) == own
