"""Attention of ragged passes without copying grouped key/value heads.

transformers repeats the K/V heads of grouped-query models whenever a mask is given. With a cache
this is the largest copy of a pass, and grows with sequences and context. Here the query heads of a
group become query positions of their shared K/V head: the same products, without a copy.

Shapes: B sequences, H query heads, G query heads per K/V head, Q new tokens, T readable tokens, D
head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "fly_grouped"
_WIDE = 64  # on GPUs wider passes (prefill) repeat heads: there the mask would be the larger copy
_SEVERAL = 16  # query positions per K/V head; with fewer, sdpa is faster
_MOST_SCORES = 1 << 22  # more do not fit into the CPU's cache
EXTRAS = ("position_bias", "softcap", "s_aux", "cache")  # left to transformers' sdpa


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, H, Q, D], key and value [B, H/G, T, D], additive mask [B, 1, Q, T].

    Returns [B, Q, H, D], as transformers' attention functions do.
    """
    rows, heads, width, size = query.shape
    kv_heads = key.shape[1]
    copies_much = query.device.type != "cpu" and width > _WIDE
    has_extras = any(kwargs.get(name) is not None for name in EXTRAS)
    if attention_mask is None or attention_mask.shape[1] > 1 or copies_much or has_extras:
        output: Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )[0]
        return output, None
    group = heads // kv_heads
    if group > 1:
        query = query.reshape(rows, kv_heads, group * width, size)
        if width > 1:
            attention_mask = attention_mask.repeat(1, 1, group, 1)
        else:
            attention_mask = attention_mask.expand(-1, -1, group, -1)
    if _as_products(query, key) and not dropout and scaling is not None:
        output = _products(query, key, value, attention_mask, scaling)
    else:
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
        )
    output = output.reshape(rows, heads, width, value.shape[-1])
    return output.transpose(1, 2).contiguous(), None


def _as_products(query: Tensor, key: Tensor) -> bool:
    """Whether whole products beat sdpa's blocks: bfloat16 on a CPU, over scores that stay small."""
    rows, heads, width, _ = query.shape
    scores = rows * heads * width * key.shape[2]
    is_bf16_on_cpu = query.device.type == "cpu" and query.dtype == torch.bfloat16
    return is_bf16_on_cpu and width >= _SEVERAL and scores <= _MOST_SCORES


def _products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Attention as two batched products; scores and softmax in float32, as in sdpa's kernel.

    query [B, H, Q, D], key and value [B, H, T, D], additive mask [B, 1, Q, T]. [B, H, Q, D].
    """
    scores_BHQT = torch.matmul(query.float().mul_(scaling), key.float().transpose(2, 3))
    weights_BHQT = scores_BHQT.add_(mask).softmax(dim=-1).to(value.dtype)
    return torch.matmul(weights_BHQT, value)


AttentionInterface.register(NAME, grouped_attention)


@contextmanager
def use_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Within the block, a model that uses sdpa uses the attention registered as `name`; others are
    unchanged. Only fly's own passes run so; the rest of lm-eval gets transformers' attention."""
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa":
        yield
        return
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
