"""Block verification (arXiv 2403.10444): lossless, and never fewer accepted tokens than token by
token. For requests that sample; greedy ones are verified exactly.

With r_0 = 1 and r_i = min(1, r_{i-1} p(d_i)/q(d_i)), of the draft's first tau tokens stand, tau the
largest i with u_i <= h_i, where h_i = S_i / (S_i + 1 - r_i), S_i = sum max(0, r_i p - q) at the
position after d_i; h_K = r_K. The next token is drawn from max(0, r_tau p - q), after a whole draft
from p. Rejected tokens have decided, too, so their random numbers are not used again.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fly.speculation.rules.exact import ExactRule
from fly.speculation.rules.judged import JudgedDraft, Resolution
from fly.speculation.sampling import Noise, certain, draw, like


class BlockRule(ExactRule):
    def sample(
        self, p_BNV: Tensor, q_BKV: Tensor | None, draft_BK: Tensor, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        k = draft_BK.shape[1]
        q_BKV = certain(draft_BK, p_BNV) if q_BKV is None else like(p_BNV, q_BKV)
        token_BK1, is_there_BK = draft_BK.clamp(min=0)[..., None], draft_BK >= 0
        p_BK, q_BK = (each[:, :k].gather(-1, token_BK1)[..., 0] for each in (p_BNV, q_BKV))
        ratio_BN = p_BNV.new_ones(p_BNV.shape[:2])  # r_0 to r_K
        for i in range(k):
            ratio_BN[:, i + 1] = (ratio_BN[:, i] * p_BK[:, i] / q_BK[:, i]).clamp(max=1)
        # nothing is drafted after a draft's end, so that p itself is left there
        q_BNV = pad(q_BKV * is_there_BK[..., None], (0, 0, 0, 1))
        rest_BNV = (ratio_BN[..., None] * p_BNV - q_BNV).clamp(min=0)
        left_BN = rest_BNV.sum(-1)
        # 0/0: p and q are the same there, so that what follows stands, too
        chance_BK = (left_BN / (left_BN + 1 - ratio_BN)).nan_to_num(1.0)[:, 1:]
        is_last_BK = is_there_BK & ~pad(is_there_BK, (0, 1))[:, 1:]
        chance_BK = torch.where(is_last_BK, ratio_BN[:, 1:], chance_BK)
        passes_BK = (noise.accept < chance_BK) & is_there_BK
        matches_BK = passes_BK.flip(1).cumsum(1).flip(1) > 0
        tau_B1 = matches_BK.sum(1, keepdim=True)
        rest_BV = rest_BNV.take_along_dim(tau_B1[..., None], 1)[:, 0]
        p_BV = p_BNV.take_along_dim(tau_B1[..., None], 1)[:, 0]
        rest_BV = torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BV)
        drawn_B = draw(rest_BV, noise.target.take_along_dim(tau_B1, 1)[:, 0])
        own_BN = pad(token_BK1[..., 0], (0, 1))  # what lies past tau means nothing, but is a token
        return matches_BK, own_BN.scatter(1, tau_B1, drawn_B[:, None])

    def resolve(self, judged: JudgedDraft) -> Resolution:
        return replace(super().resolve(judged), spends_draft=True)
