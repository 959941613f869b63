"""Multi-level acceleration: texts propose, to the target or to the draft model, which verifies."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from weakref import WeakKeyDictionary

from torch import Tensor

from fly.execution.model_runner import ModelRunner
from fly.execution.pass_costs import relative_cost
from fly.speculation.acceptance import AcceptanceEstimate
from fly.speculation.draft_length import expected_tokens
from fly.speculation.drafters.base import Drafter, DrafterContext
from fly.speculation.drafters.draft import Draft
from fly.speculation.drafters.draft_model import CATCH_UP, ModelDrafter
from fly.speculation.drafters.lookup import Lookup
from fly.speculation.drafters.ngram import NgramIndex
from fly.speculation.drafters.texts import OwnText
from fly.speculation.sequence import Sequence, Verdict


class GuessPolicy:
    """How much of an n-gram match the draft model verifies in one pass.

    What a match is worth depends on how long the matching suffix was; what verifying it costs is
    `pass_cost(tokens in the pass)`, in any unit. One length is chosen for the batch, which
    shares the pass. Nothing here follows the clock, so a run can be repeated.
    """

    def __init__(self, pass_cost: Callable[[int], float]) -> None:
        self._pass_cost = pass_cost
        # by the draft model, which agrees with a text no less late in a run than early
        self._agreement = AcceptanceEstimate(weight=3.0, kept=1.0, prior=2 / 3)

    def choose(self, matches: Seq[tuple[int, int]], running: int, feed_width: int) -> int:
        """The guess length that maximises tokens per cost. `matches`: (suffix size, length) of
        each open chain, length 0 without a match; `running`: sequences that share the pass;
        `feed_width`: tokens fed besides the guess."""
        longest = max((length for _, length in matches), default=0)

        def value(length: int) -> float:
            tokens = sum(
                expected_tokens(min(length, have), self._agreement.chance((OwnText.letter, size)))
                for size, have in matches
            )
            return tokens / self._pass_cost(running * (feed_width + length))

        return max(range(longest + 1), key=value)

    def observe(self, size: int, offered: int, agreed: int) -> None:
        """Of `offered` guessed tokens after a suffix of `size`, the first `agreed` were right."""
        self._agreement.observe((OwnText.letter, size), offered, agreed)


class CascadeDrafter(ModelDrafter):
    """What a text promises is drafted from it, if that is worth more than the draft model's tokens.

    Else the draft model drafts, with guesses from the sequence's own text that it verifies, until K
    draft tokens stand. Without a match it just takes a step: filler tokens are never verified.

    lookup: the texts; without it every draft is the draft model's. guesses: shortest and longest
    suffix of those that it verifies, and their most tokens; None for no guesses.
    """

    @classmethod
    def create(cls, context: DrafterContext) -> Drafter:
        keys = context.settings
        guesses = keys.min_ngram_size, keys.max_ngram_size, keys.num_ngram_pred_tokens
        return cls(
            context.draft_runner,
            context.eos_ids,
            guesses if "own" in context.text_sources else None,
            Lookup.create(context, has_model=True),
        )

    def __init__(
        self,
        runner: ModelRunner,
        eos_ids: frozenset[int],
        guesses: tuple[int, int, int] | None,
        lookup: Lookup | None = None,
    ) -> None:
        super().__init__(runner, eos_ids)
        self._lookup = lookup
        self.longest = lookup.longest if lookup else 0
        self.drafts_alone = guesses is None  # else the host looks guesses up in every step
        *self._sizes, self._count = guesses or (1, 1, 0)
        self._indexes: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()
        self._guess_policy = GuessPolicy(partial(relative_cost, runner.way))
        self._matched_sizes = [0] * runner.slots

    def admit(
        self, slot: int, sequence: Sequence, features: Tensor | None = None, *, soon: bool = True
    ) -> None:
        # while an earlier output is followed, the draft model has nothing to do
        super().admit(slot, sequence, features, soon=soon and not sequence.request.earlier)

    def reserve(self, longest: int, spd_k: int) -> None:
        # a sequence that texts were drafted for is fed what the draft model lacks, with a guess
        width = max(spd_k + 1, CATCH_UP + self._count if self._lookup else 0)
        self.runner.reserve_rows(longest, width=width, spd_k=spd_k)

    def propose(self, running: list[Sequence], limits: list[int]) -> Draft:
        if self._lookup is None:
            return super().propose(running, limits)
        limits = [self._within_context(s, limit) for s, limit in zip(running, limits)]
        found = self._lookup.propose(running, limits)
        left = [0 if proposal else limit for proposal, limit in zip(found, limits)]
        draft = super().propose(running, left)
        if not any(found):
            return draft
        host = draft.on_host()
        for slot, proposal in enumerate(found):
            if proposal:
                host.tokens[slot], host.by[slot] = proposal.tokens, proposal.by
                host.q[slot], host.free[slot] = None, True
        return host

    def _guess(self, running: list[Sequence], unseen: list[list[int]]) -> list[list[int]]:
        guesses: list[list[int]] = []
        for slot, (sequence, chain) in enumerate(zip(running, self._chains)):
            room = chain.limit - len(chain.tokens) - 1
            size, guess = 0, list[int]()
            if chain.is_open and room > 0 and self._count:
                most = min(room, self._count)
                index = self._indexes.setdefault(sequence, NgramIndex(*self._sizes))
                size, guess = index.match(sequence, chain.tokens, most)
                guess = guess[: len(self._views.speakable(guess))]
            self._matched_sizes[slot] = size
            guesses.append(guess)
        sizes = zip(self._chains, self._matched_sizes, guesses)
        matches = [(size, len(guess)) for chain, size, guess in sizes if chain.is_open]
        length = self._guess_policy.choose(matches, len(running), max(map(len, unseen)))
        return [guess[:length] for guess in guesses]

    def _learn(self, slot: int, guessed: int, agreed: int) -> None:
        self._guess_policy.observe(self._matched_sizes[slot], guessed, agreed)

    def commit(
        self, running: list[Sequence], verdicts: list[Verdict], features: Tensor | None = None
    ) -> None:
        super().commit(running, verdicts, features)
        if self._lookup is not None:
            self._lookup.commit(verdicts)
