"""Runs one side of a verdict in a throw-away interpreter: `python -s bootstrap.py`.

fly starts it twice for every program, once for the program and once for the judge that runs the
tests (see program.py and judge.py), each with processes of its own:

    supervisor   reads the request, waits, kills all that is left, prints how its side ended
      init       process 1 of the PID namespace (absent where there is none)
        side     limited, isolated, then executes the program, or the tests

The request (`_Request` in process.py, as JSON) is the first line of standard input, which stays
open: its end means "stop", whether fly wants it or has died. Standard library only: fly may not be
importable.
"""

import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import SimpleNamespace

import judge
import program

LINUX = sys.platform.startswith("linux")
if LINUX:
    import linux
    import seccomp
    from interpreter import folders_of_answers, paths_of_interpreter

    PATHS = paths_of_interpreter()
    HIDDEN = folders_of_answers()
del sys.path[0]  # this file's folder, which no program may import
for _name in ("judge", "program", "wire", "linux", "seccomp", "interpreter"):
    sys.modules.pop(_name, None)  # a program's import of that name is not ours

KILL_SECONDS = 20.0  # for processes that no PID namespace holds together
NO_USER = 1_499_999_999
_OF_NAMESPACES = ["own process table", "no network", "own IPC"]
_OF_BUBBLEWRAP = [*_OF_NAMESPACES, "own root", "own /proc"]


def main() -> None:
    line = sys.stdin.buffer.readline()
    request = json.loads(line, object_hook=lambda fields: SimpleNamespace(**fields))
    features = [*_OF_BUBBLEWRAP] if request.launch.bwrap else []
    own_table = False
    if LINUX:
        features += linux.harden_supervisor()
        own_table = request.launch.namespaces and linux.enter_namespaces()
        features += _OF_NAMESPACES if own_table else []
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        _guard(_init if own_table else _side, request, features, send)
    os.close(send)
    for pipe in request.pipes:
        os.close(pipe)
    ended = _wait(child, receive, request.limits.wall_seconds)
    _kill_all(child, own_table, request.uid)
    sys.stdout.write(json.dumps(ended))


def _guard(step: Callable, request: SimpleNamespace, features: list[str], send: int) -> None:
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
    ended = {"features": [], "reason": "timeout", "detail": f"still running after {wall:g} s"}
    deadline = time.monotonic() + wall
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    poller.register(receive, 0)  # wakes it when the last writer is gone
    while time.monotonic() < deadline:
        ready = [descriptor for descriptor, _ in poller.poll(20)]
        if receive in ready:
            poller.unregister(receive)
        status = _status(child, seconds=0.5 if 0 in ready else 0.0)
        if 0 in ready or status is not None:
            ended.update(_read_status(status))
            break
    os.set_blocking(receive, False)
    with suppress(BlockingIOError):  # nothing was reported; what is reported fits into a pipe
        for line in os.read(receive, 65536).splitlines():
            ended.update(json.loads(line))
    return ended


def _status(child: int, seconds: float = 0.0) -> int | None:
    """The child's wait status; None if it still runs after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.005)


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

    Without one, a program may fork faster than it is killed. Root becomes the program's user and
    kills all that it owns. Then the descendants are stopped until none runs, and killed; stopped
    processes still count towards the process limit, so no new ones can start.
    """
    if not own_table:
        if os.geteuid() == 0:
            _kill_user(uid)
        _stop_descendants()
        with suppress(OSError):
            os.killpg(child, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        _signal([child] if own_table else {child, *_descendants()}, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _kill_user(uid: int) -> None:
    """Kill every process of a user that only the program is; the kernel lets none fork away.

    The killer keeps a real user id of its own, so that the program may not signal it.
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
        _signal(_descendants(), signal.SIGSTOP)
        if not any(map(_runs, _descendants())):
            return


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


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
        with suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
            found += map(int, file.read().split())
    return found[1:]


def _init(request: SimpleNamespace, features: list[str], send: int) -> None:
    """Process 1: set up the mounts, start the side, reap until it ends."""
    linux.die_with_parent()
    workdir = os.getcwd()
    features += linux.own_root(workdir, PATHS, HIDDEN, request.limits.disk_bytes)
    os.chdir(linux.WORKDIR if "own root" in features else workdir)
    side = os.fork()
    if side == 0:
        _guard(_side, request, features, send)
    _close_all_but([])
    while True:
        pid, status = os.wait()
        if pid == side:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _side(request: SimpleNamespace, features: list[str], send: int) -> None:
    os.setsid()
    if LINUX:
        linux.die_with_parent()
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in range(3):  # output is discarded; reading input fails, as under code_eval
        os.dup2(null, stream)
    _close_all_but([send, *request.pipes])
    features += _confine(request, features)
    os.environ.clear()
    for name in ("OMP", "OPENBLAS", "MKL"):  # for numpy's library; os.environ stays empty
        os.putenv(f"{name}_NUM_THREADS", "1")
    sys.argv[:] = ["program"]
    _report(send, features=features)
    if missing := sorted({*request.needed} - {*features}):
        _report(send, reason="machine", detail=f"isolation is lost: {', '.join(missing)}")
        os._exit(0)
    if request.nonce:
        reason, detail = judge.run(request.source, request.pipes)
        _report(send, reason=reason, detail=detail[:1000], nonce=request.nonce)
    else:
        os.close(send)
        program.run(request.source, request.pipes)
    os._exit(0)


def _close_all_but(kept: list[int]) -> None:
    """Close what this process inherited, such as the supervisor's ends of its pipes."""
    start = 3
    for descriptor in (*sorted(kept), 4096):
        os.closerange(start, descriptor)
        start = descriptor + 1


def _confine(request: SimpleNamespace, features: list[str]) -> list[str]:
    """Landlock, a powerless user, limits, a system call filter. Returns what took hold."""
    done: list[str] = []
    own_root = "own root" in features
    if LINUX:
        # set-uid programs gain nothing; Landlock and the system call filter need it, too
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        if request.launch.landlock:
            own = ["/proc"] if "own /proc" in features else []
            hidden = [] if own_root else HIDDEN
            done += linux.landlock("/tmp" if own_root else ".", [*PATHS, *own], hidden)
        if linux.drop_privileges(request.uid, may_override="Landlock writes" in done):
            done.append("powerless user")
        linux.die_with_parent()  # the change of user cleared it
    limits = request.limits
    cpu = max(1, round(limits.cpu_seconds))
    _limit("CORE", 0)
    _limit("CPU", cpu, hard=cpu + 1)  # SIGXCPU comes first: a reason that can be read
    _limit("FSIZE", limits.file_bytes)
    _limit("NOFILE", limits.open_files)
    if _limit("AS", limits.memory_bytes):
        done.append("memory limit")
    if _limit("NPROC", request.processes) and os.geteuid() != 0:  # the kernel exempts root
        done.append("process limit")
    if LINUX and request.launch.filter and seccomp.filter_calls(own_files=own_root):
        done.append("system call filter")
    return done


def _limit(name: str, soft: int | None, hard: int | None = None) -> bool:
    if soft is None:
        return False
    try:
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (soft, hard or soft))
    except (ValueError, OSError, AttributeError):
        return False
    return True


if __name__ == "__main__":
    main()
