"""Did the scores hold? Two runs on the same documents, compared in pairs.

Everything is about recovery, the share of the baseline's score that the other run keeps:
mean(other) / mean(baseline), or its inverse where lower scores are better, so that below 1 is
always worse. docs/compare.md says what each number means and how the verdict is reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Verdict = Literal["held", "unchanged", "fell", "not enough evidence"]
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

RESAMPLES = 9999
LEVEL = 0.95  # of the printed intervals
POWER = 0.8  # chance with which `decides` documents decide
_DRAWS = 20_000
_FEW = 10  # resamples beyond the observed value; with fewer, p is only an upper bound
_MOST_AT_ONCE = 4_000_000  # numbers in memory per batch of resamples


@dataclass(frozen=True)
class Demand:
    """What scores must do: keep this share of the baseline's, shown with this confidence."""

    min_recovery: float = 0.99
    confidence: float = 0.95


DEFAULT_DEMAND = Demand()


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Scores of two runs on the same documents.

    baseline, other: mean scores; over several tasks, the mean of the tasks' means. other is None
    where the run lacks some of the scores. recovery: None if it is undefined; `reason` says why.
    interval: of the recovery, paired percentile bootstrap at LEVEL; None if too many resamples
    have no recovery. lost, won: documents that the other run scores worse and better. p:
    two-sided; `test` names it. probability: that the recovery is at least the demanded one.
    verdict: `held` says that it is; `unchanged` only says that every document scored the same.
    decides: documents that would decide with a chance of POWER if they went on differing as these
    did; without losses, documents that would show the demand for new ones; None if no number
    would. reason: a clause for people. withheld: the scores allow no verdict, however many they
    are; `reason` says why.
    """

    documents: int
    baseline: float
    other: float | None = None
    recovery: float | None = None
    interval: Interval | None = None
    lost: int = 0
    won: int = 0
    p: float = 1.0
    test: Literal["McNemar", "sign flips", "none"] = "none"
    probability: float | None = None
    verdict: Verdict = "not enough evidence"
    decides: int | None = None
    reason: str = ""
    withheld: bool = False


@dataclass(frozen=True)
class Ratio:
    """A ratio of sums with its paired bootstrap interval over documents, at LEVEL."""

    value: float
    interval: Interval | None


@dataclass(frozen=True)
class _Pairs:
    """One task; kept / base is the recovery. Where lower is better, the runs change places."""

    kept: Floats
    base: Floats


def compare_tasks(
    tasks: Sequence[tuple[ArrayLike, ArrayLike]],
    demand: Demand = DEFAULT_DEMAND,
    *,
    higher_is_better: bool = True,
    verdicts: int = 1,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Compare mean task scores: every task counts the same; documents are resampled within tasks.

    tasks: (baseline, other) scores of each, [N] and [N]. verdicts: how many are reached together,
    any of which may fail a job: `fell` needs that much more certainty (Bonferroni). Raises
    ValueError on unequal or no documents, on scores that are not finite numbers, and unless
    0 < min_recovery <= 1 and 0.5 < confidence < 1.
    """
    if not 0 < demand.min_recovery <= 1 or not 0.5 < demand.confidence < 1:
        raise ValueError("min_recovery must be in (0, 1], confidence between 0.5 and 1")
    arrays = [_checked(*task) for task in tasks]
    if not arrays:
        raise ValueError("no documents to compare")
    pairs = [_Pairs(b, a) if higher_is_better else _Pairs(a, b) for a, b in arrays]
    doubt = (1 - demand.confidence) / verdicts  # that a fall may leave
    change = np.concatenate([(t.kept - t.base) / len(t.base) for t in pairs]) / len(pairs)
    lost, won = int((change < 0).sum()), int((change > 0).sum())
    binary = all(np.isin(values, (0, 1)).all() for task in arrays for values in task)
    mcnemar = binary and len(pairs) == 1  # over several tasks, documents differ in weight
    p = _mcnemar(lost, won) if mcnemar else _sign_flips(change, resamples)
    found = Comparison(
        documents=len(change),
        baseline=float(np.mean([a.mean() for a, _ in arrays])),
        other=float(np.mean([b.mean() for _, b in arrays])),
        lost=lost,
        won=won,
        p=p,
        test="McNemar" if mcnemar else "sign flips",
    )
    base = float(np.mean([task.base.mean() for task in pairs]))
    undefined = _undefined(pairs, base, higher_is_better)
    perfect = not higher_is_better and lost == 0 and not any(t.base.any() for t in pairs)
    if undefined and not perfect:
        return replace(found, reason=undefined)
    probability = _probability(pairs, demand.min_recovery)
    fell = not undefined and change.sum() < 0 and p / 2 <= doubt and probability <= doubt
    verdict, reason = _verdict(probability >= demand.confidence, fell, lost, won)
    found = replace(found, probability=probability, verdict=verdict)
    if undefined:
        return replace(found, reason=f"{reason}; {undefined}")
    decides = _documents_that_decide(pairs, base, lost, demand, doubt)
    if decides is not None and verdict == "not enough evidence":
        decides = max(decides, len(change) + 1)
    return replace(
        found,
        recovery=float(np.mean([task.kept.mean() for task in pairs])) / base,
        interval=_recovery_interval(pairs, resamples),
        decides=decides,
        reason=reason,
    )


def compare_sums(numerator: ArrayLike, denominator: ArrayLike) -> Ratio | None:
    """The ratio of two sums over the same documents, [N] each, such as seconds of two runs.

    None if one of the sums is zero.
    """
    above, below = np.asarray(numerator, float), np.asarray(denominator, float)
    if not above.sum() or not below.sum():
        return None

    def ratio(index: Indices) -> Floats:
        return _divide(above[index].sum(axis=-1), below[index].sum(axis=-1))

    interval = _bootstrap(ratio, [len(above)], RESAMPLES)
    return Ratio(float(above.sum() / below.sum()), interval)


def bound_of_no_loss(documents: int, confidence: float = 0.95) -> float:
    """The largest share that may be lost when none of these documents was (exact rule of three)."""
    return float(stats.binomtest(0, documents).proportion_ci(2 * confidence - 1, "exact").high)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for being read together, in their order.

    Whichever of the hypotheses are true, the chance that any of them gets a corrected p of at most
    a level is no more than that level: Holm (1979), Scandinavian Journal of Statistics 6, 65-70.
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
        corrected[at] = largest
    return corrected


# ------------------------------------------------------------------------------------ the parts


def _checked(baseline: ArrayLike, other: ArrayLike) -> tuple[Floats, Floats]:
    a, b = np.asarray(baseline, float), np.asarray(other, float)
    if a.ndim != 1 or a.shape != b.shape or not len(a):
        raise ValueError(f"scores must pair up one by one: got shapes {a.shape} and {b.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("scores must be finite numbers")
    return a, b


def _undefined(pairs: list[_Pairs], base: float, higher_is_better: bool) -> str:
    """Why there is no recovery; empty if there is one."""
    if any((task.base < 0).any() or (task.kept < 0).any() for task in pairs):
        return "recovery is undefined: scores below zero have no ratio"
    if base > 0:
        return ""
    whose = "the baseline's score" if higher_is_better else "the run's own score"
    return f"recovery is undefined: {whose} is zero"


def _mcnemar(lost: int, won: int) -> float:
    return float(stats.binomtest(lost, lost + won).pvalue) if lost + won else 1.0


def _sign_flips(change: Floats, resamples: int) -> float:
    """Exact test of the mean difference where 2^n is small; McNemar's test, for any scores."""
    differing = change[change != 0]
    if len(differing) < 2:
        return 1.0
    sampled = len(differing) >= 60 or 2 ** len(differing) > resamples
    result = stats.permutation_test(
        (differing / np.abs(differing).max(),),
        lambda x, axis: np.round(np.sum(x, axis=axis), 9),  # equal sums must be equal
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        batch=max(1, _MOST_AT_ONCE // len(differing)),
        rng=np.random.default_rng(0),
    )
    p = float(result.pvalue)
    if sampled and p < _FEW / resamples:  # no smaller p can be drawn: the flips' normal tail
        z = differing.sum() / math.sqrt((differing**2).sum())
        p = min(p, float(2 * stats.norm.sf(abs(z))))
    return p


def _recovery_interval(pairs: list[_Pairs], resamples: int) -> Interval | None:
    def recovery(*indices: Indices) -> Floats:
        kept = sum(np.mean(t.kept[i], axis=-1) for t, i in zip(pairs, indices))
        base = sum(np.mean(t.base[i], axis=-1) for t, i in zip(pairs, indices))
        return _divide(np.asarray(kept), np.asarray(base))

    return _bootstrap(recovery, [len(task.base) for task in pairs], resamples)


def _bootstrap(
    statistic: Callable[..., Floats], documents: list[int], resamples: int
) -> Interval | None:
    """Percentile interval of a statistic of resampled document indices, [resamples, N] per task.

    Few documents widen it as t is wider than the normal distribution (Hesterberg 2015, sec. 4.1;
    BCa covered no better). None for a task of one document, and if more resamples than one tail
    have no value (a denominator of zero).
    """
    total = sum(documents)
    if min(documents) < 2:
        return None
    rng, batch = np.random.default_rng(0), max(1, _MOST_AT_ONCE // total)
    sizes = [min(batch, resamples - done) for done in range(0, resamples, batch)]
    values = np.concatenate(
        [statistic(*(rng.integers(n, size=(size, n)) for n in documents)) for size in sizes]
    )
    defined = values[np.isfinite(values)]
    if len(defined) < (1 + LEVEL) / 2 * len(values):
        return None
    width = math.sqrt(total / (total - 1)) * stats.t.ppf((1 + LEVEL) / 2, total - 1)
    low, high = np.quantile(defined, stats.norm.cdf([-width, width]))
    return Interval(float(low), float(high))


def _divide(numerator: Floats, denominator: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(numerator / denominator)


def _probability(pairs: list[_Pairs], min_recovery: float) -> float:
    """Posterior probability that the recovery is at least min_recovery.

    Bayesian bootstrap (Rubin 1981) with half a document of each of four kinds added: solved by
    both, lost, won, solved by neither; several tasks share it. On right-or-wrong scores of one
    task this is Jeffreys' prior on the table of pairs. Unlike resampling, it allows for a loss
    that was not seen.
    """
    rng = np.random.default_rng(0)
    margin = np.zeros(_DRAWS)
    for task in pairs:
        top = max(task.kept.max(), task.base.max(), np.finfo(float).tiny)
        kinds, counts = np.unique(
            np.stack([task.kept, task.base]), axis=1, return_counts=True
        )  # documents with equal scores share one gamma variable
        added = top * np.array([[1, 0, 1, 0], [1, 1, 0, 0]])
        kept, base = np.concatenate([kinds, added], axis=1)
        shape = np.concatenate([counts, np.full(4, 0.5 / len(pairs))])
        step = max(1, _MOST_AT_ONCE // len(shape))
        for start in range(0, _DRAWS, step):
            weights = rng.gamma(shape, size=(min(step, _DRAWS - start), len(shape)))
            share = weights @ (kept - min_recovery * base) / weights.sum(axis=1)
            margin[start : start + step] += share
    return float(np.mean(margin >= 0))


def _verdict(enough: bool, fell: bool, lost: int, won: int) -> tuple[Verdict, str]:
    """enough: the recovery is at least the demanded one, with confidence."""
    if enough:
        return "held", "recovery is high enough, with confidence"
    if lost == won == 0:
        return "unchanged", "every document scored the same"
    if fell:
        return "fell", "recovery is too low, with confidence"
    none_worse = "no document scored worse, but they are too few"
    return "not enough evidence", "the documents do not tell" if lost else none_worse


def _documents_that_decide(
    pairs: list[_Pairs], base: float, lost: int, demand: Demand, doubt: float
) -> int | None:
    """Sample size of a one-sided z test of mean(kept - min_recovery * base) = 0, at POWER.

    Over several tasks: all together, in their present proportions. Without losses: the documents
    after which `bound_of_no_loss` is no more than what may be lost.
    """
    total = sum(len(task.base) for task in pairs)
    if lost == 0:
        top = max(task.base.max() for task in pairs)
        may_be_lost = (1 - demand.min_recovery) * base / top
        if may_be_lost <= 0:
            return None
        return math.ceil(math.log(1 - demand.confidence) / math.log1p(-may_be_lost))
    margins = [task.kept - demand.min_recovery * task.base for task in pairs]
    mean = float(np.mean([margin.mean() for margin in margins]))
    variance = sum(total * margin.var() / len(margin) for margin in margins) / len(pairs) ** 2
    if abs(mean) < 1e-12:
        return None
    z = stats.norm.ppf(demand.confidence if mean > 0 else 1 - doubt) + stats.norm.ppf(POWER)
    return max(1, math.ceil(variance * (z / mean) ** 2))
