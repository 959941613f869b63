"""Did the scores hold? Every metric and filter, as `fly compare` pairs and judges them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fly.analysis import compare
from fly.analysis.comparability import check_comparable
from fly.analysis.scores import Measured
from fly.analysis.statistics import Comparison
from fly.errors import FlyError


@dataclass(frozen=True)
class Recovery:
    """One metric under one filter, against the target alone on the same documents."""

    task: str
    metric: str  # `name` or `name,filter`
    scores: Comparison  # as `fly compare` judges them
    is_judged: bool  # the target alone has a recovery by this metric; if not, none can be shown
    least: float  # share of the target's score that it must keep

    @property
    def name(self) -> str:
        return f"{self.task} {self.metric}"

    @property
    def is_held(self) -> bool:
        """Where the target alone has no recovery, no document may be worse.

        A run without any error, where lower is better, has no recovery either, and held.
        """
        scores = self.scores
        if scores.other is None:
            return False
        if not self.is_judged:
            return scores.lost == 0
        if scores.recovery is None:  # without any error, say: nothing is left that could be worse
            without_error = scores.other == 0 and scores.lost == 0
            return without_error or scores.verdict in ("held", "unchanged")
        return scores.recovery >= self.least

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "task": self.task,
            "metric": self.metric,
            "documents": self.scores.documents,
            "baseline": self.scores.baseline,
            "score": self.scores.other,
            "value": self.scores.recovery,
            "lost": self.scores.lost,
            "won": self.scores.won,
            "verdict": self.scores.verdict,
            "reason": self.scores.reason,
            "is_judged": self.is_judged,
        }


def held(recoveries: Sequence[Recovery]) -> bool:
    """Whether every metric kept its share; not so if nothing was judged."""
    judged = any(recovery.is_judged for recovery in recoveries)
    return judged and all(recovery.is_held for recovery in recoveries)


def recoveries(baseline: Measured, other: Measured, least: float) -> list[Recovery]:
    """One for each metric of the baseline that has all of its numbers, also where the other run
    lacks it.

    Raises FlyError if the runs did not answer the same questions.
    """
    check_comparable(baseline, other)
    both = zip(_rows(baseline, baseline, least), _rows(baseline, other, least))
    return [
        Recovery(row.task, row.metric, row.scores, itself.scores.recovery is not None, least)
        for itself, row in both
        if itself.scores.other is not None
    ]


def _rows(baseline: Measured, other: Measured, least: float) -> list[compare.ScoreRow]:
    demand = compare.Demand(min_recovery=least)
    return compare.compare(baseline, [other], demand).others[0].rows


def check_judgeable(baseline: Measured, least: float) -> list[str]:
    """Refuse tasks by which nothing could be held; notes on what else will not be judged."""
    found = recoveries(baseline, baseline, least)
    for name, task in baseline.tasks.items():
        of_task = [recovery for recovery in found if recovery.task == name]
        if any(recovery.is_judged for recovery in of_task):
            continue
        scores = ", ".join(f"{r.metric} {r.scores.baseline:g}" for r in of_task)
        raise FlyError(
            f"task {name}: the target alone has no score that could be kept or lost "
            f"({scores or 'no metric is a mean over documents'}; {len(task.documents)} documents): "
            "raise --limit, or choose other --tasks"
        )
    unjudged = [recovery for recovery in found if not recovery.is_judged]
    return [*baseline.notes, *(f"{r.name}: {r.scores.reason}: not judged" for r in unjudged)]
