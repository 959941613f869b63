"""The report's documents: one row per task and document, and the texts behind it."""

from __future__ import annotations

from typing import Any

from fly.analysis.compare import primary
from fly.analysis.scores import Measured, Metric, Work
from fly.runs.reader import Run, Sample

Key = tuple[str, int]


def keys(runs: list[Run]) -> list[Key]:
    """(task, doc_id) of every document that any of the runs scored, in order."""
    found: dict[str, set[int]] = {}
    for run in runs:
        for (task, _), task_run in run.tasks.items():
            found.setdefault(task, set()).update(task_run.samples)
    return [(task, doc_id) for task, documents in found.items() for doc_id in sorted(documents)]


def samples_of(run: Run, key: Key) -> dict[str, Sample]:
    """The document's samples by filter; empty if the run did not score it."""
    task, doc_id = key
    return {
        filter_name: task_run.samples[doc_id]
        for (name, filter_name), task_run in run.tasks.items()
        if name == task and doc_id in task_run.samples
    }


def rows(runs: list[Run], measured: list[Measured], wanted: list[Key]) -> list[dict[str, Any]]:
    """For the table. The first run is what the others are compared with."""
    main = {name: primary(task.metrics) for name, task in measured[0].tasks.items()}
    result = []
    for key in wanted:
        base = samples_of(runs[0], key)
        cells = [
            _cell(run, key, base, _work(own, key), main.get(key[0]))
            for run, own in zip(runs, measured)
        ]
        result.append({"task": key[0], "doc": key[1], "runs": cells})
    return result


def texts(runs: list[Run], wanted: list[Key]) -> list[dict[str, Any]]:
    """For the detail view: prompt and target once, responses, answers and scores of every run."""
    return [_texts_of([samples_of(run, key) for run in runs]) for key in wanted]


def _texts_of(samples: list[dict[str, Sample]]) -> dict[str, Any]:
    first = next(sample for by_filter in samples for sample in by_filter.values())
    return {
        "prompt": first.prompt,
        "target": first.target,
        "runs": [_outputs(by_filter) if by_filter else None for by_filter in samples],
    }


def _outputs(by_filter: dict[str, Sample]) -> dict[str, Any]:
    first = next(iter(by_filter.values()))
    return {
        "responses": first.responses,
        "filters": [
            {"name": name, "answer": sample.answer, "scores": sample.scores}
            for name, sample in by_filter.items()
        ],
    }


def _work(measured: Measured, key: Key) -> Work | None:
    task = measured.tasks.get(key[0])
    return task.work.get(key[1]) if task else None


def _cell(
    run: Run, key: Key, base: dict[str, Sample], work: Work | None, main: Metric | None
) -> dict[str, Any] | None:
    own = samples_of(run, key)
    if not own:
        return None
    cell: dict[str, Any] = {"score": _main_score(own, main)}
    if base:
        cell["change"] = _change(run, key[0], base, own)
        cell["same"] = _responses(base) == _responses(own)
    if work:
        cell["tokens"] = work.tokens
        cell["tau"] = round(work.tokens / work.rounds, 3) if work.rounds else None
        cell["seconds"] = round(work.end_to_end, 3)
    return cell


def _main_score(by_filter: dict[str, Sample], main: Metric | None) -> float | None:
    """By what stands for the task; else under the first filter that gives a number, its first."""
    if main and main.filter in by_filter and main.name in by_filter[main.filter].scores:
        return by_filter[main.filter].scores[main.name]
    for sample in by_filter.values():
        for score in sample.scores.values():
            return score
    return None


def _responses(by_filter: dict[str, Sample]) -> tuple[str, ...]:
    return next(iter(by_filter.values())).responses


def _change(run: Run, task: str, base: dict[str, Sample], own: dict[str, Sample]) -> str:
    """`won`, `lost` or `same` under all metrics and filters, `mixed` if they disagree."""
    signs = set()
    for name in base.keys() & own.keys():
        higher = run.tasks[task, name].higher_is_better
        before, after = base[name].scores, own[name].scores
        for metric in before.keys() & after.keys():
            if before[metric] != after[metric]:
                signs.add((after[metric] > before[metric]) == higher.get(metric, True))
    if len(signs) == 2:
        return "mixed"
    return "same" if not signs else ("won" if signs.pop() else "lost")
