"""Where fly's own files lie: shipped configurations and tasks, and the user's cache."""

import contextlib
import glob
import logging
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from fly.errors import FlyError

logger = logging.getLogger(__name__)


def data_dir(name: str) -> Path:
    """The shipped folder `name` ("fly_config" or "lm_eval_tasks").

    In a wheel it lies inside the package, in a checkout (editable install) beside it.
    """
    package = Path(__file__).resolve().parent
    packaged = package / "_data" / name
    return packaged if packaged.is_dir() else package.parent / name


def expanded(path: str | Path) -> Path:
    """The path, with `~` as the user's home folder. Raises FlyError if that has none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise FlyError(f"{path}: no such user: write the path out") from None


def fly_home() -> Path:
    """FLY_HOME, or `fly` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    if home := os.environ.get("FLY_HOME"):
        return expanded(home)
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fly"


def hold(path: Path, wait: float = 0) -> FileLock | None:
    """Lock this file until its release or the process's end; None, with a warning, where the file
    system knows no locks. Raises filelock.Timeout if another process still has it after `wait`
    seconds."""
    lock = FileLock(path, timeout=wait)
    try:
        lock.acquire()
    except Timeout:
        raise
    except (NotImplementedError, OSError) as error:
        logger.warning("%s cannot be locked (%s): let no second process work there", path, error)
        return None
    return lock


def write_whole(path: Path, content: str | bytes) -> None:
    """Write or replace a file as a whole: nobody ever meets half of it. Raises OSError.

    What a link names is replaced, not the link; a pipe or a terminal is written to.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    # a name of its own: two processes may write the same file at once
    ours = f".{path.name}.{socket.gethostname()}-"
    beside = path.with_name(f"{ours}{os.getpid()}-{time.monotonic_ns()}-{threading.get_ident()}")
    try:
        with open(beside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # else a machine's crash may leave the new name empty
        if path.exists():
            with contextlib.suppress(OSError):  # not every file system knows permissions
                beside.chmod(stat.S_IMODE(path.stat().st_mode))
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    for left in path.parent.glob(f"{glob.escape(ours)}*"):
        pid = left.name.removeprefix(ours).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):  # killed in the middle of this
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which gets its name at the end of the block: nobody ever meets half of
    it, and nothing is left of a failure. Raises OSError, also if `folder` is there by then."""
    beside = folder.with_name(f".{folder.name}-{os.getpid()}-{time.monotonic_ns()}")
    beside.mkdir(parents=True)
    try:
        yield beside
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_output(path: Path, content: str | bytes, flag: str) -> None:
    """`write_whole` in a folder that is made; raises FlyError that names the command's flag."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise FlyError(f"{flag} {path}: cannot be written: {error.strerror}") from None


def timestamp() -> str:
    """The present second, as the names of a run's files have it."""
    return time.strftime("%Y-%m-%dT%H-%M-%S")


def run_files(folder: Path, name: str, started: str) -> dict[int, Path]:
    """The files `name` of the run of that start, by rank: each of its processes writes its own."""
    found = {}
    for path in folder.glob(f"{name}_{started}*.jsonl"):
        rank = path.stem.removeprefix(f"{name}_{started}").removeprefix("_rank") or "0"
        if rank.isdigit():
            found[int(rank)] = path
    return dict(sorted(found.items()))
