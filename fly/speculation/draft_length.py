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

from fly.execution.pass_costs import PairCosts
from fly.speculation.acceptance import DRAFT_MODEL, AcceptanceEstimate

GAIN = 1.08  # drafting has to promise this much over the target alone: costs are coarse
# A text has to promise this much over what would be done without it. Not GAIN: with it texts that
# are sampled, or verified loosely, would change where earlier runs are drafted from; and with this
# for lengths, what was measured at six sequences would be undone (docs/performance.md).
GAIN_OF_TEXT = 1.05


class DraftLength:
    """How many tokens to draft; here K in every round."""

    def __init__(self, spd_k: int) -> None:
        self._spd_k = spd_k

    def choose(self, sequences: int) -> int:
        """Most draft tokens per sequence in the next round."""
        return self._spd_k

    def observe(self, judged: Iterable[tuple[int, int]]) -> None:
        """Per sequence: draft tokens that were accepted, and that were drafted."""


class AdaptiveLength(DraftLength):
    """At most `spd_k`, by costs and by how many draft tokens were accepted lately.

    Only where texts do not depend on it: greedy decoding, verified exactly.

    is_coarse: only powers of two, and spd_k: each length that comes up costs a captured graph.
    """

    def __init__(self, spd_k: int, costs: PairCosts, *, is_coarse: bool = False) -> None:
        super().__init__(spd_k)
        self._costs = costs
        self._acceptance = AcceptanceEstimate()
        powers = [1 << n for n in range(spd_k.bit_length()) if 1 << n < spd_k]
        self._lengths = [0, *powers, spd_k] if is_coarse else range(spd_k + 1)

    def choose(self, sequences: int) -> int:
        chance = self._acceptance.chance(DRAFT_MODEL)
        return best_length(self._lengths, sequences, chance, self._costs)

    def observe(self, judged: Iterable[tuple[int, int]]) -> None:
        self._acceptance.forget()
        for accepted, drafted in judged:
            self._acceptance.observe(DRAFT_MODEL, drafted, accepted)


def best_length(lengths: Iterable[int], sequences: int, acceptance: float, costs: PairCosts) -> int:
    """The K of these with the most expected tokens per cost; 0 unless drafting gains."""
    best = max(lengths, key=lambda k: value(k, sequences, acceptance, costs))
    return best if pays(best, sequences, acceptance, costs) else 0


def pays(spd_k: int, sequences: int, acceptance: float, costs: PairCosts) -> bool:
    """Whether rounds of exactly spd_k draft tokens beat the target alone."""
    alone = value(0, sequences, acceptance, costs)
    return value(spd_k, sequences, acceptance, costs) > GAIN * alone


def value(k: int, sequences: int, acceptance: float, costs: PairCosts) -> float:
    """Expected tokens of a sequence per target pass over one token."""
    return expected_tokens(k, acceptance) / costs.of_round(k, k, sequences)


def expected_tokens(k: int, acceptance: float) -> float:
    """Tokens of a round with k draft tokens, the target's own included."""
    return sum(acceptance**power for power in range(k + 1))
