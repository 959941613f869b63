"""Block heads (DFlash, DSpark): a whole draft from one pass over the target's hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from fly.errors import FlyError
from fly.execution.cuda_graphs import Drafted
from fly.execution.heads.block import BlockRunner
from fly.speculation.drafters.base import Drafter, DrafterContext
from fly.speculation.drafters.draft import Draft, HostDraft
from fly.speculation.drafters.draft_model import DraftSampler
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
        self._eos = torch.tensor(sorted(eos_ids), dtype=torch.long, device=runner.device)
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
        limits = [min(limit, room) for limit, room in zip(limits, rooms)]
        if not (steps := max(limits)):
            return HostDraft([[] for _ in running])
        last = [sequence.tokens[-1] for sequence in running]
        sampler = DraftSampler(running, limits, self._eos, self.keeps_q)
        states_BKD = self.runner.draft(last)[:, :steps]
        logits_BKD = self.runner.logits(states_BKD)
        before_B = torch.tensor(last).to(self._eos.device, non_blocking=True)
        drafted, is_sure = list[Drafted](), list[Tensor]()
        for step in range(steps):
            if self._confidence is not None:
                confidence_B = self.runner.confidence(states_BKD[:, step], before_B)
                is_sure.append(confidence_B >= self._confidence)
            logits_BV = self.runner.after(logits_BKD[:, step], before_B)
            drafted.append(sampler(logits_BV, step, *sampler.inputs))
            before_B = drafted[-1].tokens.clamp(min=0)
        is_sure_BK = torch.stack(is_sure, dim=1) if is_sure else None
        return sampler.draft(Drafted.together(drafted), is_sure_BK)

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
