"""Where fetched pairs lie, and the fetch itself: locked, resumable, nothing half-written.

Layout under FLY_HOME/pairs/NAME: `draft/model.gguf` and `target/model.gguf` appear by one rename
each, after their checksum was right, so their presence means complete. `.download/` holds verified
parts while a fetch is under way and is removed at its end.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fly.errors import FlyError
from fly.models.pairs import download
from fly.models.pairs.registry import PAIRS, ModelFiles, Pair
from fly.paths import fly_home

_PREFIX = "pair:"
_FILE = "model.gguf"


@dataclass(frozen=True)
class PairPaths:
    """The GGUF files."""

    draft: Path
    target: Path


def get_pair(name: str) -> Pair:
    if name not in PAIRS:
        raise FlyError(f"pair {name!r} is not known: known pairs are {', '.join(PAIRS)}")
    return PAIRS[name]


def folder_of(name: str) -> Path:
    return fly_home() / "pairs" / name


def locate(name: str) -> PairPaths | None:
    """The fetched pair's files, or None if it is not (completely) there."""
    folder = folder_of(get_pair(name).name)
    paths = PairPaths(folder / "draft" / _FILE, folder / "target" / _FILE)
    return paths if paths.draft.is_file() and paths.target.is_file() else None


def role_of(text: str) -> tuple[str, str] | None:
    """(NAME, "draft" or "target") of `pair:NAME/draft` and `pair:NAME/target`; else None.

    Raises FlyError for a pair that is not known and for any other role.
    """
    if not text.startswith(_PREFIX):
        return None
    name, _, role = text[len(_PREFIX) :].rpartition("/")
    if role not in ("draft", "target"):
        raise FlyError(f"{text}: write pair:NAME/draft or pair:NAME/target")
    get_pair(name)
    return name, role


def resolve_model_path(text: str) -> str:
    """`pair:NAME/draft` or `pair:NAME/target` as a local GGUF file; other strings unchanged.

    Raises FlyError with the command to run if the pair was not fetched.
    """
    if (named := role_of(text)) is None:
        return text
    name, role = named
    if (paths := locate(name)) is None:
        raise FlyError(f"{text}: the pair is not here yet: run `fly pair fetch {name}` first")
    return str(paths.draft if role == "draft" else paths.target)


def how_to_fetch(file: Path) -> str:
    """What to do about a model's file that is damaged."""
    folder = file.parent
    if folder.parent.parent == fly_home() / "pairs":
        return f"remove {folder} and run `fly pair fetch {folder.parent.name}`"
    return "fetch it again"


def fetch(name: str, *, progress: bool = True) -> PairPaths:
    """Download and check a pair; returns at once if it is there.

    Raises FlyError for an unknown name, too little disk, no network, or bytes whose checksum is
    wrong. Verified parts survive a failure: the same call continues from them.
    """
    pair = get_pair(name)
    folder = folder_of(name)
    paths = locate(name)
    if paths is not None and not (folder / ".download").exists():
        return paths
    with _clear_disk_errors(folder), _lock(folder, progress):
        missing = {r: f for r, f in pair.roles.items() if not (folder / r / _FILE).is_file()}
        if missing:  # else another process has fetched them meanwhile
            _remove_leftovers(folder)
            _check_space(pair, folder)
            use_hub = download.hub_reachable(pair.draft)
            for role, files in missing.items():
                _fetch_model(folder, role, files, use_hub, progress)
        shutil.rmtree(folder / ".download", ignore_errors=True)
    paths = locate(name)
    assert paths is not None
    return paths


def _fetch_model(folder: Path, role: str, files: ModelFiles, use_hub: bool, progress: bool) -> None:
    work = folder / ".download" / role
    work.mkdir(parents=True, exist_ok=True)
    downloaded = download.gguf_file(files, work, role, use_hub, progress)
    with open(downloaded, "rb") as file:  # a power cut after the rename leaves no empty model
        os.fsync(file.fileno())
    shutil.rmtree(folder / role, ignore_errors=True)  # converted by an earlier version of fly
    (folder / role).mkdir()
    downloaded.rename(folder / role / _FILE)


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed fetch left behind and the next one cannot continue from."""
    for pattern in ("wheel-*", "*.partial"):
        for path in folder.glob(f".download/*/{pattern}"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _lock(folder: Path, progress: bool) -> AbstractContextManager[object]:
    """Held until the `with` block ends; waits while another process fetches the same pair."""
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        download.say("another process is fetching this pair: waiting for it", progress)
        return lock.acquire()


@contextmanager
def _clear_disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FlyError(
                f"{folder}: the disk is full: free some space or set FLY_HOME to another disk, "
                "then run the same command again (finished parts are kept)"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise FlyError(
                f"FLY_HOME={fly_home()}: cannot be written ({error.strerror}): "
                "set FLY_HOME to a folder of yours"
            ) from error
        raise


def _check_space(pair: Pair, folder: Path) -> None:
    present = sum(item.stat().st_size for item in folder.rglob("*") if item.is_file())
    needed = max(0, pair.disk_bytes - present)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FlyError(
            f"pair {pair.name} needs {needed / 1e9:.1f} GB free in {folder}, "
            f"{free / 1e9:.1f} GB are: set FLY_HOME to another disk"
        )
