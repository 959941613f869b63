"""Linear layers whose weights stay as they lie in a GGUF file.

A pass reads a third of bfloat16's bytes or less. Weights are unpacked as they are read, to the
values of the gguf package's dequantisation rounded to bfloat16, and results have the same bits as
Bfloat16Linear's on those (tests/unit/test_gguf_kernels.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fly.execution import kernels
from fly.execution.kernels import blocks, build, formats
from fly.execution.kernels.ir import PANEL
from fly.models.gguf import GgufWeight, dequantize


def takes(weight: GgufWeight) -> bool:
    """Whether the kernels compute with a weight as it is."""
    return weight.out_features >= PANEL and why_not_format(weight.format) is None


@functools.cache
def why_not_format(form: str) -> str | None:
    """Why weights of a format are not computed with as they are; None if they are.

    A product is compared with that of the dequantised weights once.
    """
    if (reason := kernels.why_not()) is not None:
        return reason
    if form not in formats.FORMATS:
        return f"fly's kernels do not know {form}"
    raw = random_blocks(form, rows=40, width=512)
    dense = nn.Linear(512, 40, bias=False, device="meta")
    dense.weight = nn.Parameter(dequantize(raw, form).bfloat16(), requires_grad=False)
    kept = GgufProduct([GgufWeight(512, 40, form, raw, bias=None)])
    plain = kernels.Bfloat16Linear(dense)
    x = torch.sin(torch.arange(37 * 512)).view(37, 512).to(kernels.activation_dtype())
    if all(torch.equal(plain(x[:rows]), kept(x[:rows])) for rows in (1, 5, 20, 37)):
        return None
    return f"fly's kernels compute wrongly with {form} here"


def random_blocks(form: str, rows: int, width: int) -> Tensor:
    """Weights of a format, [rows, bytes]: random levels, and scales of up to 1 / 64."""
    kind = formats.FORMATS[form]
    generator = torch.Generator().manual_seed(0)
    shape = (rows, width // kind.weights, kind.bytes)
    raw = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    for at in kind.factors:
        factors = torch.rand(*shape[:2], 1, generator=generator) / 64
        raw[..., at : at + 2] = factors.half().view(torch.uint8)
    return raw.flatten(1)


def unpack(weight: GgufWeight, ids: Tensor | None = None) -> Tensor:
    """Rows of a weight, all by default, as bfloat16: ids [...] -> [..., in_features]."""
    ids = torch.arange(weight.out_features) if ids is None else ids.contiguous()
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < weight.out_features:
        raise IndexError(f"an id is not among the {weight.out_features} of the embedding")
    out = torch.empty(*ids.shape, weight.in_features, dtype=torch.bfloat16)
    count = weight.in_features // formats.FORMATS[weight.format].weights
    function = build.unpacking_function("rows", weight.format, kernels._isa())
    addresses = (weight.blocks.data_ptr(), ids.data_ptr(), out.data_ptr())
    row_bytes = weight.blocks.shape[1]
    build.run(function, *addresses, ids.numel(), count, row_bytes, 0, work=out.numel())
    return out


class GgufProduct(nn.Module):
    """One or several linears that take the same input, [..., in] -> [..., outs]. Their widths are
    multiples of 16, but for the last. is_unpacked: their weights are unpacked now, not in every
    pass; not on AMX."""

    def __init__(self, linears: Sequence[GgufWeight], *, is_unpacked: bool = False) -> None:
        super().__init__()
        self.is_unpacked = is_unpacked
        self.rounds_inputs = kernels._isa() in build.ROUND_INPUTS
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        self._is_amx = kernels._isa() == "amx"
        self._parts = []
        column = 0
        for linear in linears:
            bias = kernels.pad_columns(linear.bias, linear.out_features, torch.float32)
            weight = _panels(linear) if is_unpacked else linear.blocks
            products = kernels.products_of("bfloat16" if is_unpacked else linear.format)
            self._parts.append((weight, linear.out_features, bias, column, products))
            column += linear.out_features
        self._columns = column - column % -PANEL
        self._dtype = kernels.activation_dtype()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).to(self._dtype)
        if self.rounds_inputs:
            rows = rows.bfloat16()
        count = rows.shape[0]
        out = torch.empty(count, self._columns, dtype=self._dtype)
        is_many = self._is_amx and count > blocks.CHUNK
        scratch, scratch_bytes, line, steps = out, 0, 0, self.in_features // 2
        if self._is_amx:
            rows, line = _transposed(rows)
            steps = self.in_features // 32
        else:
            rows = rows.contiguous()
            scratch_bytes = formats.SCRATCH
            scratch = torch.empty(torch.get_num_threads() * scratch_bytes, dtype=torch.uint8)
        for weight, columns, bias, column, products in self._parts if count else ():
            panels = bias.numel() // PANEL
            grab = kernels.panels_at_once(panels, many_rows=is_many)
            build.run(
                products[is_many], rows.data_ptr(), weight.data_ptr(), bias.data_ptr(),
                out.data_ptr() + column * out.element_size(), steps, count, panels,
                self._columns * out.element_size(), grab, 0, 0, 0, 0,
                kernels.tile_configurations(quantized=True).data_ptr(), columns, line,
                scratch.data_ptr(), scratch_bytes, 0,
            )  # fmt: skip
        return out[:, : self.out_features].view(*x.shape[:-1], self.out_features)


def _panels(weight: GgufWeight) -> Tensor:
    """[panels, in / 2, 16] pairs of bfloat16, as in a Bfloat16Linear without tiles."""
    panels, steps = -(-weight.out_features // PANEL), weight.in_features // 2
    out = torch.empty(panels, steps, PANEL, dtype=torch.int32)
    function = build.unpacking_function("panels", weight.format, kernels._isa())
    addresses = (weight.blocks.data_ptr(), out.data_ptr())
    build.run(function, *addresses, steps, weight.out_features, panels, 0, work=out.numel())
    return out


def _transposed(rows: Tensor) -> tuple[Tensor, int]:
    """Rows of bfloat16 as [inputs / 2, rows] pairs, in chunks if they are many, and the bytes from
    one line to the next: a power of two, as lines of a tile should not cross those of the cache."""
    pairs = rows.contiguous().view(torch.int32)
    count, width = pairs.shape
    line = min(1 << (count - 1).bit_length(), blocks.CHUNK)
    chunks = -(-count // line)
    if count < chunks * line:
        padded = pairs.new_empty(chunks * line, width)
        padded[:count] = pairs
        pairs = padded
    return pairs.view(chunks, line, width).transpose(1, 2).contiguous(), 4 * line
