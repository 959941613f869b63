"""Prompt lookup: a text proposes what followed last time (arXiv 2304.04487)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from fly.speculation.sequence import Sequence


class NgramIndex:
    """Where each n-gram of a growing sequence was last followed by another token.

    A new token costs one dictionary write per size, a match at most one read per size, however
    long the text is.
    """

    def __init__(self, min_size: int, max_size: int) -> None:
        self._sizes = range(max_size, min_size - 1, -1)
        self._last: dict[tuple[int, ...], int] = {}
        self._count = 0  # of the sequence's tokens that are in the index

    def match(self, sequence: Sequence, drafted: Seq[int], count: int) -> tuple[int, list[int]]:
        """(size of the longest suffix found, up to `count` tokens after its most recent match).

        The suffix is that of the sequence's tokens and of those drafted behind them; it is looked
        for in what is final.
        """
        tokens, final = sequence.tokens, sequence.final_length
        for end in range(self._count, final):
            for size in self._sizes:
                if size <= end:
                    self._last[tuple(tokens[end - size : end])] = end
        self._count = final
        longest = self._sizes.start
        suffix = [*tokens[-longest:], *drafted][-longest:]
        for size in self._sizes:
            if size > len(suffix):
                continue
            if (start := self._last.get(tuple(suffix[-size:]))) is not None:
                return size, tokens[start : min(start + count, final)]
        return 0, []


def until_eos(tokens: list[int], eos_ids: frozenset[int]) -> list[int]:
    """The tokens up to and including the first EOS: nothing after it could be emitted."""
    for index, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: index + 1]
    return tokens
