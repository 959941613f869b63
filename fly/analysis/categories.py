"""A comparison by a field of the documents (`--by category`): each of its values by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fly.analysis.compare import Against, Speed, compare, equal_texts
from fly.analysis.scores import Measured
from fly.analysis.statistics import DEFAULT_DEMAND, Demand


def rows(
    baseline: Measured,
    others: Sequence[Measured],
    demand: Demand = DEFAULT_DEMAND,
    metrics: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Plain values by task, category and run, the baseline's first. Scores are of the task's first
    metric; p is not corrected for the number of categories.

    The runs were measured with `by`. A stored baseline takes the others' categories. Keys:
    docs/compare.md.
    """
    found = []
    for name, task in baseline.tasks.items():
        groups = task.groups or next((o.tasks[name].groups for o in others), {})
        for value in sorted({*groups.values()}):
            ids = {i for i, group in groups.items() if group == value}
            base, *rest = (_restrict(run, name, ids) for run in (baseline, *others))
            result = compare(base, rest, demand, metrics)
            start = {"task": name, "category": value, "documents": len(ids)}
            speeds = {speed.task: speed for speed in result.baseline_speeds}
            pairs = [(base, None), *zip(rest, result.others)]
            for run, against in pairs:
                own = speeds if against is None else {s.task: s for s in against.speeds}
                first = against or next(iter(result.others), None)
                found.append({**start, **_row(run, base, against, first, own.get(name))})
    return found


def _row(
    run: Measured,
    base: Measured,
    against: Against | None,
    first: Against | None,
    speed: Speed | None,
) -> dict[str, Any]:
    """against: None for the baseline, whose score is `first`'s."""
    row = next((row for row in first.rows if row.primary), None) if first else None
    scores = row.scores if row else None
    shown = scores if against else None
    (name,) = run.tasks
    equal = equal_texts(base.tasks[name], run.tasks[name]) if against else None
    pace = speed.pace if speed else None
    return {
        "run": run.name,
        "metric": row.metric if row else None,
        "score": (shown.other if shown else scores.baseline) if scores else None,
        "recovery": shown.recovery if shown else None,
        "interval": asdict(shown.interval) if shown and shown.interval else None,
        "lost": shown.lost if shown else None,
        "won": shown.won if shown else None,
        "p": shown.p if shown else None,
        "equal_texts": equal[0] if equal else None,
        "tau": pace.tau if pace else None,
        "al": pace.al if pace else None,
        "decode_x": speed.decode.value if speed and speed.decode else None,
        "model": run.target["name"],
        "k": run.spd_k,
    }


def _restrict(run: Measured, name: str, ids: set[int]) -> Measured:
    """The run with these documents of one task alone."""
    task = run.tasks[name].select({number: number for number in ids})
    return run.model_copy(update={"tasks": {name: task}})
