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
from scipy import optimize, stats

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
    two-sided; `test` names it. bound: without losses, the largest loss of recovery (a share) that
    so few documents leave possible, with the demanded confidence; else None. probability: that the
    recovery is at least the demanded one, if one more document had been lost.
    verdict: `held` says that it is; `unchanged` only says that every document scored the same.
    decides_nothing: the baseline scores nothing, so that nothing can be lost.
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
    bound: float | None = None
    probability: float | None = None
    verdict: Verdict = "not enough evidence"
    decides_nothing: bool = False
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

    @property
    def top(self) -> float:
        """The largest score that either run has: what one document may lose."""
        return float(max(self.kept.max(), self.base.max()))


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
    if higher_is_better and not lost and _scores_nothing(pairs):
        return replace(found, decides_nothing=True, reason=undefined)
    perfect = not higher_is_better and lost == 0 and not any(t.base.any() for t in pairs)
    if undefined and not perfect:
        return replace(found, reason=undefined)
    probability = _probability(pairs, demand.min_recovery)
    falls = change.sum() < 0 and p / 2 <= doubt and not undefined
    fell = falls and _probability_as_seen(pairs, demand.min_recovery) <= doubt
    verdict, reason = _verdict(probability >= demand.confidence, fell, lost, won)
    found = replace(found, probability=probability, verdict=verdict)
    if undefined:
        return replace(found, reason=f"{reason}; {undefined}")
    decides = _documents_that_decide(pairs, base, change, demand, doubt)
    if decides is not None and verdict == "not enough evidence":
        decides = max(decides, len(change) + 1)
    return replace(
        found,
        recovery=float(np.mean([task.kept.mean() for task in pairs])) / base,
        interval=_recovery_interval(pairs, resamples),
        bound=None if lost else min(1.0, _unseen_loss(pairs, base, _surprise(demand))),
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

    value = float(above.sum() / below.sum())
    return Ratio(value, _bootstrap(ratio, [above - value * below], RESAMPLES))


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


def _scores_nothing(pairs: list[_Pairs]) -> bool:
    """Whether all of the baseline's scores are one number, not above zero: RULER's -1, say, of
    lengths that a document does not have."""
    scores = np.unique(np.concatenate([task.base for task in pairs]))
    return len(scores) == 1 and scores[0] <= 0


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

    total = sum(task.kept.mean() for task in pairs) / sum(task.base.mean() for task in pairs)
    return _bootstrap(recovery, [task.kept - total * task.base for task in pairs], resamples)


def _bootstrap(
    statistic: Callable[..., Floats], deviations: list[Floats], resamples: int
) -> Interval | None:
    """Percentile interval of a statistic of resampled document indices, [resamples, N] per task.

    deviations: by task, what each document adds to the statistic's error, to first order and up to
    a factor that all share, [N]. Few documents widen the interval as t is wider than the normal
    distribution (Hesterberg 2015, sec. 4.1; BCa covered no better), with Satterthwaite's degrees of
    freedom where tasks differ. None for a task of one document, and if more resamples than one
    tail have no value (a denominator of zero).
    """
    documents = [len(each) for each in deviations]
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
    width = _width_in_deviations(deviations)
    low, high = np.quantile(defined, stats.norm.cdf([-width, width]))
    return Interval(float(low), float(high))


def _width_in_deviations(tasks: list[Floats]) -> float:
    """Half the width of an interval at LEVEL, in standard deviations of the bootstrap, which are
    too small by (n - 1) / n in the variance of each task's mean."""
    sizes = np.array([len(each) for each in tasks])
    resampled = np.array([each.var() / len(each) for each in tasks])
    unbiased = resampled * sizes / (sizes - 1)
    if not unbiased.any():
        return 0.0
    freedom = unbiased.sum() ** 2 / (unbiased**2 / (sizes - 1)).sum()
    inflation = math.sqrt(unbiased.sum() / resampled.sum())
    return float(inflation * stats.t.ppf((1 + LEVEL) / 2, freedom))


def _divide(numerator: Floats, denominator: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(numerator / denominator)


def _probability(pairs: list[_Pairs], min_recovery: float) -> float:
    """Posterior probability that the recovery is at least min_recovery, if one more document had
    been lost: in the task where that counts most.

    Bayesian bootstrap (Rubin 1981). On right-or-wrong scores of one task without wins this is
    nearly Clopper and Pearson's exact bound of the share that is lost, which errs no more often
    than it says, however few documents are lost. Resampling alone does not allow for losses that
    were not seen.
    """
    rng = np.random.default_rng(0)
    if len(pairs) == 1:
        return float(np.mean(_margins(pairs[0], min_recovery, _ONE_LOST, rng) >= 0))
    seen = [_margins(task, min_recovery, _NONE, rng) for task in pairs]
    total = np.sum(seen, axis=0)
    return min(
        float(np.mean(total - own + _margins(task, min_recovery, _ONE_LOST, rng) >= 0))
        for task, own in zip(pairs, seen)
    )


def _probability_as_seen(pairs: list[_Pairs], min_recovery: float) -> float:
    """The same with half a document of each kind added, for a fall: on right-or-wrong scores of
    one task Jeffreys' prior on the table of pairs. Several tasks share it."""
    rng, each = np.random.default_rng(0), _HALF_OF_EACH / len(pairs)
    total = np.sum([_margins(task, min_recovery, each, rng) for task in pairs], axis=0)
    return float(np.mean(total >= 0))


# documents that are added: solved by both, lost, won, solved by neither
_NONE, _ONE_LOST, _HALF_OF_EACH = np.zeros(4), np.array([0.0, 1, 0, 0]), np.full(4, 0.5)


def _margins(
    task: _Pairs, min_recovery: float, added_4: Floats, rng: np.random.Generator
) -> Floats:
    """Draws of mean(kept - min_recovery * base) under random weights of the documents, [draws]."""
    top = max(task.top, np.finfo(float).tiny)
    kinds, counts = np.unique(
        np.stack([task.kept, task.base]), axis=1, return_counts=True
    )  # documents with equal scores share one gamma variable
    used = added_4 > 0
    kinds = np.concatenate([kinds, top * np.array([[1, 0, 1, 0], [1, 1, 0, 0]])[:, used]], axis=1)
    shape = np.concatenate([counts, added_4[used]])
    kept, base = kinds
    margins = np.empty(_DRAWS)
    step = max(1, _MOST_AT_ONCE // len(shape))
    for start in range(0, _DRAWS, step):
        weights = rng.gamma(shape, size=(min(step, _DRAWS - start), len(shape)))
        share = weights @ (kept - min_recovery * base) / weights.sum(axis=1)
        margins[start : start + step] = share
    return margins


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


def _surprise(demand: Demand) -> float:
    """What an event of probability 1 - confidence is, in nats."""
    return -math.log(1 - demand.confidence)


def _unseen_loss(pairs: list[_Pairs], base: float, surprise: float) -> float:
    """The largest loss of recovery with which no lost document among these is no more of a
    surprise than so many nats; with one task the exact rule of three.

    The maximum, over shares s of lost documents, of sum(worth * s) where sum(documents *
    -log(1 - s)) = surprise: 1 - s is proportional to documents / worth, but at most 1.
    """
    scoring = [task for task in pairs if task.top > 0]
    worth = np.array([task.top for task in scoring]) / (len(pairs) * base)
    documents = np.array([len(task.base) for task in scoring])
    order = np.argsort(documents / worth)
    documents, worth = documents[order], worth[order]
    ratio = np.log(documents / worth)
    for last in range(len(ratio)):  # the tasks that may lose: small ones, as few as it takes
        losing = slice(last + 1)
        factor = -(surprise + documents[losing] @ ratio[losing]) / documents[losing].sum()
        if last + 1 == len(ratio) or factor + ratio[last + 1] >= 0:
            break
    return float(worth @ -np.expm1(np.minimum(0, factor + ratio)))


def _documents_that_decide(
    pairs: list[_Pairs], base: float, change: Floats, demand: Demand, doubt: float
) -> int | None:
    """Sample size of a one-sided z test of mean(kept - min_recovery * base) = 0, at POWER.

    Over several tasks: all together, in their present proportions. `held` has to allow for one more
    lost document; without losses, that is how many documents it takes for `_unseen_loss` to be no
    more than what may be lost. A fall takes at least so many that the test of the loss can be so
    sure.
    """
    total = len(change)
    if (lost := int((change < 0).sum())) == 0:
        may_be_lost = min(1 - demand.min_recovery, 1 - 1e-9)
        if may_be_lost < 1e-9:
            return None
        left = optimize.brentq(
            lambda surprise: _unseen_loss(pairs, base, surprise) - may_be_lost, 0, 1e3 * total
        )
        return math.ceil(round(total * _surprise(demand) / left, 6))
    margins = [task.kept - demand.min_recovery * task.base for task in pairs]
    mean = float(np.mean([margin.mean() for margin in margins]))
    variance = sum(total * margin.var() / len(margin) for margin in margins) / len(pairs) ** 2
    if abs(mean) < 1e-12:
        return None
    z = stats.norm.ppf(demand.confidence if mean > 0 else 1 - doubt) + stats.norm.ppf(POWER)
    if mean < 0:
        return math.ceil(max(variance * (z / mean) ** 2, total * -math.log2(doubt) / lost))
    # N * mean - one_lost = z * sqrt(N * variance)
    most = max(task.top * total / len(task.base) for task in pairs)
    one_lost = demand.min_recovery * most / len(pairs)
    spread = z * math.sqrt(variance)
    return math.ceil(((spread + math.sqrt(spread**2 + 4 * mean * one_lost)) / (2 * mean)) ** 2)
