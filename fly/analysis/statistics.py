"""Did the scores hold? Two runs on the same documents, compared in pairs.

Everything is about recovery, the share of the baseline's score that the other run keeps:
mean(other) / mean(baseline), or its inverse where lower scores are better, so that below 1 is
always worse. docs/compare.md says what each number means and how the verdict is reached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from fly.analysis.posterior import (
    MOST_AT_ONCE,
    Floats,
    Interval,
    Pairs,
    divide,
    is_binary,
    probability,
    probability_as_seen,
    recovery_interval,
    unseen_loss,
)
from fly.analysis.sample_size import documents_that_decide

Verdict = Literal["held", "unchanged", "fell", "not enough evidence"]

RESAMPLES = 9999
LEVEL = 0.95  # of the printed intervals
_TAILS = (1 - LEVEL) / 2, (1 + LEVEL) / 2
_MANY = 5000  # documents, whose sums are all but normal
_FEW = 10  # resamples beyond the observed value; with fewer, p is only an upper bound


@dataclass(frozen=True)
class Demand:
    """What scores must do."""

    min_recovery: float = 0.99  # the share of the baseline's to be kept
    confidence: float = 0.95  # with which that must be shown


DEFAULT_DEMAND = Demand()


@dataclass(frozen=True)
class Comparison:
    """Scores of two runs on the same documents."""

    documents: int
    baseline: float  # mean score; over several tasks, the mean of the tasks' means
    other: float | None = None  # None where the run lacks some of the scores
    recovery: float | None = None  # None if it is undefined; `reason` says why
    # of the recovery, paired, at LEVEL; None for a task of one document
    interval: Interval | None = None
    lost: int = 0  # documents that the other run scores worse
    won: int = 0  # and better
    clusters: int | None = None  # of documents, where only those are independent; else None
    p: float = 1.0  # two-sided; `test` names it
    test: Literal["McNemar", "sign flips", "none"] = "none"
    # without losses, the largest loss of recovery (a share) that so few documents leave possible,
    # with the demanded confidence; else None
    bound: float | None = None
    # that the recovery is at least the demanded one, if one more document had been lost
    probability: float | None = None
    # `held`: the recovery is shown; `unchanged`: every document scored the same, no more is known
    verdict: Verdict = "not enough evidence"
    decides_nothing: bool = False  # the baseline scores nothing, so that nothing can be lost
    # documents that would decide with a chance of 80 % if they went on differing as these did;
    # None if no number would, and where a verdict has been reached
    decides: int | None = None
    reason: str = ""  # a clause for people
    withheld: bool = False  # the scores allow no verdict, however many they are; `reason` says why


@dataclass(frozen=True)
class Ratio:
    """A ratio of sums with its paired bootstrap interval over documents, at LEVEL."""

    value: float
    interval: Interval | None


def compare_tasks(
    tasks: Sequence[tuple[ArrayLike, ArrayLike]],
    demand: Demand = DEFAULT_DEMAND,
    *,
    higher_is_better: bool = True,
    verdicts: int = 1,
    clusters: Sequence[ArrayLike] | None = None,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Compare mean task scores: every task counts the same; documents are resampled within tasks.

    tasks: (baseline, other) scores of each, [N] and [N]. verdicts: how many are reached together,
    any of which may fail a job: `fell` needs that much more certainty (Bonferroni). clusters: of
    each task, its documents' clusters, [N]: only documents of different clusters are independent.
    """
    arrays = [(np.asarray(a, float), np.asarray(b, float)) for a, b in tasks]
    documents = [Pairs(b, a) if higher_is_better else Pairs(a, b) for a, b in arrays]
    by_document = np.concatenate([task.change for task in documents])
    lost, won = int((by_document < 0).sum()), int((by_document > 0).sum())
    pairs = documents
    if clusters is not None:
        pairs = [task.by_cluster(labels) for task, labels in zip(documents, clusters, strict=True)]
    doubt = (1 - demand.confidence) / verdicts  # that a fall may leave
    change = np.concatenate([task.change / len(task.base) for task in pairs]) / len(pairs)
    is_mcnemar = is_binary(pairs)
    p = _mcnemar(change) if is_mcnemar else _sign_flips(change, resamples)
    found = Comparison(
        documents=len(by_document),
        clusters=None if clusters is None else len(change),
        baseline=float(np.mean([a.mean() for a, _ in arrays])),
        other=float(np.mean([b.mean() for _, b in arrays])),
        lost=lost,
        won=won,
        p=p,
        test="McNemar" if is_mcnemar else "sign flips",
    )
    base = float(np.mean([task.base.mean() for task in pairs]))
    undefined = _undefined(documents, base, higher_is_better)
    if higher_is_better and not lost and _scores_nothing(documents):
        return replace(found, decides_nothing=True, reason=undefined)
    perfect = not higher_is_better and lost == 0 and not any(t.base.any() for t in pairs)
    if undefined and not perfect:
        return replace(found, reason=undefined)
    chance = probability(pairs, demand.min_recovery)
    falls = change.sum() < 0 and p / 2 <= doubt and not undefined
    fell = falls and probability_as_seen(pairs, demand.min_recovery) <= doubt
    verdict, reason = _verdict(chance >= demand.confidence, fell, lost, won)
    found = replace(found, probability=chance, verdict=verdict)
    if undefined:
        return replace(found, reason=f"{reason}; {undefined}")
    decides = None
    if verdict in ("unchanged", "not enough evidence"):
        units = documents_that_decide(pairs, demand.min_recovery, demand.confidence, doubt)
        decides = units and math.ceil(units * found.documents / len(change))
    surprise = -math.log(1 - demand.confidence)  # in nats
    return replace(
        found,
        recovery=float(np.mean([task.kept.mean() for task in pairs])) / base,
        interval=recovery_interval(pairs, LEVEL, resamples),
        bound=None if lost else min(1.0, unseen_loss(pairs, base, surprise)),
        decides=decides,
        reason=reason,
    )


def compare_rates(
    rates: Sequence[tuple[float, float]],
    base: Sequence[tuple[float, float]] | None = None,
    *,
    tails: tuple[float, float] = _TAILS,
) -> Ratio | None:
    """The ratio of two sums over documents, given as pairs (such as the seconds of two runs), over
    the same of `base`, if given, with its percentile interval over resampled documents.

    tails: the probabilities of the interval's ends. Few documents widen it as t is wider than the
    normal distribution (Hesterberg 2015, sec. 4.1; BCa covered no better). None if one of the sums
    is zero; no interval for one document, and if more resamples than one tail have no value (a
    denominator of zero).
    """
    rows = np.asarray([*zip(*rates), *(zip(*base) if base else ())], float)
    totals, documents = rows.sum(axis=-1), len(rates)
    if not rates or not totals.all():
        return None

    def ratio(sums: Sequence[Floats] | Floats) -> Floats:
        above, below, *others = sums
        found = divide(above, below)
        return divide(found, divide(*others)) if others else found

    value = float(ratio(totals))
    if documents < 2:
        return Ratio(value, None)
    # the ends of 95 % intervals of many documents need no more
    is_enough = documents >= _MANY and min(tails[0], 1 - tails[1]) > 0.01
    resamples = RESAMPLES // 5 if is_enough else RESAMPLES
    rng, batch, values = np.random.default_rng(0), max(1, MOST_AT_ONCE // documents), []
    for start in range(0, resamples, batch):
        index = rng.integers(documents, size=(min(batch, resamples - start), documents))
        values.append(ratio([row[index].sum(axis=-1) for row in rows]))
    resampled = np.concatenate(values)
    defined = resampled[np.isfinite(resampled)]
    if len(defined) < max(1 - tails[0], tails[1]) * len(resampled):
        return Ratio(value, None)
    # what each document adds to the ratio's error, to first order and up to a factor
    deviations = np.array([1, -1, -1, 1])[: len(rows)] @ (rows / totals[:, None])
    ends = np.zeros(2)
    if deviations.any():
        ends = stats.t.ppf(tails, documents - 1) / math.sqrt(1 - 1 / documents)
    low, high = np.quantile(defined, stats.norm.cdf(ends))
    return Ratio(value, Interval(float(low), float(high)))


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


def _undefined(pairs: list[Pairs], base: float, higher_is_better: bool) -> str:
    """Why there is no recovery; empty if there is one."""
    if any((task.base < 0).any() or (task.kept < 0).any() for task in pairs):
        return "recovery is undefined: scores below zero have no ratio"
    if base > 0:
        return ""
    whose = "the baseline's score" if higher_is_better else "the run's own score"
    return f"recovery is undefined: {whose} is zero"


def _scores_nothing(pairs: list[Pairs]) -> bool:
    """Whether all of the baseline's scores are one number, not above zero: RULER's -1, say, of
    lengths that a document does not have."""
    scores = np.unique(np.concatenate([task.base for task in pairs]))
    return len(scores) == 1 and scores[0] <= 0


def _mcnemar(change: Floats) -> float:
    lost, won = int((change < 0).sum()), int((change > 0).sum())
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
        batch=max(1, MOST_AT_ONCE // len(differing)),
        rng=np.random.default_rng(0),
    )
    p = float(result.pvalue)
    if sampled and p < _FEW / resamples:  # no smaller p can be drawn: the flips' normal tail
        z = differing.sum() / math.sqrt((differing**2).sum())
        p = min(p, float(2 * stats.norm.sf(abs(z))))
    return p


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
