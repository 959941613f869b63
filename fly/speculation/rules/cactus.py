"""Cactus, constrained acceptance (arXiv 2604.04987, ICLR 2026). For requests that sample.

A token d drafted from q is verified against h: h(d) = min(1, p(d) + sqrt(2 delta p(d) (1 - p(d)))),
every other token's p scaled to the rest. It stands with probability min(1, h(d)/q(d)); the one in
its place is drawn from max(0, h - q). delta bounds the divergence KL(h, p) to second order; 0 is
exact verification. (The paper calls the target's distribution q and the draft's p.)
"""

from __future__ import annotations

from torch import Tensor

from fly.speculation.rules.revised import RevisedRule, replace_token
from fly.speculation.rules.settings import CactusSettings


class CactusRule(RevisedRule):
    requests = "samples"
    settings: CactusSettings

    def revise(self, p_BKV: Tensor, q_BKV: Tensor, token_BK1: Tensor) -> Tensor:
        p_BK1 = p_BKV.gather(-1, token_BK1)
        delta = self.settings.cactus_delta
        bonus_BK1 = (2 * delta * p_BK1 * (1 - p_BK1)).clamp(min=0).sqrt()
        return replace_token(p_BKV, token_BK1, (p_BK1 + bonus_BK1).clamp(max=1))
