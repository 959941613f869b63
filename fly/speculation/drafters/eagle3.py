"""An EAGLE-3 head of the target.

It reads pairs of a token and the target's features at the token before (see
fly/execution/heads/eagle3.py). A round's first pass feeds it the pairs of the tokens that the last
round added, with true features, and gives the first draft token; every further token takes a pass
over that token and the head's own state, which is forgotten when the round is decided.

Shapes: F features of a token, H the head's hidden size, M states that are kept, D draft ids, V
target ids.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fly.execution.cuda_graphs import Drafted
from fly.execution.heads.eagle3 import Eagle3Runner
from fly.models.draft_vocabulary import DraftVocabulary
from fly.speculation.drafters.base import Drafter, DrafterContext
from fly.speculation.drafters.draft import Draft, HostDraft
from fly.speculation.drafters.draft_model import CATCH_UP, DraftSampler
from fly.speculation.sequence import Sequence, Verdict


@dataclass
class TrueStates:
    """What is known of a sequence."""

    # the projected features of its tokens from `first` on; earlier ones cannot be needed again
    states_MH: Tensor
    first: int = 0
    fed: int = 0  # how many pairs with true features the head's cache holds

    @property
    def end(self) -> int:
        """How many of the sequence's tokens have features: all but the last, after a round."""
        return self.first + len(self.states_MH)

    def unfed(self, tokens: list[int]) -> tuple[list[int], Tensor]:
        """The pairs that the head has not been fed: their tokens, and their states."""
        return tokens[self.fed + 1 : self.end + 1], self.states_MH[self.fed - self.first :]


class Eagle3Drafter(Drafter):
    """Chains from an EAGLE-3 head, greedy or sampled as the request says; none past EOS."""

    runner: Eagle3Runner

    @classmethod
    def create(cls, context: DrafterContext) -> Drafter:
        return cls(context.draft_runner, context.eos_ids)

    def __init__(self, runner: Eagle3Runner, eos_ids: frozenset[int]) -> None:
        self.runner = runner
        self.wants_features = runner.head.layers_read
        self._vocabulary: DraftVocabulary = runner.head.vocabulary.to(runner.device)
        self._eos = torch.tensor(sorted(eos_ids), dtype=torch.long, device=runner.device)
        self._known: WeakKeyDictionary[Sequence, TrueStates] = WeakKeyDictionary()

    def admit(
        self, slot: int, sequence: Sequence, features: Tensor | None = None, *, soon: bool = True
    ) -> None:
        assert features is not None
        self.runner.truncate(slot, 0)
        self._known[sequence] = known = TrueStates(self.runner.project(features[0]))
        if soon:
            self._catch_up(slot, known, sequence)

    def _catch_up(self, slot: int, known: TrueStates, sequence: Sequence) -> None:
        """Feed all true pairs but the last, whose pass predicts, and keep no state in vain."""
        tokens, states_QH = known.unfed(sequence.tokens)
        is_prompt = known.fed == 0  # at admission, or put off then
        with self.prefilling(sequence) if is_prompt else nullcontext():
            self.runner.catch_up(slot, tokens[:-1], states_QH[:-1])
        known.fed += max(0, len(tokens) - 1)
        self._forget(known, sequence)

    def _forget(self, known: TrueStates, sequence: Sequence) -> None:
        """Drop states that are fed and cannot be rolled back to: a rollback replaces a token that
        is not final, whose pair takes the state of the token before."""
        least = max(known.first, min(known.fed, sequence.final_length - 1))
        known.states_MH = known.states_MH[least - known.first :].clone()
        known.first = least

    def propose(self, running: list[Sequence], limits: list[int]) -> Draft:
        limits = [self._limit(sequence, limit) for sequence, limit in zip(running, limits)]
        if not (steps := max(limits)):
            return HostDraft([[] for _ in running])
        sampler = DraftSampler(running, limits, self._eos, self.keeps_q)
        drafted = list[Drafted]()
        logits_BD, states_BH = self.runner.extend(*self._true_pairs(running, limits))
        ended_B = torch.zeros(len(running), dtype=torch.bool, device=self._eos.device)
        for step in range(steps):
            if step:
                fed_B, stay = drafted[-1].tokens.clamp(min=0), [limit > step for limit in limits]
                logits_BD, states_BH = self.runner.extend_ids(fed_B, states_BH, stay)
            logits_BV = self._vocabulary.spread_logits(logits_BD)
            drafted.append(sampler(logits_BV, step, *sampler.inputs))
            if self._eos.device.type == "cpu":  # an accelerator would have to be waited for
                ended_B |= torch.isin(drafted[-1].tokens, self._eos)
                if all(limit <= step + 1 or end for limit, end in zip(limits, ended_B.tolist())):
                    break
        return sampler.draft(Drafted.together(drafted))

    def _limit(self, sequence: Sequence, limit: int) -> int:
        """Nothing is drafted after a text's first token, before which no features are."""
        left = self.runner.max_length - len(sequence.tokens)
        return min(limit, max(0, left)) if self._known[sequence].end else 0

    def _true_pairs(
        self, running: list[Sequence], limits: list[int]
    ) -> tuple[list[list[int]], list[Tensor]]:
        """What sequences that are drafted for have not been fed, at least one pair of each."""
        tokens, states = list[list[int]](), list[Tensor]()
        for slot, (sequence, limit) in enumerate(zip(running, limits)):
            known = self._known[sequence]
            if limit and known.end - known.fed > CATCH_UP:
                self._catch_up(slot, known, sequence)
            fed, states_QH = known.unfed(sequence.tokens)
            tokens.append(fed if limit else [])
            states.append(states_QH[: len(tokens[slot])])
            known.fed += len(tokens[slot])
        return tokens, states

    def commit(
        self, running: list[Sequence], verdicts: list[Verdict], features: Tensor | None = None
    ) -> None:
        assert features is not None
        for slot, (sequence, new_QH) in enumerate(zip(running, self.runner.project(features))):
            known = self._known[sequence]
            wanted = len(sequence.tokens) - 1
            if wanted > known.end:
                new_QH = new_QH[: wanted - known.end]
                known.states_MH = torch.cat([known.states_MH, new_QH])
            else:  # an earlier deferral was rolled back
                known.states_MH = known.states_MH[: wanted - known.first]
            # the last token was not there when its place in the cache was filled
            known.fed = min(known.fed, max(0, wanted - 1))
            self.runner.truncate(slot, known.fed)
            self._forget(known, sequence)
            if known.end - known.fed > 8 * CATCH_UP:  # nothing is drafted for it, for now
                self._catch_up(slot, known, sequence)

    def resize(self, slots: int) -> None:
        super().resize(slots)
        self._known.clear()
