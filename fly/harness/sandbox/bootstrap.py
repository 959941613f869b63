"""Runs one side of a verdict in a throw-away interpreter: `python -I bootstrap.py`.

fly starts it twice for every program, once for the program and once for the judge that runs the
tests (see program.py and judge.py), each with processes of its own:

    supervisor   reads the request, waits, kills all that is left, prints how its side ended
      init       process 1 of the PID namespace (absent where there is none)
        side     limited, isolated, then executes the program, or the tests

The request is the first line of standard input, which stays open: its end means "stop", whether
fly wants it or has died. Standard library only: in isolated mode fly cannot be imported.
"""

import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable

LINUX = sys.platform.startswith("linux")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import judge  # noqa: E402
import program  # noqa: E402
from wire import Pipes  # noqa: E402

if LINUX:
    import linux
    import seccomp
    from interpreter import paths_of_interpreter

    PATHS = paths_of_interpreter()
del sys.path[0]
for _name in ("judge", "program", "wire", "linux", "seccomp", "interpreter"):
    sys.modules.pop(_name, None)  # a program's import of that name is not ours

KILL_SECONDS = 20.0  # for what no process table of its own holds together
NO_USER = 1_499_999_999


def main() -> None:
    request = json.loads(sys.stdin.buffer.readline())
    features = list(request["features"])
    if LINUX:
        linux.harden_supervisor()
        if request["namespaces"] and linux.enter_namespaces():
            features += ["own process table", "no network", "own IPC"]
    receive, send = os.pipe()
    own_table = "own process table" in features and not request["features"]
    child = os.fork()
    if child == 0:
        _guard(_init if own_table else _side, request, features, send)
    os.close(send)
    for pipe in request["pipes"]:
        os.close(pipe)
    ended = _wait(child, receive, request["limits"]["wall_seconds"])
    _kill_all(child, own_table, request["uid"])
    sys.stdout.write(json.dumps(ended))


def _guard(step: Callable, request: dict, features: list[str], send: int) -> None:
    """Take a step that ends this process; a failure of the sandbox itself is reported as such."""
    try:
        step(request, features, send)
    except BaseException as error:
        _report(send, reason="sandbox", detail=f"{type(error).__name__}: {error}")
    finally:
        os._exit(70)


def _report(send: int, **facts: object) -> None:
    os.write(send, json.dumps(facts).encode() + b"\n")


def _wait(child: int, receive: int, wall: float) -> dict:
    """Wait for the child's end, for "stop", or for the time limit; what it reported and why."""
    start, reported, status = time.monotonic(), b"", None
    poller = select.poll()
    poller.register(receive, select.POLLIN | select.POLLHUP)
    poller.register(0, select.POLLIN | select.POLLHUP)
    ended = {"features": [], "reason": "timeout", "detail": f"still running after {wall:g} s"}
    while time.monotonic() - start < wall:
        ready = [descriptor for descriptor, _ in poller.poll(20)]
        if receive in ready:
            chunk = os.read(receive, 65536)
            reported += chunk
            if not chunk:
                poller.unregister(receive)
        status = _status(child) if status is None else status
        if 0 in ready or (status is not None and receive not in ready):
            ended.update(_read_status(_wait_briefly(child) if status is None else status))
            break
    for line in reported.splitlines():
        ended.update(json.loads(line))
    return ended


def _status(child: int) -> int | None:
    pid, status = os.waitpid(child, os.WNOHANG)
    return status if pid else None


def _wait_briefly(child: int) -> int | None:
    for _ in range(100):
        status = _status(child)
        if status is not None:
            return status
        time.sleep(0.005)
    return None


def _read_status(status: int | None) -> dict:
    """Why a side that reported no verdict ended. Init passes a signal on as status 128 + number."""
    if status is None:
        return {"reason": "exit", "detail": "closed the pipe to its tests"}
    code = os.waitstatus_to_exitcode(status)
    number = -code if code < 0 else code - 128
    if number == signal.SIGXCPU:
        return {"reason": "timeout", "detail": "used up its processor time"}
    if number > 0:
        return {"reason": "killed", "detail": f"ended by signal {number}"}
    return {"reason": "exit", "detail": f"left with status {code} before its end"}


def _kill_all(child: int, own_table: bool, uid: int) -> None:
    """End every descendant: the death of a PID namespace's init takes all of them at once.

    Elsewhere what forks without end has to be caught up with: root becomes the program's user and
    kills all that it owns; then, as stopped processes still count towards the process limit, they
    are stopped until none is left that runs, and killed.
    """
    if not own_table:
        if os.geteuid() == 0:
            _kill_user(uid)
        _stop_descendants()
        _send(os.killpg, child, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        for pid in [child] if own_table else {child, *_descendants()}:
            _send(os.kill, pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _kill_user(uid: int) -> None:
    """Kill every process of a user that only the program is; the kernel lets none fork away.

    The killer acts as that user and is another one, whom the program may not signal.
    """
    killer = os.fork()
    if killer == 0:
        try:
            os.setresuid(NO_USER, uid, NO_USER)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(killer, 0)


def _stop_descendants() -> None:
    deadline = time.monotonic() + KILL_SECONDS / 2
    while time.monotonic() < deadline:
        for pid in _descendants():
            _send(os.kill, pid, signal.SIGSTOP)
        if not any(map(_runs, _descendants())):
            return


def _send(kill: Callable[[int, int], None], pid: int, number: int) -> None:
    try:
        kill(pid, number)
    except OSError:
        pass


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in b"TtZX"
    except OSError:
        return False


def _descendants() -> list[int]:
    """Orphans deeper down are children of this process (PR_SET_CHILD_SUBREAPER)."""
    found = [os.getpid()]
    for pid in found:
        try:
            with open(f"/proc/{pid}/task/{pid}/children") as file:
                found += [int(child) for child in file.read().split()]
        except OSError:
            continue
    return found[1:]


def _init(request: dict, features: list[str], send: int) -> None:
    """Process 1: set up the mounts, start the side, reap until it ends."""
    linux.die_with_parent()
    features += linux.own_root(request["workdir"], PATHS, request["limits"]["disk_bytes"])
    if "own root" in features:
        request["workdir"] = linux.WORKDIR
    side = os.fork()
    if side == 0:
        _guard(_side, request, features, send)
    _close_all_but([])
    while True:
        pid, status = os.wait()
        if pid == side:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _side(request: dict, features: list[str], send: int) -> None:
    os.setsid()
    os.chdir(request["workdir"])
    if LINUX:
        linux.die_with_parent()
    _redirect_streams()
    _close_all_but([send, *request["pipes"]])
    features += _confine(request, features)
    os.environ.clear()
    for name in ("OMP", "OPENBLAS", "MKL"):  # for numpy's library; os.environ stays empty
        os.putenv(f"{name}_NUM_THREADS", "1")
    sys.argv[:] = ["program"]
    _report(send, features=features)
    pipes = Pipes(*request.pop("pipes"))
    source = request.pop("source")
    if request.pop("is_judge"):
        reason, detail = judge.run(source, pipes)
        _report(send, reason=reason, detail=detail, nonce=request["nonce"])
    else:
        os.close(send)
        program.run(source, pipes)
    os._exit(0)


def _redirect_streams() -> None:
    """Output is discarded. Reading input fails, as under lm-eval's code_eval."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in range(3):
        os.dup2(null, stream)


def _close_all_but(kept: list[int]) -> None:
    """Close what this process inherited, such as the supervisor's ends of its pipes."""
    start = 3
    for descriptor in (*sorted(kept), 4096):
        os.closerange(start, descriptor)
        start = descriptor + 1


def _confine(request: dict, features: list[str]) -> list[str]:
    """Landlock, a powerless user, limits, a system call filter. Returns what took hold."""
    done: list[str] = []
    if LINUX:
        linux.no_new_privileges()
        if request["landlock"]:
            own = ["/proc"] if "own /proc" in features else []
            folder = "/tmp" if "own root" in features else "."
            done += linux.landlock(folder, [*PATHS, *own])
        if linux.drop_privileges(request["uid"], may_override="Landlock writes" in done):
            done.append("powerless user")
        linux.die_with_parent()  # the change of user cleared it
    limits = request["limits"]
    for name, value in (
        ("CORE", 0),
        ("CPU", max(1, round(limits["cpu_seconds"]))),
        ("FSIZE", limits["file_bytes"]),
        ("NOFILE", limits["open_files"]),
        ("AS", limits["memory_bytes"]),
        ("NPROC", limits["processes"]),
    ):
        if value is not None and _limit(f"RLIMIT_{name}", value) and name in ("AS", "NPROC"):
            done.append({"AS": "memory limit", "NPROC": "process limit"}[name])
    if os.geteuid() == 0 and "process limit" in done:
        done.remove("process limit")  # the kernel does not hold root to it
    if LINUX and request["filter"] and seccomp.filter_calls(own_files="own root" in features):
        done.append("system call filter")
    return done


def _limit(name: str, value: int) -> bool:
    hard = value + 1 if name == "RLIMIT_CPU" else value  # SIGXCPU first: a reason we can read
    try:
        resource.setrlimit(getattr(resource, name), (value, hard))
    except (ValueError, OSError, AttributeError):
        return False
    return True


if __name__ == "__main__":
    main()
