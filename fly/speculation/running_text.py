"""The text of a growing list of tokens, every final token decoded a few times at most."""

from __future__ import annotations

from collections.abc import Sequence

from fly.speculation.stop_strings import BROKEN, Decode


class RunningText:
    """Text of a sequence's tokens. `decode` keeps special tokens.

    What a tokenizer writes may depend on the tokens before (a leading space, the bytes of one
    character), so new ones are decoded with those that were added before them.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._text = ""  # of the first `_count` tokens
        self._count = self._overlap = 0  # both where a character begins

    def of(self, tokens: Sequence[int], final: int) -> str:
        """The text of all these tokens, of which the first `final` are the same from now on."""
        if final > self._count:
            new = self._after(tokens[:final])
            if not new.endswith(BROKEN):
                self._text += new
                self._overlap, self._count = self._count, final
        return self._text + self._after(tokens)

    def _after(self, tokens: Sequence[int]) -> str:
        """What the tokens after the first `_count` add to the text."""
        known = self._decode(tokens[self._overlap : self._count])
        return self._decode(tokens[self._overlap :])[len(known) :]
