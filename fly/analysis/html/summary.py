"""The report's numbers about whole runs. Counts and rates are fly's own (docs/compare.md)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from fly.analysis.acceptance import Acceptance
from fly.analysis.scores import Measured
from fly.analysis.statistics import LEVEL
from fly.runs import run_settings
from fly.runs.reader import Run, TaskRun
from fly.runs.records import Positions

_BINS = 20


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """The runs' names; equal ones get the settings that differ, or else a number."""
    names = [run_settings.with_drafts(run.name, bool(run.draft_runs)) for run in runs]
    same: dict[str, list[int]] = defaultdict(list)
    for number, name in enumerate(names):
        same[name].append(number)
    for numbers in same.values():
        labels = run_settings.labels([runs[number] for number in numbers])
        for number, label in zip(numbers, labels):
            names[number] += f" ({label})" if len(set(labels)) > 1 else ""
    taken = set(names)
    for number, name in enumerate(names):
        if name in names[:number]:
            names[number] = run_settings.unused_name(name, taken, " #")
            taken.add(names[number])
    return names


def of_run(run: Run, scores: Measured, traced: Acceptance) -> dict[str, Any]:
    """One run: what it was, how fast, and what its trace says. Missing parts are None."""
    acceptance = traced if traced.requests else None
    entry = run.entry or {}
    stats_of_run = entry.get("stats") or {}
    return {
        "name": scores.name,
        "mode": run.mode,
        "facts": _facts(run, scores),
        "settings": _settings(run, scores),
        "stats": stats_of_run if stats_of_run.get("requests") else None,
        "sources": {
            key.replace("_", " "): counts
            for key, counts in (stats_of_run.get("sources") or {}).items()
        },
        "traced": traced.requests,
        "positions": _positions(stats_of_run, acceptance),
        "blocks": acceptance.block_counts if acceptance else None,
        "entropy": _entropies(acceptance, entry.get("config", {})) if acceptance else None,
    }


def _facts(run: Run, scores: Measured) -> dict[str, str]:
    """For the page's head: what was asked, of which model, where and when."""
    device = (run.entry or {}).get("device") or {}
    return {
        "task": ", ".join(scores.tasks),
        "model": scores.target["name"] or "",
        "machine": str(device.get("name") or ""),
        "date": str((run.entry or {}).get("started") or "")[:10],
    }


def _settings(run: Run, scores: Measured) -> dict[str, str]:
    """For the table of runs: the settings in force, by configuration key, and where they are."""
    found = run_settings.in_force(run) or {
        "target_model_path": scores.target["name"],
        "dtype": scores.target["dtype"],
        "batch_size": run.results["config"].get("batch_size"),
    }
    found["configuration"] = (run.entry or {}).get("config_hash")
    found["results"] = run.path.name
    return {key: str(value) for key, value in found.items() if value is not None}


def _positions(stats_of_run: dict[str, Any], acceptance: Acceptance | None) -> dict[str, Any]:
    """Counts and shares by position in the draft, empty without drafts; from the trace if there is
    one, as only that tells deferrals from matches."""
    counted = Positions(**stats_of_run.get("positions", {}))
    found = acceptance.positions if acceptance else counted
    return {
        **found.as_dict(),
        "unconditional": found.unconditional,
        "conditional": found.conditional,
        "deferred": [acceptance.deferred[at] for at, _ in enumerate(found.accepted)]
        if acceptance
        else None,
    }


def _entropies(acceptance: Acceptance, config: dict[str, Any]) -> dict[str, Any] | None:
    """Histograms over one axis; None where no mismatch was traced."""
    groups = {
        "stood": acceptance.stood,
        "rolled_back": acceptance.rolled_back,
        "rejected": acceptance.rejected,
    }
    largest = max((value for values in groups.values() for value in values), default=None)
    if largest is None:
        return None
    edges = np.linspace(0, max(largest, 1e-3), _BINS + 1)
    kind = config.get("entropy_kind", "top3")
    deferred = acceptance.stood or acceptance.rolled_back
    return {
        "unit": "0 to 1" if kind == "normalized" else "nats",
        "kind": kind,
        "theta": config.get("entropy_thre") if deferred else None,
        "edges": edges.tolist(),
        "counts": {name: np.histogram(v, edges)[0].tolist() for name, v in groups.items()},
        "medians": {name: float(np.median(v)) if v else None for name, v in groups.items()},
    }


def scores(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """By task, filter and metric, in the order of the runs: each run's score and interval."""
    wanted = {
        (task.name, task.filter, metric): task.higher_is_better.get(metric, True)
        for run in runs
        for task in run.tasks.values()
        for metric in task.aggregated
    }
    return [
        {
            "task": task,
            "filter": filter_name,
            "metric": metric,
            "higher_is_better": higher_is_better,
            "runs": [_score(run.tasks.get((task, filter_name)), metric) for run in runs],
        }
        for (task, filter_name, metric), higher_is_better in wanted.items()
    ]


def _score(task: TaskRun | None, metric: str) -> dict[str, Any] | None:
    """`interval`: at LEVEL; Wilson's for right-or-wrong scores, else from lm-eval's error."""
    if task is None or metric not in task.aggregated:
        return None
    value, error = task.aggregated[metric]
    values = [sample.scores[metric] for sample in task.samples.values() if metric in sample.scores]
    documents = len(task.documents[metric])
    found: dict[str, Any] = {"value": value, "documents": documents, "interval": None}
    if values and set(values) <= {0.0, 1.0} and abs(np.mean(values) - value) < 1e-6:
        found["right"] = int(sum(values))
        wilson = stats.binomtest(found["right"], len(values)).proportion_ci(LEVEL, "wilson")
        found["interval"] = {"low": wilson.low, "high": wilson.high}
    elif error is not None:
        margin = float(stats.norm.ppf((1 + LEVEL) / 2)) * error
        found["interval"] = {"low": value - margin, "high": value + margin}
    return found
