"""Texts that tokens can be drafted from at no cost, one class per source.

In the order in which they are asked: earlier runs' outputs of the same document, other samples of
the same prompt, the sequence's own text, other documents' outputs of this run.
docs/drafting_from_texts.md explains each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar
from weakref import WeakKeyDictionary

from fly.settings import DrafterSettings, TextSourceName
from fly.speculation.drafters.follower import Follower
from fly.speculation.drafters.ngram import NgramIndex, ngram_sizes
from fly.speculation.drafters.suffix_index import Continuation, SuffixIndex
from fly.speculation.sequence import Sequence

START = -1  # size of a proposal for a text's first tokens
_MOST_FOLLOWED = 8  # earlier outputs of one document
_TAIL = 8  # of a prompt: tokens that lead into the output, so that its beginning is found
_MOST_TOKENS = 1 << 20  # of other documents that are kept, some 100 MB


@dataclass(frozen=True)
class Proposal:
    """Tokens from a text. letter: of the source (fly.runs.records.SOURCES). size: how many of the
    sequence's last tokens spoke for it, or START. shares: as in suffix_index.Continuation."""

    letter: str
    size: int
    tokens: list[int]
    shares: list[float]

    @property
    def by(self) -> str:
        """The letter of every token."""
        return self.letter * len(self.tokens)

    def cut(self, count: int) -> Proposal:
        return Proposal(self.letter, self.size, self.tokens[:count], self.shares[:count])


class TextSource:
    """One source, for all slots. A sequence's final tokens are learned in `commit`; the provisional
    ones, which may be rolled back, are only looked at."""

    letter: ClassVar[str]

    def __init__(self, settings: DrafterSettings) -> None:
        """`settings`: sizes of n-grams."""

    def admit(self, slot: int, sequence: Sequence) -> None:
        """A sequence starts in a slot, or starts again after memory ran out."""

    def match(self, slot: int, sequence: Sequence, count: int) -> Proposal | None:
        """Up to `count` tokens that may come next."""
        raise NotImplementedError

    def commit(self, slot: int, sequence: Sequence) -> None:
        """A round of the sequence has ended, and perhaps the sequence."""

    def move(self, source: int, destination: int) -> None:
        """The sequence of slot `source` continues in slot `destination`."""


class EarlierRuns(TextSource):
    """What earlier runs gave for the same document and prompt, followed."""

    letter = "e"

    def __init__(self, settings: DrafterSettings) -> None:
        # by sequence: one that goes on after memory ran out goes on from its place in them
        self._followers: WeakKeyDictionary[Sequence, list[Follower]] = WeakKeyDictionary()

    def admit(self, slot: int, sequence: Sequence) -> None:
        if sequence not in self._followers:
            self._followers[sequence] = [
                Follower(tokens) for tokens in sequence.request.earlier[:_MOST_FOLLOWED]
            ]

    def match(self, slot: int, sequence: Sequence, count: int) -> Proposal | None:
        generated = sequence.generated
        best: tuple[int, list[int]] | None = None
        for follower in self._followers[sequence]:
            place = follower.find(generated)
            tokens = follower.following(place, count)
            if tokens and (best is None or place.agreed > best[0]):
                best = place.agreed, tokens
        if best is None:
            return None
        agreed, tokens = best
        return Proposal(self.letter, agreed if generated else START, tokens, [1.0] * len(tokens))


@dataclass
class _Samples:
    """The samples of one prompt, finished or not. texts: by request, its number in the index and
    how many of its tokens are there."""

    index: SuffixIndex = field(default_factory=lambda: SuffixIndex(2))
    texts: dict[int, tuple[int, int]] = field(default_factory=dict)


class Siblings(TextSource):
    """Other samples of the same prompt in this run, those that still run included."""

    letter = "s"

    def __init__(self, settings: DrafterSettings) -> None:
        self._of_prompt: dict[tuple[int, ...], _Samples] = {}
        self._of_slot: dict[int, _Samples] = {}

    def admit(self, slot: int, sequence: Sequence) -> None:
        request = sequence.request
        if request.prompt not in self._of_prompt:  # samples of one prompt come one after another
            running = {id(samples) for samples in self._of_slot.values()}
            kept = {p: s for p, s in self._of_prompt.items() if id(s) in running}
            self._of_prompt = {**kept, request.prompt: _Samples()}
        samples = self._of_slot[slot] = self._of_prompt[request.prompt]
        if id(request) not in samples.texts:
            text = samples.index.begin()
            samples.index.extend(text, request.prompt[-_TAIL:])
            samples.texts[id(request)] = text, 0
            self._learn(samples, sequence)

    def match(self, slot: int, sequence: Sequence, count: int) -> Proposal | None:
        samples = self._of_slot[slot]
        own, _ = samples.texts[id(sequence.request)]
        found = samples.index.match(sequence.tokens, count, without=own)
        return _proposal(self.letter, found)

    def commit(self, slot: int, sequence: Sequence) -> None:
        self._learn(self._of_slot[slot], sequence)

    def _learn(self, samples: _Samples, sequence: Sequence) -> None:
        text, known = samples.texts[id(sequence.request)]
        new = _final(sequence)[known:]
        samples.index.extend(text, new)
        samples.texts[id(sequence.request)] = text, known + len(new)

    def move(self, source: int, destination: int) -> None:
        self._of_slot[destination] = self._of_slot[source]


class OwnText(TextSource):
    """What followed the longest suffix last time in the sequence's own prompt and output."""

    letter = "n"

    def __init__(self, settings: DrafterSettings) -> None:
        *self._sizes, self._most = ngram_sizes(settings)
        self._indexes: dict[int, NgramIndex] = {}  # by slot

    def admit(self, slot: int, sequence: Sequence) -> None:
        self._indexes[slot] = NgramIndex(*self._sizes)

    def match(self, slot: int, sequence: Sequence, count: int) -> Proposal | None:
        size, tokens = self._indexes[slot].match_in(sequence, (), min(count, self._most))
        return Proposal(self.letter, size, tokens, [1.0] * len(tokens)) if tokens else None

    def move(self, source: int, destination: int) -> None:
        self._indexes[destination] = self._indexes[source]


class Others(TextSource):
    """All finished outputs of this run; when there are very many, the first of them."""

    letter = "o"

    def __init__(self, settings: DrafterSettings) -> None:
        self._index = SuffixIndex(3)

    def match(self, slot: int, sequence: Sequence, count: int) -> Proposal | None:
        return _proposal(self.letter, self._index.match(sequence.tokens, count))

    def commit(self, slot: int, sequence: Sequence) -> None:
        if not sequence.is_open and len(self._index) < _MOST_TOKENS:
            text = self._index.begin()
            self._index.extend(text, sequence.request.prompt[-_TAIL:])
            self._index.extend(text, sequence.generated)


SOURCES: dict[TextSourceName, type[TextSource]] = {
    "runs": EarlierRuns,
    "siblings": Siblings,
    "own": OwnText,
    "others": Others,
}


def _proposal(letter: str, found: Continuation) -> Proposal | None:
    return Proposal(letter, found.size, found.tokens, found.shares) if found.tokens else None


def _final(sequence: Sequence) -> list[int]:
    """The sequence's generated tokens that no rollback can take back."""
    return sequence.tokens[len(sequence.request.prompt) : sequence.final_length]
