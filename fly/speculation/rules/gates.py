"""Gates: may a draft token that is not the target's own stand at this position?

Pure functions of the target's distribution and the draft token. M positions, V vocabulary. The
distribution is the one that the target decodes from: after temperature, top-p and the like.
Gates of a rule are combined: all must pass; a rule without gates lets everything in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fly.settings import EntropyKind


class Gate(Protocol):
    """passes(logits_MV, token_M) -> [M] bool. At equality all but TypicalGate's pass."""

    def passes(self, logits_MV: Tensor, token_M: Tensor) -> Tensor: ...


def top_k_entropy(logits: Tensor, k: int) -> Tensor:
    """Entropy of the k largest probabilities, in nats, not renormalised. [..., V] -> [...].

    FLy's gate (arXiv 2511.22972 sec. 3.2; the reference code and vLLM use k = 3).
    """
    logits = logits.float()
    log_p = torch.topk(logits, k, dim=-1).values - torch.logsumexp(logits, dim=-1, keepdim=True)
    return torch.special.entr(log_p.exp()).sum(-1)  # entr(0) = 0: top-p leaves zeros


def full_entropy(logits: Tensor) -> Tensor:
    """Entropy of the whole distribution, in nats. [..., V] -> [...]."""
    return torch.special.entr(torch.softmax(logits.float(), dim=-1)).sum(-1)


def entropy(logits: Tensor, kind: EntropyKind) -> Tensor:
    """The target's uncertainty by name; see FlySettings.entropy_kind. [..., V] -> [...]."""
    if kind == "top3":
        return top_k_entropy(logits, 3)
    nats = full_entropy(logits)
    return nats / math.log(logits.shape[-1]) if kind == "normalized" else nats


@dataclass(frozen=True)
class EntropyGate:
    """The target's entropy is at least `threshold`, in the unit of `kind`. Never sees the token."""

    threshold: float
    kind: EntropyKind = "top3"

    def passes(self, logits_MV: Tensor, token_M: Tensor) -> Tensor:
        return entropy(logits_MV, self.kind) >= self.threshold


@dataclass(frozen=True)
class AnyGate:
    """Every token that the target may say at all (see `all_pass`)."""

    def passes(self, logits_MV: Tensor, token_M: Tensor) -> Tensor:
        return torch.ones_like(token_M, dtype=torch.bool)


@dataclass(frozen=True)
class MarginGate:
    """The target's two largest probabilities differ by at most `threshold` (0 to 1)."""

    threshold: float

    def passes(self, logits_MV: Tensor, token_M: Tensor) -> Tensor:
        logits_MV = logits_MV.float()
        top_M2 = (logits_MV.topk(2).values - logits_MV.logsumexp(-1, keepdim=True)).exp()
        return top_M2[:, 0] - top_M2[:, 1] <= self.threshold


@dataclass(frozen=True)
class RatioGate:
    """The token's target probability is at least `threshold` (0 to 1) of the largest one."""

    threshold: float

    def passes(self, logits_MV: Tensor, token_M: Tensor) -> Tensor:
        logits_MV = logits_MV.float()
        return (values_of(token_M, logits_MV) - logits_MV.amax(-1)).exp() >= self.threshold


@dataclass(frozen=True)
class RankGate:
    """At most `rank - 1` tokens are likelier: rank 2 lets in the second likeliest."""

    rank: int

    def passes(self, logits_MV: Tensor, token_M: Tensor) -> Tensor:
        likelier_M = (logits_MV > values_of(token_M, logits_MV)[:, None]).sum(-1)
        return likelier_M < self.rank


@dataclass(frozen=True)
class DistanceGate:
    """The largest probability exceeds the token's by at most `threshold` (0 to 1).

    With a RankGate: relaxed acceptance of TensorRT-LLM (relaxed_topk, relaxed_delta;
    docs/source/blogs/tech_blog/blog2_DeepSeek_R1_MTP_Implementation_and_Optimization.md).
    """

    threshold: float

    def passes(self, logits_MV: Tensor, token_M: Tensor) -> Tensor:
        p_MV = torch.softmax(logits_MV.float(), dim=-1)
        return p_MV.amax(-1) - values_of(token_M, p_MV) <= self.threshold


@dataclass(frozen=True)
class TypicalGate:
    """p(token) > min(epsilon, delta * exp(-H)), H the full entropy in nats.

    Typical acceptance (Medusa, arXiv 2401.10774 sec. 2.3.1; its code: 0.09 and 0.3).
    """

    epsilon: float
    delta: float

    def passes(self, logits_MV: Tensor, token_M: Tensor) -> Tensor:
        p_MV = torch.softmax(logits_MV.float(), dim=-1)
        bar_M = (self.delta * (-full_entropy(logits_MV)).exp()).clamp(max=self.epsilon)
        return values_of(token_M, p_MV) > bar_M


def all_pass(gates: Sequence[Gate], logits_MV: Tensor, token_M: Tensor) -> Tensor:
    """[M] bool: every gate passes; not for a token that the sampling filters (top-p) exclude."""
    if not gates:
        return torch.ones_like(token_M, dtype=torch.bool)
    logits_MV = logits_MV.float()
    result_M = values_of(token_M, logits_MV) > -math.inf
    for gate in gates:
        result_M &= gate.passes(logits_MV, token_M)
    return result_M


def values_of(token_M: Tensor, values_MV: Tensor) -> Tensor:
    """Each position's value of its own token. [M]."""
    return values_MV.gather(-1, token_M.clamp(min=0)[:, None])[:, 0]
