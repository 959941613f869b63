"""Did the scores hold? Two runs on the same documents, compared in pairs.

Everything is about recovery, the share of the baseline's score that the other run keeps:
mean(other) / mean(baseline), or its inverse where lower scores are better, so that below 1 is
always worse. docs/compare.md says what each number means and how the verdict is reached.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Verdict = Literal["held", "unchanged", "fell", "not enough evidence"]
Floats = NDArray[np.float64]

RESAMPLES = 9999
LEVEL = 0.95  # of the printed intervals
POWER = 0.8  # chance with which `decides` documents decide
_DRAWS = 20_000
_FEW = 10  # resamples beyond the observed value: with fewer, p is but an upper bound
_MOST_AT_ONCE = 4_000_000  # numbers in memory per batch of resamples


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Scores of two runs on the same documents.

    baseline, other: mean scores (over several tasks: the mean of the tasks' means). recovery:
    None if it is undefined (`reason` says why). interval: of the recovery, paired bootstrap,
    percentile, at LEVEL; None if too many resamples have no recovery. lost, won: documents that
    the other run scores worse, better. p: two-sided; `test` names it. probability: that the
    recovery is at least the demanded one. verdict: `held` says that it is, `unchanged` no more
    than that every document scored the same. decides: documents that would decide, if documents
    went on differing as they did, with a chance of POWER; where nothing was lost, documents
    that would show it for new ones; None: no number would. reason: a clause for people.
    other: None where the run has no such score (`missing`).
    """

    documents: int
    baseline: float
    other: float | None
    recovery: float | None
    interval: Interval | None
    lost: int
    won: int
    p: float
    test: Literal["McNemar", "sign flips", "none"]
    probability: float | None
    verdict: Verdict
    decides: int | None
    reason: str

    @classmethod
    def missing(cls, baseline: ArrayLike, reason: str) -> Comparison:
        """Of scores that the other run lacks, some or all, for this reason."""
        scores = np.asarray(baseline, float)
        return cls(
            documents=len(scores),
            baseline=float(scores.mean()),
            other=None,
            recovery=None,
            interval=None,
            lost=0,
            won=0,
            p=1.0,
            test="none",
            probability=None,
            verdict="not enough evidence",
            decides=None,
            reason=reason,
        )


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

    @property
    def change(self) -> Floats:
        """Below zero where the other run is worse."""
        return self.kept - self.base


def compare_scores(
    baseline: ArrayLike,
    other: ArrayLike,
    *,
    higher_is_better: bool = True,
    min_recovery: float = 0.99,
    confidence: float = 0.95,
    verdicts: int = 1,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Compare scores of the same documents, [N] each; see `compare_tasks`."""
    return compare_tasks(
        [(baseline, other)],
        higher_is_better=higher_is_better,
        min_recovery=min_recovery,
        confidence=confidence,
        verdicts=verdicts,
        resamples=resamples,
        seed=seed,
    )


def compare_tasks(
    tasks: Sequence[tuple[ArrayLike, ArrayLike]],
    *,
    higher_is_better: bool = True,
    min_recovery: float = 0.99,
    confidence: float = 0.95,
    verdicts: int = 1,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Compare mean task scores: every task counts the same; documents are resampled within tasks.

    tasks: (baseline, other) scores of each. verdicts: how many are reached together, any of which
    may fail a job: `fell` needs that much more certainty (Bonferroni). Raises ValueError on
    unequal or no documents, on scores that are no finite numbers, and on min_recovery or
    confidence out of range.
    """
    if not 0 < min_recovery <= 1 or not 0.5 < confidence < 1:
        raise ValueError("min_recovery must be in (0, 1], confidence between 0.5 and 1")
    arrays = [_checked(*task) for task in tasks]
    if not arrays:
        raise ValueError("no documents to compare")
    pairs = [_Pairs(b, a) if higher_is_better else _Pairs(a, b) for a, b in arrays]
    doubt = (1 - confidence) / verdicts  # that a fall may leave
    change = np.concatenate([task.change / len(task.base) for task in pairs]) / len(pairs)
    lost, won = int((change < 0).sum()), int((change > 0).sum())
    binary = all(np.isin(values, (0, 1)).all() for task in arrays for values in task)
    mcnemar = binary and len(pairs) == 1  # tasks weigh by their size: counts alone do not do
    p = _mcnemar(lost, won) if mcnemar else _sign_flips(change, resamples, seed)
    base = float(np.mean([task.base.mean() for task in pairs]))
    kept = float(np.mean([task.kept.mean() for task in pairs]))
    undefined = _undefined(pairs, base, higher_is_better)
    verdict: Verdict = "not enough evidence"
    recovery, interval, probability, decides, reason = None, None, None, None, undefined
    if not undefined:
        recovery = kept / base
        interval = _recovery_interval(pairs, resamples, seed)
        probability = _probability(pairs, min_recovery, seed)
        fell = change.sum() < 0 and p / 2 <= doubt and probability <= doubt
        verdict, reason = _verdict(probability >= confidence, fell, lost, won)
        decides = _documents_that_decide(pairs, base, lost, min_recovery, confidence, doubt)
        if decides is not None and verdict == "not enough evidence":
            decides = max(decides, len(change) + 1)
    elif lost == 0 and not higher_is_better and _is_zero(pairs):
        probability = _probability(pairs, min_recovery, seed)
        verdict, reason = _verdict(probability >= confidence, False, lost, won)
        reason = f"{reason}; {undefined}"
    return Comparison(
        documents=len(change),
        baseline=float(np.mean([a.mean() for a, _ in arrays])),
        other=float(np.mean([b.mean() for _, b in arrays])),
        recovery=recovery,
        interval=interval,
        lost=lost,
        won=won,
        p=p,
        test="McNemar" if mcnemar else "sign flips",
        probability=probability,
        verdict=verdict,
        decides=decides,
        reason=reason,
    )


def compare_sums(
    numerator: ArrayLike, denominator: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0
) -> Ratio | None:
    """The ratio of two sums over the same documents, [N] each: of the baseline's seconds over the
    other run's, say, which is how many times less time it took.

    None if one of the sums is zero.
    """
    values = [np.asarray(v, float) for v in (numerator, denominator)]

    def ratio(index: NDArray[np.int64], axis: int = -1) -> Floats:
        above, below = (np.sum(value[index], axis=axis) for value in values)
        return _divide(above, below)

    everything = np.arange(len(values[0]))
    value = float(ratio(everything)) if len(everything) else math.nan
    if not math.isfinite(value) or value == 0:
        return None
    return Ratio(value, _bootstrap(ratio, [everything], resamples, seed))


def bound_of_no_loss(documents: int, confidence: float = 0.95) -> float:
    """Largest share of documents that may be lost if none of so many was (rule of three, exact)."""
    return float(stats.binomtest(0, documents).proportion_ci(2 * confidence - 1, "exact").high)


# ------------------------------------------------------------------------------------ the parts


def _checked(baseline: ArrayLike, other: ArrayLike) -> tuple[Floats, Floats]:
    a, b = np.asarray(baseline, float), np.asarray(other, float)
    if a.ndim != 1 or a.shape != b.shape or not len(a):
        raise ValueError(f"scores must pair up one by one: got shapes {a.shape} and {b.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("scores must be finite numbers")
    return a, b


def _is_zero(pairs: list[_Pairs]) -> bool:
    return not any(task.base.any() for task in pairs)


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


def _sign_flips(change: Floats, resamples: int, seed: int) -> float:
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
        rng=np.random.default_rng(seed),
    )
    p = float(result.pvalue)
    if sampled and p < _FEW / resamples:  # no smaller p can be drawn: the flips' normal tail
        z = differing.sum() / math.sqrt((differing**2).sum())
        p = min(p, float(2 * stats.norm.sf(abs(z))))
    return p


def _recovery_interval(pairs: list[_Pairs], resamples: int, seed: int) -> Interval | None:
    def recovery(*indices: NDArray[np.int64], axis: int = -1) -> Floats:
        kept = sum(np.mean(t.kept[i], axis=axis) for t, i in zip(pairs, indices))
        base = sum(np.mean(t.base[i], axis=axis) for t, i in zip(pairs, indices))
        return _divide(np.asarray(kept), np.asarray(base))

    return _bootstrap(recovery, [np.arange(len(task.base)) for task in pairs], resamples, seed)


def _bootstrap(
    statistic: Callable[..., Floats], indices: list[NDArray[Any]], resamples: int, seed: int
) -> Interval | None:
    """Percentile interval. What is resampled are document indices, so that pairs stay together.

    Widened for few documents as t is wider than the normal distribution (Hesterberg 2015, sec.
    4.1; BCa was tried, and covered no better). None for a task of one document, and if resamples
    without a value (zero denominators) are more than a tail.
    """
    total = sum(map(len, indices))
    if min(map(len, indices), default=0) < 2:
        return None
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):  # in scipy's own interval
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        result = stats.bootstrap(
            indices,
            statistic,
            vectorized=True,
            n_resamples=resamples,
            batch=max(1, _MOST_AT_ONCE // total),
            method="percentile",
            rng=np.random.default_rng(seed),
        )
    values = result.bootstrap_distribution
    defined = values[np.isfinite(values)]
    if len(defined) < (1 + LEVEL) / 2 * len(values):
        return None
    width = math.sqrt(total / (total - 1)) * stats.t.ppf((1 + LEVEL) / 2, total - 1)
    low, high = np.quantile(defined, stats.norm.cdf([-width, width]))
    return Interval(float(low), float(high))


def _divide(numerator: Floats, denominator: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(numerator / denominator)


def _probability(pairs: list[_Pairs], min_recovery: float, seed: int) -> float:
    """Posterior probability that the recovery is at least min_recovery.

    Bayesian bootstrap (Rubin 1981) with half a document of each of four kinds added: solved by
    both, lost, won, solved by none; over several tasks, shared out among them. On right-or-wrong
    scores of one task that is Jeffreys' prior on the table of pairs; unlike resampling, it knows
    that a loss which was not seen may exist.
    """
    rng = np.random.default_rng(seed)
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
    """`enough`: the recovery is at least the demanded one, with confidence. No lost document among
    few shows little: that is `unchanged` at most."""
    if enough:
        return "held", "recovery is high enough, with confidence"
    if lost == won == 0:
        return "unchanged", "every document scored the same"
    if fell:
        return "fell", "recovery is too low, with confidence"
    none_worse = "no document scored worse, but they are too few"
    return "not enough evidence", "the documents do not tell" if lost else none_worse


def _documents_that_decide(
    pairs: list[_Pairs],
    base: float,
    lost: int,
    min_recovery: float,
    confidence: float,
    doubt: float,
) -> int | None:
    """Sample size of a one-sided z test of mean(kept - min_recovery * base) = 0, at POWER.

    Over several tasks: all together, in their present proportions. Without losses: the documents
    after which `bound_of_no_loss` is no more than what may be lost.
    """
    total = sum(len(task.base) for task in pairs)
    if lost == 0:
        top = max(task.base.max() for task in pairs)
        may_be_lost = (1 - min_recovery) * base / top
        if may_be_lost <= 0:
            return None
        return math.ceil(math.log(1 - confidence) / math.log1p(-may_be_lost))
    margins = [task.kept - min_recovery * task.base for task in pairs]
    mean = float(np.mean([margin.mean() for margin in margins]))
    variance = sum(total * margin.var() / len(margin) for margin in margins) / len(pairs) ** 2
    if abs(mean) < 1e-12:
        return None
    z = stats.norm.ppf(confidence if mean > 0 else 1 - doubt) + stats.norm.ppf(POWER)
    return max(1, math.ceil(variance * (z / mean) ** 2))
