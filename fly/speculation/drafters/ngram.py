"""Prompt lookup: a text proposes what followed last time (arXiv 2304.04487)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from fly.settings import DrafterSettings
from fly.speculation.sequence import Sequence


class NgramIndex:
    """Where each n-gram of a growing token list was last followed by another token.

    `extend` costs one dictionary write per size and token; `match` costs at most one read per
    size, however long the text is.
    """

    def __init__(self, min_size: int, max_size: int) -> None:
        self._sizes = range(max_size, min_size - 1, -1)
        self._last: dict[tuple[int, ...], int] = {}
        self._tokens: list[int] = []

    def extend(self, tokens: Seq[int]) -> None:
        """Append tokens; an n-gram is entered once the token after it is known."""
        for token in tokens:
            end = len(self._tokens)
            for size in self._sizes:
                if size <= end:
                    self._last[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token)

    def match_in(self, sequence: Sequence, drafted: Seq[int], count: int) -> tuple[int, list[int]]:
        """`match` in the sequence's own text, of which the index takes in what is final. drafted:
        tokens behind it."""
        tokens, final = sequence.tokens, sequence.final_length
        self.extend(tokens[len(self._tokens) : final])
        return self.match([*tokens[final:], *drafted], count)

    def match(self, pending: Seq[int], count: int) -> tuple[int, list[int]]:
        """(size of the longest suffix found, up to `count` tokens after its most recent match).

        The suffix is that of the text so far plus `pending` (draft tokens, not yet in the index).
        """
        longest = self._sizes.start
        suffix = [*self._tokens[-longest:], *pending][-longest:]
        for size in self._sizes:
            if size > len(suffix):
                continue
            if (start := self._last.get(tuple(suffix[-size:]))) is not None:
                return size, self._tokens[start : start + count]
        return 0, []


def ngram_sizes(settings: DrafterSettings) -> tuple[int, int, int]:
    """(shortest suffix, longest suffix, most tokens of a proposal)."""
    return settings.min_ngram_size, settings.max_ngram_size, settings.num_ngram_pred_tokens


def until_eos(tokens: list[int], eos_ids: frozenset[int]) -> list[int]:
    """The tokens up to and including the first EOS: nothing after it could be emitted."""
    for index, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: index + 1]
    return tokens
