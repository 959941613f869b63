"""Stop strings, matched incrementally while tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_SLACK = 4  # a character may span up to 4 byte-level tokens
BROKEN = "\N{REPLACEMENT CHARACTER}"  # bytes that are no character, or not yet


class StopMatcher:
    """Finds the token at which generated text first contains a stop string.

    The first token after which the generated text, decoded, holds a stop. Only a tail is decoded:
    as many tokens before the new ones as the longest stop has bytes (a token holds at least one
    byte), so matches that span tokens and rounds are found and the cost per round does not grow
    with the text. `decode` keeps special tokens: a stop may be one.

    Tokenizers with byte fallback (Llama 2's) give up a whole run of byte tokens if it begins or
    ends within a character, and hide a stop in it. So a tail begins where a character does, and a
    text that ends within one is looked at token by token. (Bytes that are no character at all
    would hide what follows them in the text as a whole; here they do not.)

    An empty stop is in any text: the first token ends it, as in lm-eval's hf.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = list(stops)
        self.decode = decode
        self._tail = max((len(stop.encode()) for stop in self._stops), default=0) + _SLACK

    def tokens_until_match(self, generated: Sequence[int], new: Sequence[int]) -> int | None:
        """How many of the `new` tokens complete the first match; None without one.

        `generated` are the tokens before them, which hold no match.
        """
        if not self._stops or not new:
            return None
        tail, whole = self._from_a_character(generated, new)
        found = self._has_stop(whole)
        if not found and BROKEN not in whole:
            return None
        for count in range(1, len(new)):
            if self._has_stop(self.decode([*tail, *new[:count]])):
                return count
        return len(new) if found else None

    def _from_a_character(
        self, generated: Sequence[int], new: Sequence[int]
    ) -> tuple[Sequence[int], str]:
        """(a tail that begins with a character, its text and that of the new tokens)"""
        start = max(0, len(generated) - self._tail)
        for earlier in range(min(start, _SLACK - 1) + 1):
            tail = generated[start - earlier :]
            whole = text = self.decode([*tail, *new])
            for cut in range(1, _SLACK + 1):  # up to 3 bytes at the end may be no whole character
                if not text.startswith(BROKEN):
                    return tail, whole
                text = self.decode([*tail, *new][:-cut])
        return generated[start:], self.decode([*generated[start:], *new])

    def _has_stop(self, text: str) -> bool:
        return any(stop in text for stop in self._stops)
