"""How many tokens to draft: as many as pay for so many running sequences on this machine.

A round over n sequences with K draft tokens each costs a target pass over n (K + 1) tokens and K
draft passes over n, or one over n blocks; it emits 1 + a + ... + a^K tokens a sequence, if a draft
token is accepted with probability a. The K with the most tokens per cost is taken; 0, the target
alone, unless drafting gains a few percent.

What decides are relative pass costs in coarse steps (fly/execution/pass_costs.py) and counts of
accepted tokens, never the clock of a round: the same run decides the same way again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from fly.execution.pass_costs import PairCosts

_PRIOR = (8.0, 10.0)  # accepted of judged draft tokens, where there are no counts
_FORGET = 0.99  # per round: texts change, and what stopped paying is tried again
_GAIN = 1.08  # drafting has to promise this much over the target alone: costs are coarse
_ROUND = 0.03  # of a target pass: what a round costs beside its passes


class DraftLength(Protocol):
    def choose(self, sequences: int) -> int:
        """Most draft tokens per sequence in the next round."""

    def observe(self, judged: Iterable[tuple[int, int]]) -> None:
        """Per sequence: draft tokens that were accepted, and that were drafted."""


class FixedLength:
    """K tokens in every round."""

    def __init__(self, spd_k: int) -> None:
        self._spd_k = spd_k

    def choose(self, sequences: int) -> int:
        return self._spd_k

    def observe(self, judged: Iterable[tuple[int, int]]) -> None:
        pass


class AdaptiveLength:
    """At most `spd_k`, by costs and by how many draft tokens were accepted lately.

    Only where texts do not depend on it: greedy decoding, verified exactly.
    """

    def __init__(self, spd_k: int, costs: PairCosts) -> None:
        self._spd_k = spd_k
        self._costs = costs
        self._accepted = self._judged = 0.0

    @property
    def acceptance(self) -> float:
        """Share of judged draft tokens that were accepted, in steps of 0.02."""
        share = (_PRIOR[0] + self._accepted) / (_PRIOR[1] + self._judged)
        return round(share * 50) / 50

    def choose(self, sequences: int) -> int:
        return best_length(self._spd_k, sequences, self.acceptance, self._costs)

    def observe(self, judged: Iterable[tuple[int, int]]) -> None:
        self._accepted *= _FORGET
        self._judged *= _FORGET
        for accepted, drafted in judged:
            self._accepted += accepted
            self._judged += min(accepted + 1, drafted)  # what follows a rejection was not judged


def best_length(spd_k: int, sequences: int, acceptance: float, costs: PairCosts) -> int:
    """The K from 0 to spd_k with the most expected tokens per cost; 0 unless drafting gains."""
    alone = value(0, sequences, acceptance, costs)
    best = max(range(spd_k + 1), key=lambda k: value(k, sequences, acceptance, costs))
    return best if value(best, sequences, acceptance, costs) > _GAIN * alone else 0


def pays(spd_k: int, sequences: int, acceptance: float, costs: PairCosts) -> bool:
    """Whether rounds of exactly spd_k draft tokens beat the target alone."""
    alone = value(0, sequences, acceptance, costs)
    return value(spd_k, sequences, acceptance, costs) > _GAIN * alone


def value(k: int, sequences: int, acceptance: float, costs: PairCosts) -> float:
    """Expected tokens of a sequence per target pass over one token."""
    return expected_tokens(k, acceptance) / round_cost(k, k, sequences, costs)


def expected_tokens(k: int, acceptance: float) -> float:
    """Tokens of a round with k draft tokens, the target's own included."""
    return sum(acceptance**power for power in range(k + 1))


def round_cost(width: int, steps: int, sequences: int, costs: PairCosts) -> float:
    """Of a round of `steps` tokens from the draft and a target pass over `width` draft tokens, in
    target passes over one token."""
    drafting = costs.drafting(steps, sequences)
    return costs.target.at(sequences * (width + 1)) + drafting + _ROUND
