"""Traces for the page: replayed generations in columns, their texts in one shared list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from fly.analysis.html.documents import Key
from fly.config import FlyConfig
from fly.errors import FlyError
from fly.runs.reader import Run
from fly.runs.replay import Generation, Token, generations
from fly.speculation.rules import configured

_LETTERS = {
    "ngram": "n",
    "draft": "d",
    "deferred": "w",
    "correction": "c",
    "bonus": "b",
    "rolled_back": "r",
}


def replayed(run: Run) -> list[Generation]:
    """All traced requests of the run; empty without a trace."""
    try:
        return list(generations(run.rounds, run.vocabulary, window_of(run)))
    except (ValueError, KeyError, IndexError) as error:
        raise FlyError(f"{run.folder}: its trace cannot be replayed: {error}") from None


def window_of(run: Run) -> int:
    """How many tokens after a deferral had to match; 0 where the rule knows no windows."""
    try:
        rule = configured.relaxation(FlyConfig.model_validate((run.entry or {}).get("config")))
    except ValidationError:  # a later version's keys: the view only lacks the windows' marks
        return 0
    return 0 if rule is None else rule.window


def block(per_run: list[list[Generation]], numbers: Mapping[Key, int]) -> dict[str, Any]:
    """The page's traces of the documents in `numbers`, which are the table's row numbers.

    texts: every token's text once; the columns name them by number, -1 for none. documents: by row
    number, then by run, a list of requests.
    """
    texts: dict[str, int] = {}
    documents: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for run, done in enumerate(per_run):
        for generation in done:
            number = numbers.get((generation.task, generation.doc_id))
            if number is not None:
                by_run = documents.setdefault(number, {})
                by_run.setdefault(run, []).append(_columns(generation, texts))
    return {"texts": list(texts), "documents": documents}


def _columns(generation: Generation, texts: dict[str, int]) -> dict[str, Any]:
    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    shown: list[Token] = generation.shown
    return {
        "finish": generation.finish,
        "source": "".join(_LETTERS[token.source] for token in shown),
        "by": "".join(token.by or "t" for token in shown),
        "text": [number(token.text) for token in shown],
        "choice": [-1 if token.native else number(token.choice_text) for token in shown],
        "replaced": [
            -1 if token.replaced is None else number(token.replaced_text) for token in shown
        ],
        "entropy": [token.entropy for token in shown],
        "index": [token.index for token in shown],
        "round": [token.round for token in shown],
        "window": [-1 if token.window is None else token.window for token in shown],
    }
