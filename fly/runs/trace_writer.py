"""Every round of a run as JSONL, one line per request and round. docs/report.md has the keys."""

from __future__ import annotations

from typing import Any

from fly.models import token_bytes
from fly.runs.context import RunContext
from fly.runs.jsonl import JsonLines
from fly.runs.records import RoundRecord
from fly.runs.shapes import RoundLine, TokenLine


class Trace:
    """An observer of the engine that writes `fly_trace_*.jsonl` beside lm-eval's samples, and
    `fly_vocabulary_*.jsonl`: every token id that the trace names, once per run, with its text.

    rank, world_size: of the process: each writes files of its own, and request numbers are unique
    among all processes.
    """

    def __init__(self, run: RunContext, tokenizer: Any, rank: int, world_size: int) -> None:
        self._run, self._rank, self._world_size = run, rank, world_size
        self._bytes_of = token_bytes.reader(tokenizer)
        self._vocabulary = JsonLines(run, "fly_vocabulary", rank)
        self._lines = JsonLines(run, "fly_trace", rank)
        self._numbers: dict[int, int] = {}  # of running requests, by their ids in Python

    def on_round(self, record: RoundRecord) -> None:
        request = id(record.request)
        if request not in self._numbers:
            number = self._run.traced_requests * self._world_size + self._rank
            self._numbers[request] = number
            self._run.traced_requests += 1
        self.add_to_vocabulary(record.draft + record.target_tokens)
        self._lines.write(line_of(record, self._numbers[request]))
        if record.finish is not None:
            del self._numbers[request]

    def add_to_vocabulary(self, ids: list[int]) -> None:
        """Add those tokens to the vocabulary that are not in it yet."""
        for token in ids:
            if token not in self._run.traced_tokens:
                self._run.traced_tokens.add(token)
                self._vocabulary.write(_token_line(token, self._bytes_of(token)))

    def close(self) -> None:
        self._lines.close()
        self._vocabulary.close()


def _token_line(token: int, piece: bytes) -> TokenLine:
    try:
        return {"id": token, "text": piece.decode()}
    except UnicodeDecodeError:
        return {"id": token, "bytes": piece.hex()}


def line_of(record: RoundRecord, number: int) -> RoundLine:
    """The round's line in the trace. number: of the request in the file."""
    instance = record.request.tag
    line: RoundLine = {
        "task_name": instance.task_name,
        "doc_id": instance.doc_id,
        "idx": instance.idx,
        "repeat": record.request.repeat,
        "request": number,
        "round": record.number,
        "start": record.start,
        "draft": record.draft,
        "by": record.drafted_by,
        "native": "".join("1" if match else "0" for match in record.matches),
        "choice": record.target_tokens,
        "deferred": record.deferred,
        "rolled_back": record.rolled_back,
        "open": record.open_at,
        "length": record.length,
        "finish": record.finish,
    }
    if record.entropy is not None:
        line["entropy"] = [round(value, 3) for value in record.entropy]
    return line
