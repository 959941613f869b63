"""Speculative cascades, token-specific rule TokenV3 (arXiv 2405.19261, sections 4.4 and 5).

T = {v: p(v) >= (1 - alpha) max p} are the tokens that the draft is trusted with. Drafts are
verified against v(x) = q(x) [x in T] + p(x) (1 - q(T)): tokens of T stand always, others with
probability min(1, v/q), which is less than exact verification's min(1, p/q).

The paper's "exact rule" outside of T is this v, not p. A greedy draft is all on its token: it
stands in T, and outside of T if it is the target's likeliest.
"""

from __future__ import annotations

from torch import Tensor

from fly.speculation.rules.gates import RatioGate
from fly.speculation.rules.revised import RevisedRule
from fly.speculation.rules.settings import CascadeSettings


class CascadeRule(RevisedRule):
    def __init__(self, settings: CascadeSettings) -> None:
        self.alpha = settings.cascade_alpha
        self.gates = (RatioGate(1 - self.alpha),)  # of greedy requests

    def revise(self, p_BKV: Tensor, q_BKV: Tensor, token_BK1: Tensor) -> Tensor:
        is_trusted_BKV = p_BKV >= (1 - self.alpha) * p_BKV.amax(dim=-1, keepdim=True)
        trusted_BKV = q_BKV * is_trusted_BKV
        return trusted_BKV + p_BKV * (1 - trusted_BKV.sum(-1, keepdim=True)).clamp(min=0)
