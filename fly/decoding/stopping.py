"""Stop strings, matched incrementally while tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_SLACK = 4  # a character may span up to 4 byte-level tokens


class StopMatcher:
    """Finds the token at which generated text first contains a stop string.

    Only a tail is decoded: as many tokens before the new ones as the longest stop has bytes (a
    token holds at least one byte), so matches that span tokens and rounds are found and the cost
    per round does not grow with the text. `decode` keeps special tokens: a stop may be one.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = [stop for stop in stops if stop]
        self._decode = decode
        self._tail = max((len(stop.encode()) for stop in self._stops), default=0) + _SLACK

    def tokens_until_match(self, generated: Sequence[int], new: Sequence[int]) -> int | None:
        """How many of the `new` tokens complete the first match; None without one.

        `generated` are the tokens before them, which hold no match.
        """
        if not self._stops or not new:
            return None
        tail = list(generated[-self._tail :])
        if not self._contains(tail + list(new)):
            return None
        for count in range(1, len(new)):
            if self._contains(tail + list(new[:count])):
                return count
        return len(new)

    def _contains(self, tokens: list[int]) -> bool:
        text = self._decode(tokens)
        return any(stop in text for stop in self._stops)
