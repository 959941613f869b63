"""The most probable token, fast on CPUs.

A float32 copy of the logits of a batched verification is larger than what the allocator keeps, so
every pass would fault its pages in again, and argmax in bfloat16 is slow. Block maxima are fast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BLOCK = 128


class NotFiniteError(ArithmeticError):
    """Logits are NaN or infinite. role: target or draft. at: tokens of the request's output so
    far."""

    def __init__(self, role: str, request: Any, at: int) -> None:
        super().__init__(f"the {role}'s logits are not finite after {at} tokens")
        self.role, self.request, self.at = role, request, at


def mask_nonfinite(tokens: Tensor, logits: Tensor) -> Tensor:
    """The tokens [...] taken from logits [..., V], or -1 where these were not finite.

    Only the tokens' own logits are read: argmax takes a NaN for the largest, and a draw from
    probabilities that are NaN ends past the vocabulary.
    """
    inside = tokens.clamp(max=logits.shape[-1] - 1)
    is_finite = logits.gather(-1, inside[..., None])[..., 0].isfinite()
    return tokens.masked_fill(~is_finite | (tokens != inside), -1)


def greedy(logits: Tensor) -> Tensor:
    """Index of each row's largest logit, the first one of equals. [..., V] -> [...]."""
    vocabulary = logits.shape[-1]
    if logits.device.type != "cpu" or logits.dtype == torch.float32 or vocabulary % _BLOCK:
        return logits.float().argmax(dim=-1)
    blocks_MNV = logits.reshape(-1, vocabulary // _BLOCK, _BLOCK)
    best_M = blocks_MNV.amax(dim=-1).float().argmax(dim=-1)
    rows_M = torch.arange(len(best_M))
    within_M = blocks_MNV[rows_M, best_M].float().argmax(dim=-1)
    return (best_M * _BLOCK + within_M).view(logits.shape[:-1])
