"""Fuzzy speculative decoding (arXiv 2502.20704), its reduced form: what exact verification rejects
stands, too, where p and q differ by at most a threshold.

So drafts are verified against v = q where div(p, q) <= T, else against p. `fsd_div_type`, as in its
code: kl_div = sum q ln(q/p), kl_div_reversed = sum p ln(p/q), js_div and tv_div. Where code and
paper part: its js_div is the mean of KL(m, p) and KL(m, q), m the mean of p and q, not the
Jensen-Shannon divergence (the means of KL(p, m) and KL(q, m)), which is what this one computes; its
author says that the published "JS" numbers are of reverse KL. It takes p and q before temperature
and filters, this rule after them (for greedy requests there are none); it accepts by the divergence
alone, and draws from p after a rejection.

Drafts from texts have no q and are verified exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fly.speculation.rules.revised import RevisedRule
from fly.speculation.rules.settings import FsdSettings

_NEGLIGIBLE = 1e-12  # of a probability: below it, what the other gives may be 0 by rounding alone


class FsdRule(RevisedRule):
    judges = "all"
    settings: FsdSettings

    def revise(self, p_BKV: Tensor, q_BKV: Tensor, token_BK1: Tensor) -> Tensor:
        div_BK = divergence(p_BKV, q_BKV, self.settings.fsd_div_type)
        is_close_BK = div_BK <= self.settings.fsd_div_threshold
        always_BKV = q_BKV.scatter(-1, token_BK1, 1.0)  # whatever q gave is what follows then
        return torch.where(is_close_BK[..., None], always_BKV, p_BKV)


def divergence(p: Tensor, q: Tensor, kind: str) -> Tensor:
    """Of distributions over the last axis, in nats but for tv_div (0 to 1)."""
    if kind == "tv_div":
        return (p - q).abs().sum(-1) / 2
    if kind == "js_div":
        mean = (p + q) / 2
        return (_relative_entropy(p, mean) + _relative_entropy(q, mean)) / 2
    return _relative_entropy(q, p) if kind == "kl_div" else _relative_entropy(p, q)


def _relative_entropy(p: Tensor, q: Tensor) -> Tensor:
    """KL(p, q) over what p has; infinite where q leaves that out."""
    return torch.where(p > _NEGLIGIBLE, p * (p.log() - q.log()), 0.0).sum(-1)
