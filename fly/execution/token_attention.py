"""Attention in passes whose rows are tokens, each with the slot of its own sequence.

A token's sums go over its keys in blocks at fixed places, so that their bits depend neither on the
length of the cache nor on what else is in the pass. On GPUs a Triton kernel reads the cache in
place (fly/execution/triton_attention.py). Where it does not work, PyTorch's products gather every
token's blocks of keys first, which takes several times as long as reading the weights at longer
contexts.

Shapes: T tokens, H query heads, G query heads per K/V head, S slots, C capacity, R readable keys, D
head size.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from fly.errors import reason_of
from fly.execution.grouped_attention import EXTRAS, use_attention
from fly.execution.oom import is_out_of_memory

logger = logging.getLogger(__name__)

BLOCK = 256  # keys whose sums are added up together; changing it changes texts
_NAME = "fly_tokens"
_WHERE: ContextVar[tuple[Tensor, Tensor]] = ContextVar("slots and positions of the tokens, [T]")


@contextmanager
def of_tokens(model: PreTrainedModel, slots_T: Tensor, positions_T: Tensor) -> Iterator[None]:
    """Within the block, `model` attends by `token_attention` for tokens of these places."""
    token = _WHERE.set((slots_T, positions_T))
    try:
        with use_attention(model, _NAME):
            yield
    finally:
        _WHERE.reset(token)


def token_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [T, H, 1, D], all of a layer's key and value [S, H/G, C, D], additive mask
    [T, 1, 1, R], R a multiple of BLOCK. Scores and sums are float32, or float64 if the model is.

    Returns [T, 1, H, D], as transformers' attention functions do.
    """
    for name in EXTRAS:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name} cannot be computed in blocks")
    slots_T, positions_T = (where.to(key.device) for where in _WHERE.get())
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if reads_in_place(query.device, query.dtype):
        try:
            kernel = _triton().attention
            return kernel(query[:, :, 0], key, value, slots_T, positions_T, scaling)[:, None], None
        except Exception as error:  # a compiler's errors are of any kind
            if is_out_of_memory(error):
                raise
            _give_up(reason_of(error))
    return _in_blocks(query[:, :, 0], key, value, attention_mask, slots_T, scaling)[:, None], None


def _in_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, slots_T: Tensor, scaling: float
) -> Tensor:
    """By PyTorch's products: query [T, H, D]; returns [T, H, D]."""
    assert mask.shape[-1] % BLOCK == 0, "a part of a block would be added up otherwise"
    dtype, (tokens, heads, size) = query.dtype, query.shape
    wide = torch.promote_types(dtype, torch.float32)
    kv_heads = key.shape[1]
    query = query.reshape(tokens, kv_heads, heads // kv_heads, size).to(wide) * scaling
    highest = query.new_full((*query.shape[:3], 1), -torch.inf)
    whole = torch.zeros_like(highest)
    mixed = query.new_zeros(*query.shape[:3], value.shape[-1])
    for start in range(0, mask.shape[-1], BLOCK):
        block = slice(start, start + BLOCK)
        keys = key[:, :, block][slots_T].to(wide)
        scores = query @ keys.mT + mask[..., block]
        del keys
        new_highest = torch.maximum(highest, scores.amax(dim=-1, keepdim=True))
        # of a block that is hidden from a token: weights are 0 and what came before is kept whole
        weights, kept = (scores - new_highest).exp(), (highest - new_highest).exp()
        # what lies past a sequence's end was written by others, and may even be infinite
        is_hidden = mask[..., block].mT < 0
        values = value[:, :, block][slots_T].to(wide).masked_fill_(is_hidden, 0.0)
        whole = whole * kept + weights.sum(dim=-1, keepdim=True)
        mixed = mixed * kept + weights @ values
        highest = new_highest
        del values
    return (mixed / whole).to(dtype).reshape(tokens, heads, -1)


AttentionInterface.register(_NAME, token_attention)


def reads_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the Triton kernel serves there, so that no pass's cost depends on the mask."""
    if device.type != "cuda" or dtype == torch.float64 or _failures:
        return False
    try:
        _triton()
    except ImportError as error:
        _give_up(reason_of(error))
    return not _failures


@functools.cache
def _triton() -> Any:
    return import_module("fly.execution.triton_attention")


_failures: list[str] = []  # why the kernel is not used in this process


def _give_up(reason: str) -> None:
    _failures.append(reason)
    logger.warning(
        "batch_invariant: attention by PyTorch's products, which is slow at longer contexts: "
        "Triton: %s",
        reason,
    )
