"""Did the scores hold? One number per task, against the target alone on the same documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fly.tuning.live import Scores


@dataclass(frozen=True)
class Recovery:
    """One task. name: "task,filter,metric". value: share of the baseline's score that is kept,
    None if that is zero. lost, won: documents that score worse and better than the target alone.
    """

    name: str
    documents: int
    baseline: float
    score: float
    value: float | None
    lost: int
    won: int

    def held(self, least: float) -> bool:
        """Where the target scores nothing, nothing can be lost."""
        return self.value is None or self.value >= least

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def recoveries(baseline: Mapping[str, Scores], other: Mapping[str, Scores]) -> list[Recovery]:
    """By task, under the filter and metric by which the target alone scores best."""
    chosen: dict[str, str] = {}
    for name in sorted(baseline):
        task = name.split(",", 1)[0]
        if task not in chosen or _sum(baseline[name]) > _sum(baseline[chosen[task]]):
            chosen[task] = name
    return [_recovery(name, baseline[name], other[name]) for name in chosen.values()]


def _recovery(name: str, baseline: Scores, other: Scores) -> Recovery:
    if baseline.keys() != other.keys():
        raise ValueError(f"{name}: the runs scored different documents")
    before, after = _sum(baseline), _sum(other)
    return Recovery(
        name,
        len(baseline),
        before / len(baseline),
        after / len(baseline),
        after / before if before > 0 else None,
        sum(other[doc] < baseline[doc] for doc in baseline),
        sum(other[doc] > baseline[doc] for doc in baseline),
    )


def _sum(scores: Scores) -> float:
    return sum(scores.values())
