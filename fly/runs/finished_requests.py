"""What a resumed run's earlier processes finished: read from its records, not decoded again."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from fly.errors import FlyError
from fly.paths import write_whole
from fly.runs import shapes
from fly.runs.manifest import first_difference, plain
from fly.runs.reader import read_lines
from fly.runs.records import RunStats

logger = logging.getLogger(__name__)

_WHICH = ("task", "doc_id", "idx", "repeat")
_ASKED = ("doc_hash", "prompt_hash", "prompt_tokens", "decoding")


class Earlier:
    """What a run's earlier processes finished: its records, by what they answer.

    stats: their sums. traced_requests: the first number that no line of the trace has, without
    the rounds of requests that have no record: these will be decoded again. traced_tokens: ids that
    the vocabulary beside the trace has.
    """

    def __init__(self, folder: Path, started: str) -> None:
        path = folder / f"fly_requests_{started}.jsonl"
        self._where = path
        self._asked: set[tuple[Any, ...]] = set()
        self._records: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.stats = RunStats()
        for record in _whole_lines(path, shapes.RESUMABLE):
            key = tuple(record.get(name) for name in _WHICH)
            if key in self._records:
                raise FlyError(f"{path}: two records of {_name(record)}: start a new run")
            self._records[key] = record
            self.stats.merge(RunStats.of_record(record))
        self._trace = folder / f"fly_trace_{started}.jsonl"
        rounds = _whole_lines(self._trace, shapes.TRACED)
        finished = [line for line in rounds if (line["task_name"], *_rest(line)) in self._records]
        self._new_trace = finished if len(finished) < len(rounds) else None
        self.traced_requests = 1 + max((int(line["request"]) for line in finished), default=-1)
        vocabulary = _whole_lines(folder / f"fly_vocabulary_{started}.jsonl", shapes.TOKEN)
        self.traced_tokens = {int(line["id"]) for line in vocabulary}

    def __len__(self) -> int:
        return len(self._records)

    def text(self, asked: dict[str, Any]) -> str | None:
        """The text decoded for this request (`requests.identity`); None if there is none.

        Raises FlyError if the record answers another document, prompt or decoding.
        """
        record = self._records.get(tuple(asked[name] for name in _WHICH))
        if record is None:
            return None
        was = {name: record.get(name) for name in _ASKED}
        if found := first_difference("", was, plain({name: asked[name] for name in _ASKED})):
            field, old, new = found
            raise FlyError(
                f"{self._where}: {_name(asked)}: {field[1:]} was {old}, is now {new}: the task, "
                "its data or its settings have changed: start a new run (leave --resume out)"
            )
        text = record.get("text")
        if not isinstance(text, str):
            raise FlyError(
                f"{self._where}: {_name(asked)}: text is {json.dumps(text)}, which is no text: "
                "remove the line, and the request is decoded again"
            )
        return text

    def note_asked(self, asked: list[dict[str, Any]]) -> None:
        """These requests are part of the run. Raises FlyError if a record of one of their tasks
        belongs to none of them."""
        self._asked |= {tuple(item[name] for name in _WHICH) for item in asked}
        tasks = {item["task"] for item in asked}
        self._check(key for key, record in self._records.items() if record["task"] in tasks)

    def check_all_asked(self) -> None:
        """Raise FlyError if a record belongs to nothing that the run has asked for."""
        self._check(self._records)

    def _check(self, keys: Iterable[tuple[Any, ...]]) -> None:
        for key in keys:
            if key not in self._asked:
                raise FlyError(
                    f"{self._where}: {_name(self._records[key])} is no longer asked for: the task "
                    "or its data have changed: start a new run (leave --resume out)"
                )

    def mend_trace(self) -> None:
        """Drop the rounds of requests without a record from the file, before new ones join it."""
        if self._new_trace is None:
            return
        logger.info("%s: rounds of unfinished requests are dropped", self._trace)
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in self._new_trace]
        write_whole(self._trace, "".join(lines))
        self._new_trace = None


def _rest(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in _WHICH[1:])


def _name(record: dict[str, Any]) -> str:
    return f"task {record['task']}, doc {record['doc_id']}"


def _whole_lines(path: Path, shape: TypeAdapter[Any]) -> list[dict[str, Any]]:
    """The records of a JSONL file, after cutting off a line that a kill left unfinished."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        logger.warning("%s: a torn last line (%d bytes) is dropped", path, len(content) - whole)
        os.truncate(path, whole)  # one call: another kill finds the line or does not
    return read_lines(path, shape)
