"""Verification rules: which draft tokens stand. Pure batched functions, no model, no state.

Shapes: B rows, K draft positions (padded), V vocabulary. Position j (1-based in the texts, 0-based
in the tensors) is judged by the target's distribution before it, p_{j-1}.

native match   d_j equals the target's own choice.
deferred       a native mismatch that the entropy gate lets wait for its window.
stood          a deferred mismatch whose next W draft tokens are all native matches: accepted.
rolled back    a deferred mismatch whose window met a native mismatch: rejected after all.
correction     the target's own token at the first rejection; bonus: its token after K acceptances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EntropyKind = Literal["top3", "full", "normalized"]


@dataclass(frozen=True)
class Relaxation:
    """FLy's loose verification within a round (arXiv 2511.22972, section 3.2).

    window: W, how many following draft tokens must all be native matches; 0 is no window.
    threshold: theta, the entropy from which on a mismatch may be deferred (gate passes at
        equality), in the unit of `entropy`; None switches the gate off.
    """

    window: int
    threshold: float | None
    entropy: EntropyKind = "top3"


@dataclass(frozen=True)
class Verdict:
    """accepted_B: leading draft tokens that stand. next_token_B: correction or bonus.

    native_BK: native matches, everywhere. stood_BK, rolled_back_BK: see the module's text; both
    are False past the first rejection.
    """

    accepted_B: Tensor
    next_token_B: Tensor
    native_BK: Tensor
    stood_BK: Tensor
    rolled_back_BK: Tensor


def top_k_entropy(logits: Tensor, k: int) -> Tensor:
    """Entropy of the k largest probabilities, in nats, not renormalised. [..., V] -> [...].

    FLy's gate (arXiv 2511.22972 sec. 3.2; the reference code and vLLM use k = 3).
    Raises ValueError if k exceeds the vocabulary.
    """
    if k > logits.shape[-1]:
        raise ValueError(f"k={k} exceeds the vocabulary of {logits.shape[-1]}")
    logits = logits.float()
    log_p = torch.topk(logits, k, dim=-1).values - torch.logsumexp(logits, dim=-1, keepdim=True)
    return -(log_p.exp() * log_p).sum(-1)


def full_entropy(logits: Tensor) -> Tensor:
    """Entropy of the whole distribution, in nats. [..., V] -> [...]."""
    return torch.special.entr(torch.softmax(logits.float(), dim=-1)).sum(-1)


def entropy(logits: Tensor, kind: EntropyKind) -> Tensor:
    """The gate's uncertainty measure by name; see FlyConfig.entropy_kind. [..., V] -> [...]."""
    if kind == "top3":
        return top_k_entropy(logits, 3)
    nats = full_entropy(logits)
    return nats / math.log(logits.shape[-1]) if kind == "normalized" else nats


def verify_greedy(
    draft_BK: Tensor, length_B: Tensor, logits_BKV: Tensor, relaxation: Relaxation | None
) -> Verdict:
    """Judge greedy drafts. `draft_BK` is padded past `length_B`; logits hold K+1 positions.

    relaxation None is exact match: the output is the target's own greedy continuation.
    """
    k = draft_BK.shape[1]
    choice_BK1 = logits_BKV.float().argmax(dim=-1)  # bfloat16 argmax is slow on CPUs
    valid_BK = torch.arange(k, device=draft_BK.device) < length_B[:, None]
    native_BK = (draft_BK == choice_BK1[:, :k]) & valid_BK
    deferred_BK = torch.zeros_like(native_BK)
    stands_BK = native_BK
    if relaxation is not None and k > 0:
        fits_BK = _window_fits(length_B, k, relaxation.window)
        deferred_BK = _gate(logits_BKV[:, :k], valid_BK & fits_BK & ~native_BK, relaxation)
        stands_BK = native_BK | (deferred_BK & _window_holds(native_BK, relaxation.window))
    accepted_BK = stands_BK.long().cumprod(dim=1).bool()
    accepted_B = accepted_BK.sum(dim=1)
    first_rejected_BK = torch.arange(k, device=draft_BK.device) == accepted_B[:, None]
    return Verdict(
        accepted_B=accepted_B,
        next_token_B=choice_BK1.gather(1, accepted_B[:, None])[:, 0],
        native_BK=native_BK,
        stood_BK=accepted_BK & ~native_BK,
        rolled_back_BK=first_rejected_BK & deferred_BK,
    )


def _gate(logits_BKV: Tensor, candidates_BK: Tensor, relaxation: Relaxation) -> Tensor:
    """Candidates whose entropy reaches the threshold.

    On a CPU only their rows of logits are read; on an accelerator picking them would make the
    host wait.
    """
    if relaxation.threshold is None:
        return candidates_BK
    if logits_BKV.device.type != "cpu":
        return _gate_everywhere(logits_BKV, candidates_BK, relaxation)
    passed_BK = torch.zeros_like(candidates_BK)
    entropy_M = entropy(logits_BKV[candidates_BK], relaxation.entropy)
    passed_BK[candidates_BK] = entropy_M >= relaxation.threshold
    return passed_BK


def _gate_everywhere(logits_BKV: Tensor, candidates_BK: Tensor, relaxation: Relaxation) -> Tensor:
    """`_gate` from every position's entropy: nothing depends on how many candidates there are."""
    assert relaxation.threshold is not None
    return candidates_BK & (entropy(logits_BKV, relaxation.entropy) >= relaxation.threshold)


def _window_fits(length_B: Tensor, k: int, window: int) -> Tensor:
    """j + W <= the row's own draft length: the window lies within this round. [B, K]."""
    position_K = torch.arange(1, k + 1, device=length_B.device)
    return position_K + window <= length_B[:, None]


def _window_holds(native_BK: Tensor, window: int) -> Tensor:
    """Whether the `window` positions after each one are all native matches. [B, K]."""
    k = native_BK.shape[1]
    count_BK1 = torch.nn.functional.pad(native_BK.long().cumsum(dim=1), (1, 0))
    after_K = torch.arange(1, k + 1, device=native_BK.device)
    end_K = (after_K + window).clamp(max=k)
    return count_BK1[:, end_K] - count_BK1[:, after_K] == window
