"""What traces say of drafts: acceptance by position, tokens per round, entropy at mismatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from fly.runs.records import Positions
from fly.runs.replay import Generation


@dataclass
class Acceptance:
    """How drafts fared. A mismatch that was dropped only because it was in another deferral's
    window is in none of the entropies."""

    requests: int = 0
    positions: Positions = field(default_factory=Positions)
    deferred: Counter[int] = field(default_factory=Counter)  # mismatches that stood, by position
    blocks: Counter[int] = field(default_factory=Counter)  # rounds by tokens that stood
    # the target's entropies at mismatches that stood
    stood: list[float] = field(default_factory=list)
    rolled_back: list[float] = field(default_factory=list)  # and at those that were rolled back
    rejected: list[float] = field(default_factory=list)  # and at those that were rejected at once

    @property
    def block_counts(self) -> list[int]:
        return [self.blocks[length] for length in range(max(self.blocks, default=0) + 1)]


def measure(generations: Iterable[Generation]) -> Acceptance:
    """Add up whole requests; one that was cut short (finish None) only counts as a request."""
    result = Acceptance()
    rounds = Counter[tuple[int, int]]()  # by tokens that were drafted, and that stood
    for generation in generations:
        result.requests += 1
        if generation.finish is not None:
            _add(result, rounds, generation)
    for (drafted, accepted), count in rounds.items():
        result.positions.add_round(drafted, accepted, count)
    return result


def _add(result: Acceptance, rounds: Counter[tuple[int, int]], generation: Generation) -> None:
    tokens, accepted = Counter[int](), Counter[int]()  # by round
    rolled_back_at: set[int] = set()
    for token in generation.shown:
        if token.stands:
            tokens[token.round] += 1
            if token.position is not None:
                accepted[token.round] += 1
                if token.source == "deferred":
                    result.deferred[token.position] += 1
        if token.entropy is None:
            continue
        if token.source == "deferred":
            result.stood.append(token.entropy)
        elif token.source == "rolled_back" and token.was_deferred:
            result.rolled_back.append(token.entropy)
            rolled_back_at.add(token.index)
        elif token.source == "recovered" and token.index not in rolled_back_at:
            result.rejected.append(token.entropy)
    for line in generation.rounds:
        result.blocks[tokens[line["round"]]] += 1
        rounds[len(line["draft"]), accepted[line["round"]]] += 1
