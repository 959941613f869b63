"""The manifest of a run: what it was asked for, so that a killed run goes on as the same run.

`fly_run_<started>.json` lies beside the run's records from before the models load. It is replaced
as a whole (written beside, then renamed), so no kill leaves half of one. docs/resume.md has the
rules.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

from fly import reading
from fly.errors import FlyError
from fly.paths import write_whole

logger = logging.getLogger(__name__)

FORMAT = 1


@with_config(ConfigDict(strict=True))
class _Data(TypedDict):
    started: reading.Name
    finished: bool
    results: str | None
    resumed: list[str]


@with_config(ConfigDict(strict=True))
class _Arguments(TypedDict):
    output_path: str


@with_config(ConfigDict(strict=True))
class _Resumable(TypedDict):
    working_directory: str
    below: bool
    arguments: _Arguments


_SHAPE: TypeAdapter[Any] = TypeAdapter(_Data)
_RESUMABLE: TypeAdapter[Any] = TypeAdapter(_Resumable)
_ABSENT = object()


@dataclass
class Manifest:
    """`data`: what the file holds. `lock`: held while a process works on the run, if it could be.

    Keys of `data`: format, started, finished, results (name of the results file), resumed (when),
    working_directory, below (records lie in a folder below --output_path), arguments (lm-eval's),
    and the facts that must not change: whatever `agree` was given.
    """

    path: Path
    data: dict[str, Any]
    lock: FileLock | None = field(default=None, repr=False)

    @classmethod
    def create(cls, folder: Path, **data: Any) -> Manifest:
        """A new run in `folder`, under a name (the second it started) that no other run has."""
        while True:
            started = time.strftime("%Y-%m-%dT%H-%M-%S")
            path = folder / f"fly_run_{started}.json"
            first = {"format": FORMAT, "started": started, "finished": False, "results": None}
            manifest = cls(path, plain({**first, "resumed": [], **data}))
            if not path.exists() and manifest.hold():
                manifest.save()
                return manifest
            time.sleep(0.1)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        data = reading.read_object(path)
        if data.get("format") != FORMAT:
            raise FlyError(f"{path}: not a run's manifest of this version of fly")
        reading.check_shape(data, _SHAPE, f"{path}, a run's manifest")
        return cls(path, data)

    def check_resumable(self) -> None:
        """Raise FlyError unless it says how the run was started."""
        reading.check_shape(self.data, _RESUMABLE, f"{self.path}, a run's manifest")

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def started(self) -> str:
        return str(self.data["started"])

    @property
    def finished(self) -> bool:
        return bool(self.data["finished"])

    @property
    def results(self) -> Path | None:
        """The results file of a run that has ended."""
        name = self.data["results"]
        return self.folder / name if name else None

    def save(self) -> None:
        write_whole(self.path, json.dumps(self.data, indent=2, ensure_ascii=False))

    def agree(self, name: str, value: Any) -> None:
        """Note a fact that must stay as it is while the run lasts, or check it against the note.

        Raises FlyError naming what differs, as it was and as it is.
        """
        if name not in self.data:
            self.data[name] = plain(value)
            self.save()
        elif found := first_difference(name, self.data[name], plain(value)):
            what, old, new = found
            raise FlyError(
                f"--resume {self.folder}: {what} was {old}, is now {new}: restore it, or start a "
                "new run (leave --resume out)"
            )

    def hold(self, wait: float = 0) -> bool:
        """Whether no other process works on this run; none will while this one lives.

        The system releases the lock when a process dies, however it does. wait: so many seconds,
        for one that is about to end.
        """
        lock = FileLock(self.path.with_name(f".{self.path.stem}.lock"), timeout=wait)
        try:
            lock.acquire()
        except Timeout:
            return False
        except (NotImplementedError, OSError) as error:
            logger.warning("%s cannot be locked (%s): start no second --resume", self.path, error)
            return True
        self.lock = lock
        return True

    def release(self) -> None:
        """Let others work on the run; of one that has ended or is gone, the lock goes, too."""
        if self.lock is None:
            return
        ended = self.finished or not self.path.exists()
        file = Path(self.lock.lock_file)
        self.lock.release()
        self.lock = None
        if ended:  # nobody waits for it any more; while held, another could lock a second file
            with contextlib.suppress(OSError):  # one that is open cannot be removed on Windows
                file.unlink(missing_ok=True)

    def finish(self, results: Path) -> None:
        self.data.update(finished=True, results=results.name)
        self.save()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def all_in(folder: Path) -> list[Manifest]:
    """Manifests in the folder and in those below it, the oldest first."""
    paths = [*folder.glob("fly_run_*.json"), *folder.glob("*/fly_run_*.json")]
    return [Manifest.read(path) for path in sorted(paths, key=lambda path: path.name)]


def find(given: str) -> Manifest:
    """The newest unfinished run that RUN_DIR names, else the newest finished one.

    given: an --output_path, the folder below it that holds the records, or a manifest.
    """
    path = Path(given).expanduser().absolute()
    if path.is_file() and path.name.startswith("fly_run_"):
        return Manifest.read(path)
    folder = path.parent if path.suffix == ".json" else path
    if not folder.is_dir():
        raise FlyError(f"--resume {given}: no such folder: give the run's --output_path")
    found = all_in(folder)
    if not found:
        raise FlyError(
            f"--resume {given}: holds no fly_run_*.json: runs of one process of fly's backend with "
            "--output_path and without enable_statistics=false can be resumed"
        )
    return ([manifest for manifest in found if not manifest.finished] or found)[-1]


def plain(value: Any) -> Any:
    """The value as JSON gives it back, so that what was noted and what is now compare."""
    return json.loads(json.dumps(value, default=str))


def first_difference(name: str, old: Any, new: Any) -> tuple[str, str, str] | None:
    """(where, old, new) of the first place at which two JSON values differ; None if none does."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            values = old.get(key, _ABSENT), new.get(key, _ABSENT)
            if found := first_difference(f"{name}.{key}", *values):
                return found
        return None
    if old == new or (old in (None, _ABSENT) and new in (None, _ABSENT)):
        return None  # a key that an earlier fly did not have yet is as good as null
    return name, _shown(old), _shown(new)


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else json.dumps(value, ensure_ascii=False)
