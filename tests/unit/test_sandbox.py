"""Programs that misbehave end as failed samples, and the run goes on."""

import logging
import os
import sys
import time
from pathlib import Path

import pytest

from fly.sandbox import Limits, Outcome, isolation_level, run_program, run_programs, runner
from fly.sandbox.process import Launch, execute

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


def launches() -> list[Launch]:
    """The level in force, and the one without namespaces."""
    return [isolation_level().launch, Launch(namespaces=False)]


@pytest.fixture(params=["in force", "without namespaces"])
def run(request):
    launch = launches()[request.param != "in force"]

    def run(source: str, limits: Limits = SHORT) -> Outcome:
        return execute(source, limits, launch)

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


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_misbehaviour_fails(name):
    """Each ends as a failed sample with the right reason, not as an error or a pass."""
    source, reason, limits = MISBEHAVIOUR[name]
    outcome = run_program(source, limits)
    assert not outcome.passed
    assert outcome.reason == reason, outcome
    assert outcome.detail
    assert outcome.seconds < limits.wall_seconds + 5


def test_a_bad_neighbour_does_no_harm():
    """Everything at once, each followed by a good program: all of the good ones pass."""
    names = [name for name in MISBEHAVIOUR if MISBEHAVIOUR[name][1] != "timeout"]
    sources = [source for name in names for source in (MISBEHAVIOUR[name][0], GOOD)]
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


def test_forked_copy_cannot_pass_for_its_parent(run):
    source = "import os, time\nif os.fork():\n    time.sleep(0.3)\n    raise RuntimeError\n"
    assert run(source).reason == "exception"


@pytest.mark.parametrize("how", ["write", "create", "delete", "chmod"])
def test_writes_outside_the_folder(run, how, tmp_path):
    features = ["read-only root", "powerless user"]
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
    need(run, "own process table", "Landlock writes", "powerless user")
    source = (
        "import os\n"
        "for pid in os.listdir('/proc'):\n"
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


def test_programs_run_in_parallel_and_in_order():
    sources = [f"import time; time.sleep(0.5); raise RuntimeError({n})" for n in range(4)]
    start = time.perf_counter()
    outcomes = run_programs(sources, workers=4)
    assert time.perf_counter() - start < 1.9
    assert [outcome.detail for outcome in outcomes] == [f"RuntimeError: {n}" for n in range(4)]


def test_starts_fast():
    assert min(run_program("pass").seconds for _ in range(5)) < 0.5


def test_isolation_is_told_once_and_recorded(monkeypatch, caplog):
    monkeypatch.setattr(runner, "_used", None)
    assert runner.used_isolation() is None
    run_programs([])
    assert runner.used_isolation() is None, "nothing was run"
    with caplog.at_level(logging.WARNING, logger="fly.sandbox"):
        run_program("pass")
        run_program("pass")
    assert [record.message for record in caplog.records] == [
        f"running model-written code isolated by {isolation_level()}"
    ]
    assert runner.used_isolation() == str(isolation_level())
