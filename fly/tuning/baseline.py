"""The target alone over the documents; kept beside the output, so that a restart need not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fly.analysis import compare
from fly.analysis.scores import Measured
from fly.errors import FlyError
from fly.paths import write_output
from fly.tuning.real_runs import RunResult
from fly.tuning.recorder import Answer


class _Kept(BaseModel):
    """The file. key: what the run depended on."""

    key: dict[str, Any]
    stats: dict[str, Any]
    available: dict[str, int]
    measured: Measured
    documents: list[Answer]


def load(path: Path, key: dict[str, Any]) -> RunResult | None:
    """What an earlier tune with the same key kept; None without one."""
    try:
        kept = _Kept.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None  # not there, or not ours: it is made anew
    if kept.key != json.loads(json.dumps(key)):
        return None
    return RunResult(kept.stats, kept.measured, kept.documents, kept.available)


def save(path: Path, key: dict[str, Any], run: RunResult) -> None:
    kept = _Kept(
        key=key,
        stats=run.stats,
        available=run.available,
        measured=run.measured,
        documents=run.answers,
    )
    write_output(path, kept.model_dump_json() + "\n", "--output")


def check_same_documents(kept: RunResult, other: RunResult, path: Path) -> None:
    """Refuse to compare runs on different prompts (a task's file changed in between)."""
    try:
        compare.check_pairs(kept.measured, other.measured)
    except FlyError as error:
        raise FlyError(
            f"{path}: holds other documents than this run has ({error}): remove it and run again"
        ) from None
