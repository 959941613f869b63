"""A comparison by a field of the documents (`--by category`): each of its values by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import inf
from statistics import fmean
from typing import Any

from fly.analysis.compare import (
    Against,
    Speed,
    choose_metrics,
    compare,
    equal_texts,
    find_speed,
    primary,
)
from fly.analysis.scores import Measured, Metric
from fly.analysis.statistics import DEFAULT_DEMAND, Demand


def rows(
    baseline: Measured,
    others: Sequence[Measured],
    demand: Demand = DEFAULT_DEMAND,
    metrics: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Plain values by task, category and run, the baseline's first. Scores are of the task's first
    metric, or the first of `metrics`; p is not corrected for the number of categories.

    The runs were measured with `by`. A stored baseline takes the others' categories. Keys:
    docs/compare.md.
    """
    found = []
    for name, chosen in choose_metrics(baseline, metrics).items():
        task, first = baseline.tasks[name], primary(chosen)
        groups = task.groups or next((o.tasks[name].groups for o in others), {})
        for value in sorted({*groups.values()}, key=_by_size):
            own = {i: i for i, group in groups.items() if group == value}
            base, *rest = (_part(run, name, own, first) for run in (baseline, *others))
            result = compare(base, rest, demand)
            start = {"task": name, "category": value, "documents": len(own)}
            start["metric"] = first.label if first else None
            for run, against in [(base, None), *zip(rest, result.others)]:
                speed = find_speed(against.speeds if against else result.baseline_speeds, name)
                equal = equal_texts(base.tasks[name], run.tasks[name]) if against else None
                row = _row(against, speed, equal)
                if not against:
                    scores = [metric.scores.values() for metric in base.tasks[name].metrics]
                    row["score"] = next(map(fmean, filter(None, scores)), None)
                model = {"model": run.target["name"], "k": run.spd_k}
                found.append({**start, "run": run.name, **row, **model})
    return found


def _by_size(value: str) -> tuple[float, str]:
    """Sorts numbers as numbers, before all texts."""
    try:
        return float(value), value
    except ValueError:
        return inf, value


def _part(run: Measured, name: str, documents: dict[int, int], first: Metric | None) -> Measured:
    """The run of these documents of one task, by the metric that stands for all of the task."""
    task = run.tasks[name].select(documents)
    metrics = [metric for metric in task.metrics if first and metric.label == first.label]
    return run.model_copy(update={"tasks": {name: task.model_copy(update={"metrics": metrics})}})


def _row(
    against: Against | None, speed: Speed | None, equal: tuple[int, int] | None
) -> dict[str, Any]:
    """A run's scores, which are compared with nothing if it is the baseline, and its speed."""
    main = against.main if against else None
    scores = asdict(main.scores) if main else {}
    pace = speed.pace if speed else None
    return {
        "score": scores.get("other"),
        **{key: scores.get(key) for key in ("recovery", "interval", "lost", "won", "p")},
        "equal_texts": equal[0] if equal else None,
        "tau": pace.tau if pace else None,
        "al": pace.al if pace else None,
        "decode_x": speed.decode.value if speed and speed.decode else None,
    }
