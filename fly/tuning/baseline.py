"""The target alone over the documents; kept beside the output, so that a restart need not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fly.analysis import compare
from fly.analysis.scores import Measured
from fly.errors import FlyError
from fly.paths import write_whole
from fly.tuning.real_runs import Outcome
from fly.tuning.recorder import Document


def load(path: Path, key: dict[str, Any]) -> Outcome | None:
    """What an earlier tune with the same key kept; None without one."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["key"] != json.loads(json.dumps(key)):
            return None
        measured = Measured.model_validate(kept["measured"])
        documents = [
            Document(**{**d, "prompt": tuple(d["prompt"]), "tokens": tuple(d["tokens"])})
            for d in kept["documents"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or not ours: it is made anew
    return Outcome(kept["stats"], measured, documents, kept["available"])


def save(path: Path, key: dict[str, Any], outcome: Outcome) -> None:
    write_json(
        path,
        {
            "key": key,
            "stats": outcome.stats,
            "available": outcome.available,
            "measured": outcome.measured.model_dump(mode="json"),
            "documents": [asdict(document) for document in outcome.documents],
        },
        indent=None,
    )


def check_same_documents(kept: Outcome, other: Outcome, path: Path) -> None:
    """Refuse to compare runs on different prompts (a task's file changed in between)."""
    try:
        compare.check_pairs(kept.measured, other.measured)
        differs = "its prompts" if _prompts(kept) != _prompts(other) else None
    except FlyError as error:
        differs = str(error)
    if differs:
        raise FlyError(
            f"{path}: holds other documents than this run has ({differs}): remove it and run again"
        )


def _prompts(outcome: Outcome) -> set[tuple[str, int, tuple[int, ...]]]:
    return {(d.task, d.doc_id, d.prompt) for d in outcome.documents}


def write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    """Whole or not at all: a reader never sees half of it."""
    write_whole(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")
