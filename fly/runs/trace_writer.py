"""Every round of a run as JSONL, one line per row and round. docs/traces.md describes the keys."""

from __future__ import annotations

from typing import Any

from fly.errors import FlyError
from fly.runs import vocabulary
from fly.runs.context import JsonLines, Session
from fly.speculation.engine import RoundRecord
from fly.speculation.sequence import Sequence, Source


class Trace:
    """An observer of the engine that writes `fly_trace_*.jsonl` beside lm-eval's samples.

    tokenizer: for `fly_vocabulary_*.jsonl`, the texts of the ids in it. rank, world_size: of the
    process: each writes a file of its own, and no two number a request alike.
    """

    def __init__(
        self, session: Session, tokenizer: Any, rank: int = 0, world_size: int = 1
    ) -> None:
        check_has_folder(session)
        self._session, self._rank, self._world_size = session, rank, world_size
        self._vocabulary = Vocabulary(session, rank, tokenizer)
        self._lines = JsonLines(session, "fly_trace", rank)
        self._open: dict[int, list[int]] = {}  # by row: its number, its rounds so far

    def on_round(self, record: RoundRecord) -> None:
        row = record.row
        if id(row) not in self._open:
            number = self._session.traced_requests * self._world_size + self._rank
            self._open[id(row)] = [number, 0]
            self._session.traced_requests += 1
        whose = self._open[id(row)]
        whose[1] += 1
        self._vocabulary.add(record.verdict.draft + record.verdict.choice)
        self._lines.write(
            {**_document(row), "request": whose[0], "round": whose[1], **decided(record)}
        )
        if not row.is_open:
            del self._open[id(row)]

    def close(self) -> None:
        self._lines.close()
        self._vocabulary.close()


class Vocabulary:
    """Writes `fly_vocabulary_*.jsonl`: every token id that a trace names, once per run."""

    def __init__(self, session: Session, rank: int, tokenizer: Any) -> None:
        self._lines = JsonLines(session, "fly_vocabulary", rank)
        self._known = session.traced_tokens
        self._bytes_of = vocabulary.reader(tokenizer)

    def add(self, ids: list[int]) -> None:
        for token in ids:
            if token not in self._known:
                self._known.add(token)
                self._lines.write({"id": token, **vocabulary.entry_of(self._bytes_of(token))})

    def close(self) -> None:
        self._lines.close()


def check_has_folder(session: Session) -> None:
    if session.output_dir is None:
        raise FlyError("trace=true: traces are written beside the samples: add --output_path DIR")


def _document(row: Sequence) -> dict[str, Any]:
    instance = row.request.tag
    names = {name: getattr(instance, name, None) for name in ("task_name", "doc_id", "idx")}
    return {**names, "repeat": row.request.repeat}


def decided(record: RoundRecord) -> dict[str, Any]:
    """The keys of a line that a round decides. Positions count the row's generated tokens."""
    verdict, row, start = record.verdict, record.row, record.start
    rolled_back = record.length - 1 if row.sources[-1] is Source.ROLLBACK else None
    deferred = [start + position for position in verdict.resolution.deferred]
    kept = record.length if rolled_back is None else rolled_back
    line: dict[str, Any] = {
        "start": start,
        "draft": verdict.draft,
        "by": record.drafted_by,
        "native": "".join("1" if match else "0" for match in verdict.native),
        "choice": verdict.choice,
        "deferred": [index for index in deferred if index < kept],
        "rolled_back": rolled_back,
        "open": None if row.open is None else row.open.at,
        "length": record.length,
        "finish": row.finish_reason,
    }
    if verdict.entropy is not None:
        line["entropy"] = [round(value, 3) for value in verdict.entropy]
    return line
