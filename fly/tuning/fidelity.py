"""Did the scores hold? Every metric and filter, as `fly compare` pairs and judges them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fly.analysis import compare
from fly.analysis.scores import Measured
from fly.errors import FlyError


@dataclass(frozen=True)
class Recovery:
    """One metric under one filter, against the target alone on the same documents.

    metric: `name` or `name,filter`. value: the recovery of docs/compare.md; None where it is
    undefined (`reason` says why). lost, won: documents that score worse and better than the
    target alone. verdict: that of `fly compare`, with its confidence. is_judged: whether the target
    alone has a recovery by this metric; if not, none can be shown.
    """

    task: str
    metric: str
    documents: int
    baseline: float
    score: float | None
    value: float | None
    lost: int
    won: int
    verdict: str
    reason: str
    is_judged: bool

    @property
    def name(self) -> str:
        return f"{self.task} {self.metric}"

    def held(self, least: float) -> bool:
        """Where the target alone has no recovery, no document may be worse.

        A run without any error, where lower is better, has no recovery either, and held.
        """
        if self.score is None:
            return False
        if not self.is_judged:
            return self.lost == 0
        if self.value is None:  # without any error, say: nothing is left that could be worse
            without_error = self.score == 0 and self.lost == 0
            return without_error or self.verdict in ("held", "unchanged")
        return self.value >= least

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}


def held(recoveries: Sequence[Recovery], least: float) -> bool:
    """Whether every metric kept this share; not so if nothing was judged."""
    judged = any(recovery.is_judged for recovery in recoveries)
    return judged and all(recovery.held(least) for recovery in recoveries)


def recoveries(baseline: Measured, other: Measured, least: float) -> list[Recovery]:
    """One for each metric of the baseline, also where the other run lacks it.

    Raises FlyError if the runs did not answer the same questions.
    """
    compare.check_pairs(baseline, other)
    itself, found = _rows(baseline, baseline, least), _rows(baseline, other, least)
    return [_recovery(own, found.get(key)) for key, own in itself.items()]


def check_judgeable(baseline: Measured, least: float) -> list[str]:
    """Refuse tasks by which nothing could be held; notes on what else will not be judged."""
    found = recoveries(baseline, baseline, least)
    for name, task in baseline.tasks.items():
        of_task = [recovery for recovery in found if recovery.task == name]
        if any(recovery.is_judged for recovery in of_task):
            continue
        scores = ", ".join(f"{r.metric} {r.baseline:g}" for r in of_task)
        raise FlyError(
            f"task {name}: the target alone has no score that could be kept or lost "
            f"({scores or 'no metric is a mean over documents'}; {len(task.documents)} documents): "
            "raise --limit, or choose other --tasks"
        )
    unjudged = [recovery for recovery in found if not recovery.is_judged]
    return [*baseline.notes, *(f"{r.name}: {r.reason}: not judged" for r in unjudged)]


def _rows(baseline: Measured, other: Measured, least: float) -> dict[tuple[str, str], compare.Row]:
    try:
        result = compare.compare(baseline, [other], compare.Demand(min_recovery=least))
    except FlyError:  # the runs pair up, so what is missing is a metric that both have
        return {}
    return {(row.task, row.metric): row for row in result.others[0].rows}


def _recovery(own: compare.Row, found: compare.Row | None) -> Recovery:
    scores = own.scores if found is None else found.scores
    missing = found is None or scores.other is None
    return Recovery(
        task=own.task,
        metric=own.metric,
        documents=scores.documents,
        baseline=scores.baseline,
        score=None if missing else scores.other,
        value=None if missing else scores.recovery,
        lost=scores.lost,
        won=scores.won,
        verdict="not enough evidence" if missing else scores.verdict,
        reason="the run has no such metric" if found is None else scores.reason,
        is_judged=own.scores.recovery is not None,
    )
