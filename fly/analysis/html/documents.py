"""The report's documents: one row per task and document, and the texts behind it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from fly.analysis.compare import primary
from fly.analysis.scores import Measured, Metric
from fly.runs.reader import Run, Sample

# task, doc_id, hashes of document and prompt: --samples numbers documents anew
Key = tuple[str, int, str, str]
_LONGEST, _MOST_GROUPS = 40, 30  # characters of a category's name, categories of a field
_ORDER = ("lost", "mixed", "won", "another text", "same")
ByFilter = dict[str, Sample]  # one run's samples of a document; empty if it did not score it
Documents = dict[Key, list[ByFilter]]
Rows = list[dict[str, Any]]


def collect(runs: list[Run], scores: list[Measured]) -> tuple[Documents, Rows]:
    """Every document that any of the runs scored, with all runs' samples of it; the table's rows.

    What changed comes first: lost, mixed, won, another text; then task by task. The first run is
    what the others are compared with.
    """
    found: Documents = {}
    for number, run in enumerate(runs):
        for (task, filter_name), task_run in run.tasks.items():
            for doc_id, sample in task_run.samples.items():
                key = task, doc_id, *sample.hashes[:2]
                found.setdefault(key, [{} for _ in runs])[number][filter_name] = sample
    tasks = {task: number for number, task in enumerate(dict.fromkeys(task for task, *_ in found))}
    documents = {key: found[key] for key in sorted(found, key=lambda k: (tasks[k[0]], *k[1:]))}
    order = sorted(zip(documents, _rows(runs, scores, documents)), key=lambda each: _rank(each[1]))
    return {key: documents[key] for key, _ in order}, [row for _, row in order]


def _rank(row: dict[str, Any]) -> int:
    cells = [cell for cell in row["runs"] if cell]
    changes = [_ORDER.index(cell.get("change", "same")) for cell in cells]
    differs = any(not cell.get("same", True) for cell in cells)
    return min(*changes, 3 if differs else 4)


def row_numbers(documents: Documents, run: int) -> dict[tuple[str, int], int]:
    """By task and doc_id, the rows of the documents that this run scored."""
    return {key[:2]: row for row, (key, samples) in enumerate(documents.items()) if samples[run]}


def _rows(runs: list[Run], scores: list[Measured], documents: Documents) -> Rows:
    main = {name: primary(task.metrics) for name, task in scores[0].tasks.items()}
    docs = [next(_first(own).doc for own in samples if own) for samples in documents.values()]
    fields = _categories(docs)
    return [
        {
            "task": key[0],
            "doc": key[1],
            "fields": {name: str(doc[name]) for name in fields if name in doc},
            "runs": [
                _cell(run, of_run, key, samples[0], own, main.get(key[0])) if own else None
                for run, of_run, own in zip(runs, scores, samples)
            ],
        }
        for (key, samples), doc in zip(documents.items(), docs)
    ]


def _categories(docs: list[dict[str, Any]]) -> list[str]:
    """Fields by which documents fall into a few groups, such as a subject or a level."""
    values: dict[str, Counter[str]] = defaultdict(Counter)
    for doc in docs:
        for name, value in doc.items():
            if isinstance(value, (str, int)) and len(str(value)) <= _LONGEST:
                values[name][str(value)] += 1
    groups = {name: found for name, found in values.items() if 1 < len(found) <= _MOST_GROUPS}
    return [name for name, found in groups.items() if found.total() >= 2 * len(found)]


def _cell(
    run: Run, scores: Measured, key: Key, base: ByFilter, own: ByFilter, main: Metric | None
) -> dict[str, Any]:
    texts = _first(own).responses
    cell: dict[str, Any] = {"score": _main_score(own, main), "length": sum(map(len, texts))}
    if base:
        cell["change"] = _change(run, key[0], base, own)
        others = _first(base).responses
        cell["same"] = texts == others
        if base is not own:
            cell["parts"] = _parting(others, texts)
    if work := scores.tasks[key[0]].work.get(key[1]):
        cell["tokens"] = work.tokens
        cell["tau"] = round(work.tokens / work.rounds, 3) if work.rounds else None
        cell["seconds"] = round(work.end_to_end, 3)
    return cell


def _first(by_filter: ByFilter) -> Sample:
    return next(iter(by_filter.values()))


def _parting(left: Sequence[str], right: Sequence[str]) -> int | None:
    """How many characters the first two texts that differ have in common at their beginnings; None
    where none differ."""
    a, b = next(((a, b) for a, b in zip(left, right) if a != b), ("", ""))
    if a == b:
        return None
    lengths = range(1, min(len(a), len(b)) + 1)
    return bisect_left(lengths, True, key=lambda length: a[:length] != b[:length])


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


def texts(documents: Documents) -> Iterator[dict[str, Any]]:
    """For the detail view: prompt and target once, responses, answers and scores of every run."""
    for samples in documents.values():
        first = next(_first(by_filter) for by_filter in samples if by_filter)
        outputs = [_outputs(by_filter) if by_filter else None for by_filter in samples]
        yield {"prompt": first.prompt, "target": first.target, "runs": outputs}


def _outputs(by_filter: ByFilter) -> dict[str, Any]:
    return {
        "responses": _first(by_filter).responses,
        "filters": [
            {"name": name, "answer": sample.answer, "scores": sample.scores}
            for name, sample in by_filter.items()
        ],
    }
