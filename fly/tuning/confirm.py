"""The last word of a tune: is the fastest configuration faster than the given one, and as good?

Of several measured configurations the fastest is partly the luckiest, in speed and in scores. So it
is run once more beside the given one and the target alone, on documents that the search has not
seen, document by document in turns, so that what else the machine does hits all alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fly.analysis.statistics import Ratio, compare_rates
from fly.config import FlyConfig
from fly.tuning import fidelity
from fly.tuning.fidelity import Recovery
from fly.tuning.real_runs import RunResult, TunedPair, Workload


@dataclass(frozen=True)
class Confirmation:
    """What the runs in turns say."""

    documents: dict[str, list[int]]  # by task
    fresh: bool  # the search has used none of them
    # the given configuration's seconds of decoding over the candidate's, paired by document
    over_given: Ratio | None
    over_target: Ratio | None  # the target's over the candidate's
    given_over_target: Ratio | None  # the target's over the given one's
    recoveries: list[Recovery]  # against the target alone on these documents
    given_recoveries: list[Recovery]  # the same of the given configuration

    @property
    def is_judged(self) -> bool:
        """Whether the target alone scores anything on these documents."""
        return any(recovery.is_judged for recovery in self.recoveries)

    @property
    def is_faster(self) -> bool:
        """Whether noise is ruled out, with the usual confidence."""
        ratio = self.over_given
        return ratio is not None and ratio.interval is not None and ratio.interval.low > 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "documents": self.documents,
            "unseen_by_the_search": self.fresh,
            "time_x_over_given": _as_dict(self.over_given),
            "time_x_over_target": _as_dict(self.over_target),
            "given_time_x_over_target": _as_dict(self.given_over_target),
            "recoveries": [recovery.as_dict() for recovery in self.recoveries],
            "held": fidelity.held(self.recoveries),
            "given_held": fidelity.held(self.given_recoveries),
        }


def _as_dict(ratio: Ratio | None) -> dict[str, float | None] | None:
    if ratio is None:
        return None
    low, high = (ratio.interval.low, ratio.interval.high) if ratio.interval else (None, None)
    return {"value": ratio.value, "low": low, "high": high}


def documents_for(available: dict[str, int], count: int) -> tuple[dict[str, list[int]], bool]:
    """(`count` documents of every task, whether the search has used none of them).

    The search has used the first `count`. The next ones are taken; where a task has fewer left, the
    last of those that the search used as well.
    """
    found = {name: [*range(min(2 * count, have))][-count:] for name, have in available.items()}
    return found, all(have >= 2 * count for have in available.values())


def confirm(
    pair: TunedPair,
    workload: Workload,
    candidate: FlyConfig,
    least: float,
    done: Callable[[int], object],
) -> Confirmation:
    """Run the target alone, the given configuration and the candidate in turns.

    As many documents as the search used, unseen ones if every task has them. done: as in
    `TunedPair.run_in_turns`.
    """
    documents, fresh = documents_for(workload.available, workload.limit)
    on = replace(workload, samples=documents)
    target, own, other = pair.run_in_turns(on, [pair.alone, pair.given, candidate], done)
    return Confirmation(
        documents,
        fresh,
        over_given=_time_x(own, other),
        over_target=_time_x(target, other),
        given_over_target=_time_x(target, own),
        recoveries=fidelity.recoveries(target.measured, other.measured, least),
        given_recoveries=fidelity.recoveries(target.measured, own.measured, least),
    )


def _time_x(baseline: RunResult, other: RunResult) -> Ratio | None:
    seconds = sorted(baseline.decode_seconds.items())
    return compare_rates([(taken, other.decode_seconds[key]) for key, taken in seconds])
