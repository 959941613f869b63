"""How long to draft: as long as one more token's expected gain beats its cost.

A round emits the accepted draft tokens and one of the target's own. With R the rate that the run
reaches (tokens per second), spending s more seconds is worth it if it brings more than R * s
tokens: the rule that maximises a renewal process's reward rate. The gain of one more draft token
is the probability that everything before it stands, times that it does itself; both come from the
draft's confidence, calibrated against what the target accepted so far. docs/performance.md has
figures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from fly.decoding.costs import PassCosts

_EDGES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.92, 0.97, 0.99, 1.01)
_PRIOR = 4.0  # pseudo-observations per bin
_FORGET = 0.99  # per observation
_DECAY = 0.9  # per round: the rate follows the text
_EXPLORE = 24  # after so many rounds without a draft, one is drafted to see what it would bring


@dataclass
class Chain:
    """One row's draft while it grows. `confidence[i]`: the draft's own probability of token i.

    by: who proposed each token (see `Draft`). q: what each was drawn from, [V], where rows sample.
    """

    limit: int
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    by: str = ""
    q: list[Tensor] = field(default_factory=list)
    ended: bool = False  # by EOS

    @property
    def is_open(self) -> bool:
        return len(self.tokens) < self.limit and not self.ended


class DraftPolicy(Protocol):
    """Decides for the rows of one round together: they share every pass."""

    needs_confidence: bool

    def goes_on(self, chains: Seq[Chain], feed_width: int) -> bool:
        """Whether the draft model takes one more pass, `feed_width` tokens wide."""

    def trim(self, chains: Seq[Chain]) -> None:
        """Drop tokens that are not worth verifying."""

    def observe(self, chains: Seq[Chain], accepted: Seq[int], draft_seconds: float) -> None:
        """The target accepted so many tokens of each chain."""


class FixedPolicy:
    """K tokens every round."""

    needs_confidence = False

    def goes_on(self, chains: Seq[Chain], feed_width: int) -> bool:
        return True

    def trim(self, chains: Seq[Chain]) -> None:
        pass

    def observe(self, chains: Seq[Chain], accepted: Seq[int], draft_seconds: float) -> None:
        pass


class AdaptivePolicy:
    """Drafts while the expected gain of one more token beats its measured cost."""

    needs_confidence = True

    def __init__(self, target_costs: PassCosts, draft_costs: PassCosts) -> None:
        self._target_costs = target_costs
        self._draft_costs = draft_costs
        self._calibration = Calibration()
        self._emitted = 0.0
        self._alone = 0.0  # what the target alone would have emitted in the same time
        self._rounds = 0
        self._rounds_without_draft = 0

    def rate(self, rows: int) -> float:
        """Tokens per second that so many rows have to beat: the target's alone, times what
        drafting gained on it lately (at least 1). 0 before the first round."""
        gained = self._emitted / self._alone if self._alone else 1.0
        return max(1.0, gained) * self._alone_rate(rows)

    @property
    def _explores(self) -> bool:
        return self._rounds_without_draft >= _EXPLORE

    def _alone_rate(self, rows: int) -> float:
        seconds = self._target_costs.seconds(rows)
        return rows / seconds if seconds else 0.0

    def goes_on(self, chains: Seq[Chain], feed_width: int) -> bool:
        if self._rounds < 2:  # measure: the target alone first, then as many as are allowed
            return self._rounds == 1
        if self._explores and not any(chain.tokens for chain in chains):
            return True
        rows = len(chains)
        gain = self._calibration.mean * sum(
            self._stands(chain)[-1] for chain in chains if chain.is_open
        )
        longest = max(len(chain.tokens) for chain in chains if chain.is_open)
        width = max(len(chain.tokens) for chain in chains) + 1
        cost = self._draft_costs.seconds(rows * feed_width)
        if longest + 1 == width:
            cost += self._column_cost(rows, width)
        return gain > self.rate(rows) * cost

    def trim(self, chains: Seq[Chain]) -> None:
        """Keep columns from the front as long as each gains what the target's pass grows by.

        From the front, so that whether a token stays cannot depend on it, nor on what was drafted
        after it: under sampling that would bend the distribution.
        """
        if self._rounds < 2:
            return
        stands = [self._stands(chain) for chain in chains]
        longest = max(len(chain.tokens) for chain in chains)
        width = min(int(self._explores), longest)
        while width < longest:
            gain = sum(row[width + 1] for row in stands if len(row) > width + 1)
            if gain < self.rate(len(chains)) * self._column_cost(len(chains), width + 1):
                break
            width += 1
        for chain in chains:
            del chain.tokens[width:], chain.confidence[width:], chain.q[width:]
            chain.by = chain.by[:width]

    def observe(self, chains: Seq[Chain], accepted: Seq[int], draft_seconds: float) -> None:
        for chain, count in zip(chains, accepted):
            self._calibration.observe(chain.confidence, count)
        self._rounds += 1
        width = max(len(chain.tokens) for chain in chains)
        self._rounds_without_draft = 0 if width else self._rounds_without_draft + 1
        seconds = draft_seconds + self._target_costs.seconds(len(chains) * (width + 1))
        self._emitted = self._emitted * _DECAY + sum(accepted) + len(chains)
        self._alone = self._alone * _DECAY + seconds * self._alone_rate(len(chains))

    def _stands(self, chain: Chain) -> list[float]:
        """Probability that the first i tokens of the chain all stand, for i = 0..len."""
        result = [1.0]
        for confidence in chain.confidence:
            result.append(result[-1] * self._calibration.acceptance(confidence))
        return result

    def _column_cost(self, rows: int, width: int) -> float:
        """Seconds that a target pass over `width` draft tokens costs more than one over fewer."""
        wide = self._target_costs.seconds(rows * (width + 1))
        return max(0.0, wide - self._target_costs.seconds(rows * width))


class Calibration:
    """From the draft's confidence in a token to the probability that the target accepts it."""

    def __init__(self) -> None:
        self._bins = [
            _Share(_PRIOR, _PRIOR * (low + min(high, 1.0)) / 2)
            for low, high in zip((0.0, *_EDGES), _EDGES)
        ]
        self._all = _Share(_PRIOR, _PRIOR * 0.75)

    def acceptance(self, confidence: float) -> float:
        return self._bins[_bin(confidence)].value

    @property
    def mean(self) -> float:
        """Acceptance of a token not drafted yet, all before it standing."""
        return self._all.value

    def observe(self, confidence: Seq[float], accepted: int) -> None:
        """The first `accepted` tokens stood and the next, if any, did not; more is not known."""
        for index, value in enumerate(confidence[: accepted + 1]):
            for share in (self._bins[_bin(value)], self._all):
                share.observe(index < accepted)


@dataclass
class _Share:
    """How often something held among the last few hundred times, weighing late ones more."""

    times: float
    held: float

    @property
    def value(self) -> float:
        return self.held / self.times

    def observe(self, holds: bool) -> None:
        self.times = self.times * _FORGET + 1
        self.held = self.held * _FORGET + holds


def _bin(confidence: float) -> int:
    return next(index for index, edge in enumerate(_EDGES) if confidence < edge)


class GuessPolicy:
    """How much of an n-gram match the draft model verifies in one pass.

    What a match is worth depends on how long the matching suffix was; what verifying it costs is
    `pass_cost(tokens in the pass)`, in any unit. One length is chosen for the batch, whose rows
    share the pass. Nothing here follows the clock, so a run can be repeated.
    """

    def __init__(self, pass_cost: Callable[[int], float]) -> None:
        self._pass_cost = pass_cost
        self._offered: dict[int, float] = defaultdict(lambda: 3.0)
        self._agreed: dict[int, float] = defaultdict(lambda: 2.0)

    def choose(self, matches: Seq[tuple[int, int]], rows: int, feed_width: int) -> int:
        """The guess length that maximises tokens per cost. `matches`: (suffix size, length) of
        each open row, length 0 without a match; `rows`: all that share the pass; `feed_width`:
        tokens fed besides the guess."""
        longest = max((length for _, length in matches), default=0)

        def value(length: int) -> float:
            tokens = sum(1 + self._expected(size, min(length, have)) for size, have in matches)
            return tokens / self._pass_cost(rows * (feed_width + length))

        return max(range(longest + 1), key=value)

    def observe(self, size: int, offered: int, agreed: int) -> None:
        """Of `offered` guessed tokens after a suffix of `size`, the first `agreed` were right."""
        if offered:
            self._offered[size] += min(agreed + 1, offered)
            self._agreed[size] += agreed

    def _expected(self, size: int, length: int) -> float:
        """Expected number of right tokens among the first `length`: q + q^2 + ..."""
        chance = self._agreed[size] / self._offered[size]
        return sum(chance**power for power in range(1, length + 1))
