"""What may the true recovery be, after the documents that were seen?

Bayesian bootstrap (Rubin 1981): documents get random weights, the same in both runs, within each
task. Resampling alone does not allow for changes that were not seen, so that documents are added.
docs/compare.md says what the verdicts make of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_DRAWS, _SEED = 20_000, 0
MOST_AT_ONCE = 4_000_000  # numbers in memory per batch of draws


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True)
class Pairs:
    """One task's scores by document, or by cluster of documents; kept / base is the recovery.

    Where lower is better, the runs change places.
    """

    kept: Floats
    base: Floats

    @property
    def change(self) -> Floats:
        """What each unit gained."""
        return self.kept - self.base

    @property
    def top(self) -> float:
        """The largest score that either run has: the most that one unit may lose."""
        return float(max(self.kept.max(), self.base.max()))

    @property
    def largest_change(self) -> float:
        """Of all units; the largest score where none changed."""
        return float(np.abs(self.change).max()) or self.top

    @cached_property
    def kinds(self) -> tuple[Floats, NDArray[np.int64]]:
        """The pairs of scores that there are, (kept, base) in columns; how many units have each."""
        both = np.stack([self.kept, self.base])
        return np.unique(both, axis=1, return_counts=True)  # type: ignore[return-value]

    def by_cluster(self, labels: ArrayLike) -> Pairs:
        """The same task with clusters as units. labels: each document's cluster, [N].

        A cluster's score is the sum of its documents' over the mean size of the clusters, so that
        the mean over clusters is the mean over documents.
        """
        _, index = np.unique(np.asarray(labels), return_inverse=True)
        share = (index.max() + 1) / len(index)
        kept, base = (np.bincount(index, scores) * share for scores in (self.kept, self.base))
        return Pairs(kept, base)


def is_binary(pairs: list[Pairs]) -> bool:
    """Whether they are right-or-wrong scores of one task: over several tasks, documents differ in
    weight."""
    return len(pairs) == 1 and bool(np.isin([pairs[0].kept, pairs[0].base], (0, 1)).all())


# documents that are added: solved by both, lost, won, solved by neither
NONE, ONE_LOST, HALF_OF_EACH = np.zeros(4), np.array([0.0, 1, 0, 0]), np.full(4, 0.5)
ADDED_24 = np.array([[1.0, 0, 1, 0], [1, 1, 0, 0]])  # their scores: (kept, base)


def probability(pairs: list[Pairs], min_recovery: float) -> float:
    """Posterior probability that the recovery is at least min_recovery, if one more document had
    been lost: in the task where that counts most.

    On right-or-wrong scores of one task without wins this is nearly Clopper and Pearson's exact
    bound of the share that is lost, which errs no more often than it says, however few documents
    are lost. The document loses the largest score, however little those that were seen lost: a text
    that goes astray loses all.
    """
    rng = np.random.default_rng(_SEED)
    if len(pairs) == 1:
        return float(np.mean(_margins(pairs[0], min_recovery, ONE_LOST, pairs[0].top, rng) >= 0))
    seen = [_margins(task, min_recovery, NONE, task.top, rng) for task in pairs]
    total = np.sum(seen, axis=0)
    return min(
        float(np.mean(total - own + _margins(task, min_recovery, ONE_LOST, task.top, rng) >= 0))
        for task, own in zip(pairs, seen)
    )


def probability_as_seen(pairs: list[Pairs], min_recovery: float) -> float:
    """The same with half a document of each kind added, for a fall: on right-or-wrong scores of
    one task Jeffreys' prior on the table of pairs. Several tasks share it.

    These documents score 0 or the largest change that was seen, so that they weigh no more than
    the documents themselves where each changes a little.
    """
    rng, each = np.random.default_rng(_SEED), HALF_OF_EACH / len(pairs)
    total = np.sum(
        [_margins(task, min_recovery, each, task.largest_change, rng) for task in pairs], axis=0
    )
    return float(np.mean(total >= 0))


def _margins(
    task: Pairs, min_recovery: float, added_4: Floats, size: float, rng: np.random.Generator
) -> Floats:
    """Draws of mean(kept - min_recovery * base) under random weights of the documents, [draws].

    added_4: how many documents of each kind are added, with scores of 0 and `size`.
    """
    size = max(size, np.finfo(float).tiny)
    kinds, counts = task.kinds  # documents with equal scores share one gamma variable
    used = added_4 > 0
    kinds = np.concatenate([kinds, size * ADDED_24[:, used]], axis=1)
    shape = np.concatenate([counts, added_4[used]])
    kept, base = kinds
    return _weighted_means([kept - min_recovery * base], shape, _DRAWS, rng)[0]


def _weighted_means(
    values_KN: Sequence[Floats] | Floats, shape_N: Floats, draws: int, rng: np.random.Generator
) -> Floats:
    """Means under gamma weights of these shapes, [K, draws]."""
    means = np.empty((len(values_KN), draws))
    step = max(1, MOST_AT_ONCE // len(shape_N))
    for start in range(0, draws, step):
        weights = rng.gamma(shape_N, size=(min(step, draws - start), len(shape_N)))
        sums = [weights @ values for values in values_KN]
        means[:, start : start + step] = sums / weights.sum(axis=1)
    return means


def recovery_interval(pairs: list[Pairs], level: float, draws: int) -> Interval | None:
    """Interval of the recovery: its low end if one more document had been lost, its high end if
    one more had been won, by the largest change that was seen: in the task where that counts most.

    On right-or-wrong scores of one task whose changes are all losses this is nearly Clopper and
    Pearson's interval. None for a task of one document.
    """
    if min(len(task.base) for task in pairs) < 2:
        return None
    rng = np.random.default_rng(_SEED)
    seen, lost, won = [], [], []  # by task: means of (kept, base)
    for task in pairs:
        kinds, counts = task.kinds
        means = _weighted_means(kinds, counts.astype(float), draws, rng)
        share = rng.beta(1, len(task.base), draws)  # the added document's weight
        change = share * task.largest_change
        seen.append(means)
        lost.append(means * (1 - share) + np.stack([0 * change, change]))
        won.append(means * (1 - share) + np.stack([change, 0 * change]))
    tails = (1 - level) / 2, (1 + level) / 2
    total = np.sum(seen, axis=0)
    low, high = (
        [np.quantile(divide(*(total - own + new)), tail) for own, new in zip(seen, added)]
        for added, tail in zip((lost, won), tails)
    )
    return Interval(float(min(low)), float(max(high)))


def divide(numerator: Floats, denominator: Floats) -> Floats:
    """Not finite where the denominator is zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(numerator / denominator)


def unseen_loss(pairs: list[Pairs], base: float, surprise: float) -> float:
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
