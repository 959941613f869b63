"""The manifest of a run: what it was asked for, so that a killed run goes on as the same run.

`fly_run_<started>.json` is written beside the run's records before the models load, and replaced
atomically, so that a kill leaves a whole one. docs/scale.md has the rules.
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

from fly import reading
from fly.errors import FlyError
from fly.paths import expanded, hold, timestamp, write_whole
from fly.runs import shapes

logger = logging.getLogger(__name__)

_FORMAT = 1
_ABSENT = object()


@dataclass
class Manifest:
    """The file that makes a run resumable.

    Keys of `data`: format, started, finished, results (name of the results file), resumed (when),
    working_directory, below (records lie in a folder below --output_path), arguments (lm-eval's),
    and the facts that must not change: whatever `agree` was given.
    """

    path: Path
    data: dict[str, Any]  # what the file holds
    # held while this process works on the run
    lock: FileLock | None = field(default=None, repr=False)

    @classmethod
    def create(cls, folder: Path, arguments: dict[str, Any]) -> Manifest:
        """A new run in `folder`, under a name (the second it started) that no other run has."""
        cls._remove_orphaned_locks(folder)
        while True:
            started = timestamp()
            data = {
                "format": _FORMAT,
                "started": started,
                "finished": False,
                "results": None,
                "resumed": [],
                "working_directory": str(Path.cwd()),
                "below": Path(arguments["output_path"]) != folder,
                "arguments": plain(arguments),
            }
            manifest = cls(path_in(folder, started), data)
            if not manifest.path.exists() and manifest.hold():
                manifest.save()
                return manifest
            time.sleep(0.1)

    @classmethod
    def _remove_orphaned_locks(cls, folder: Path) -> None:
        """Of processes that were killed between locking their run and writing its manifest."""
        for lock in folder.glob(".fly_run_*.lock"):
            run = cls(folder / f"{lock.stem[1:]}.json", {"finished": False})
            if not run.path.exists() and run.hold():
                run.release()

    @classmethod
    def read(cls, path: Path) -> Manifest:
        data = reading.read_object(path)
        if data.get("format") != _FORMAT:
            raise FlyError(f"{path}: not a run's manifest of this version of fly")
        reading.check_shape(data, shapes.ManifestShape, f"{path}, a run's manifest")
        return cls(path, data)

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def output_path(self) -> Path:
        """--output_path of the run, wherever its folder lies now."""
        original = Path(self.data["arguments"]["output_path"])
        if original.suffix == ".json":
            return self.folder / original.name
        return self.folder.parent if self.data["below"] else self.folder

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
        """Note a fact that must not change during the run, or check it against the note.

        Raises FlyError naming what differs, as it was and as it is.
        """
        value = plain(value)
        if name not in self.data:
            self.data[name] = value
            self.save()
        elif found := first_difference(name, self.data[name], value):
            what, old, new = found
            raise FlyError(
                f"--resume {self.folder}: {what} was {old}, is now {new}: restore it, or start a "
                "new run (leave --resume out)"
            )

    def hold(self, wait: float = 0) -> bool:
        """Lock the run; False if another process works on it. The lock ends with the process.

        wait: seconds to wait for a process that is about to end.
        """
        try:
            self.lock = hold(self.path.with_name(f".{self.path.stem}.lock"), wait)
        except Timeout:
            return False
        return True

    def release(self) -> None:
        """Let other processes work on the run; once it has ended or is gone, remove the lock."""
        if self.lock is None:
            return
        self.lock.release()  # before its file is removed: another process could lock a second file
        if self.finished or not self.path.exists():
            with contextlib.suppress(OSError):  # Windows removes no open file
                Path(self.lock.lock_file).unlink(missing_ok=True)
        self.lock = None

    def finish(self, results: Path) -> None:
        self.data.update(finished=True, results=results.name)
        self.save()


def path_in(folder: Path, started: str) -> Path:
    """Of the run in this folder that started then."""
    return folder / f"fly_run_{started}.json"


def all_in(folder: Path) -> list[Manifest]:
    """Manifests in the folder and in those below it, the oldest first."""
    paths = [*folder.glob("fly_run_*.json"), *folder.glob("*/fly_run_*.json")]
    return [Manifest.read(path) for path in sorted(paths, key=lambda path: path.name)]


def find(given: str) -> Manifest:
    """The newest unfinished run that RUN_DIR names, else the newest finished one.

    given: an --output_path, the folder below it that holds the records, or a manifest.
    """
    path = expanded(given).absolute()
    if path.is_file() and path.name.startswith("fly_run_"):
        return Manifest.read(path)
    folder = path.parent if path.suffix == ".json" else path
    if not folder.is_dir():
        raise FlyError(f"--resume {given}: no such folder: give the run's --output_path")
    found = all_in(folder)
    # an --output_path of that name, of runs with results files of their own names
    if path.suffix == ".json" and not path.is_file():
        named = [run for run in found if run.output_path.name == path.name]
        found = named or [run for run in found if run.output_path.suffix != ".json"]
    if not found:
        raise FlyError(
            f"--resume {given}: holds no fly_run_*.json: runs of fly's backend with "
            "--output_path and without enable_statistics=false can be resumed"
        )
    return ([manifest for manifest in found if not manifest.finished] or found)[-1]


def plain(value: Any) -> Any:
    """The value as JSON gives it back, to be compared with what was read from a file."""
    return json.loads(json.dumps(value, default=str))


def first_difference(name: str, old: Any, new: Any) -> tuple[str, str, str] | None:
    """(where, old, new) of the first place at which two JSON values differ; None if none does.

    An absent key equals null: an earlier version of fly may not have had it.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            values = old.get(key, _ABSENT), new.get(key, _ABSENT)
            if found := first_difference(f"{name}.{key}", *values):
                return found
        return None
    if old == new or (old in (None, _ABSENT) and new in (None, _ABSENT)):
        return None
    return name, _shown(old), _shown(new)


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else json.dumps(value, ensure_ascii=False)
