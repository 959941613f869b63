"""The draft model, plain or itself accelerated by n-gram lookup (multi-level acceleration).

One loop serves both: each pass feeds the draft model what it has not seen of the row plus a
guess (empty in the plain drafter), keeps the guess as far as it is the draft model's own greedy
choice, and adds that choice after it. The chain is therefore the same with and without the guess.
"""

from __future__ import annotations

from fly.decoding.runner import ModelRunner
from fly.decoding.sequence import Sequence
from fly.drafters.base import Draft
from fly.drafters.ngram import NgramIndex, until_eos


class ModelDrafter:
    """Greedy chains from a draft model. Never proposes past EOS or the draft's own context."""

    def __init__(self, runner: ModelRunner, eos_ids: frozenset[int]) -> None:
        self.runner = runner
        self._eos_ids = eos_ids

    def admit(self, slot: int, row: Sequence) -> None:
        # A prompt past the draft's context is not drafted for at all; the target goes on alone.
        self.runner.lengths[slot] = 0
        if len(row.tokens) < self.runner.max_length:
            self.runner.prefill(slot, row.tokens[:-1])

    def propose(self, rows: list[Sequence], limits: list[int]) -> Draft:
        limits = [
            min(limit, max(0, self.runner.max_length - len(row.tokens)))
            for row, limit in zip(rows, limits)
        ]
        drafts: list[list[int]] = [[] for _ in rows]
        while any(self._is_open(draft, limit) for draft, limit in zip(drafts, limits)):
            self._pass(rows, limits, drafts)
        return Draft(drafts)

    def _is_open(self, draft: list[int], limit: int) -> bool:
        return len(draft) < limit and not (draft and draft[-1] in self._eos_ids)

    def _pass(self, rows: list[Sequence], limits: list[int], drafts: list[list[int]]) -> None:
        feeds, guesses = [], []
        for slot, (row, limit, draft) in enumerate(zip(rows, limits, drafts)):
            open_ = self._is_open(draft, limit)
            unseen = (row.tokens + draft)[self.runner.lengths[slot] :] if open_ else []
            room = limit - len(draft) - 1
            guess = self._guess(slot, row, draft, room) if open_ and room > 0 else []
            feeds.append(unseen + guess)
            guesses.append(guess)
        choices = self.runner.extend(feeds).float().argmax(dim=-1).tolist()
        for slot, (feed, guess, draft) in enumerate(zip(feeds, guesses, drafts)):
            if not feed:
                continue
            unseen_count = len(feed) - len(guess)
            own = choices[slot][unseen_count - 1 : len(feed)]
            agreed = _common_prefix(guess, own)
            draft.extend(until_eos(own[: agreed + 1], self._eos_ids))
            self.runner.keep(slot, self.runner.lengths[slot] + unseen_count + agreed)

    def _guess(self, slot: int, row: Sequence, draft: list[int], room: int) -> list[int]:
        """Tokens that the draft model only has to verify; none in the plain drafter."""
        return []

    def commit(self, slot: int, row: Sequence) -> None:
        self.runner.keep(slot, min(self.runner.lengths[slot], len(row.tokens) - 1))

    def move(self, source: int, destination: int) -> None:
        self.runner.move(source, destination)


class CascadeDrafter(ModelDrafter):
    """N-gram lookup proposes, the draft model verifies, until K draft tokens stand.

    Without a match the draft model just takes a step: filler tokens are never verified.
    """

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

    def admit(self, slot: int, row: Sequence) -> None:
        super().admit(slot, row)
        self._indexes[slot] = NgramIndex(*self._sizes)

    def _guess(self, slot: int, row: Sequence, draft: list[int], room: int) -> list[int]:
        self._indexes[slot].sync(row.tokens)
        return self._indexes[slot].lookup(draft, min(room, self._count))

    def move(self, source: int, destination: int) -> None:
        super().move(source, destination)
        self._indexes[destination] = self._indexes[source]


def _common_prefix(left: list[int], right: list[int]) -> int:
    count = 0
    for a, b in zip(left, right):
        if a != b:
            break
        count += 1
    return count
