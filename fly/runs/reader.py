"""Finished runs read back from disk: lm-eval's results and samples, fly's records beside them.

A run's folder (what lm-eval makes of --output_path) holds `results_*.json`, one
`samples_<task>_*.jsonl` per task (with --log_samples), and, if fly's backend decoded, files named
by when the run started (`config.fly.started` of the results): `fly_requests_<started>*.jsonl`,
perhaps `fly_trace_<started>*.jsonl` with `fly_vocabulary_<started>*.jsonl`, by every process of the
run, and `fly_run_<started>.json`, which says whether the run has ended. Runs of lm-eval's own `hf`
have none of these.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from lm_eval.utils import hash_string, simple_parse_args_string

from fly import reading
from fly.errors import FlyError
from fly.paths import expanded, run_files
from fly.runs import manifest, shapes

_Line = TypeVar("_Line")
# files of records, and the setting with which a run writes them
_WRITTEN_IF = {"fly_requests": "enable_statistics", "fly_trace": "trace", "fly_vocabulary": "trace"}
# lm-eval puts the date behind `results`, or behind the name that --output_path NAME.json gives
_DATE = r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(\.\d+)?"
_RESULTS = re.compile(rf"(?!fly_).*_{_DATE}|.*results_\d{{4}}-.*")


@dataclass(frozen=True)
class Sample:
    """One document of a task under one filter, as lm-eval scored it."""

    doc_id: int
    doc: dict[str, Any]
    hashes: tuple[str, str, str]  # lm-eval's, of document, prompt and target
    prompt: str
    target: str
    responses: tuple[str, ...]  # the model's texts, one per repeat, before the filter
    answer: str  # after the filter
    scores: dict[str, float]  # by metric, numbers only


@dataclass(frozen=True)
class TaskRun:
    """One task of a run under one filter."""

    name: str
    filter: str
    version: str
    num_fewshot: int
    higher_is_better: dict[str, bool]
    aggregated: dict[str, tuple[float, float | None]]  # by metric: (value, standard error)
    # by metric, those that it is of: a task may give different documents different metrics (RULER's
    # are called by their lengths)
    documents: dict[str, frozenset[int]] = field(repr=False)
    samples: dict[int, Sample] = field(repr=False)


@dataclass(frozen=True)
class Run:
    """One results file."""

    path: Path
    name: str  # what tables call it
    results: dict[str, Any] = field(repr=False)
    # by (task, filter), in the order of the results file
    tasks: dict[tuple[str, str], TaskRun] = field(repr=False)

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def entry(self) -> dict[str, Any] | None:
        return self.results["config"].get("fly")

    @property
    def mode(self) -> str:
        """`target-only`, `exact`, `fly`, ... or the name of another backend, such as `hf`."""
        mode = str(self.entry["mode"] if self.entry else self.results["config"]["model"])
        return "exact" if mode == "strict" else mode  # as runs of November 2026 call it

    @property
    def engine(self) -> str:
        """What decoded it, for print: `fly`, `vLLM`, or another backend's name, such as `hf`."""
        if self.entry is None:
            return str(self.results["config"]["model"])
        engine = str(self.entry.get("engine", "fly"))  # the only one of earlier versions
        return "vLLM" if engine == "vllm" else engine

    @property
    def batch_size(self) -> str:
        """As text: lm-eval has it from the command line as a text, else as a number."""
        return str(self.results["config"].get("batch_size"))

    @property
    def sources(self) -> list[str]:
        """Where its drafts came from, by the keys in fly.runs.records.SOURCES."""
        stats = (self.entry or {}).get("stats") or {}
        return [key for key, counts in (stats.get("sources") or {}).items() if counts["drafted"]]

    @property
    def draft_runs(self) -> list[str]:
        """The earlier runs whose outputs it drafted from, as its configuration names them; empty
        if they had nothing for its requests."""
        if self.entry is None:
            return []
        found = self.entry.get("draft_runs") or {"matched": 0}
        is_from_them = found["matched"] > 0 or "earlier_run" in self.sources
        return list(self.entry["config"].get("draft_runs") or ["?"]) if is_from_them else []

    @cached_property
    def outputs(self) -> list[shapes.OutputLine]:
        """fly's records of all requests, as what a later run drafts from."""
        return self._records("fly_requests", shapes.OutputLine)

    @cached_property
    def requests(self) -> list[shapes.RequestLine]:
        """fly's record of every request; empty for other models, or without enable_statistics."""
        return self._records("fly_requests", shapes.RequestLine)

    @property
    def rounds(self) -> Iterator[shapes.RoundLine]:
        """The trace, one line per request and round, read as it is asked for: it may be larger than
        the memory. Empty without trace=true."""
        for path in self._files("fly_trace"):
            yield from iterate_lines(path, shapes.RoundLine, keep_others=False)

    @cached_property
    def vocabulary(self) -> dict[int, bytes]:
        """The bytes of every token id in the trace; empty without one."""
        lines = self._records("fly_vocabulary", shapes.TokenLine)
        return {line["id"]: _bytes_of(line) for line in lines}

    def _records(self, kind: str, shape: type[_Line]) -> list[_Line]:
        paths = self._files(kind)
        records = [record for path in paths for record in iterate_lines(path, shape)]
        return sorted(records, key=_place) if len(paths) > 1 else records

    def _files(self, kind: str) -> list[Path]:
        started = self.entry.get("started") if self.entry else None
        if self.entry is None or started is None:
            return []
        if not self.entry["config"].get(_WRITTEN_IF[kind], True):
            return []  # what is there is of a run that started in the same second
        return [*run_files(self.folder, kind, started).values()]


def _bytes_of(line: shapes.TokenLine) -> bytes:
    return bytes.fromhex(line["bytes"]) if "bytes" in line else line.get("text", "").encode()


def _place(line: Any) -> tuple[str, int, int, int]:
    """Where a line of several processes' files belongs: among those of its document, in order."""
    task = line.get("task", line.get("task_name", ""))
    return task, line.get("doc_id", 0), line.get("idx", 0), line.get("repeat", 0)


def read_lines(path: Path, shape: type[_Line]) -> list[_Line]:
    """The JSON objects of a JSONL file, all of this shape.

    A last line that a kill left unfinished is dropped. Raises FlyError for any other.
    """
    return [*iterate_lines(path, shape)]


def iterate_lines(path: Path, shape: type[_Line], *, keep_others: bool = True) -> Iterator[_Line]:
    """`read_lines`, one at a time. keep_others: with the keys that the shape does not name, too;
    without them reading takes a third of the time."""
    for number, line in enumerate(reading.iterate_lines(path), 1):
        where = f"{path}, line {number}"
        if not line.endswith("\n"):  # the last: it may still be a whole one
            try:
                json.loads(line)
            except ValueError:
                return
        if not keep_others and (found := reading.parse_as(line, shape)) is not None:
            yield found
            continue
        record = reading.parse(line.removesuffix("\n"), where)
        reading.check_shape(record, shape, where)
        yield record


def results_in(folder: Path, *, below: bool = False) -> list[Path]:
    """The results files in a folder, the oldest first; below: those in the folders in it, too."""
    files = [*folder.glob("*.json"), *(folder.glob("*/*.json") if below else ())]
    return sorted((path for path in files if _RESULTS.fullmatch(path.stem)), key=date_of)


def find_results(path: str | Path) -> Path:
    """The results file that `path` names: itself, or the newest in the folder or one below it.

    Raises FlyError if a newer run in the folder has not ended: its results are yet to come.
    """
    given = expanded(path)
    if given.is_file():
        return given
    if not given.is_dir():
        raise FlyError(f"{path}: no such run: give a results_*.json or the folder that holds it")
    found = results_in(given, below=True)
    newest = found[-1] if found else None
    started = manifest.all_in(given)
    if started and not started[-1].finished and not _is_of_another_later(newest, started[-1]):
        raise FlyError(
            f"{path}: the run of {started[-1].started} has not ended: `fly --resume "
            f"{shlex.quote(str(path))}` goes on with it"
            + (" (or name an older run's results file)" if newest else "")
        )
    if newest is None:
        if modes := sorted(path.parent.name for path in given.glob("*/fly_compare.json")):
            raise FlyError(
                f"{path}: is a comparison's folder: name that of a run in it: {', '.join(modes)}"
            )
        raise FlyError(
            f"{path}: holds no results_*.json: the run has not ended, or had no --output_path"
        )
    return newest


def _is_of_another_later(results: Path | None, run: manifest.Manifest) -> bool:
    """Whether these results are newer than the unfinished run, and not its own incomplete ones
    (lm-eval writes the samples after the results)."""
    if results is None or date_of(results) < run.started:
        return False
    try:
        return started_of(results) != run.started
    except FlyError:
        return False


def started_of(results: Path) -> str | None:
    """When the run of these results started; None for other backends.

    Raises FlyError if the file is no results file, or not a whole one.
    """
    entry = _read(results)["config"].get("fly")
    started: str | None = entry.get("started") if isinstance(entry, dict) else None
    if started is not None:
        reading.check_shape(started, reading.Name, f"{results}, config.fly.started")
    return started


def _read(results: Path) -> dict[str, Any]:
    found = reading.read_object(results)
    if not isinstance(found.get("config"), dict):
        raise FlyError(f"{results}: not a results file of lm-eval")
    return found


def read_results(file: Path) -> dict[str, Any]:
    """What a results file holds, checked."""
    results = _read(file)
    reading.check_shape(results, shapes.Results, f"{file}, lm-eval's results")
    return results


def date_of(file: Path) -> str:
    """When lm-eval wrote this results file, as its name and its samples' say."""
    _, is_named, date = file.stem.rpartition("_")
    if not (is_named and _RESULTS.fullmatch(file.stem)):
        raise FlyError(f"{file}: its name was results_DATE.json, as its samples': give it back")
    return date


def named(text: str) -> tuple[str | None, str]:
    """`NAME=PATH` or a path alone, as (name, path)."""
    name, equals, path = text.partition("=")
    if not (equals and name) or expanded(text).exists():
        return None, text
    if not name.isprintable():
        raise FlyError(f"{text!r}: its name holds control characters: give one without")
    return name, path


def load_all(texts: Iterable[str | Path]) -> list[Run]:
    """The finished runs that these name, each as `named` reads it."""
    return [load(path, name) for name, path in (named(str(text)) for text in texts)]


def load(path: str | Path, name: str | None = None) -> Run:
    """Read a finished run; `name` defaults to its mode. Raises FlyError if its samples are gone."""
    file = find_results(path)
    results = read_results(file)
    if isinstance(given := results["config"].get("model_args"), str):  # as older lm-eval wrote it
        results["config"]["model_args"] = simple_parse_args_string(given)
    run = Run(file, "", results, _task_runs(results, _samples(file, results)))
    return replace(run, name=name or run.mode)


def of_results(results: dict[str, Any], name: str) -> Run:
    """A run as lm-eval returned it in this process, samples included; nothing is on disk."""
    samples = {
        task: [
            {
                **line,
                # as lm-eval's samples file has the part that is read
                "arguments": {"gen_args_0": {"arg_0": line["arguments"][0][0]}},
                "target": str(line["target"]),
            }
            for line in lines
        ]
        for task, lines in results["samples"].items()
    }
    return Run(Path(name), name, results, _task_runs(results, samples))


def check_samples(file: Path) -> None:
    """Raise FlyError unless all samples of this results file are beside it."""
    _samples(file, _read(file))


def _samples(file: Path, results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """By task, the lines of its samples file. Raises FlyError unless they are those scored."""
    found: dict[str, list[dict[str, Any]]] = {}
    for task in results["configs"]:
        path = file.parent / f"samples_{task}_{date_of(file)}.jsonl"
        if not path.is_file():
            raise FlyError(f"{file}: {path.name} is not beside it: run with --log_samples")
        lines: Any = read_lines(path, shapes.SampleLine)
        found[task] = lines
        names = ("doc_hash", "prompt_hash", "target_hash")
        own = hash_string("".join(line[name] for line in lines for name in names))
        if results.get("task_hashes", {}).get(task, own) != own:
            raise FlyError(
                f"{path}: not the samples that were scored: their writing was cut short, or they "
                "were changed: run it again"
            )
    return found


def _task_runs(
    results: dict[str, Any], samples: dict[str, list[dict[str, Any]]]
) -> dict[tuple[str, str], TaskRun]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for task, lines in samples.items():
        for line in lines:
            groups.setdefault((task, line["filter"]), []).append(line)
    return {key: _task_run(results, *key, lines) for key, lines in groups.items()}


def _task_run(
    results: dict[str, Any], task: str, filter_name: str, lines: list[dict[str, Any]]
) -> TaskRun:
    aggregated = {}
    of_task = results["results"].get(task, {})
    metrics = dict.fromkeys(metric for line in lines for metric in line["metrics"])
    for metric in metrics:
        value = of_task.get(f"{metric},{filter_name}")
        error = of_task.get(f"{metric}_stderr,{filter_name}")
        if isinstance(value, (int, float)):
            aggregated[metric] = (value, error if isinstance(error, (int, float)) else None)
    known = results.get("higher_is_better", {}).get(task) or {}
    return TaskRun(
        name=task,
        filter=filter_name,
        version=str(results.get("versions", {}).get(task)),
        num_fewshot=int(results.get("n-shot", {}).get(task) or 0),
        higher_is_better={metric: known.get(metric) is not False for metric in metrics},
        aggregated=aggregated,
        documents={
            metric: frozenset(line["doc_id"] for line in lines if metric in line["metrics"])
            for metric in metrics
        },
        samples={line["doc_id"]: _sample(line) for line in lines},
    )


def _sample(line: dict[str, Any]) -> Sample:
    arguments = line["arguments"].get("gen_args_0", {})
    responses = line["resps"][0] if line["resps"] else []
    return Sample(
        doc_id=line["doc_id"],
        doc=line["doc"] if isinstance(line["doc"], dict) else {"doc": line["doc"]},
        hashes=(line["doc_hash"], line["prompt_hash"], line["target_hash"]),
        prompt=_text(arguments.get("arg_0", "")),
        target=line["target"],
        responses=tuple(_text(response) for response in responses),
        answer=_text(line["filtered_resps"][0] if line["filtered_resps"] else ""),
        scores={
            metric: float(line[metric])
            for metric in line["metrics"]
            if isinstance(line.get(metric), (bool, int, float))
        },
    )


def _text(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:
        return _text(value[0])
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
