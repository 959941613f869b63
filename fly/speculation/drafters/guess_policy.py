"""One sequence's draft while it grows, and how much of an n-gram match the draft model verifies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Chain:
    """One row's draft while it grows.

    by: who proposed each token (see `Draft`). q: what each was drawn from, [V], where rows sample.
    """

    limit: int
    tokens: list[int] = field(default_factory=list)
    by: str = ""
    q: list[Tensor] = field(default_factory=list)
    ended: bool = False  # by EOS

    @property
    def is_open(self) -> bool:
        return len(self.tokens) < self.limit and not self.ended


class GuessPolicy:
    """How much of an n-gram match the draft model verifies in one pass.

    What a match is worth depends on how long the matching suffix was; what verifying it costs is
    `pass_cost(tokens in the pass)`, in any unit. One length is chosen for the batch, whose rows
    share the pass. Nothing here follows the clock, so a run can be repeated.
    """

    def __init__(self, pass_cost: Callable[[int], float]) -> None:
        self._pass_cost = pass_cost
        self._offered: dict[int, float] = defaultdict(lambda: 3.0)
        self._agreed: dict[int, float] = defaultdict(lambda: 2.0)

    def choose(self, matches: Seq[tuple[int, int]], rows: int, feed_width: int) -> int:
        """The guess length that maximises tokens per cost. `matches`: (suffix size, length) of
        each open row, length 0 without a match; `rows`: all that share the pass; `feed_width`:
        tokens fed besides the guess."""
        longest = max((length for _, length in matches), default=0)

        def value(length: int) -> float:
            tokens = sum(1 + self._expected(size, min(length, have)) for size, have in matches)
            return tokens / self._pass_cost(rows * (feed_width + length))

        return max(range(longest + 1), key=value)

    def observe(self, size: int, offered: int, agreed: int) -> None:
        """Of `offered` guessed tokens after a suffix of `size`, the first `agreed` were right."""
        if offered:
            self._offered[size] += min(agreed + 1, offered)
            self._agreed[size] += agreed

    def _expected(self, size: int, length: int) -> float:
        """Expected number of right tokens among the first `length`: q + q^2 + ..."""
        chance = self._agreed[size] / self._offered[size]
        return sum(chance**power for power in range(1, length + 1))
