"""What a Llama-like layer computes between its products, as Triton kernels for GPUs.

In a captured pass every kernel costs one to two microseconds, however little it computes, and
transformers' layers run some forty. Attention splits a sequence's keys over programs: one sequence
with two K/V heads would keep two of a GPU's hundred multiprocessors busy.

Rounding follows transformers' layers, but for the rotation, which is rounded once.

Shapes: B sequences, Q new tokens of each, H query heads, G query heads per K/V head, D head size;
a part is the keys that one program goes over.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fly.execution.triton_attention import KEYS_OF, LEAST_ROWS, add_keys

_MOST_ROWS = 64  # of a matrix product
_LEAST_PART, _MOST_PARTS = 128, 32  # keys; parts of a sequence
_PROGRAMS = 256  # that keep a GPU busy
_COLUMNS = 1024  # of the gate that one program computes


@triton.jit
def add_and_norm(
    x, delta, total, weight, output, eps,
    WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """*_2: the next power of two."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, WIDTH_2)
    is_in = columns < WIDTH
    value = tl.load(x + row + columns, mask=is_in, other=0.0)
    if ADDS:
        value = (value.to(tl.float32) + tl.load(delta + row + columns, mask=is_in, other=0.0)).to(
            total.dtype.element_ty
        )
        tl.store(total + row + columns, value, mask=is_in)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    normed = (wide * scale).to(output.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + columns, mask=is_in, other=0.0)
    tl.store(output + row + columns, scaled.to(output.dtype.element_ty), mask=is_in)


@triton.jit
def gate(x, output, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_in = columns < WIDTH
    gates = tl.load(x + row * 2 * WIDTH + columns, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * WIDTH + WIDTH + columns, mask=is_in, other=0.0).to(tl.float32)
    silu = (gates * tl.sigmoid(gates)).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + row * WIDTH + columns, (silu * up).to(output.dtype.element_ty), mask=is_in)


@triton.jit(do_not_specialize=["first_slot", "width"])
def rotate_and_store(
    x, cos, sin, output, key, value, positions, first_slot, width,
    stride_ab, stride_aq, stride_ks, stride_kh, stride_kc,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF_2: tl.constexpr,
    LOADS: tl.constexpr,
):  # fmt: skip
    """One head of one token: a query to `output`, a key or a value to the cache. LOADS: the first
    slot lies on the device."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, index = token // width, token % width
    half: tl.constexpr = SIZE // 2
    at = tl.arange(0, HALF_2)
    is_in = at < half
    source = x + (token * (HEADS + 2 * KV_HEADS) + head) * SIZE
    low = tl.load(source + at, mask=is_in, other=0.0)
    high = tl.load(source + half + at, mask=is_in, other=0.0)
    if head < HEADS + KV_HEADS:
        angles = sequence * stride_ab + index * stride_aq
        cos_low = tl.load(cos + angles + at, mask=is_in, other=0.0).to(tl.float32)
        cos_high = tl.load(cos + angles + half + at, mask=is_in, other=0.0).to(tl.float32)
        sin_low = tl.load(sin + angles + at, mask=is_in, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + angles + half + at, mask=is_in, other=0.0).to(tl.float32)
        first, second = low.to(tl.float32), high.to(tl.float32)
        low = (first * cos_low - second * sin_low).to(low.dtype)
        high = (second * cos_high + first * sin_high).to(high.dtype)
    slot = (tl.load(first_slot) if LOADS else first_slot) + sequence
    position = tl.load(positions + token)
    if head < HEADS:
        place = output + ((sequence * HEADS + head) * width + index) * SIZE
    elif head < HEADS + KV_HEADS:
        place = key + slot * stride_ks + (head - HEADS) * stride_kh + position * stride_kc
    else:
        kv_head = head - HEADS - KV_HEADS
        place = value + slot * stride_ks + kv_head * stride_kh + position * stride_kc
    tl.store(place + at, low, mask=is_in)
    tl.store(place + half + at, high, mask=is_in)


@triton.jit(do_not_specialize=["first_slot", "width", "part"])
def attend(
    query, key, value, positions, mixed, highest, whole, first_slot, width, part, scaling,
    stride_ks, stride_kh, stride_kc,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, SIZE_2: tl.constexpr,
    KEYS: tl.constexpr, LOADS: tl.constexpr,
):  # fmt: skip
    """A tile of the queries that share a K/V head, over one part of the keys."""
    parts, kv_heads = tl.num_programs(2), tl.num_programs(1)
    tiles = tl.cdiv(GROUP * width, ROWS)
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    tile, head, split = tl.program_id(0) % tiles, tl.program_id(1), tl.program_id(2)
    rows, sizes, keys = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE_2), tl.arange(0, KEYS)
    is_row, is_size = rows < GROUP * width, sizes < SIZE
    position = tl.load(positions + sequence * width + rows % width, mask=is_row, other=-1)
    last = tl.minimum(tl.max(position, 0) + 1, (split + 1) * part)
    if split * part >= last:
        return
    row = (sequence * kv_heads + head) * GROUP * width + rows
    q = tl.load(
        query + row[:, None] * SIZE + sizes[None, :],
        mask=is_row[:, None] & is_size[None, :],
        other=0.0,
    )
    slot = (tl.load(first_slot) if LOADS else first_slot) + sequence
    key += slot * stride_ks + head * stride_kh
    value += slot * stride_ks + head * stride_kh
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, SIZE_2], tl.float32)
    for start in range(split * part, last, KEYS):
        place = start + keys
        is_there = place < last
        best, total, sums = add_keys(  # of a row that sees none of this part, never read
            q,
            key + place[None, :] * stride_kc + sizes[:, None],
            is_there[None, :] & is_size[:, None],
            value + place[:, None] * stride_kc + sizes[None, :],
            is_there[:, None] & is_size[None, :],
            is_there[None, :] & (place[None, :] <= position[:, None]),
            scaling, best, total, sums,
        )  # fmt: skip
    at = row * parts + split
    tl.store(highest + at, best, mask=is_row)
    tl.store(whole + at, total, mask=is_row)
    tl.store(
        mixed + at[:, None] * SIZE + sizes[None, :],
        sums,
        mask=is_row[:, None] & is_size[None, :],
    )


@triton.jit(do_not_specialize=["width", "parts", "part"])
def combine(
    mixed, highest, whole, positions, output, width, parts, part,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_2: tl.constexpr, PARTS_2: tl.constexpr,
):  # fmt: skip
    """The parts of one query that it sees."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, index = token // width, token % width
    splits, sizes = tl.arange(0, PARTS_2), tl.arange(0, SIZE_2)
    is_seen = splits * part <= tl.load(positions + token)
    at = ((sequence * HEADS + head) * width + index) * parts + splits
    best = tl.load(highest + at, mask=is_seen, other=float("-inf"))
    scale = tl.exp(best - tl.max(best, 0))
    total = tl.sum(tl.load(whole + at, mask=is_seen, other=0.0) * scale, 0)
    sums = tl.load(
        mixed + at[:, None] * SIZE + sizes[None, :],
        mask=is_seen[:, None] & (sizes < SIZE)[None, :],
        other=0.0,
    )
    value = tl.sum(sums * scale[:, None], 0) / total
    place = output + (token * HEADS + head) * SIZE + sizes
    tl.store(place, value.to(output.dtype.element_ty), mask=sizes < SIZE)


class TritonKernels:
    """`LayerKernels` (fly/execution/kernels, which describes the calls) on a GPU: tensors are of
    the model's dtype, and the first slot may lie on the device, [1]."""

    def norm(
        self, x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        width, output = x.shape[-1], torch.empty_like(x)
        total = x if delta is None else torch.empty_like(x)
        with torch.cuda.device_of(x):
            add_and_norm[x.numel() // width,](
                x, x if delta is None else delta, total, weight, output, eps,
                WIDTH=width, WIDTH_2=triton.next_power_of_2(width), ADDS=delta is not None,
            )  # fmt: skip
        return total, output

    def gated(self, x: Tensor) -> Tensor:
        width = x.shape[-1] // 2
        output = x.new_empty(*x.shape[:-1], width)
        with torch.cuda.device_of(x):
            grid = (output.numel() // width, triton.cdiv(width, _COLUMNS))
            gate[grid](x, output, WIDTH=width, COLUMNS=_COLUMNS)
        return output

    def rotate(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        cached: tuple[Tensor, Tensor],
        positions_BQ: Tensor,
        first_slot: int | Tensor,
        heads: int,
    ) -> Tensor:
        rows, width = positions_BQ.shape
        kv_heads, size = cached[0].shape[1], cached[0].shape[3]
        output = x.new_empty(rows, heads, width, size)
        cos, sin = (part.expand(rows, width, size) for part in angles)
        with torch.cuda.device_of(x):
            rotate_and_store[rows * width, heads + 2 * kv_heads](
                x, cos, sin, output, *cached, positions_BQ, first_slot, width,
                *cos.stride()[:2], *cached[0].stride()[:3],
                HEADS=heads, KV_HEADS=kv_heads, SIZE=size,
                HALF_2=triton.next_power_of_2(size // 2), LOADS=isinstance(first_slot, Tensor),
            )  # fmt: skip
        return output

    def attention(
        self,
        query: Tensor,
        cached: tuple[Tensor, Tensor],
        positions_BQ: Tensor,
        first_slot: int | Tensor,
        scaling: float,
        read_length: int,
    ) -> Tensor:
        key, value = cached
        rows, heads, width, size = query.shape
        kv_heads = key.shape[1]
        group = heads // kv_heads
        keys = KEYS_OF[key.element_size()]
        tile = min(_MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(group * width)))
        tiles = triton.cdiv(group * width, tile)
        wanted = min(_MOST_PARTS, triton.cdiv(_PROGRAMS, rows * tiles * kv_heads))
        part = max(_LEAST_PART, triton.cdiv(read_length, wanted))
        part = triton.cdiv(part, keys) * keys
        parts = triton.cdiv(read_length, part)
        size_2 = max(LEAST_ROWS, triton.next_power_of_2(size))
        mixed = query.new_empty(rows, heads, width, parts, size, dtype=torch.float32)
        highest, whole = (mixed.new_empty(rows, heads, width, parts) for _ in range(2))
        output = query.new_empty(rows, width, heads, size)
        with torch.cuda.device_of(query):
            attend[rows * tiles, kv_heads, parts](
                query, key, value, positions_BQ, mixed, highest, whole, first_slot, width, part,
                scaling, *key.stride()[:3],
                GROUP=group, ROWS=tile, SIZE=size, SIZE_2=size_2, KEYS=keys,
                LOADS=isinstance(first_slot, Tensor),
            )  # fmt: skip
            combine[rows * width, heads](
                mixed, highest, whole, positions_BQ, output, width, parts, part,
                HEADS=heads, SIZE=size, SIZE_2=size_2, PARTS_2=triton.next_power_of_2(parts),
            )  # fmt: skip
        return output
