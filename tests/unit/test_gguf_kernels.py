"""Products with GGUF's weights have the bits of Bfloat16Linear on the dequantised ones."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fly.execution import kernels
from fly.execution.kernels import build, formats, gguf
from fly.models.gguf import dequantize
from tests.unit.test_kernels import isa  # noqa: F401  (a fixture)

pytestmark = pytest.mark.skipif(kernels.why_not() is not None, reason=str(kernels.why_not()))

ROWS = (1, 2, 9, 16, 17, 23, 32, 33, 70, 545)  # few, two tiles, many, and more than a group


def weight(form, out, inputs, seed=0):
    bias = torch.randn(out, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return SimpleNamespace(
        in_features=inputs, out_features=out, format=form, bias=bias,
        blocks=gguf.random_blocks(form, out, inputs),
    )  # fmt: skip


def dequantized(kept):
    linear = nn.Linear(kept.in_features, kept.out_features, device="meta")
    dense = dequantize(kept.blocks, kept.format).bfloat16()
    linear.weight = nn.Parameter(dense, requires_grad=False)
    linear.bias = nn.Parameter(kept.bias, requires_grad=False)
    return linear


def inputs_of(rows, width):
    return torch.randn(rows, width).to(kernels.activation_dtype())


@pytest.mark.parametrize("form", formats.FORMATS)
@pytest.mark.parametrize(("out", "inputs"), [(16, 256), (70, 512), (600, 2304)])
def test_bits_are_those_of_the_dequantized_weights(isa, form, out, inputs):  # noqa: F811
    kept = weight(form, out, inputs)
    plain, product = kernels.Bfloat16Linear(dequantized(kept)), gguf.GgufProduct([kept])
    unpacked = product if isa == "amx" else gguf.GgufProduct([kept], is_unpacked=True)
    for rows in ROWS:
        x = inputs_of(rows, inputs)
        assert torch.equal(product(x), plain(x)), rows
        assert torch.equal(unpacked(x), plain(x)), rows


@pytest.mark.parametrize("form", ["Q4_K", "Q8_0"])
def test_a_wrong_weight_is_seen(isa, form):  # noqa: F811
    """The mutant: a column has the weights of its neighbour."""
    kept = weight(form, 64, 256)
    plain = kernels.Bfloat16Linear(dequantized(kept))
    kept.blocks[37] = kept.blocks[36]
    x = inputs_of(3, 256)
    differs = (gguf.GgufProduct([kept])(x) != plain(x)).any(dim=0)
    assert differs.nonzero().flatten().tolist() == [37]


def test_linears_of_several_formats_are_one_product(isa):  # noqa: F811
    kept = [weight("Q4_K", 96, 512, 1), weight("Q8_0", 32, 512, 2), weight("Q6_K", 50, 512, 3)]
    plain = [kernels.Bfloat16Linear(dequantized(part)) for part in kept]
    product = gguf.GgufProduct(kept)
    for rows in ROWS:
        x = inputs_of(rows, 512)
        assert torch.equal(product(x), torch.cat([part(x) for part in plain], dim=-1)), rows


@pytest.mark.parametrize("form", formats.FORMATS)
def test_rows_are_unpacked_as_gguf_dequantizes_them(isa, form):  # noqa: F811
    kept = weight(form, 40, 512)
    ids = torch.tensor([[3, 39, 3], [0, 7, 21]])
    dense = dequantize(kept.blocks, form).bfloat16()
    assert torch.equal(gguf.unpack(kept), dense)
    assert torch.equal(gguf.unpack(kept, ids), dense[ids])


@pytest.mark.parametrize("form", formats.FORMATS)
def test_every_format_is_tried_before_it_is_used(form):
    assert gguf.why_not_format(form) is None
    assert gguf.takes(weight(form, 16, 256))
    assert not gguf.takes(weight(form, 8, 256)), "less than a panel"


def test_what_computes_wrongly_is_not_used(monkeypatch):
    other, honest = formats.FORMATS["Q5_K"](dots=False, words=False), build.unpacking_of
    monkeypatch.setattr(build, "unpacking_of", lambda *of: honest(*of) and other)
    build.product.cache_clear()
    try:
        kept = weight("Q4_K", 40, 512)
        assert "Q4_K" in gguf.why_not_format.__wrapped__(kept.format)
    finally:
        build.product.cache_clear()


def test_unknown_formats_are_named():
    assert "IQ2_XS" in gguf.why_not_format("IQ2_XS")
