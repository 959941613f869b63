"""What traces say about drafts: acceptance by position, tokens per round, entropy at mismatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from fly.runs.replay import Generation


@dataclass
class Position:
    """One draft position over all rounds: how often it was drafted, and what stood in the end.

    reached: drafted where everything before it in the same draft stood in the end.
    """

    drafted: int = 0
    reached: int = 0
    native: int = 0
    deferred: int = 0


@dataclass
class Acceptance:
    """positions: by place in the draft, from the first. blocks: rounds by tokens that stood.

    stood, rolled_back, rejected: the target's entropies at mismatches, by their fate. A mismatch
    that fell only because it was in another deferral's window is in none of them.
    """

    positions: list[Position] = field(default_factory=list)
    blocks: Counter[int] = field(default_factory=Counter)
    stood: list[float] = field(default_factory=list)
    rolled_back: list[float] = field(default_factory=list)
    rejected: list[float] = field(default_factory=list)


def measure(generations: Iterable[Generation]) -> Acceptance:
    """Add up whole requests; one that was cut short (finish None) is left out."""
    result = Acceptance()
    for generation in generations:
        if generation.finish is not None:
            _add(result, generation)
    return result


def _add(result: Acceptance, generation: Generation) -> None:
    kept: dict[int, dict[int, str]] = {}  # by round and position, of draft tokens that stood
    per_round: Counter[int] = Counter()
    for token in generation.shown:
        if token.stands:
            per_round[token.round] += 1
            if token.position is not None:
                kept.setdefault(token.round, {})[token.position] = token.source
    for line in generation.rounds:
        number = line["round"]
        result.blocks[per_round[number]] += 1
        _add_positions(result.positions, len(line["draft"]), kept.get(number, {}))
    _add_entropies(result, generation)


def _add_positions(positions: list[Position], drafted: int, kept: dict[int, str]) -> None:
    while len(positions) < drafted:
        positions.append(Position())
    for at in range(drafted):
        here = positions[at]
        here.drafted += 1
        here.reached += at == 0 or at - 1 in kept
        if at in kept:
            here.deferred += kept[at] == "deferred"
            here.native += kept[at] != "deferred"


def _add_entropies(result: Acceptance, generation: Generation) -> None:
    fallen_at: set[int] = set()
    for token in generation.shown:
        if token.entropy is None:
            continue
        if token.source == "deferred":
            result.stood.append(token.entropy)
        elif token.source == "rolled_back" and token.was_deferred:
            result.rolled_back.append(token.entropy)
            fallen_at.add(token.index)
        elif token.source == "correction" and token.index not in fallen_at:
            result.rejected.append(token.entropy)
