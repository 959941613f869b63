"""What earlier processes of a resumed run finished: read from its records, not decoded again."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fly import launch, reading
from fly.errors import FlyError
from fly.paths import run_files, write_whole
from fly.runs import shapes
from fly.runs.manifest import first_difference, plain
from fly.runs.reader import read_lines
from fly.runs.records import RunStats

logger = logging.getLogger(__name__)

_DECIDE_TEXT = ("doc_hash", "prompt_hash", "prompt_tokens", "decoding")
_Line = TypeVar("_Line")
_Key = tuple[str, int, int, int]  # task, document, index, repeat


class FinishedRequests:
    """The records of a run's earlier processes, by request.

    stats: their sums. traced_requests: the first number that no request in the trace has.
    traced_tokens: ids that the vocabulary beside the trace has.
    """

    def __init__(self, folder: Path, started: str, *, is_traced: bool = False) -> None:
        """is_traced: the run writes a trace. Raises FlyError for damaged files, and if the trace
        lacks rounds of a finished request."""
        self._path = folder / f"fly_requests_{started}.jsonl"
        self._asked: set[_Key] = set()
        self._records: dict[_Key, shapes.ResumableLine] = {}
        self.stats = RunStats()
        try:
            records = _whole_lines(folder, "fly_requests", started, shapes.ResumableLine)
        except FlyError as error:
            raise FlyError(f"{error}: remove the line, and its request is decoded again") from None
        for record in records:
            if _key(record) in self._records:
                raise FlyError(f"{self._path}: two records of {_name(record)}: start a new run")
            self._records[_key(record)] = record
            self.stats.merge(RunStats.of_line(record))
        rounds = _whole_lines(folder, "fly_trace", started, shapes.TracedLine)
        numbers = [line["request"] for line in rounds if _key_of_round(line) in self._records]
        self.traced_requests = 1 + max(numbers, default=-1)
        vocabulary = _whole_lines(folder, "fly_vocabulary", started, shapes.TokenLine)
        self.traced_tokens = {line["id"] for line in vocabulary}
        if is_traced:
            self._check_traced(rounds)
        self._traces = run_files(folder, "fly_trace", started)  # with rounds of unfinished requests

    def _check_traced(self, rounds: list[shapes.TracedLine]) -> None:
        """Lines of a trace are written before the record of their request, and a token's before the
        first line that names it: what lacks was removed."""
        traced = Counter(map(_key_of_round, rounds))
        for key, record in self._records.items():
            if traced[key] != (count := record["rounds"]):
                raise self._lacks("trace", f"{traced[key]} of {count} rounds of {_name(record)}")
        named = {
            token for line in rounds for token in (*line.get("draft", ()), *line.get("choice", ()))
        }
        if missing := named - self.traced_tokens:
            raise self._lacks("vocabulary", f"no token {min(missing)}, which the trace names")

    def _lacks(self, kind: str, what: str) -> FlyError:
        path = self._path.with_name(self._path.name.replace("requests", kind, 1))
        return FlyError(
            f"{path}: holds {what}: put the file back, or start a new run (leave --resume out)"
        )

    def __len__(self) -> int:
        return len(self._records)

    def text(self, asked: Mapping[str, Any]) -> str | None:
        """The text decoded for this request (`requests.identity`); None if there is none.

        Raises FlyError if the record answers another document, prompt or decoding.
        """
        record = self._records.get(_key(asked))
        if record is None:
            return None
        was = {name: record.get(name) for name in _DECIDE_TEXT}
        now = plain({name: asked[name] for name in _DECIDE_TEXT})
        if found := first_difference("", was, now):
            field, old, new = found
            raise FlyError(
                f"{self._path}: {_name(asked)}: {field[1:]} was {old}, is now {new}: the task, "
                "its data or its settings have changed: start a new run (leave --resume out)"
            )
        return record["text"]

    def note_asked(self, asked: list[dict[str, Any]], *, are_all: bool = True) -> None:
        """These requests are part of the run. Raises FlyError if a record of one of their tasks
        belongs to none of them, unless more are to come."""
        self._asked.update(_key(item) for item in asked)
        tasks = {item["task"] for item in asked if are_all}
        self._check(key for key in self._records if key[0] in tasks)

    def check_all_asked(self) -> None:
        """Raise FlyError if a record belongs to no request of the run."""
        self._check(self._records)

    def _check(self, keys: Iterable[_Key]) -> None:
        for key in keys:
            if key not in self._asked:
                raise FlyError(
                    f"{self._path}: {_name(self._records[key])} is no longer asked for: the task "
                    "or its data have changed: start a new run (leave --resume out)"
                )

    def drop_unfinished_rounds(self) -> None:
        """Remove the rounds of requests without a record from the trace: these requests will be
        decoded, and traced, again.

        Every process drops those of its own file, and of files that no process writes any more.
        """
        traces, self._traces = self._traces, {}  # once only: new rounds join the files
        for rank, path in traces.items():
            if rank % launch.processes() != launch.rank():
                continue
            rounds = read_lines(path, shapes.TracedLine)
            finished = [line for line in rounds if _key_of_round(line) in self._records]
            if len(finished) < len(rounds):
                logger.info("%s: rounds of unfinished requests are dropped", path)
                lines = (json.dumps(line, ensure_ascii=False) + "\n" for line in finished)
                write_whole(path, "".join(lines))


def _key(record: Mapping[str, Any]) -> _Key:
    return record["task"], record["doc_id"], record["idx"], record["repeat"]


def _key_of_round(line: shapes.TracedLine) -> _Key:
    return line["task_name"], line["doc_id"], line["idx"], line["repeat"]


def _name(record: Mapping[str, Any]) -> str:
    return f"task {record['task']}, doc {record['doc_id']}"


def _whole_lines(folder: Path, name: str, started: str, shape: type[_Line]) -> list[_Line]:
    """The records of all processes, after cutting off lines that a kill left unfinished."""
    found: list[_Line] = []
    for path in run_files(folder, name, started).values():
        content = reading.bytes_of(path, str(path))
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            logger.warning("%s: a torn last line (%d bytes) is dropped", path, len(content) - whole)
            os.truncate(path, whole)  # atomic: a second kill leaves the line or no line
        found += read_lines(path, shape)
    return found
