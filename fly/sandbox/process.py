"""One program, one fresh interpreter: starts bootstrap.py and reads its verdict."""

import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

_BOOTSTRAP = str(Path(__file__).with_name("bootstrap.py"))
_STARTUP_SECONDS = 30.0  # on top of the wall limit: interpreter start on an overloaded machine
_numbers = itertools.count()


@dataclass(frozen=True)
class Limits:
    """What one program may use. Every field must be positive.

    wall_seconds is more than code_eval's 3 s: it is there to end infinite loops, and a slow or
    busy machine must not turn a right answer into a wrong one.
    """

    wall_seconds: float = 10.0
    cpu_seconds: float = 10.0  # per process
    memory_bytes: int = 4 << 30  # address space, per process
    processes: int = 32  # processes and threads at one time
    file_bytes: int = 16 << 20  # each file
    disk_bytes: int = 64 << 20  # the folder, where it is a file system of its own
    open_files: int = 128


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    reason: passed, exception, exit (left before its end), threads (one outlived it), timeout,
    killed (a signal ended it), or sandbox (it could not be run, or silenced its supervisor).
    """

    passed: bool
    reason: str
    detail: str
    seconds: float
    features: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Launch:
    """How to start the interpreter: directly, or through bubblewrap."""

    namespaces: bool = True  # let bootstrap.py enter namespaces itself
    bwrap: str | None = None

    def command(self, workdir: str) -> list[str]:
        python = [sys.executable, "-I", _BOOTSTRAP]
        if not self.bwrap:
            return python
        spaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
        if os.geteuid() == 0:
            # Root keeps what it needs to become a powerless user inside (bootstrap drops it).
            caps = [f"CAP_{name}" for name in ("SETUID", "SETGID", "CHOWN", "DAC_READ_SEARCH")]
            spaces += [word for cap in caps for word in ("--cap-add", cap)]
        else:
            spaces += ["--unshare-user", "--cap-drop", "ALL"]
        files = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
        files += ["--bind", workdir, workdir, "--chdir", workdir]
        return [self.bwrap, *spaces, *files, "--die-with-parent", "--", *python]

    def features(self) -> Sequence[str]:
        if not self.bwrap:
            return ()
        return "own process table", "no network", "own IPC", "read-only root", "own /proc"


def execute(source: str, limits: Limits, launch: Launch) -> Outcome:
    """Run `source` in a fresh interpreter and a folder of its own. Never raises for the program."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fly-", ignore_cleanup_errors=True) as workdir:
        request = {
            "source": source,
            "nonce": secrets.token_hex(16),
            "workdir": workdir,
            "features": launch.features(),
            "namespaces": launch.namespaces,
            "uid": 1_500_000_000 + os.getpid() % 1_000_000 * 1000 + next(_numbers) % 1000,
            "limits": asdict(limits) | {"processes": _process_limit(limits.processes)},
        }
        verdict = _converse(launch.command(workdir), request, workdir)
    return Outcome(
        passed=verdict["reason"] == "passed",
        reason=verdict["reason"],
        detail=verdict["detail"],
        seconds=time.perf_counter() - start,
        features=tuple(name for name in verdict["features"] if name),
    )


def _converse(command: list[str], request: dict, workdir: str) -> dict:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=workdir,
        env={},
        start_new_session=True,
    )
    seconds = request["limits"]["wall_seconds"] + _STARTUP_SECONDS
    try:
        output, errors = process.communicate(json.dumps(request).encode(), timeout=seconds)
        return json.loads(output)
    except subprocess.TimeoutExpired:
        return _failure("timeout", f"no verdict within {seconds:g} s")
    except ValueError:  # no JSON: the supervisor died
        lines = errors.decode("utf-8", "replace").strip().splitlines() or ["no message"]
        return _failure("sandbox", f"supervisor ended ({process.returncode}): {lines[-1]:.300}")
    finally:
        if process.returncode != 0:
            _sweep(process, workdir)


def _failure(reason: str, detail: str) -> dict:
    return {"reason": reason, "detail": detail, "features": []}


def _sweep(process: subprocess.Popen, workdir: str) -> None:
    """The supervisor did not clean up: kill its session and whoever still works in `workdir`."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        pass
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "cwd").removesuffix(" (deleted)").startswith(workdir):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue
    process.communicate()


def _process_limit(allowed: int) -> int | None:
    """`allowed` plus what the user already runs, because RLIMIT_NPROC counts all of it.

    Root's programs run under a user id of their own, where only they count. None: not known.
    """
    if os.geteuid() == 0:
        return allowed
    if not sys.platform.startswith("linux"):
        return None
    tasks = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if entry.stat().st_uid == os.geteuid():
                tasks += (entry / "task").stat().st_nlink - 2
        except OSError:
            continue
    return allowed + tasks
