"""Traces for the page: replayed generations in columns, their texts in one shared list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fly.errors import FlyError
from fly.runs import run_settings
from fly.runs.reader import Run
from fly.runs.replay import MATCHES, Generation, generations, set_texts

# by fly.runs.replay's sources, as trace.js has them
LETTERS = {source: letter for letter, source in MATCHES.items()}
LETTERS |= {"deferred": "w", "recovered": "r", "bonus": "b", "rolled_back": "x"}


def replayed(run: Run) -> Iterator[Generation]:
    """All traced requests of the run, one at a time, without texts; empty without a trace."""
    try:
        yield from generations(run.rounds, window=_window(run))
    except FlyError as error:
        raise FlyError(f"{run.folder}: {error}") from None


def _window(run: Run) -> int:
    """How many tokens after a deferral had to match; 0 where the rule has no windows."""
    found = run_settings.in_force(run)
    window = int(found.get("win_len", 0))
    return max(0, window - (found.get("window_rule") == "reference"))


class Shown:
    """The page's traces: of the first `most` traced documents, in the order of the table's rows."""

    def __init__(self, runs: Sequence[Run], most: int) -> None:
        self.traced: set[int] = set()  # rows of all traced documents
        self._runs, self._most = runs, most
        self._kept: dict[int, list[tuple[int, Generation]]] = {}  # by row, (run, request)

    @property
    def rows(self) -> list[int]:
        return sorted(self._kept)

    def keep(self, run: int, rows: Mapping[tuple[str, int], int]) -> Iterator[Generation]:
        """The run's requests, of which those of documents in `rows` (by task and doc_id) are kept
        if they belong to the first."""
        for generation in replayed(self._runs[run]):
            row = rows.get((generation.task, generation.doc_id))
            if row is not None:
                self.traced.add(row)
                self._kept.setdefault(row, []).append((run, generation))
                if len(self._kept) > self._most:
                    del self._kept[max(self._kept)]
            yield generation

    def block(self) -> dict[str, Any]:
        """texts: every token's text once; the columns name them by number, null for none.
        documents: by row, then by run, a list of requests."""
        vocabularies = [run.vocabulary for run in self._runs]
        texts: dict[str, int] = {}
        documents: dict[int, dict[int, list[dict[str, Any]]]] = {}
        for row in self.rows:
            for run, generation in self._kept[row]:
                set_texts(generation.shown, vocabularies[run])
                by_run = documents.setdefault(row, {})
                by_run.setdefault(run, []).append(_columns(generation, texts))
        return {"texts": list(texts), "documents": documents}


def _columns(generation: Generation, texts: dict[str, int]) -> dict[str, Any]:
    def number(text: str, is_there: bool = True) -> int | None:
        return texts.setdefault(text, len(texts)) if is_there else None

    shown = generation.shown
    return {
        "finish": generation.finish,
        "source": "".join(LETTERS[token.source] for token in shown),
        "by": "".join(token.by or "t" for token in shown),
        "text": [number(token.text) for token in shown],
        "target": [number(token.target_text, not token.matches_target) for token in shown],
        "replaced": [number(token.replaced_text, token.replaced is not None) for token in shown],
        "entropy": [token.entropy for token in shown],
        "index": [token.index for token in shown],
        "round": [token.round for token in shown],
        "window": [token.window for token in shown],
    }
