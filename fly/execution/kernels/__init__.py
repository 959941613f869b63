"""Linear layers for CPUs at the memory's speed, in kernels that fly compiles for the machine.

Decoding reads every weight once per pass, so a pass over few tokens costs its bytes. PyTorch's own
kernels reach that speed for a single token at best; these stay at it for 4 tokens on AVX2, some 8
on AVX-512 and 16 on AMX, which is what verification asks for (docs/performance.md).

    Bfloat16Linear   the checkpoint's own bfloat16 weights, unchanged
    Int8Linear       int8 weights and inputs, scaled per row and column, for drafts

On AMX inputs and outputs are bfloat16, elsewhere float32; with AVX512-BF16 the inputs of
Bfloat16Linear are rounded to bfloat16. Sums are float32 everywhere. A row's
result has the same bits however many rows share the pass.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor, nn

from fly.errors import FlyError, reason_of
from fly.execution.kernels import blocks, build, tiles
from fly.execution.kernels.build import instructions as instructions
from fly.execution.kernels.ir import PANEL

_LEVELS = 63  # int8 weights lie within -63..63: see vector._Int8
_TINY = torch.finfo(torch.float32).tiny
_SCORES = 1 << 17  # scores on a worker thread's stack, which may have 2 MiB: these take 512 KiB
_GRABS = 8  # how often a thread comes for more panels
_ROWS_AT_ONCE = 256  # of a weight are quantised: they should fit into a cache


@functools.cache
def why_not() -> str | None:
    """Why the kernels cannot be used here; None if they can. They are tried on small sums once."""
    if (reason := build.why_not()) is not None:
        return reason
    try:
        works = all(_is_right(kind) for kind in (Bfloat16Linear, Int8Linear))
    except (RuntimeError, OSError) as error:  # LLVM's
        return f"fly's kernels cannot be compiled here: {reason_of(error)}"
    return None if works else "fly's kernels compute wrongly here"


def _is_right(kind: type[Bfloat16Linear] | type[Int8Linear]) -> bool:
    """Whether a product of ones and minus ones, which every dtype holds exactly, is right."""
    layer = nn.Linear(64, 48, bias=False, device="meta")
    signs = torch.arange(48 * 64).view(48, 64) * 7919 % 3 - 1
    layer.weight = nn.Parameter(signs.bfloat16(), requires_grad=False)
    x = (torch.arange(37 * 64).view(37, 64) * 104729 % 3 - 1).to(activation_dtype())
    expected = x.float() @ signs.float().T
    packed, limit = kind(layer), 0.01 * expected.abs().max()
    return all(  # few rows and many are different code
        bool((packed(x[:rows]).float() - expected[:rows]).abs().max() <= limit) for rows in (5, 37)
    )


def activation_dtype() -> torch.dtype:
    """dtype of the linears' inputs and outputs, and so of the rest of the model."""
    return torch.bfloat16 if instructions() == "amx" else torch.float32


def _isa() -> str:
    isa = instructions()
    assert isa is not None, "callers ask why_not() first"
    return isa


@functools.cache
def tile_configurations(*, quantized: bool = False) -> Tensor:
    """Tile configurations of 1 to 32 rows, one after the other."""
    data = b"".join(tiles.configuration(rows, quantized=quantized) for rows in range(1, 33))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def pad_columns(values: Tensor | None, count: int, dtype: torch.dtype) -> Tensor:
    """Values of `count` output columns for compiled code, with zeros up to whole panels."""
    columns = torch.zeros(-(-count // PANEL) * PANEL, dtype=dtype, device="cpu")
    if values is not None:
        columns[:count] = values
    return columns


def panels_at_once(panels: int, *, many_rows: bool) -> int:
    """How many panels a thread takes at a time: of many rows whole blocks, if every thread gets as
    many."""
    threads = torch.get_num_threads()
    if many_rows:
        shares = threads * max(1, round(panels / (2 * blocks.PAIRS * threads)))
        return -(-panels // (2 * shares)) * 2
    return max(4, panels // (_GRABS * threads) // 4 * 4)


def products_of(weights: str) -> list[int]:
    """The products of bfloat16 or int8 weights, or of those in a GGUF format: that of any number of
    rows, or on AMX those of up to a chunk and of more."""
    isa = _isa()
    by_rows = (False, True) if isa == "amx" else (False,)
    return [build.product(weights, isa, of_many=of_many) for of_many in by_rows]


class _PackedLinear(nn.Module):
    """A weight in panels, and the call of its kernel. [..., in] -> [..., out].

    rounds_inputs: whether the product takes its inputs in fewer bits than float32.
    """

    rounds_inputs = True
    _weight: Tensor

    def __init__(self, linear: nn.Linear, weights: str) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._dtype = activation_dtype()
        self._products = products_of(weights)
        per_step = (4 if weights == "int8" else 2) * (16 if _isa() == "amx" else 1)
        align = max(per_step, 16)  # whole vectors of inputs are quantised at a time
        self._width = -(-self.in_features // align) * align
        self._steps = self._width // per_step
        self._panels = -(-self.out_features // PANEL)
        bias = None if linear.bias is None else linear.bias.detach()
        self._bias = pad_columns(bias, self.out_features, torch.float32)

    def _pack(self, weight: Tensor) -> Tensor:
        """[out, in] -> 32 bits of consecutive inputs each, [panels, in / 2 or 4, 16]."""
        missing = (self._width - self.in_features, self._panels * PANEL - self.out_features)
        if any(missing):
            weight = nn.functional.pad(weight, (0, missing[0], 0, missing[1]))
        steps = weight.contiguous().view(torch.int32).view(self._panels, PANEL, -1)
        return steps.transpose(1, 2).contiguous()

    def _rows(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if self._width != self.in_features:
            rows = nn.functional.pad(rows, (0, self._width - self.in_features))
        return rows.to(self._dtype).contiguous()

    def _multiply(
        self, x: Tensor, rows: Tensor, scales: tuple[int, int, int] = (0, 0, 0)
    ) -> Tensor:
        """rows: of x, as the product takes them. scales: addresses of the columns' scales and
        offsets and the rows' scales, or zeros."""
        count, columns, weight = rows.shape[0], self._panels * PANEL, self._weight
        if count == 0:
            return torch.empty(*x.shape[:-1], self.out_features, dtype=self._dtype, device="cpu")
        out = torch.empty(count, columns, dtype=self._dtype, device="cpu")
        is_many = len(self._products) > 1 and count > blocks.CHUNK
        if is_many:
            rows = _pack_rows(rows)
        grab = panels_at_once(self._panels, many_rows=is_many)
        build.run(
            self._products[is_many], rows.data_ptr(), weight.data_ptr(), self._bias.data_ptr(),
            out.data_ptr(), self._steps, count, self._panels, columns * out.element_size(), grab, 0,
            *scales, tile_configurations().data_ptr(), 0, 0, 0, 0, 0,
        )  # fmt: skip
        if columns != self.out_features:
            out = out[:, : self.out_features]
        return out.view(*x.shape[:-1], self.out_features)


def _pack_rows(rows: Tensor) -> Tensor:
    """Rows in the order of blocks.py's product. Rows that the last chunk lacks are undefined: sums
    of other rows hold nothing of them."""
    lines = rows.view(len(rows), -1, tiles.LINE // rows.element_size())
    whole, rest = divmod(len(rows), blocks.CHUNK)
    packed = lines.new_empty(whole + bool(rest), lines.shape[1], blocks.CHUNK, lines.shape[2])
    in_chunks = lines[: whole * blocks.CHUNK].unflatten(0, (whole, blocks.CHUNK))
    packed[:whole] = in_chunks.transpose(1, 2)
    packed[whole:, :, :rest] = lines[whole * blocks.CHUNK :].transpose(0, 1)
    return packed


class Bfloat16Linear(_PackedLinear):
    """A linear with the checkpoint's bfloat16 weights, unchanged."""

    def __init__(self, linear: nn.Linear) -> None:
        if linear.weight.dtype != torch.bfloat16:
            raise ValueError(f"weights are {linear.weight.dtype}: only bfloat16 is packed")
        super().__init__(linear, "bfloat16")
        self.rounds_inputs = _isa() in build.ROUND_INPUTS
        self._weight = self._pack(linear.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        rows = self._rows(x)
        if self.rounds_inputs:
            rows = rows.bfloat16()
        return self._multiply(x, rows)


class Int8Linear(_PackedLinear):
    """A linear in int8: weights scaled per output column, inputs per row.

    Rows do not influence each other. Weights have 127 levels, which one AVX2 instruction needs and
    all machines share, so that drafts do not differ between them by more than rounding.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear, "int8")
        self._quantize = build.elementwise_function("quantize", instructions=_isa())
        weight = linear.weight.detach()
        scale = weight.abs().amax(dim=1).float().clamp_min(_TINY) / _LEVELS
        levels = torch.empty(weight.shape, dtype=torch.int8)
        # a whole head in float32 would be most of a run's memory
        for to, part, step in zip(*(t.split(_ROWS_AT_ONCE) for t in (levels, weight, scale))):
            to.copy_((part.float() / step[:, None]).round())
        self._scale = pad_columns(scale, self.out_features, torch.float32)
        # the 128 that is added to every input, times the weights: subtracted from the sums
        offset = levels.sum(dim=1, dtype=torch.int32) * 128
        self._offset = pad_columns(offset, self.out_features, torch.int32)
        self._weight = self._pack(levels)

    def forward(self, x: Tensor) -> Tensor:
        rows = self._rows(x)
        int8 = torch.empty(rows.shape, dtype=torch.uint8, device="cpu")
        scales = torch.empty(rows.shape[0], dtype=torch.float32, device="cpu")
        build.run(
            self._quantize, rows.data_ptr(), int8.data_ptr(), scales.data_ptr(),
            rows.shape[0], self._width, 0, work=rows.numel(),
        )  # fmt: skip
        addresses = (self._scale.data_ptr(), self._offset.data_ptr(), scales.data_ptr())
        return self._multiply(x, int8, addresses)


Kind = type[Bfloat16Linear] | type[Int8Linear]
LINEARS: dict[str, Kind] = {"none": Bfloat16Linear, "int8": Int8Linear}  # by quantisation


def rounds_inputs(model: nn.Module) -> bool:
    """Whether some linear of it is a kernel that takes inputs in fewer bits than float32."""
    return any(getattr(module, "rounds_inputs", False) for module in model.modules())


class LayerKernels:
    """What a Llama-like layer computes between its products; see elementwise.py.

    Tensors are contiguous, of `activation_dtype()`; norms' weights are float32.
    """

    def __init__(self) -> None:
        isa = _isa()
        self._norm = build.elementwise_function("norm", instructions=isa)
        self._gated = build.elementwise_function("gated", instructions=isa)
        self._rotate = build.elementwise_function("rotate", instructions=isa)

    def norm(
        self, x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(x + delta, its RMS norm), both like x; without delta the first is x itself."""
        out = torch.empty_like(x)
        total = x if delta is None else torch.empty_like(x)
        width = x.shape[-1]
        build.run(
            self._norm, x.data_ptr(), 0 if delta is None else delta.data_ptr(), total.data_ptr(),
            weight.data_ptr(), out.data_ptr(), x.numel() // width, width, _float_bits(eps), 0,
            work=x.numel(),
        )  # fmt: skip
        return total, out

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) * up of [..., gate | up]: [..., 2 I] -> [..., I]."""
        width = x.shape[-1] // 2
        out = torch.empty(*x.shape[:-1], width, dtype=x.dtype)
        rows = out.numel() // width
        build.run(self._gated, x.data_ptr(), out.data_ptr(), rows, width, 0, work=x.numel())
        return out

    def rotate(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        cached: tuple[Tensor, Tensor],
        positions_BQ: Tensor,
        first_slot: int,
        heads: int,
    ) -> Tensor:
        """Rotated queries [B, heads, Q, D] of x [B, Q, queries | keys | values].

        Rotated keys, and values, are written to the cache's [slots, kv heads, capacity, D]. angles:
        cosines and sines, [B, Q, D].
        """
        rows, width = positions_BQ.shape
        _, kv_heads, capacity, size = cached[0].shape
        out = torch.empty(rows, heads, width, size, dtype=x.dtype)
        cos, sin = (part.expand(rows, width, size).contiguous() for part in angles)
        build.run(
            self._rotate, x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
            cached[0].data_ptr(), cached[1].data_ptr(), positions_BQ.data_ptr(), rows * width,
            width, heads, kv_heads, size, capacity, first_slot, 0, work=x.numel(),
        )  # fmt: skip
        return out

    def attention(
        self,
        query: Tensor,
        cached: tuple[Tensor, Tensor],
        positions_BQ: Tensor,
        first_slot: int,
        scaling: float,
        read_length: int,
    ) -> Tensor:
        """Causal attention of queries [B, heads, Q, D] over the cache's [slots, kv heads, capacity,
        D], each query up to its own position: [B, Q, heads, D].

        read_length: more than any of the positions; a GPU splits so many keys over its programs. On
        a CPU a query's result has the same bits whatever else is in the pass.
        """
        rows, heads, width, size = query.shape
        _, kv_heads, capacity, _ = cached[0].shape
        out = torch.empty(rows, width, heads, size, dtype=query.dtype)
        isa = _isa()
        if capacity > 2 * _SCORES:
            raise FlyError(
                f"a context of {capacity} tokens is too long for fly's kernels: set compile=off, "
                f"or max_length to at most {2 * _SCORES}"
            )
        heads_at_once = max(1, min(4, _SCORES // capacity))
        parts_at_once = 1 if isa == "avx2" else 4  # of 16 and of 32 vector registers
        function = build.elementwise_function(
            "attention", size, heads // kv_heads, heads_at_once, parts_at_once, instructions=isa
        )
        build.run(
            function, query.data_ptr(), cached[0].data_ptr(), cached[1].data_ptr(),
            positions_BQ.data_ptr(), out.data_ptr(), rows, width, heads, kv_heads, capacity,
            first_slot, _float_bits(scaling), 0,
        )  # fmt: skip
        return out


@functools.cache
def _float_bits(value: float) -> int:
    return ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value
