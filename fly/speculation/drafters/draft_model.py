"""The draft model, plain or itself accelerated by n-gram lookup (multi-level acceleration).

One loop serves both: each pass feeds the draft model what it has not seen of the row plus a
guess (empty in the plain drafter), keeps the guess as far as it is the draft model's own choice
(greedy or drawn), and adds that choice after it. The chain is therefore the same with and without
the guess, up to the rounding of passes of another width (quantised drafts round more than others).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fly.execution.argmax import NotFiniteError, greedy, marked
from fly.execution.model_runner import ModelRunner, common_prefix
from fly.speculation.drafters.base import Draft
from fly.speculation.drafters.guess_policy import Chain, GuessPolicy
from fly.speculation.drafters.ngram import NgramIndex, until_eos
from fly.speculation.sampling import draw
from fly.speculation.sequence import RowVerdict, Sequence

_CATCH_UP = 32  # a row this far behind is fed without building logits


class ModelDrafter:
    """Chains from a draft model, greedy or sampled as the row says.

    Never proposes past EOS or the draft's own context.
    """

    drafts_alone = True  # nothing on the host takes part in a step

    def __init__(self, runner: ModelRunner, eos_ids: frozenset[int]) -> None:
        self.runner = runner
        self.devices: tuple[torch.device, ...] = (runner.device,)
        self._eos_ids = eos_ids
        self._eos = torch.tensor(sorted(eos_ids), dtype=torch.long, device=runner.device)
        self._chains: list[Chain] = []

    def reserve(self, longest: int, spd_k: int) -> None:
        self.runner.reserve_rows(longest, width=spd_k + 1, steps=spd_k)

    def admit(self, slot: int, row: Sequence, *, soon: bool = True) -> None:
        # A prompt past the draft's context is not drafted for at all; the target goes on alone.
        self.runner.keep(slot, 0)
        if soon and len(row.tokens) < self.runner.max_length:
            self.runner.prefill(slot, row.tokens[:-1])

    def propose(self, rows: list[Sequence], limits: list[int]) -> Draft:
        self._chains = [
            Chain(min(limit, max(0, self.runner.max_length - len(row.tokens))))
            for row, limit in zip(rows, limits)
        ]
        if (draft := self._on_device(rows)) is not None:
            return draft
        while any(chain.is_open for chain in self._chains):
            self._pass(rows, [self._unseen(slot, row) for slot, row in enumerate(rows)])
        return Draft(
            [list(chain.tokens) for chain in self._chains],
            by=[chain.by for chain in self._chains],
            q=[_stacked(chain.q) for chain in self._chains],
        )

    def _on_device(self, rows: list[Sequence]) -> Draft | None:
        """The whole draft loop as one graph, its tokens left on the device; None without graphs."""
        limits = [chain.limit for chain in self._chains]
        steps = max(limits)
        plain = all(row.request.sampling.is_plain for row in rows)
        if not self.drafts_alone or not plain or steps == 0:
            return None
        feeds = [self._unseen(slot, row) for slot, row in enumerate(rows)]
        limit_B = torch.tensor(limits).to(self.runner.device)
        drafted_BK = self.runner.chain(feeds, steps)
        if drafted_BK is None:
            return None
        ends_BK = torch.isin(drafted_BK, self._eos)
        ended_before_BK = ends_BK.cumsum(dim=1) - ends_BK.long() > 0
        return Draft.on_device(drafted_BK, (~ended_before_BK).sum(dim=1).minimum(limit_B))

    def _unseen(self, slot: int, row: Sequence) -> list[int]:
        """The row's tokens, drafted ones too, that the draft model has not been fed yet."""
        chain = self._chains[slot]
        if not chain.is_open:
            return []
        if self.runner.lengths[slot] == 0:  # admitted for later
            self.runner.prefill(slot, row.tokens[:-1])
        elif len(row.tokens) - self.runner.lengths[slot] > _CATCH_UP:
            self.runner.catch_up(slot, row.tokens[:-1])
        return (row.tokens + chain.tokens)[self.runner.lengths[slot] :]

    def _pass(self, rows: list[Sequence], unseen: list[list[int]]) -> None:
        guesses = self._guess(rows, unseen)
        feeds = [fed + guess for fed, guess in zip(unseen, guesses)]
        logits_BQV = self.runner.extend(feeds)
        choices = marked(greedy(logits_BQV), logits_BQV).tolist()
        for slot, row in enumerate(rows):
            if unseen[slot] and not row.request.sampling.is_plain:
                last = len(unseen[slot]) - 1
                logits_NV = logits_BQV[slot, last : last + len(guesses[slot]) + 1]
                choices[slot][last : last + len(logits_NV)] = self._draw(
                    row, self._chains[slot], logits_NV, guesses[slot]
                )
        for slot, (fed, guess) in enumerate(zip(unseen, guesses)):
            if not fed:
                continue
            chain = self._chains[slot]
            own = choices[slot][len(fed) - 1 : len(fed) + len(guess)]
            if -1 in own:
                at = len(rows[slot].generated) + len(chain.tokens) + own.index(-1)
                raise NotFiniteError("draft", rows[slot].request, at)
            agreed = common_prefix(guess, own)
            self._learn(slot, len(guess), agreed)
            new = until_eos(own[: agreed + 1], self._eos_ids)
            chain.tokens.extend(new)
            chain.by += ("n" * agreed + "d")[: len(new)]
            del chain.q[len(chain.tokens) :]
            chain.ended = new[-1] in self._eos_ids
            self.runner.keep(slot, self.runner.lengths[slot] + len(fed) + agreed)

    def _draw(self, row: Sequence, chain: Chain, logits_NV: Tensor, guess: list[int]) -> list[int]:
        """The draft's own tokens at the chain's end and after each guessed token, sampled.

        Each place in the chain has one random number, so that a guess, which stands if it is what
        was drawn there, changes neither the tokens nor their distribution q.
        """
        before = [*row.tokens, *chain.tokens]
        scores_NV = row.request.sampling.process(logits_NV, before, guess)
        if row.noise is None:
            own_N = scores_NV.argmax(dim=-1)
        else:
            q_NV = torch.softmax(scores_NV, dim=-1)
            chain.q.extend(q_NV)
            own_N = draw(q_NV, row.noise.draft[len(chain.tokens) :][: len(q_NV)])
        result: list[int] = marked(own_N, logits_NV).tolist()
        return result

    def _guess(self, rows: list[Sequence], unseen: list[list[int]]) -> list[list[int]]:
        """Tokens that the draft model only has to verify; none in the plain drafter."""
        return [[] for _ in rows]

    def _learn(self, slot: int, guessed: int, agreed: int) -> None:
        """The draft model's own choice agreed with the first `agreed` guessed tokens."""

    def commit(self, rows: list[Sequence], verdicts: list[RowVerdict]) -> None:
        for slot, row in enumerate(rows):
            known = min(self.runner.lengths[slot], len(row.tokens) - 1)
            self.runner.settle(slot, row.tokens, known)

    def move(self, source: int, destination: int) -> None:
        self.runner.move(source, destination)

    def resize(self, slots: int) -> None:
        self.runner.resize(slots)


class CascadeDrafter(ModelDrafter):
    """N-gram lookup proposes, the draft model verifies, until K draft tokens stand.

    Without a match the draft model just takes a step: filler tokens are never verified.
    """

    drafts_alone = False

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

    def admit(self, slot: int, row: Sequence, *, soon: bool = True) -> None:
        super().admit(slot, row, soon=soon)
        self._indexes[slot] = NgramIndex(*self._sizes)

    def _guess(self, rows: list[Sequence], unseen: list[list[int]]) -> list[list[int]]:
        guesses: list[list[int]] = []
        for slot, (row, chain) in enumerate(zip(rows, self._chains)):
            room = chain.limit - len(chain.tokens) - 1
            size, guess = 0, list[int]()
            if chain.is_open and room > 0:
                self._indexes[slot].sync(row.tokens[: row.final_length])
                pending = row.tokens[row.final_length :] + chain.tokens
                size, guess = self._indexes[slot].match(pending, min(room, self._count))
            self._matched_sizes[slot] = size
            guesses.append(guess)
        sizes = zip(self._chains, self._matched_sizes, guesses)
        matches = [(size, len(guess)) for chain, size, guess in sizes if chain.is_open]
        length = self._guess_policy.choose(matches, len(rows), max(map(len, unseen)))
        return [guess[:length] for guess in guesses]

    def _learn(self, slot: int, guessed: int, agreed: int) -> None:
        self._guess_policy.observe(self._matched_sizes[slot], guessed, agreed)

    def move(self, source: int, destination: int) -> None:
        super().move(source, destination)
        self._indexes[destination] = self._indexes[source]

    def resize(self, slots: int) -> None:
        super().resize(slots)
        del self._indexes[slots:]


def _stacked(rows: list[Tensor]) -> Tensor | None:
    """[K, V], and the rows let go: at a large vocabulary both would be held through the round."""
    if not rows:
        return None
    result = torch.stack(rows)
    rows.clear()
    return result
