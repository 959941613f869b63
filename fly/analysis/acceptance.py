"""What traces say of drafts: acceptance by position, tokens per round, entropy at mismatches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from fly.runs.records import Positions
from fly.runs.replay import Generation, Token


@dataclass
class Acceptance:
    """How drafts fared. A mismatch that was dropped only because it was in another deferral's
    window is in none of the entropies."""

    positions: Positions = field(default_factory=Positions)
    deferred: Counter[int] = field(default_factory=Counter)  # mismatches that stood, by position
    blocks: Counter[int] = field(default_factory=Counter)  # rounds by tokens that stood
    # the target's entropies at mismatches that stood
    stood: list[float] = field(default_factory=list)
    rolled_back: list[float] = field(default_factory=list)  # and at those that were rolled back
    rejected: list[float] = field(default_factory=list)  # and at those that were rejected at once


def measure(generations: Iterable[Generation]) -> Acceptance:
    """Add up whole requests; one that was cut short (finish None) is left out."""
    result = Acceptance()
    for generation in generations:
        if generation.finish is not None:
            _add(result, generation)
    return result


def _add(result: Acceptance, generation: Generation) -> None:
    per_round: dict[int, list[Token]] = defaultdict(list)
    for token in generation.tokens:
        per_round[token.round].append(token)
    for line in generation.rounds:
        tokens = per_round[line["round"]]
        result.blocks[len(tokens)] += 1
        drafted = [(t.position, t.source) for t in tokens if t.position is not None]
        result.positions.add_round(len(line["draft"]), len(drafted))
        result.deferred.update(at for at, source in drafted if source == "deferred")
    _add_entropies(result, generation)


def _add_entropies(result: Acceptance, generation: Generation) -> None:
    rolled_back_at: set[int] = set()
    for token in generation.shown:
        if token.entropy is None:
            continue
        if token.source == "deferred":
            result.stood.append(token.entropy)
        elif token.source == "rolled_back" and token.was_deferred:
            result.rolled_back.append(token.entropy)
            rolled_back_at.add(token.index)
        elif token.source == "recovered" and token.index not in rolled_back_at:
            result.rejected.append(token.entropy)
