"""Several growing texts, searched for what followed the longest suffix of another one.

A hash chain, as compressors use it: every position is linked to the one before it whose last few
tokens are the same, so that a token costs 20 bytes and one dictionary entry at most, texts may grow
side by side, and a search looks at the latest candidates only (suffix statistics as in
SuffixDecoding, arXiv 2411.04975, without its tree).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_NOWHERE = -1
_ID_BITS = 21  # three token ids fit into one machine word: keys are small integers
_CANDIDATES = 64  # latest occurrences that a search looks at
_LONGEST = 32  # tokens of a suffix that are compared


@dataclass(frozen=True)
class Continuation:
    """What followed a suffix. size: tokens of the suffix that were found. shares: of each token,
    how many of the occurrences that had gone the same way until there went on with it, 0 to 1."""

    size: int = 0
    tokens: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)


class SuffixIndex:
    """size: tokens of the shortest suffix that is found."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._latest: dict[int, int] = {}  # by key: the last position that it ends at
        self._tokens, self._text = array("i"), array("i")
        self._before, self._after = array("i"), array("i")  # neighbours in the same text
        self._same = array("i")  # the position before it with the same key
        self._ends: list[int] = []  # by text

    def __len__(self) -> int:
        return len(self._tokens)

    def begin(self) -> int:
        """A new text, which is empty; its number."""
        self._ends.append(_NOWHERE)
        return len(self._ends) - 1

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        """Append tokens to a text."""
        for token in tokens:
            position, end = len(self._tokens), self._ends[text]
            self._tokens.append(token)
            self._text.append(text)
            self._before.append(end)
            self._after.append(_NOWHERE)
            if end != _NOWHERE:
                self._after[end] = position
            self._ends[text] = position
            key = _key(list(self._backwards(position, self._size)))
            self._same.append(self._latest.get(key, _NOWHERE))
            self._latest[key] = position

    def match(self, tokens: Sequence[int], count: int, without: int = _NOWHERE) -> Continuation:
        """Up to `count` tokens that most often followed the longest suffix of `tokens` that any
        text holds; among equals what followed it last. without: a text that is not looked at."""
        if len(tokens) < self._size:
            return Continuation()
        size, found = self._occurrences(tokens, without)
        drafted: list[int] = []
        shares: list[float] = []
        while found and len(drafted) < count:
            votes = Counter(self._tokens[position] for position in found)
            token, times = votes.most_common(1)[0]
            drafted.append(token)
            shares.append(times / len(found))
            agreeing = (p for p in found if self._tokens[p] == token)
            found = [self._after[p] for p in agreeing if self._after[p] != _NOWHERE]
        return Continuation(size, drafted, shares) if drafted else Continuation()

    def _occurrences(self, tokens: Sequence[int], without: int) -> tuple[int, list[int]]:
        """(size of the longest suffix found, the positions after its occurrences, latest first)."""
        position = self._latest.get(_key(list(reversed(tokens[-self._size :]))), _NOWHERE)
        best, found = self._size, list[int]()
        for _ in range(_CANDIDATES):
            if position == _NOWHERE:
                break
            if self._text[position] != without and self._after[position] != _NOWHERE:
                size = self._common(position, tokens)
                if size > best:
                    best, found = size, []
                if size == best:
                    found.append(self._after[position])
            position = self._same[position]
        return best, found

    def _common(self, position: int, tokens: Sequence[int]) -> int:
        """How many tokens up to this position equal the last ones of `tokens`."""
        longest = min(_LONGEST, len(tokens))
        pairs = zip(self._backwards(position, longest), reversed(tokens[-longest:]))
        size = 0
        for ours, theirs in pairs:
            if ours != theirs:
                break
            size += 1
        return size

    def _backwards(self, position: int, count: int) -> Iterator[int]:
        """The text's tokens from this position back, at most `count`."""
        while position != _NOWHERE and count:
            yield self._tokens[position]
            position, count = self._before[position], count - 1


def _key(backwards: list[int]) -> int:
    """One number for a few tokens; keys of fewer tokens, at a text's beginning, differ from all."""
    key = 1
    for token in backwards:
        key = key << _ID_BITS | token
    return key
