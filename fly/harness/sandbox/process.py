"""One program: starts bootstrap.py for it and for its judge, and reads what the judge says."""

import itertools
import json
import logging
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fly.harness.sandbox.interpreter import paths_of_interpreter

_logger = logging.getLogger("fly.harness.sandbox")
_BOOTSTRAP = str(Path(__file__).with_name("bootstrap.py"))
_STARTUP_SECONDS = 30.0  # on top of the wall limit: interpreter start on an overloaded machine
_BESIDE = 8  # processes per core that programs started at the same time may add
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
class Program:
    """What a model wrote, and the tests that judge it."""

    source: str
    tests: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    reason: passed, exception, exit (left before its end), threads (one outlived it), timeout,
    killed (a signal ended it), garbled (it wrote bytes of its own to its judge) or sandbox (it
    could not be run or judged).
    """

    passed: bool
    reason: str
    detail: str
    seconds: float
    features: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Launch:
    """How to start the interpreters: directly, or through bubblewrap, and with which means."""

    namespaces: bool = True  # let bootstrap.py enter namespaces itself
    bwrap: str | None = None
    landlock: bool = True
    filter: bool = True

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
        files = ["--dev", "/dev", "--proc", "/proc", "--bind", workdir, "/tmp"]
        for path in (*paths_of_interpreter(), str(Path(_BOOTSTRAP).parent)):
            link = os.path.islink(path)
            files += ["--symlink", os.readlink(path), path] if link else ["--ro-bind", path, path]
        files += ["--chdir", "/tmp", "--remount-ro", "/"]
        return [self.bwrap, *spaces, *files, "--die-with-parent", "--", *python]

    def features(self) -> Sequence[str]:
        if not self.bwrap:
            return ()
        return "own process table", "no network", "own IPC", "own root", "own /proc"


def execute(program: Program, limits: Limits, launch: Launch) -> Outcome:
    """Run a program and its tests, each in a fresh interpreter and a folder of its own.

    Never raises for what the program does.
    """
    start = time.perf_counter()
    try:
        ended, verdict = _converse(program, limits, launch)
    except OSError as error:  # no process, file or folder is to be had
        ended = verdict = _failure("sandbox", str(error))
    passed = verdict["reason"] == "passed" and ended["reason"] != "sandbox"
    if ended["reason"] == "sandbox" or verdict["reason"] == "gone":
        verdict = ended
    return Outcome(
        passed=passed,
        reason=verdict["reason"],
        detail=verdict["detail"],
        seconds=time.perf_counter() - start,
        features=tuple(ended["features"]),
    )


def _converse(program: Program, limits: Limits, launch: Launch) -> tuple[dict, dict]:
    """How the program's side ended, and the judge's."""
    ask, answer = os.pipe(), os.pipe()
    source = _Side(launch, limits, program, (ask[0], answer[1]), is_judge=False)
    tests = _Side(launch, limits, program, (answer[0], ask[1]), is_judge=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(source.running())
            stack.enter_context(tests.running())
        finally:  # the sides have copies; an end that stayed open here would hide that one died
            for pipe in (*ask, *answer):
                os.close(pipe)
        verdict = tests.ended(limits.wall_seconds + _STARTUP_SECONDS)
        return source.ended(0), verdict


class _Side:
    """One of the two interpreters of a verdict, with a folder of its own."""

    def __init__(
        self,
        launch: Launch,
        limits: Limits,
        program: Program,
        pipes: tuple[int, int],
        is_judge: bool,
    ) -> None:
        self._launch, self._pipes = launch, pipes
        allowed = asdict(limits) | {"processes": _process_limit(limits.processes)}
        if is_judge:  # it waits for the program, which has these limits
            allowed["wall_seconds"] += _STARTUP_SECONDS
        self._request: dict[str, Any] = {
            "source": program.tests if is_judge else program.source,
            "is_judge": is_judge,
            "nonce": secrets.token_hex(16) if is_judge else 0,  # only a judge's is ever right
            "pipes": pipes,
            "features": launch.features(),
            "namespaces": launch.namespaces,
            "landlock": launch.landlock,
            "filter": launch.filter,
            "uid": 1_500_000_000 + os.getpid() % 1_000_000 * 1000 + next(_numbers) % 1000,
            "limits": allowed,
        }

    @contextmanager
    def running(self) -> Iterator[None]:
        with _folder() as workdir:
            self._workdir = workdir
            self._process = subprocess.Popen(
                self._launch.command(workdir),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=workdir,
                env={},
                pass_fds=self._pipes,
                start_new_session=True,
            )
            try:
                request = self._request | {"workdir": "/tmp" if self._launch.bwrap else workdir}
                self._put(json.dumps(request).encode() + b"\n")
                yield
            finally:
                self._stop()

    def ended(self, seconds: float) -> dict[str, Any]:
        """What the supervisor says of its end; it is stopped if that takes more than `seconds`."""
        assert self._process.stdout is not None
        poller = select.poll()
        poller.register(self._process.stdout, select.POLLIN | select.POLLHUP)
        if not poller.poll(seconds * 1000):
            self._close_input()
        try:
            output, errors = self._process.communicate(timeout=_STARTUP_SECONDS)
        except subprocess.TimeoutExpired:
            return _failure("timeout", f"no answer within {_STARTUP_SECONDS:g} s")
        ended = self._read(output)
        if ended is None or self._process.returncode != 0:  # the supervisor died
            lines = errors.decode("utf-8", "replace").strip().splitlines() or ["no message"]
            code = self._process.returncode
            return _failure("sandbox", f"supervisor ended ({code}): {lines[-1]:.300}")
        return ended

    def _read(self, output: bytes) -> dict[str, Any] | None:
        """The supervisor's words; None if they are not its own.

        Where a program may open other processes' pipes, it may have written here.
        """
        try:
            ended = json.loads(output)
            reason, detail, features = ended["reason"], ended["detail"], ended["features"]
        except (ValueError, RecursionError, TypeError, LookupError):
            return None
        if not (isinstance(reason, str) and isinstance(detail, str) and isinstance(features, list)):
            return None
        if reason == "passed" and str(ended.get("nonce")) != self._request["nonce"]:
            return None
        return {"reason": reason, "detail": detail[:1000], "features": [str(f) for f in features]}

    def _put(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError:  # it has died, which `ended` says
            pass

    def _close_input(self) -> None:
        stdin, self._process.stdin = self._process.stdin, None  # communicate would flush it
        try:
            if stdin is not None:
                stdin.close()
        except OSError:
            pass

    def _stop(self) -> None:
        self._close_input()
        try:
            self._process.wait(_STARTUP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        if self._process.returncode != 0:
            _sweep(self._process, self._workdir)
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


def _failure(reason: str, detail: str) -> dict[str, Any]:
    return {"reason": reason, "detail": detail, "features": []}


@contextmanager
def _folder() -> Iterator[str]:
    """A temporary folder, removed whatever the program made in it; what stays is said."""
    workdir = tempfile.mkdtemp(prefix="fly-")
    try:
        yield workdir
    finally:
        # rm goes down trees of any depth; shutil.rmtree recurses, or runs out of open files.
        for command in (["rm", "-rf"], ["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            if os.path.lexists(workdir):
                subprocess.run([*command, "--", workdir], stderr=subprocess.DEVNULL, check=False)
        if os.path.lexists(workdir):
            _logger.warning("a program's folder cannot be removed: %s", workdir)


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


def _process_limit(allowed: int) -> int | None:
    """`allowed` plus what the user already runs, because RLIMIT_NPROC counts all of it.

    Root's programs run under a user id of their own, where only they count. None: not known.
    """
    if os.geteuid() == 0:
        return allowed
    if not sys.platform.startswith("linux"):
        return None
    tasks = _BESIDE * (os.cpu_count() or 1)
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            status = (entry / "status").read_text()  # the folder is root's where it is hidden
            if f"\nUid:\t{os.geteuid()}\t" in status:
                tasks += (entry / "task").stat().st_nlink - 2
        except OSError:
            continue
    return allowed + tasks
