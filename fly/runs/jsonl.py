"""JSONL files that a run writes: one line, flushed, the moment something ends."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fly.errors import FlyError
from fly.paths import fly_home, write_whole

if TYPE_CHECKING:
    from fly.runs.context import RunContext

logger = logging.getLogger(__name__)


class JsonLines:
    """One file, `<name>_<started>.jsonl`, in the run's output folder; `_rank<N>` is added to the
    names of further processes' files.

    Every line is flushed, so that it survives the death of the process, SIGKILL included (it is not
    synced to disk: a power cut may take it). Without an output folder, lines are kept in memory:
    `flush` writes them to FLY_HOME/interrupted, for runs that are cut short, and `close` leaves
    them to the run (`unsaved`).
    """

    def __init__(self, run: RunContext, name: str, rank: int) -> None:
        suffix = f"_rank{rank}" if rank else ""
        self._name = f"{name}_{run.started}{suffix}.jsonl"
        self._folder = run.output_dir and run.output_dir.absolute()
        self._run = run
        self._file: IO[str] | None = None
        self._unsaved: list[str] = []
        self.kept = 0  # lines that were written to the file as a whole

    @property
    def path(self) -> Path:
        return (self._folder or fly_home() / "interrupted") / self._name

    def write(self, record: Mapping[str, Any]) -> None:
        self._unsaved.append(json.dumps(record, ensure_ascii=False) + "\n")
        if self._folder is not None:
            self.flush()

    def flush(self) -> None:
        """Append what is in memory to the file. Raises FlyError if the file was removed or moved;
        `close` puts its content back."""
        if not self._unsaved:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115
        lines, self._unsaved = self._unsaved, []  # first: a signal may flush once more
        self._file.writelines(lines)
        self._file.flush()
        self.kept += len(lines)
        if not self._is_in_place(self._file):
            raise FlyError(
                f"output_path={self._run.output_dir}: was removed or moved while the run wrote "
                f"to it: what was finished is put back there; {self._run.resume_hint}"
            )

    def close(self) -> None:
        """Close the file, and write it again if it was removed or moved: an open file can still be
        read then."""
        if self._file is None:
            self._run.unsaved.setdefault(self._name, []).extend(self._unsaved)
            return
        if not self._is_in_place(self._file):
            self._file.seek(0)
            self._put_back(self._file.read())
        self._file.close()
        self._file = None

    def _is_in_place(self, file: IO[str]) -> bool:
        return os.fstat(file.fileno()).st_nlink > 0 and self.path.exists()

    def _put_back(self, text: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, text)
        except OSError:
            if self._folder is None:
                raise
            self._folder = None  # the folder cannot be made again: use FLY_HOME
            self._put_back(text)
            logger.warning(
                "the folder cannot be made again: kept in %s (draft_runs can use it)", self.path
            )
