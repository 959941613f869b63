"""Texts that tokens can be drafted from at no cost, one class per source.

In the order in which they are asked: earlier runs' outputs of the same document, then the
sequence's own text. docs/drafters.md explains both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary

from fly.settings import DrafterSettings, TextSourceName
from fly.speculation.acceptance import START, Speaker
from fly.speculation.drafters.follower import Follower
from fly.speculation.drafters.ngram import NgramIndex
from fly.speculation.sequence import Sequence

_MOST_FOLLOWED = 8  # earlier outputs of one document


@dataclass(frozen=True)
class Proposal:
    """Tokens from a text."""

    source: type[TextSource]
    size: int  # how many of the sequence's last tokens spoke for it, or START
    tokens: list[int]

    @property
    def speaker(self) -> Speaker:
        return self.source.letter, self.size

    @property
    def by(self) -> str:
        """The letter of every token."""
        return self.source.letter * len(self.tokens)

    def cut(self, count: int) -> Proposal:
        return Proposal(self.source, self.size, self.tokens[:count])


class TextSource:
    """One source, for all sequences; what it knows of one goes with that.

    letter: its drafts' in fly.runs.records.SOURCES. is_weighed: whether the length of its drafts is
    chosen by chance and cost where no count of the run may decide; else the draft model's length
    holds for it.
    """

    letter: ClassVar[str]
    is_weighed: ClassVar[bool]

    def __init__(self, settings: DrafterSettings) -> None:
        """`settings`: sizes of n-grams."""

    def match(self, sequence: Sequence, count: int) -> Proposal | None:
        """Up to `count` tokens that may come next."""
        raise NotImplementedError


class EarlierRuns(TextSource):
    """What earlier runs gave for the same document and prompt, followed."""

    letter = "e"
    is_weighed = True

    def __init__(self, settings: DrafterSettings) -> None:
        self._followers: WeakKeyDictionary[Sequence, list[Follower]] = WeakKeyDictionary()

    def match(self, sequence: Sequence, count: int) -> Proposal | None:
        if sequence not in self._followers:
            self._followers[sequence] = [
                Follower(tokens) for tokens in sequence.request.earlier[:_MOST_FOLLOWED]
            ]
        generated, found = sequence.generated, list[Proposal]()
        for follower in self._followers[sequence]:
            place = follower.find(generated)
            if tokens := follower.following(place, count):
                size = place.agreed if generated else START
                found.append(Proposal(EarlierRuns, size, tokens))
        return max(found, key=lambda proposal: proposal.size, default=None)


class OwnText(TextSource):
    """What followed the longest suffix last time in the sequence's own prompt and output."""

    letter = "n"
    is_weighed = False

    def __init__(self, settings: DrafterSettings) -> None:
        self._sizes = settings.min_ngram_size, settings.max_ngram_size
        self._most = settings.num_ngram_pred_tokens
        self._indexes: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def match(self, sequence: Sequence, count: int) -> Proposal | None:
        index = self._indexes.setdefault(sequence, NgramIndex(*self._sizes))
        size, tokens = index.match(sequence, (), min(count, self._most))
        return Proposal(OwnText, size, tokens) if tokens else None


SOURCES: dict[TextSourceName, type[TextSource]] = {"runs": EarlierRuns, "own": OwnText}
