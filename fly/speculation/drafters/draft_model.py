"""The draft model.

Each pass feeds it what it has not seen of a sequence plus a guess (empty here, an n-gram match in
cascade.py), accepts the guess as far as it is the draft model's own token (greedy or drawn), and
adds that token after it. The chain is therefore the same with and without the guess, up to the
rounding of passes of another width (quantised drafts round more than others).

Chains and guesses are in the target's ids, as the runner's logits are; what it is fed, and so all
of its lengths, are in the draft's own (fly.models.token_intersection).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fly.execution.argmax import NotFiniteError, greedy, mask_nonfinite
from fly.execution.cuda_graphs import Chooser, Drafted
from fly.execution.model_runner import ModelRunner, common_prefix
from fly.speculation.drafters.base import Drafter, DrafterContext
from fly.speculation.drafters.draft import DeviceDraft, Draft, HostDraft
from fly.speculation.drafters.draft_view import DraftViews
from fly.speculation.drafters.ngram import until_eos
from fly.speculation.sampling import alike, draw, seen_tokens
from fly.speculation.sequence import Sequence, Verdict

CATCH_UP = 32  # a sequence this far behind is fed without building logits


@dataclass
class Chain:
    """One sequence's draft while it grows."""

    limit: int
    tokens: list[int] = field(default_factory=list)
    by: str = ""  # who proposed each token (see `Draft`)
    q: list[Tensor] = field(default_factory=list)  # what each was drawn from, [V], when sampling
    ended: bool = False  # by EOS

    @property
    def is_open(self) -> bool:
        return len(self.tokens) < self.limit and not self.ended


class ModelDrafter(Drafter):
    """Chains from a draft model, greedy or sampled as the request says.

    Never proposes past EOS or the draft's own context.
    """

    drafts_alone = True  # nothing on the host takes part in a step

    runner: ModelRunner

    @classmethod
    def create(cls, context: DrafterContext) -> Drafter:
        return cls(context.draft_runner, context.eos_ids)

    def __init__(self, runner: ModelRunner, eos_ids: frozenset[int]) -> None:
        self.runner = runner
        self._views = DraftViews(runner.intersection)
        self._eos_ids = eos_ids
        self._eos = torch.tensor(sorted(eos_ids), dtype=torch.long, device=runner.device)
        self._chains: list[Chain] = []

    def reserve(self, longest: int, spd_k: int) -> None:
        # after rounds without drafts as many tokens at a time as CATCH_UP
        self.runner.reserve_rows(longest, width=max(spd_k, CATCH_UP) + 1, spd_k=spd_k)

    def admit(
        self, slot: int, sequence: Sequence, features: Tensor | None = None, *, soon: bool = True
    ) -> None:
        # A prompt past the draft's context is not drafted for at all; the target goes on alone.
        self.runner.truncate(slot, 0)
        ids = self._views.ids(sequence)
        if soon and len(ids) < self.runner.max_length:
            self.runner.prefill(slot, ids[:-1])

    def propose(self, running: list[Sequence], limits: list[int]) -> Draft:
        self._chains = [
            Chain(self._within_context(sequence, limit)) for sequence, limit in zip(running, limits)
        ]
        limits = [chain.limit for chain in self._chains]
        if self.drafts_alone and self.runner.chains and max(limits):
            # the whole loop on the device, where the tokens stay
            feeds = [self._unseen(slot, sequence) for slot, sequence in enumerate(running)]
            sampler = DraftSampler(running, limits, self._eos, self.keeps_q)
            return sampler.draft(self.runner.chain(feeds, max(limits), sampler))
        while any(chain.is_open for chain in self._chains):
            self._pass(running)
        return HostDraft(
            [chain.tokens for chain in self._chains],
            by=[chain.by for chain in self._chains],
            q=[_stacked(chain.q) for chain in self._chains],
        )

    def _within_context(self, sequence: Sequence, limit: int) -> int:
        return min(limit, max(0, self.runner.max_length - len(self._views.ids(sequence))))

    def _unseen(self, slot: int, sequence: Sequence) -> list[int]:
        """What the draft model has not been fed yet of the sequence, drafted tokens too."""
        chain = self._chains[slot]
        if not chain.is_open:
            return []
        ids = self._views.ids(sequence)
        if self.runner.lengths[slot] == 0:  # admitted for later
            with self.prefilling(sequence):
                self.runner.prefill(slot, ids[:-1])
        elif len(ids) - self.runner.lengths[slot] > CATCH_UP:
            self.runner.catch_up(slot, ids[:-1])
        return (ids + self._views.speakable(chain.tokens))[self.runner.lengths[slot] :]

    def _pass(self, running: list[Sequence]) -> None:
        unseen = [self._unseen(slot, sequence) for slot, sequence in enumerate(running)]
        guesses = self._guess(running, unseen)
        feeds = [fed + self._views.speakable(guess) for fed, guess in zip(unseen, guesses)]
        logits_BQV = self.runner.extend(feeds)
        own_BQ = greedy(logits_BQV)
        for slot, sequence in enumerate(running):
            if unseen[slot] and (self.keeps_q or not sequence.request.sampling.is_plain):
                last = len(unseen[slot]) - 1
                places = slice(last, last + len(guesses[slot]) + 1)
                own_BQ[slot, places] = _own_draws(
                    sequence,
                    self._chains[slot],
                    logits_BQV[slot, places],
                    guesses[slot],
                    self.keeps_q,
                )
        own_tokens = mask_nonfinite(own_BQ, logits_BQV).tolist()
        for slot, (fed, guess) in enumerate(zip(unseen, guesses)):
            if not fed:
                continue
            chain = self._chains[slot]
            own = own_tokens[slot][len(fed) - 1 : len(fed) + len(guess)]
            if -1 in own:
                at = len(running[slot].generated) + len(chain.tokens) + own.index(-1)
                raise NotFiniteError("draft", running[slot].request, at)
            agreed = common_prefix(guess, own)
            self._learn(slot, len(guess), agreed)
            new = until_eos(own[: agreed + 1], self._eos_ids)
            chain.tokens.extend(new)
            chain.by += ("n" * agreed + "d")[: len(new)]
            del chain.q[len(chain.tokens) :]
            chain.ended = new[-1] in self._eos_ids
            self.runner.truncate(slot, self.runner.lengths[slot] + len(fed) + agreed)

    def _guess(self, running: list[Sequence], unseen: list[list[int]]) -> list[list[int]]:
        """Tokens that the draft model only has to verify, all of them speakable; none in the plain
        drafter."""
        return [[] for _ in running]

    def _learn(self, slot: int, guessed: int, agreed: int) -> None:
        """The draft model's own tokens agreed with the first `agreed` guessed ones."""

    def commit(
        self, running: list[Sequence], verdicts: list[Verdict], features: Tensor | None = None
    ) -> None:
        for slot, sequence in enumerate(running):
            known = min(self.runner.lengths[slot], self._views.settled(sequence))
            self.runner.commit(slot, self._views.ids(sequence), known)


class DraftSampler(Chooser):
    """Takes every sequence's token of a step from the draft's logits, greedy or drawn as its
    request says; for one draft of at most limits[b] tokens of sequence b, up to EOS.

    Sequences that all sample in one way may share a graph, unless a penalty looks at their tokens.
    keeps_q: the drafter's.
    """

    def __init__(
        self, running: list[Sequence], limits: list[int], eos: Tensor, keeps_q: bool
    ) -> None:
        samplings = [sequence.request.sampling for sequence in running]
        self._limits, self._eos = limits, eos
        self._groups = [*alike(samplings, eos.device)]
        self._keeps_q = keeps_q
        self._drawn = [keeps_q or not sampling.is_greedy for sampling in samplings]
        if not all(sampling.is_greedy for sampling in samplings):
            uniform_BK = torch.zeros(len(running), max(limits), dtype=torch.float64)
            for slot, sequence in enumerate(running):
                if not samplings[slot].is_greedy:
                    uniform_BK[slot] = sequence.noise(max(limits)).draft
            self.inputs = (uniform_BK.to(eos.device, non_blocking=True),)
        if keeps_q or not all(sampling.is_plain for sampling in samplings):
            self.key = samplings[0] if len({*samplings}) == 1 else None
        self._before: list[list[int]] = []
        if any(sampling.is_penalised for sampling in samplings):
            self.key, self._before = None, [sequence.tokens for sequence in running]
        self._seen: dict[int, Tensor] = {}  # by a group's first slot, [M, V]

    def __call__(self, logits_BV: Tensor, step: int, *inputs: Tensor) -> Drafted:
        token_B, q_BV = greedy(logits_BV), None
        if any(self._drawn):
            q_BV = torch.zeros_like(logits_BV, dtype=torch.float32)
        for sampling, slots, rows in self._groups:
            if sampling.is_plain and not self._keeps_q:
                continue
            logits_MV, seen_MV = logits_BV[rows], None
            if sampling.is_penalised:
                if step == 0:
                    nothing = torch.empty(len(slots), 0, dtype=torch.long, device=token_B.device)
                    before = [self._before[slot] for slot in slots]
                    self._seen[slots[0]] = seen_tokens(before, nothing, logits_MV.shape[-1])[:, 0]
                seen_MV = self._seen[slots[0]]
            scores_MV = sampling.process(logits_MV, seen_MV)
            own_M = scores_MV.argmax(dim=-1)
            if q_BV is not None and (self._keeps_q or not sampling.is_greedy):
                q_BV[rows] = q_MV = torch.softmax(scores_MV, dim=-1)
                if not sampling.is_greedy:
                    own_M = draw(q_MV, inputs[0][rows, step])
            if seen_MV is not None:
                seen_MV.scatter_(1, own_M.clamp(max=seen_MV.shape[1] - 1)[:, None], True)
            token_B[rows] = own_M
        return Drafted(mask_nonfinite(token_B, logits_BV), q_BV)

    def draft(self, drafted: Drafted, is_sure_BK: Tensor | None = None) -> Draft:
        """is_sure_BK: a draft ends before the first token that is not sure."""
        device = self._eos.device
        limit_B = torch.tensor(self._limits).to(device, non_blocking=True)
        is_end_BK = torch.isin(drafted.tokens, self._eos)
        is_past_BK = is_end_BK.cumsum(dim=1) > is_end_BK.long()
        if is_sure_BK is not None:
            is_past_BK |= (~is_sure_BK).cumsum(dim=1) > 0
        length_B = (~is_past_BK).sum(dim=1).minimum(limit_B)
        found = DeviceDraft(drafted.tokens, length_B, drafted.q, self._drawn)
        return found.on_host() if device.type == "cpu" else found


def _own_draws(
    sequence: Sequence, chain: Chain, logits_NV: Tensor, guess: Seq[int], keeps_q: bool
) -> Tensor:
    """The draft's own tokens at the chain's end and after each guessed token, sampled or greedy.

    Each place in the chain has one random number, so that a guess, which stands if it is what
    was drawn there, changes neither the tokens nor their distribution q.
    """
    sampling, seen_NV = sequence.request.sampling, None
    if sampling.is_penalised:
        before, guess_1K = [*sequence.tokens, *chain.tokens], torch.tensor([guess]).long()
        guess_1K = guess_1K.to(logits_NV.device)
        seen_NV = seen_tokens([before], guess_1K, logits_NV.shape[-1])[0]
    scores_NV = sampling.process(logits_NV, seen_NV)
    if keeps_q or not sampling.is_greedy:
        q_NV = torch.softmax(scores_NV, dim=-1)
        chain.q.extend(q_NV)
    if sampling.is_greedy:
        return scores_NV.argmax(dim=-1)
    uniform_N = sequence.noise(len(chain.tokens) + len(q_NV)).draft[len(chain.tokens) :]
    return draw(q_NV, uniform_N.to(q_NV.device))


def _stacked(parts: list[Tensor]) -> Tensor | None:
    """[K, V]; frees the parts: with a large vocabulary, both at once would be much memory."""
    if not parts:
        return None
    result = torch.stack(parts)
    parts.clear()
    return result
