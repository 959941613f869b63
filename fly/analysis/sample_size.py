"""How many documents would decide? The verdict's own rule, asked of simulated runs."""

from __future__ import annotations

import numpy as np
from scipy import stats

from fly.analysis.posterior import ADDED_24, HALF_OF_EACH, NONE, ONE_LOST, Floats, Pairs, is_binary

_POWER = 0.8
_RUNS = 400  # simulated for every number of documents
_MOST = 10**8  # documents
_PRECISION = 0.01


def documents_that_decide(
    pairs: list[Pairs], min_recovery: float, confidence: float, doubt: float
) -> int | None:
    """The number of units, more than there are, with which a verdict is reached with a chance of
    _POWER, if further ones are like these; None if even 100 million do not reach one.

    Over several tasks: all together, in their present proportions. doubt: that a fall may leave.
    """
    total = sum(len(task.base) for task in pairs)

    def is_enough(documents: int) -> bool:
        rng = np.random.default_rng(0)
        drawn = [_Drawn(task, min_recovery, documents / total, rng) for task in pairs]
        return _chance(drawn, confidence, doubt) >= _POWER

    if not is_enough(_MOST):
        return None
    few, many = total, total + 1
    while not is_enough(many):
        few, many = many, min(2 * many, _MOST)
    while many - few > max(1, _PRECISION * many):
        middle = (few + many) // 2
        few, many = (few, middle) if is_enough(middle) else (middle, many)
    return many


class _Drawn:
    """A task in simulated runs of so many times its units, like those seen: sums over the units by
    run, [runs] each."""

    def __init__(self, task: Pairs, min_recovery: float, times: float, rng: np.random.Generator):
        (kept, base), counts = task.kinds
        units = max(1, round(times * len(task.base)))
        counts_RN = rng.multinomial(units, counts / counts.sum(), size=_RUNS).astype(float)
        self.task, self._min_recovery = task, min_recovery
        change = kept - base
        self._powers_R4 = counts_RN @ (kept - min_recovery * base)[:, None] ** np.arange(4)
        self.change = counts_RN @ change / units
        self.change_squared = counts_RN @ change**2 / units**2
        self.lost = counts_RN @ (change < 0)
        self.won = counts_RN @ (change > 0)

    def cumulants(self, added_4: Floats, size: float) -> Floats:
        """Mean, variance and third central moment of the task's margin in the posterior with these
        documents added, [3, runs]: those of a mean under Dirichlet weights."""
        kept, base = size * ADDED_24
        powers = (kept - self._min_recovery * base)[:, None] ** np.arange(4)
        weight, first, second, third = (self._powers_R4 + added_4 @ powers).T
        mean, second, third = first / weight, second / weight, third / weight
        variance = second - mean**2
        skew = third - 3 * mean * second + 2 * mean**3
        return np.stack([mean, variance / (weight + 1), 2 * skew / ((weight + 1) * (weight + 2))])


def _chance(tasks: list[_Drawn], confidence: float, doubt: float) -> float:
    """The share of the simulated runs with a verdict, held or fell."""
    seen = [task.cumulants(NONE, 0.0) for task in tasks]
    total = np.sum(seen, axis=0)
    held = np.min(
        [
            _above_zero(total - own + task.cumulants(ONE_LOST, task.task.top))
            for task, own in zip(tasks, seen)
        ],
        axis=0,
    )
    each = HALF_OF_EACH / len(tasks)
    as_seen = _above_zero(
        np.sum([task.cumulants(each, task.task.largest_change) for task in tasks], axis=0)
    )
    fell = (as_seen <= doubt) & (_p_of_loss(tasks) <= doubt)
    return float(np.mean((held >= confidence) | fell))


def _above_zero(cumulants_3R: Floats) -> Floats:
    """The chance to be above zero, by three moments (Pearson's type III): between a normal
    distribution, of many losses, and an exponential one, of one."""
    mean, variance, third = cumulants_3R
    least = np.maximum(1e-12 * np.abs(mean), 1e-100)  # where all documents are alike
    deviation = np.maximum(np.sqrt(np.maximum(variance, 0)), least)
    return np.asarray(stats.pearson3.sf(-mean / deviation, third / deviation**3))


def _p_of_loss(tasks: list[_Drawn]) -> Floats:
    """One-sided p of a loss, as the verdict's test has it; over scores other than 0 and 1 by the
    sign flips' normal tail, but no less than the exact test's smallest."""
    lost, won = (sum(getattr(task, name) for task in tasks) for name in ("lost", "won"))
    if is_binary([task.task for task in tasks]):
        return np.asarray(stats.binom.sf(lost - 1, lost + won, 0.5))
    change = np.sum([task.change for task in tasks], axis=0)
    squared = np.sum([task.change_squared for task in tasks], axis=0)
    z = change / np.sqrt(np.maximum(squared, np.finfo(float).tiny))
    return np.maximum(stats.norm.cdf(z), 0.5 ** (lost + won))
