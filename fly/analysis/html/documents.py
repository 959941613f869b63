"""The report's documents: one row per task and document, and the texts behind it."""

from __future__ import annotations

import math
from typing import Any

from fly.analysis.compare import primary
from fly.analysis.scores import Measured, Metric
from fly.runs.reader import Run, Sample

# task, doc_id, hashes of document and prompt: --samples numbers documents anew
Key = tuple[str, int, str, str]
ByFilter = dict[str, Sample]  # one run's samples of a document; empty if it did not score it


def collect(runs: list[Run]) -> dict[Key, list[ByFilter]]:
    """Every document that any of the runs scored, task by task; for each, all runs' samples."""
    found: dict[Key, list[ByFilter]] = {}
    for number, run in enumerate(runs):
        for (task, filter_name), task_run in run.tasks.items():
            for doc_id, sample in task_run.samples.items():
                key = task, doc_id, *sample.hashes[:2]
                found.setdefault(key, [{} for _ in runs])[number][filter_name] = sample
    tasks = {task: number for number, task in enumerate(dict.fromkeys(task for task, *_ in found))}
    return {key: found[key] for key in sorted(found, key=lambda key: (tasks[key[0]], *key[1:]))}


def row_numbers(documents: dict[Key, list[ByFilter]], run: int) -> dict[tuple[str, int], int]:
    """By task and doc_id, the rows of the documents that this run scored."""
    return {key[:2]: row for row, (key, samples) in enumerate(documents.items()) if samples[run]}


def rows(
    runs: list[Run], scores: list[Measured], documents: dict[Key, list[ByFilter]]
) -> list[dict[str, Any]]:
    """For the table. The first run is what the others are compared with."""
    main = {name: primary(task.metrics) for name, task in scores[0].tasks.items()}
    return [
        {
            "task": key[0],
            "doc": key[1],
            "runs": [
                _cell(run, of_run, key, samples[0], own, main.get(key[0])) if own else None
                for run, of_run, own in zip(runs, scores, samples)
            ],
        }
        for key, samples in documents.items()
    ]


def _cell(
    run: Run, scores: Measured, key: Key, base: ByFilter, own: ByFilter, main: Metric | None
) -> dict[str, Any]:
    cell: dict[str, Any] = {"score": _main_score(own, main)}
    if base:
        cell["change"] = _change(run, key[0], base, own)
        cell["same"] = _first(base).responses == _first(own).responses
    if work := scores.tasks[key[0]].work.get(key[1]):
        cell["tokens"] = work.tokens
        cell["tau"] = round(work.tokens / work.rounds, 3) if work.rounds else None
        cell["seconds"] = round(work.end_to_end, 3)
    return cell


def _first(by_filter: ByFilter) -> Sample:
    return next(iter(by_filter.values()))


def _main_score(by_filter: ByFilter, main: Metric | None) -> float | None:
    """By the metric that stands for the task; else the first number under any filter."""
    if main and main.filter in by_filter and main.name in by_filter[main.filter].scores:
        return by_filter[main.filter].scores[main.name]
    return next((score for s in by_filter.values() for score in s.scores.values()), None)


def _change(run: Run, task: str, base: ByFilter, own: ByFilter) -> str:
    """`won`, `lost` or `same` under all metrics and filters, `mixed` if they disagree."""
    changes = set()
    for name in base.keys() & own.keys():
        higher = run.tasks[task, name].higher_is_better
        before, after = base[name].scores, own[name].scores
        for metric in before.keys() & after.keys():
            if before[metric] != after[metric] and math.isfinite(before[metric] + after[metric]):
                better = (after[metric] > before[metric]) == higher.get(metric, True)
                changes.add("won" if better else "lost")
    return "mixed" if len(changes) > 1 else next(iter(changes), "same")


def texts(documents: dict[Key, list[ByFilter]]) -> list[dict[str, Any]]:
    """For the detail view: prompt and target once, responses, answers and scores of every run."""
    result = []
    for samples in documents.values():
        first = next(_first(by_filter) for by_filter in samples if by_filter)
        outputs = [_outputs(by_filter) if by_filter else None for by_filter in samples]
        result.append({"prompt": first.prompt, "target": first.target, "runs": outputs})
    return result


def _outputs(by_filter: ByFilter) -> dict[str, Any]:
    return {
        "responses": _first(by_filter).responses,
        "filters": [
            {"name": name, "answer": sample.answer, "scores": sample.scores}
            for name, sample in by_filter.items()
        ],
    }
