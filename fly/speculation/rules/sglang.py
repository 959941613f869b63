"""SGLang's acceptance thresholds (`--speculative-accept-threshold-single` and `-acc`, in its kernel
TreeSpeculativeSamplingTargetOnly). For requests that sample.

A draft token d stands if p(d) >= threshold_single or u <= p(d)/threshold_acc, with u uniform;
another token is drawn from p without d. The draft's q is not asked, so with both thresholds at 1
the output is the target's own, with fewer accepted tokens than by exact verification. In SGLang
p(d) adds up over the siblings of a tree; fly drafts chains. It verifies greedy requests exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fly.speculation.rules.revised import RevisedRule, replace_token
from fly.speculation.rules.settings import SglangSettings
from fly.speculation.sampling import Noise, certain


class SglangRule(RevisedRule):
    requests = "samples"
    settings: SglangSettings

    def judge(
        self, p_BNV: Tensor, q_BKV: Tensor, draft_BK: Tensor, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        return super().judge(p_BNV, certain(draft_BK, p_BNV), draft_BK, noise)

    def revise(self, p_BKV: Tensor, q_BKV: Tensor, token_BK1: Tensor) -> Tensor:
        single = self.settings.speculative_accept_threshold_single
        accumulated = self.settings.speculative_accept_threshold_acc
        p_BK1 = p_BKV.gather(-1, token_BK1)
        chance_BK1 = (p_BK1 / max(accumulated, 1e-9)).clamp(max=1)
        chance_BK1 = torch.where(p_BK1 >= single, 1.0, chance_BK1)
        return replace_token(p_BKV, token_BK1, chance_BK1)
