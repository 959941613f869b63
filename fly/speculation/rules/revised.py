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
        self, p_BNV: Tensor, q_BKV: Tensor, draft_BK: Tensor, noise: Noise | None
    ) -> tuple[Tensor, Tensor]:
        k = draft_BK.shape[1]
        p_BKV, token_BK1 = p_BNV[:, :k], draft_BK.clamp(min=0)[..., None]
        v_BNV = torch.cat([self.revise(p_BKV, q_BKV, token_BK1), p_BNV[:, k:]], dim=1)
        # past a draft's end, too, the target's own token follows
        is_past_BN1 = torch.nn.functional.pad(draft_BK < 0, (0, 1))[..., None]
        v_BNV = torch.where(is_past_BN1, p_BNV, v_BNV)
        if noise is None:
            own_BN = v_BNV.argmax(dim=-1)
            return draft_BK == own_BN[:, :k], own_BN
        return rejection_sample(v_BNV, q_BKV, draft_BK, noise)


def replace_token(p_BKV: Tensor, token_BK1: Tensor, value_BK1: Tensor) -> Tensor:
    """p with another probability of the draft's token; the rest is scaled to what is left."""
    p_token_BK1 = p_BKV.gather(-1, token_BK1)
    rest_BK1 = 1 - p_token_BK1
    scale_BK1 = torch.where(rest_BK1 > 0, (1 - value_BK1) / rest_BK1, 1.0)
    return (p_BKV * scale_BK1).scatter(-1, token_BK1, value_BK1)
