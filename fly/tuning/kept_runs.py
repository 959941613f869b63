"""Finished runs, kept beside the output: a tune that is started again does not decode them anew."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fly.models.fingerprint import hash_json
from fly.paths import write_output
from fly.tuning.real_runs import RunResult


class _Kept(RunResult):
    """A file."""

    key: dict[str, Any]


@dataclass(frozen=True)
class KeptRuns:
    """Finished runs of a tune, for the next one."""

    folder: Path  # a file for each run
    common: dict[str, Any]  # what all runs of this tune depend on

    def load(self, key: dict[str, Any]) -> RunResult | None:
        """The run that an earlier tune has kept; None without one."""
        whole = self._whole(key)
        try:
            kept = _Kept.model_validate_json(self._path(whole).read_bytes())
        except (OSError, ValueError):
            return None  # not there, or not ours: it is made anew
        return kept if kept.key == whole else None

    def save(self, key: dict[str, Any], run: RunResult) -> None:
        whole = self._whole(key)
        kept = _Kept(key=whole, **dict(run))
        write_output(self._path(whole), kept.model_dump_json() + "\n", "--output")

    def _whole(self, key: dict[str, Any]) -> dict[str, Any]:
        whole: dict[str, Any] = json.loads(json.dumps({**self.common, **key}))
        return whole

    def _path(self, whole: dict[str, Any]) -> Path:
        return self.folder / f"{hash_json(whole)[:16]}.json"
