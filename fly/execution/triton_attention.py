"""Attention of tokens that are rows of their own, as one Triton kernel: no K/V is gathered.

A program computes one token's query heads of one K/V head. It goes over the keys of its own
sequence up to its own place, in blocks of a fixed size, and sees nothing else of the pass: so the
bits of a token depend on nothing but itself.

Shapes: T tokens, H query heads, G query heads per K/V head, S slots, C capacity, D head size, E
size of a value.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS_OF = {2: 64, 4: 16}  # of a block, by bytes of a number: what fits beside it on the chip
LEAST_ROWS = 16  # of a matrix product


@triton.jit
def add_keys(q, key_at, is_key, value_at, is_value, is_seen, scaling, highest, whole, mixed):
    """(highest, whole, mixed), the running softmax of rows of queries, with a block of keys more.

    A row's highest score, the sum of its weights, and the values mixed by them. A row that has seen
    no key is not a number.
    """
    k = tl.load(key_at, mask=is_key, other=0.0)
    scores = tl.dot(q, k, input_precision="ieee") * scaling
    scores = tl.where(is_seen, scores, float("-inf"))
    now = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp(scores - now[:, None])
    kept = tl.exp(highest - now)
    whole = whole * kept + tl.sum(weights, 1)
    v = tl.load(value_at, mask=is_value, other=0.0)
    mixed = mixed * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return now, whole, mixed


@triton.jit
def attend(
    query, key, value, slots, positions, output, scaling,
    stride_qt, stride_qh, stride_ks, stride_kh, stride_kc, stride_vs, stride_vh, stride_vc,
    stride_ot, stride_oh,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, SIZE_2: tl.constexpr,
    VALUE: tl.constexpr, VALUE_2: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """*_2: the next power of two. ROWS: G, at least LEAST_ROWS."""
    token, head = tl.program_id(0), tl.program_id(1)
    slot, position = tl.load(slots + token), tl.load(positions + token)
    rows, sizes, values = tl.arange(0, ROWS), tl.arange(0, SIZE_2), tl.arange(0, VALUE_2)
    keys = tl.arange(0, KEYS)
    heads = head * GROUP + rows
    is_head = (rows < GROUP)[:, None]
    q = tl.load(
        query + token * stride_qt + heads[:, None] * stride_qh + sizes[None, :],
        mask=is_head & (sizes < SIZE)[None, :],
        other=0.0,
    )
    key += slot * stride_ks + head * stride_kh
    value += slot * stride_vs + head * stride_vh
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    whole = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE_2], tl.float32)
    for start in range(0, position + 1, KEYS):
        place = start + keys
        is_seen = place <= position
        highest, whole, mixed = add_keys(
            q,
            key + place[None, :] * stride_kc + sizes[:, None],
            is_seen[None, :] & (sizes < SIZE)[:, None],
            value + place[:, None] * stride_vc + values[None, :],
            is_seen[:, None] & (values < VALUE)[None, :],
            is_seen[None, :], scaling, highest, whole, mixed,
        )  # fmt: skip
    tl.store(
        output + token * stride_ot + heads[:, None] * stride_oh + values[None, :],
        (mixed / whole[:, None]).to(output.dtype.element_ty),
        mask=is_head & (values < VALUE)[None, :],
    )


def attention(
    query: Tensor, key: Tensor, value: Tensor, slots_T: Tensor, positions_T: Tensor, scaling: float
) -> Tensor:
    """query [T, H, D], all of a layer's key and value [S, H/G, C, D] and [S, H/G, C, E]; a token
    sees its slot's keys up to its position. Returns [T, H, E].
    """
    query, key, value = (
        part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value)
    )
    tokens, heads, size = query.shape
    kv_heads, value_size = key.shape[1], value.shape[-1]
    group = heads // kv_heads
    output = query.new_empty(tokens, heads, value_size)
    with torch.cuda.device_of(query):  # Triton launches on the current device, and its stream
        attend[tokens, kv_heads](
            query, key, value, slots_T, positions_T, output, scaling,
            *query.stride()[:2], *key.stride()[:3], *value.stride()[:3], *output.stride()[:2],
            GROUP=group,
            ROWS=max(LEAST_ROWS, triton.next_power_of_2(group)),
            SIZE=size,
            SIZE_2=max(LEAST_ROWS, triton.next_power_of_2(size)),
            VALUE=value_size,
            VALUE_2=max(LEAST_ROWS, triton.next_power_of_2(value_size)),
            KEYS=KEYS_OF[key.element_size()],
        )  # fmt: skip
    return output
