"""Following an earlier output of the same document: where in it a sequence is, as it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LONGEST = 64  # agreeing tokens that are counted
_NEAR = 24  # a place that only one token speaks for must be so near to the expected one


@dataclass(frozen=True)
class Place:
    """Where an earlier output is followed."""

    at: int  # the next token of the earlier output
    # how many tokens before it are the sequence's last ones, too; 0 where a token of it was
    # replaced by another
    agreed: int


class Follower:
    """Keeps a sequence's place in one earlier output.

    The place moves with the sequence and is checked against its last tokens, whatever became of
    the draft (a rollback included). Where they differ it is looked for again: tokens may have been
    inserted, deleted or replaced.
    """

    def __init__(self, reference: Sequence[int]) -> None:
        self.reference = list(reference)
        self._after: dict[int, list[int]] = {}  # by token: the places right after it
        for place, token in enumerate(self.reference, 1):
            self._after.setdefault(token, []).append(place)
        self._place = self._length = 0

    def find(self, generated: Sequence[int]) -> Place:
        """The place after these tokens, which are all that the sequence has generated."""
        if not generated:
            place = Place(0, 0)
        else:
            expected = self._place + len(generated) - self._length
            place = Place(expected, self._agreement(generated, expected))
            if not place.agreed:
                place = self._search(generated, expected)
        self._place, self._length = place.at, len(generated)
        return place

    def following(self, place: Place, count: int) -> list[int]:
        """Up to `count` tokens from the place on; none outside of the earlier output."""
        return self.reference[place.at : place.at + count] if place.at >= 0 else []

    def _search(self, generated: Sequence[int], expected: int) -> Place:
        """The place with the longest agreement, of equals the nearest; the expected one, as after
        a replaced token, where none agrees."""
        found = [
            Place(at, self._agreement(generated, at)) for at in self._after.get(generated[-1], ())
        ]
        likely = [p for p in found if p.agreed > 1 or abs(p.at - expected) <= _NEAR]
        nearest_first = sorted(likely, key=lambda place: abs(place.at - expected))
        return max(nearest_first, key=lambda place: place.agreed, default=Place(expected, 0))

    def _agreement(self, generated: Sequence[int], place: int) -> int:
        if not 0 < place <= len(self.reference):
            return 0
        agreed, most = 0, min(place, len(generated), _LONGEST)
        while agreed < most and generated[-1 - agreed] == self.reference[place - 1 - agreed]:
            agreed += 1
        return agreed
