"""Rules that verify a draft against another distribution than the target's.

Rejection sampling keeps the distribution that it verifies against, whatever drafts. A rule that
gives it v in the place of the target's p decodes from v, and accepts more where v is closer to the
draft's q. Shapes: B sequences, K draft tokens, N = K + 1 positions, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fly.speculation.rules.base import Rule
from fly.speculation.rules.gates import Gate
from fly.speculation.sampling import Noise, rejection_sample


class RevisedRule(Rule):
    """Only what a rule revises is its own; sampling and the recovered tokens are as ever."""

    decides_alone = False
    gates: tuple[Gate, ...] | None = None
    judges: Literal["none", "samples", "all"] = "samples"

    def revise(self, p_BKV: Tensor, q_BKV: Tensor, token_BK1: Tensor) -> Tensor:
        """v, which need not be normalised. token_BK1: the draft's."""
        raise NotImplementedError

    def judge(
        self, p_BNV: Tensor, q_BKV: Tensor, draft_BK: Tensor, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        k = draft_BK.shape[1]
        p_BKV, token_BK1 = p_BNV[:, :k], draft_BK.clamp(min=0)[..., None]
        v_BNV = torch.cat([self.revise(p_BKV, q_BKV, token_BK1), p_BNV[:, k:]], dim=1)
        # past a draft's end, too, the target's own token follows
        is_past_BN1 = torch.nn.functional.pad(draft_BK < 0, (0, 1))[..., None]
        v_BNV = torch.where(is_past_BN1, p_BNV, v_BNV)
        return rejection_sample(v_BNV, q_BKV, draft_BK, noise)

    def judge_greedy(
        self, scores_BNV: Tensor, q_BKV: Tensor, draft_BK: Tensor, target_BN: Tensor
    ) -> tuple[Tensor, Tensor]:
        k, own_BN = draft_BK.shape[1], target_BN.clone()
        own_BK = own_BN[:, :k]  # a view
        # a token that is the likeliest of p and of q is v's, too
        is_asked_BK = (draft_BK >= 0) & (draft_BK != own_BK)

        def revised(scores: Tensor, q: Tensor, token: Tensor) -> Tensor:
            p = torch.softmax(scores, dim=-1)
            return self.revise(p, q, token.clamp(min=0)[..., None]).argmax(dim=-1)

        if own_BN.device.type == "cpu":
            asked = (part[is_asked_BK] for part in (scores_BNV[:, :k], q_BKV, draft_BK))
            own_BK[is_asked_BK] = revised(*asked)
        else:  # picking would make the host wait
            v_BK = revised(scores_BNV[:, :k], q_BKV, draft_BK)
            own_BK.copy_(torch.where(is_asked_BK, v_BK, own_BK))
        return draft_BK == own_BK, own_BN


def replace_token(p_BKV: Tensor, token_BK1: Tensor, value_BK1: Tensor) -> Tensor:
    """p with another probability of the draft's token; the rest is scaled to what is left."""
    p_token_BK1 = p_BKV.gather(-1, token_BK1)
    rest_BK1 = 1 - p_token_BK1
    scale_BK1 = torch.where(rest_BK1 > 0, (1 - value_BK1) / rest_BK1, 1.0)
    return (p_BKV * scale_BK1).scatter(-1, token_BK1, value_BK1)
