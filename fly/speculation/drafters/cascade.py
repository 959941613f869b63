"""Multi-level acceleration: n-gram lookup proposes, the draft model verifies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq

from torch import Tensor

from fly.execution.model_runner import ModelRunner
from fly.speculation.drafters.base import Drafter, DrafterContext
from fly.speculation.drafters.draft_model import ModelDrafter
from fly.speculation.drafters.ngram import NgramIndex, ngram_sizes
from fly.speculation.sequence import Sequence


class GuessPolicy:
    """How much of an n-gram match the draft model verifies in one pass.

    What a match is worth depends on how long the matching suffix was; what verifying it costs is
    `pass_cost(tokens in the pass)`, in any unit. One length is chosen for the batch, which
    shares the pass. Nothing here follows the clock, so a run can be repeated.
    """

    def __init__(self, pass_cost: Callable[[int], float]) -> None:
        self._pass_cost = pass_cost
        self._offered: dict[int, float] = defaultdict(lambda: 3.0)
        self._agreed: dict[int, float] = defaultdict(lambda: 2.0)

    def choose(self, matches: Seq[tuple[int, int]], running: int, feed_width: int) -> int:
        """The guess length that maximises tokens per cost. `matches`: (suffix size, length) of
        each open chain, length 0 without a match; `running`: sequences that share the pass;
        `feed_width`: tokens fed besides the guess."""
        longest = max((length for _, length in matches), default=0)

        def value(length: int) -> float:
            tokens = sum(1 + self._expected(size, min(length, have)) for size, have in matches)
            return tokens / self._pass_cost(running * (feed_width + length))

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


class CascadeDrafter(ModelDrafter):
    """N-gram lookup proposes, the draft model verifies, until K draft tokens stand.

    Without a match the draft model just takes a step: filler tokens are never verified.
    """

    drafts_alone = False

    @classmethod
    def create(cls, context: DrafterContext) -> Drafter:
        return cls(context.draft_runner(), context.eos_ids, *ngram_sizes(context.settings))

    def __init__(
        self,
        runner: ModelRunner,
        eos_ids: frozenset[int],
        min_size: int,
        max_size: int,
        count: int,
    ) -> None:
        super().__init__(runner, eos_ids)
        self._sizes = (min_size, max_size)
        self._count = count
        self._indexes = [NgramIndex(*self._sizes) for _ in runner.lengths]
        self._guess_policy = GuessPolicy(runner.relative_cost)
        self._matched_sizes = [0] * runner.slots

    def admit(
        self, slot: int, sequence: Sequence, features: Tensor | None = None, *, soon: bool = True
    ) -> None:
        super().admit(slot, sequence, features, soon=soon)
        self._indexes[slot] = NgramIndex(*self._sizes)

    def _guess(self, running: list[Sequence], unseen: list[list[int]]) -> list[list[int]]:
        guesses: list[list[int]] = []
        for slot, (sequence, chain) in enumerate(zip(running, self._chains)):
            room = chain.limit - len(chain.tokens) - 1
            size, guess = 0, list[int]()
            if chain.is_open and room > 0:
                self._indexes[slot].sync(sequence.tokens[: sequence.final_length])
                pending = sequence.tokens[sequence.final_length :] + chain.tokens
                size, guess = self._indexes[slot].match(pending, min(room, self._count))
            self._matched_sizes[slot] = size
            guesses.append(guess)
        sizes = zip(self._chains, self._matched_sizes, guesses)
        matches = [(size, len(guess)) for chain, size, guess in sizes if chain.is_open]
        length = self._guess_policy.choose(matches, len(running), max(map(len, unseen)))
        return [guess[:length] for guess in guesses]

    def _learn(self, slot: int, guessed: int, agreed: int) -> None:
        self._guess_policy.observe(self._matched_sizes[slot], guessed, agreed)

    def move(self, source: int, destination: int) -> None:
        super().move(source, destination)
        self._indexes[destination] = self._indexes[source]

    def resize(self, slots: int) -> None:
        super().resize(slots)
        del self._indexes[slots:]
