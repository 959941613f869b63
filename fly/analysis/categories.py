"""A comparison by a field of the documents (`--by category`): each of its values by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fly.analysis.compare import ScoreRow, Speed, compare, equal_texts, find_speed
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
            own = {i: i for i, group in groups.items() if group == value}
            base, *rest = (
                run.model_copy(update={"tasks": {name: run.tasks[name].select(own)}})
                for run in (baseline, *others)
            )
            result = compare(base, rest, demand, metrics)
            start = {"task": name, "category": value, "documents": len(own)}
            for run, against in [(base, None), *zip(rest, result.others)]:
                # any comparison has the baseline's score
                shown = against or next(iter(result.others), None)
                speed = find_speed(against.speeds if against else result.baseline_speeds, name)
                equal = equal_texts(base.tasks[name], run.tasks[name]) if against else None
                row = _row(shown.main if shown else None, speed, equal, is_baseline=not against)
                model = {"model": run.target["name"], "k": run.spd_k}
                found.append({**start, "run": run.name, **row, **model})
    return found


def _row(
    row: ScoreRow | None, speed: Speed | None, equal: tuple[int, int] | None, *, is_baseline: bool
) -> dict[str, Any]:
    """A run's scores, which are compared with nothing if it is the baseline, and its speed."""
    scores = asdict(row.scores) if row else {}
    compared = {} if is_baseline else scores
    pace = speed.pace if speed else None
    return {
        "metric": row.metric if row else None,
        "score": scores.get("baseline" if is_baseline else "other"),
        **{key: compared.get(key) for key in ("recovery", "interval", "lost", "won", "p")},
        "equal_texts": equal[0] if equal else None,
        "tau": pace.tau if pace else None,
        "al": pace.al if pace else None,
        "decode_x": speed.decode.value if speed and speed.decode else None,
    }
