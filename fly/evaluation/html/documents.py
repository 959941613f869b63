"""The report's documents: one row per task and document, and the texts behind it."""

from __future__ import annotations

from typing import Any

from fly.evaluation.runs import Run, Sample

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


def rows(runs: list[Run], wanted: list[Key]) -> list[dict[str, Any]]:
    """For the table. The first run is what the others are compared with."""
    decoded = [_decoded(run) for run in runs]
    main = {task: _main_metric(runs[0], task) for task, _ in wanted}
    result = []
    for key in wanted:
        base = samples_of(runs[0], key)
        cells = [
            _cell(run, key, base, own.get(key), main[key[0]]) for run, own in zip(runs, decoded)
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


def _decoded(run: Run) -> dict[Key, dict[str, float]]:
    """Sums over the document's requests (repeats), from fly's records."""
    sums: dict[Key, dict[str, float]] = {}
    for record in run.requests:
        own = sums.setdefault(
            (record["task"], record["doc_id"]), {"tokens": 0, "rounds": 0, "seconds": 0.0}
        )
        own["tokens"] += record["emitted"]
        own["rounds"] += record["rounds"]
        own["seconds"] += sum(
            value for phase, value in record["seconds"].items() if phase != "compile"
        )
    return sums


def _main_metric(run: Run, task: str) -> tuple[str, str] | None:
    """The first (filter, metric) by which any document of the run scores, else the first."""
    scoring: dict[tuple[str, str], bool] = {}
    for (name, filter_name), task_run in run.tasks.items():
        for sample in task_run.samples.values() if name == task else ():
            for metric, score in sample.scores.items():
                key = (filter_name, metric)
                scoring[key] = scoring.get(key, False) or bool(score)
    return next((key for key, any_ in scoring.items() if any_), next(iter(scoring), None))


def _cell(
    run: Run,
    key: Key,
    base: dict[str, Sample],
    decoded: dict[str, float] | None,
    main: tuple[str, str] | None,
) -> dict[str, Any] | None:
    own = samples_of(run, key)
    if not own:
        return None
    cell: dict[str, Any] = {"score": _main_score(own, main)}
    if base:
        cell["change"] = _change(run, key[0], base, own)
        cell["same"] = _responses(base) == _responses(own)
    if decoded:
        cell["tokens"] = decoded["tokens"]
        cell["tau"] = round(decoded["tokens"] / decoded["rounds"], 3) if decoded["rounds"] else None
        cell["seconds"] = round(decoded["seconds"], 3)
    return cell


def _main_score(by_filter: dict[str, Sample], main: tuple[str, str] | None) -> float | None:
    """By the main metric; else under the first filter that gives a number, its first."""
    if main and main[0] in by_filter and main[1] in by_filter[main[0]].scores:
        return by_filter[main[0]].scores[main[1]]
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
