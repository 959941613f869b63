"""Runs one program and its judge, each in an interpreter of its own, and reads the verdict."""

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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from fly.harness.sandbox.interpreter import folders_of_answers, paths_of_interpreter

_logger = logging.getLogger("fly.harness.sandbox")
_BOOTSTRAP = str(Path(__file__).with_name("bootstrap.py"))
_STARTUP_SECONDS = 30.0  # on top of the wall limit: interpreter start on an overloaded machine
_BESIDE = 8  # processes per core that programs started at the same time may add
# Sets and dictionaries of texts in one order: the same program gets the same verdict. Any text
# can be printed, as under code_eval.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8:replace"}
_USERS = range(1_500_000_000, 2_500_000_000)  # ids that root's programs get
_NOBODY = 65534  # bootstrap's last resort
_numbers = itertools.count()


@dataclass(frozen=True)
class Limits:
    """What one program may use. Every field must be positive."""

    # more than code_eval's 3 s: it ends infinite loops, and must not end a right answer on a slow
    # or busy machine
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
    """How a program ended."""

    passed: bool
    # passed, exception, exit (left before its end), threads (one outlived it), timeout, killed (a
    # signal ended it), garbled (it wrote bytes of its own to its judge), sandbox (it could not be
    # run or judged) or machine (the machine could not run it: this says nothing about it)
    reason: str
    detail: str
    seconds: float
    features: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Launch:
    """The means of isolation to try."""

    namespaces: bool = True  # entered by bootstrap.py itself
    bwrap: str | None = None  # the path of bubblewrap, to start the interpreters in it
    landlock: bool = True
    filter: bool = True

    def command(self, workdir: str) -> list[str]:
        # not -I, which would ignore _ENVIRONMENT; bootstrap.py does what -P would
        python = [sys.executable, "-s", _BOOTSTRAP]
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
        for path in folders_of_answers():
            files += ["--tmpfs", path, "--remount-ro", path]
        files += ["--chdir", "/tmp", "--remount-ro", "/"]
        return [self.bwrap, *spaces, *files, "--die-with-parent", "--", *python]


def _new_uid() -> int:
    return _USERS[0] + os.getpid() % 1_000_000 * 1000 + next(_numbers) % 1000


def _has_users_of_its_own() -> bool:
    """Whether this user namespace has the ids of `_new_uid`; else all programs are _NOBODY's."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
    except OSError:
        return True  # no Linux
    starts = ((int(start), int(count)) for start, _, count in map(str.split, lines))
    return any(start <= _USERS[0] and start + count > _USERS[-1] for start, count in starts)


@dataclass(frozen=True)
class _Request:
    """What bootstrap.py reads from the first line of its input."""

    source: str  # the program, or its tests
    pipes: tuple[int, int]  # to read from and to write to the other side
    limits: Limits
    processes: int | None  # the limit as the kernel counts it; None if that is unknown
    launch: Launch
    needed: tuple[str, ...]  # features of isolation without which it does not start
    # the proof that a pass comes from the judge; the program's side has none
    nonce: str | None = None
    uid: int = field(default_factory=_new_uid)  # the user that root runs it as


class _Ending(BaseModel):
    """How a side ended, in the words of its supervisor."""

    model_config = ConfigDict(strict=True)

    reason: str
    detail: str
    features: list[str] = []
    nonce: str | None = None


def execute(
    program: Program, limits: Limits, launch: Launch, needed: tuple[str, ...] = ()
) -> Outcome:
    """Run a program and its tests, each in a fresh interpreter and a folder of its own.

    needed: features of isolation that must take hold. Never raises for what the program does.
    """
    start = time.perf_counter()
    try:
        ended, verdict = _converse(program, limits, launch, needed)
    except OSError as error:  # the machine is out of processes, files or disk space
        ended = verdict = _Ending(reason="machine", detail=str(error))
    not_run = ended.reason in ("sandbox", "machine")
    passed = verdict.reason == "passed" and not not_run
    if not_run or verdict.reason == "gone":
        verdict = ended
    seconds = time.perf_counter() - start
    return Outcome(passed, verdict.reason, verdict.detail[:1000], seconds, tuple(ended.features))


def _converse(
    program: Program, limits: Limits, launch: Launch, needed: tuple[str, ...]
) -> tuple[_Ending, _Ending]:
    """How the program's side ended, and the judge's."""
    # The judge waits for the program, which has its own limit.
    patient = replace(limits, wall_seconds=limits.wall_seconds + _STARTUP_SECONDS)
    processes, nonce = _process_limit(limits.processes), secrets.token_hex(16)
    ask, answer = os.pipe(), os.pipe()
    pipes = (ask[0], answer[1]), (answer[0], ask[1])
    source = _Request(program.source, pipes[0], limits, processes, launch, needed)
    tests = _Request(program.tests, pipes[1], patient, processes, launch, needed, nonce)
    with ExitStack() as stack:
        try:
            program_side = stack.enter_context(_running(source))
            judge_side = stack.enter_context(_running(tests))
        finally:  # the sides have copies; an end that stayed open here would hide that one died
            for pipe in (*ask, *answer):
                os.close(pipe)
        verdict = _end_of(judge_side, patient.wall_seconds, nonce)
        return _end_of(program_side, 0), verdict


@contextmanager
def _running(request: _Request) -> Iterator[subprocess.Popen[bytes]]:
    """Start a side in a folder of its own; end it and remove the folder on exit."""
    with _folder() as workdir:
        process = subprocess.Popen(
            request.launch.command(workdir),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=workdir,
            env=_ENVIRONMENT,
            pass_fds=request.pipes,
            start_new_session=True,
        )
        assert process.stdin is not None
        try:
            with suppress(OSError):  # it has died, which `_end_of` reports
                process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
                process.stdin.flush()
            yield process
        finally:
            with suppress(OSError):
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STARTUP_SECONDS)
            if process.returncode != 0:
                _sweep(process.pid, workdir)
            for stream in filter(None, (process.stdout, process.stderr)):
                stream.close()


def _end_of(side: subprocess.Popen[bytes], seconds: float, nonce: str | None = None) -> _Ending:
    """What the supervisor says of its side's end; it is stopped if that takes over `seconds`."""
    assert side.stdout is not None
    poller = select.poll()
    poller.register(side.stdout, select.POLLIN | select.POLLHUP)
    poller.poll(seconds * 1000)
    try:
        output, errors = side.communicate(timeout=_STARTUP_SECONDS)  # closes its input: "stop"
    except subprocess.TimeoutExpired:
        return _Ending(reason="timeout", detail=f"no answer within {_STARTUP_SECONDS:g} s")
    if side.returncode == 0:
        # A program that may open other processes' pipes may have written this output.
        with suppress(ValidationError):
            ending = _Ending.model_validate_json(output)
            if ending.reason != "passed" or (nonce is not None and ending.nonce == nonce):
                return ending
    lines = errors.decode("utf-8", "replace").strip().splitlines() or ["no message"]
    detail = f"supervisor ended ({side.returncode}): {lines[-1]:.300}"
    return _Ending(reason="sandbox", detail=detail)


@contextmanager
def _folder() -> Iterator[str]:
    """A temporary folder, removed whatever the program made in it; logs a folder that stays."""
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


def _sweep(session: int, workdir: str) -> None:
    """Clean up for a supervisor that died: kill its session and whoever works in `workdir`."""
    with suppress(OSError):
        os.killpg(session, signal.SIGKILL)
    for process in psutil.process_iter(["cwd"]):
        if (process.info["cwd"] or "").startswith(workdir):
            with suppress(psutil.Error):
                process.kill()


def _process_limit(allowed: int) -> int | None:
    """`allowed` plus what the user already runs, because RLIMIT_NPROC counts all of it.

    Root's programs run under a user id of their own, which runs nothing else, where there are such
    (a container may have few). Returns None if it cannot be counted.
    """
    user = os.geteuid()
    if user == 0:
        if _has_users_of_its_own():
            return allowed
        user = _NOBODY
    if not sys.platform.startswith("linux"):
        return None
    tasks = _BESIDE * (os.cpu_count() or 1)
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            status = (entry / "status").read_text()  # the folder is root's where it is hidden
            if f"\nUid:\t{user}\t" in status:
                tasks += (entry / "task").stat().st_nlink - 2
    return allowed + tasks
