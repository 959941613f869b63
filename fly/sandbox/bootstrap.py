"""Runs one program in a throw-away interpreter: `python -I bootstrap.py < request > verdict`.

Three processes, so that nothing the program does can reach fly or forge the verdict by exiting:

    supervisor   reads the request, waits, kills all that is left, prints the verdict
      init       process 1 of the PID namespace (absent where there is none)
        program  limited, isolated, then executes the source

The program passes only if its process reports, over a private pipe and with the request's nonce,
that the source ran to its end and no thread outlived it. Exit statuses never count as a pass.
Standard library only: in isolated mode fly cannot be imported.
"""

import _thread
import json
import os
import resource
import select
import signal
import sys
import time
import types
from collections.abc import Callable

LINUX = sys.platform.startswith("linux")
if LINUX:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import linux

    del sys.path[0], sys.modules["linux"]

THREAD_GRACE = 0.1  # seconds a thread that is just finishing may still take


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    features = list(request["features"])
    if LINUX:
        linux.harden_supervisor()
        if not features and request["namespaces"] and linux.enter_namespaces():
            features += ["own process table", "no network", "own IPC"]
    receive, send = os.pipe()
    own_table = "own process table" in features and not request["features"]
    child = os.fork()
    if child == 0:
        _guard(_init if own_table else _program, request, features, send)
    os.close(send)
    verdict = _await_report(child, receive, request)
    _kill_all(child, own_table)
    sys.stdout.write(json.dumps(verdict))


def _guard(step: Callable, request: dict, features: list[str], send: int) -> None:
    """Take a step that ends this process; a failure of the sandbox itself is reported as such."""
    nonce = request["nonce"]
    try:
        step(request, features, send)
    except BaseException as error:
        _report(send, nonce, "sandbox", f"{type(error).__name__}: {error}", "")
    finally:
        os._exit(70)


def _report(send: int, *parts: str) -> None:
    message = "\x1f".join(parts) + "\0"
    os.write(send, message.encode("utf-8", "replace"))


def _await_report(child: int, receive: int, request: dict) -> dict:
    """Wait for the report, for the child's end, or for the time limit."""
    wall = request["limits"]["wall_seconds"]
    start, data, status = time.monotonic(), b"", None
    poller = select.poll()
    poller.register(receive, select.POLLIN | select.POLLHUP)
    while time.monotonic() - start < wall:
        if poller.poll(20):
            chunk = os.read(receive, 65536)
            data += chunk
            if not chunk or data.endswith(b"\0"):
                break
        elif status is None:
            pid, code = os.waitpid(child, os.WNOHANG)
            status = code if pid else None
        else:
            break
    else:
        return {"reason": "timeout", "detail": f"still running after {wall:g} s", "features": []}
    if data.endswith(b"\0"):
        nonce, reason, detail, features = data[:-1].decode("utf-8", "replace").split("\x1f", 3)
        if nonce == request["nonce"]:
            return {"reason": reason, "detail": detail, "features": features.split("\x1f")}
    if status is None:
        status = _wait_briefly(child)
    return {**_read_status(status), "features": []}


def _wait_briefly(child: int) -> int:
    for _ in range(100):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.005)
    return 0


def _read_status(status: int) -> dict:
    """Why a program that never reported ended. Init passes a signal on as status 128 + number."""
    code = os.waitstatus_to_exitcode(status)
    number = -code if code < 0 else code - 128
    if number == signal.SIGXCPU:
        return {"reason": "timeout", "detail": "used up its processor time"}
    if number > 0:
        return {"reason": "killed", "detail": f"ended by signal {number}"}
    return {"reason": "exit", "detail": f"left with status {code} before its end"}


def _kill_all(child: int, own_table: bool) -> None:
    """End every descendant: the death of a PID namespace's init, else a sweep as their reaper."""
    deadline = time.monotonic() + 5
    victims = [child]
    while time.monotonic() < deadline:
        for pid in victims:
            for kill in (os.kill,) if own_table else (os.killpg, os.kill):
                try:
                    kill(pid, signal.SIGKILL)
                except OSError:
                    pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)
        victims = [child] if own_table else _children()


def _children() -> list[int]:
    """Direct children; orphans deeper down become direct ones (PR_SET_CHILD_SUBREAPER)."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _init(request: dict, features: list[str], send: int) -> None:
    """Process 1: set up the mounts, start the program, reap until it ends."""
    linux.die_with_parent()
    features += linux.read_only_root(request["workdir"], request["limits"]["disk_bytes"])
    program = os.fork()
    if program == 0:
        _guard(_program, request, features, send)
    os.close(send)
    while True:
        pid, status = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _program(request: dict, features: list[str], send: int) -> None:
    os.setsid()
    os.chdir(request["workdir"])
    if LINUX:
        linux.die_with_parent()
    _redirect_streams()
    features += _confine(request)
    os.environ.clear()
    for name in ("OMP", "OPENBLAS", "MKL"):  # for numpy's library; os.environ stays empty
        os.putenv(f"{name}_NUM_THREADS", "1")
    sys.argv[:] = ["program"]
    _execute(request.pop("source"), request.pop("nonce"), "\x1f".join(features), send)


def _redirect_streams() -> None:
    """Output is discarded. Reading input fails, as under lm-eval's code_eval."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in range(3):
        os.dup2(null, stream)


def _confine(request: dict) -> list[str]:
    """Landlock, then a powerless user, then limits. Returns what took hold."""
    done: list[str] = []
    if LINUX:
        linux.no_new_privileges()
        done += linux.landlock(".")
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
    return done


def _limit(name: str, value: int) -> bool:
    hard = value + 1 if name == "RLIMIT_CPU" else value  # SIGXCPU first: a reason we can read
    try:
        resource.setrlimit(getattr(resource, name), (value, hard))
    except (ValueError, OSError, AttributeError):
        return False
    return True


def _execute(source: str, nonce: str, features: str, send: int) -> None:
    """Run the source to its end and report. What is needed afterwards is bound beforehand."""
    write, leave, getpid, sleep, count = os.write, os._exit, os.getpid, time.sleep, _thread._count
    pid, printable, clock = os.getpid(), str.isprintable, time.monotonic
    module = types.ModuleType("program")  # not __main__: code_eval runs no __main__ block either
    sys.modules["program"] = module
    reason, detail = "passed", ""
    try:
        exec(compile(source, "<program>", "exec"), module.__dict__)
        deadline = clock() + THREAD_GRACE
        while count() and clock() < deadline:
            sleep(0.002)
        if count():
            reason, detail = "threads", "a thread was still running at the end"
    except SystemExit as error:
        reason, detail = "exit", f"SystemExit: {error.code!r:.100}"
    except BaseException as error:
        reason = "exception"
        try:
            text = f"{type(error).__name__}: {error}"[:300]
            detail = "".join(letter if printable(letter) else " " for letter in text)
        except BaseException:
            detail = "an exception that cannot be printed"
    if getpid() == pid:  # not a copy of the program that it forked itself
        message = "\x1f".join((nonce, reason, detail, features)) + "\0"
        write(send, message.encode("utf-8", "replace"))
    leave(0)


if __name__ == "__main__":
    main()
