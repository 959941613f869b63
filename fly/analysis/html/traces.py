"""Traces for the page: replayed generations in columns, their texts in one shared list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fly.analysis.terminal.styles import STYLES
from fly.errors import FlyError
from fly.runs import run_settings
from fly.runs.reader import Run
from fly.runs.replay import Generation, generations


def replayed(run: Run) -> list[Generation]:
    """All traced requests of the run; empty without a trace."""
    try:
        return list(generations(run.rounds, run.vocabulary, _window(run)))
    except FlyError as error:
        raise FlyError(f"{run.folder}: {error}") from None


def _window(run: Run) -> int:
    """How many tokens after a deferral had to match; 0 where the rule has no windows."""
    found = run_settings.in_force(run)
    window = int(found.get("win_len", 0))
    return max(0, window - (found.get("window_rule") == "reference"))


def block(
    per_run: list[list[Generation]], rows: Sequence[Mapping[tuple[str, int], int]], shown: set[int]
) -> dict[str, Any]:
    """The page's traces of the documents in the table's rows `shown`.

    rows: per run, by task and doc_id. texts: every token's text once; the columns name them by
    number, null for none. documents: by row, then by run, a list of requests.
    """
    texts: dict[str, int] = {}
    documents: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for run, done in enumerate(per_run):
        for generation in done:
            row = rows[run].get((generation.task, generation.doc_id))
            if row in shown:
                by_run = documents.setdefault(row, {})
                by_run.setdefault(run, []).append(_columns(generation, texts))
    return {"texts": list(texts), "documents": documents}


def _columns(generation: Generation, texts: dict[str, int]) -> dict[str, Any]:
    def number(text: str, is_there: bool = True) -> int | None:
        return texts.setdefault(text, len(texts)) if is_there else None

    shown = generation.shown
    return {
        "finish": generation.finish,
        "source": "".join(STYLES[token.source].letter for token in shown),
        "by": "".join(token.by or "t" for token in shown),
        "text": [number(token.text) for token in shown],
        "target": [number(token.target_text, not token.matches_target) for token in shown],
        "replaced": [number(token.replaced_text, token.replaced is not None) for token in shown],
        "entropy": [token.entropy for token in shown],
        "index": [token.index for token in shown],
        "round": [token.round for token in shown],
        "window": [token.window for token in shown],
    }
