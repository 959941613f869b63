"""The entropy rule of vllm-ascend (`enable_entropy_verify`, pull request 9772). For requests that
sample.

A token d drafted from q stands if p(d)/q(d) >= u t, with u uniform and t = min(posterior_threshold,
exp(-posterior_alpha H)), H the target's entropy in nats. The token in its place is drawn from
max(0, p - q). Even where H = 0 the default lets in a twentieth more than exact verification. No
distribution is claimed for it. vllm-ascend takes H before top-k and top-p, fly after them, and
verifies greedy requests exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fly.speculation.rules.revised import RevisedRule
from fly.speculation.rules.settings import EntropyRatioSettings


class EntropyRatioRule(RevisedRule):
    requests = "samples"
    settings: EntropyRatioSettings

    def revise(self, p_BKV: Tensor, q_BKV: Tensor, token_BK1: Tensor) -> Tensor:
        """p but for the draft's token: where that is rejected p(d) < q(d), so that it is not in
        what is left of v, either."""
        entropy_BK1 = torch.special.entr(p_BKV).sum(-1, keepdim=True)
        alpha, threshold = self.settings.posterior_alpha, self.settings.posterior_threshold
        bar_BK1 = (-alpha * entropy_BK1).exp().clamp(max=threshold)
        bar_BK1 = bar_BK1.clamp(min=torch.finfo(bar_BK1.dtype).tiny)  # 0 / 0 is no probability
        return p_BKV.scatter(-1, token_BK1, p_BKV.gather(-1, token_BK1) / bar_BK1)
