"""Block heads (DFlash, DSpark): a whole draft from one pass over the target's hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from fly.errors import FlyError
from fly.execution.heads.block import BlockRunner
from fly.speculation.drafters.base import Drafter, DrafterContext
from fly.speculation.drafters.draft import Draft
from fly.speculation.drafters.draft_model import Chain, draft_of, lengthen
from fly.speculation.sequence import Sequence, Verdict


class BlockDrafter(Drafter):
    """Drafts from a block head, greedily or drawn as the request says, until EOS.

    Without a Markov head every token is drawn on its own, by what its position of the block says;
    with one, each follows from the token drawn before it, too. confidence: a draft ends before the
    first token to which the head's confidence gives less; None for whole drafts. It looks at no
    token that it decides on, so that rejection sampling stays lossless.
    """

    runner: BlockRunner

    @classmethod
    def create(cls, context: DrafterContext) -> Drafter:
        runner: BlockRunner = context.draft_runner
        runner.spec.check_drafts(context.settings.spd_k)
        confidence = context.settings.confidence_thre
        if confidence is not None and runner.spec.confidence is None:
            raise FlyError(
                f"confidence_thre={confidence}: this head has no confidence head: leave it out"
            )
        return cls(runner, context.eos_ids, confidence)

    def __init__(
        self, runner: BlockRunner, eos_ids: frozenset[int], confidence: float | None = None
    ) -> None:
        self.runner = runner
        self.wants_features = runner.spec.layers
        self.devices = (runner.device,)
        self._eos_ids = eos_ids
        self._confidence = confidence

    def reserve(self, longest: int, spd_k: int) -> None:
        self.runner.reserve(longest + self.runner.spec.block_size)

    def admit(
        self, slot: int, sequence: Sequence, features: Tensor | None = None, *, soon: bool = True
    ) -> None:
        assert features is not None
        self.runner.lengths[slot] = 0
        self.runner.extend(slot, features, [features.shape[1]])

    def propose(self, running: list[Sequence], limits: list[int]) -> Draft:
        # the head has learned no positions past its own context; the target goes on alone there
        rooms = [max(0, self.runner.max_length - len(s.tokens)) for s in running]
        chains = [Chain(min(limit, room)) for limit, room in zip(limits, rooms)]
        if any(chain.is_open for chain in chains):
            states_BKD = self.runner.draft([s.tokens[-1] for s in running])
            states_BKD = states_BKD[:, : max(chain.limit for chain in chains)]
            logits_BKD = self.runner.logits(states_BKD)
            for states_BD, logits_BD in zip(states_BKD.unbind(dim=1), logits_BKD.unbind(dim=1)):
                self._lengthen(running, chains, states_BD, logits_BD)
        return draft_of(chains)

    def _lengthen(
        self, running: list[Sequence], chains: list[Chain], states_BD: Tensor, logits_BD: Tensor
    ) -> None:
        ends = [(chain.tokens or s.tokens)[-1] for s, chain in zip(running, chains)]
        before_B = torch.tensor(ends, device=states_BD.device)
        if self._confidence is not None:
            sure = self.runner.confidence(states_BD, before_B).tolist()
            for chain, probability in zip(chains, sure):
                chain.ended = chain.ended or probability < self._confidence
        lengthen(running, chains, self.runner.after(logits_BD, before_B), self._eos_ids)

    def commit(
        self, running: list[Sequence], verdicts: list[Verdict], features: Tensor | None = None
    ) -> None:
        assert features is not None
        lengths, counts = self.runner.lengths, []
        for slot, sequence in enumerate(running):
            known = len(sequence.tokens) - 1
            counts.append(max(0, known - lengths[slot]))
            lengths[slot] = min(lengths[slot], known)
        self.runner.extend(0, features, counts)
