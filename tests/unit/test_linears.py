"""Prepacked and int8 linears: the same products, and only where they apply."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from fly import launch
from fly.config import build
from fly.errors import FlyError
from fly.execution import packed_linear, weights
from tests import tiny

needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no bfloat16 kernels on this CPU"
)


TOLERANCE = {
    packed_linear.PackedLinear: 0.01,
    packed_linear.Int8Linear: 0.03,
    packed_linear.Int4Linear: 0.15,
}


@needs_bf16
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", list(TOLERANCE))
@pytest.mark.parametrize("rows", [1, 4, 5, 33])
def test_the_product_is_the_linear_s_own(kind, bias, rows):
    torch.manual_seed(0)
    linear = nn.Linear(96, 160, bias=bias).bfloat16()
    x = torch.randn(rows, 1, 96).bfloat16()
    with torch.inference_mode():
        expected, actual = linear(x).float(), kind(linear)(x).float()
    assert actual.shape == expected.shape
    tolerance = TOLERANCE[kind]
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@needs_bf16
def test_int8_sums_hold_without_vnni():
    """oneDNN then adds two products in 16 bits: outputs were off by a tenth to a fifth."""
    program = """
import torch
from fly.execution.packed_linear import Int8Linear
torch.manual_seed(0)
linear, x = torch.nn.Linear(64, 64, bias=False).bfloat16(), torch.randn(16, 64).bfloat16()
with torch.inference_mode():
    expected, actual = linear(x).float(), Int8Linear(linear)(x).float()
print(float((actual - expected).norm() / expected.norm()))
"""
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(printed.stdout) < 0.02


@needs_bf16
def test_every_plain_linear_is_replaced_and_no_other():
    class Adapter(nn.Linear):
        pass

    model = tiny.model(1).bfloat16()
    model.model.layers[0].mlp.up_proj = Adapter(32, 64)
    before = sum(type(module) is nn.Linear for module in model.modules())
    assert packed_linear.replace(model, packed_linear.PackedLinear) == before == 2 * 7 + 1 - 1
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert isinstance(model.model.layers[0].mlp.up_proj, Adapter)


@needs_bf16
def test_shapes_that_the_int4_kernel_does_not_take_become_int8():
    model = tiny.model(1, vocab=67).bfloat16()
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        plain = model(ids).logits.float()
        packed_linear.replace(model, packed_linear.ONEDNN["int4"])
        actual = model(ids).logits.float()
    assert type(model.lm_head) is packed_linear.Int8Linear
    assert type(model.model.layers[0].mlp.down_proj) is packed_linear.Int4Linear
    assert (plain - actual).abs().max() <= 0.3 * plain.abs().max()


@needs_bf16
def test_rows_of_a_quantised_pass_do_not_influence_each_other():
    torch.manual_seed(0)
    layer = packed_linear.Int8Linear(nn.Linear(96, 160).bfloat16())
    quiet, loud = torch.randn(1, 96).bfloat16(), 100 * torch.randn(1, 96).bfloat16()
    with torch.inference_mode():
        torch.testing.assert_close(layer(torch.cat([quiet, loud]))[:1], layer(quiet))


@needs_bf16
def test_an_input_of_other_values_is_quantised_anew():
    layer = packed_linear.Int8Linear(nn.Linear(96, 160, bias=False).bfloat16())
    x = torch.randn(2, 96).bfloat16()
    with torch.inference_mode():
        assert not torch.equal(layer(x), layer(x + 1))
        torch.testing.assert_close(layer(x), layer(x.clone()))


@needs_bf16
def test_a_packed_model_s_logits_are_the_plain_model_s():
    model = tiny.model(1).bfloat16()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.inference_mode():
        plain = model(ids).logits.float()
        packed_linear.replace(model, packed_linear.PackedLinear)
        packed = model(ids).logits.float()
    assert (plain - packed).abs().max() <= 0.02 * plain.abs().max()


def config(**values):
    return build({"target_model_path": "t", **values}, "test")


def test_float32_stays_as_it_is():
    target, draft = tiny.model(1), tiny.model(2)
    done = weights.pack(target, draft, config())
    assert (done.target, done.draft) == ("eager", "eager")
    assert type(target.lm_head) is nn.Linear


@needs_bf16
def test_onednn_packs_the_target_and_quantises_the_draft_only():
    target, draft = tiny.model(1).bfloat16(), tiny.model(2).bfloat16()
    parameters = draft.num_parameters()
    done = weights.pack(target, draft, config(execution="onednn"))
    assert (done.target, done.draft) == ("onednn", "onednn int4")
    assert (done.draft_parameters, done.draft_weight) == (parameters, 0.25)
    assert type(target.lm_head) is packed_linear.PackedLinear
    assert type(draft.lm_head) is packed_linear.Int4Linear


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"compile": "off"}, "eager"),
        ({"execution": "eager"}, "eager"),
        ({"draft_quantization": "none"}, "onednn"),
        ({"draft_quantization": "int8"}, "onednn int8"),
    ],
)
@needs_bf16
def test_each_lever_can_be_switched_off(values, expected):
    draft = tiny.model(2).bfloat16()
    values = {"execution": "onednn", **values} if "compile" not in values else values
    assert weights.pack(tiny.model(1).bfloat16(), draft, config(**values)).draft == expected


@pytest.mark.parametrize(
    ("kind", "text"),
    [("int8", r"draft_quantization=int8: only bfloat16 .*float32.*none or auto"), ("fp8", "fp8")],
)
def test_a_quantisation_that_cannot_be_had_is_refused(kind, text):
    with pytest.raises(FlyError, match=text):
        weights.pack(tiny.model(1), tiny.model(2), config(draft_quantization=kind))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_torchao_s_weights_are_close_to_the_plain_ones(kind):
    pytest.importorskip("torchao")
    model = tiny.model(1).bfloat16()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        plain = model(ids).logits.float()
        weights._quantize_with_torchao(model, kind)
        quantised = model(ids).logits.float()
    assert type(model.lm_head.weight.data) is not torch.Tensor
    assert (plain - quantised).abs().max() <= 0.2 * plain.abs().max()


def test_threads_fit_the_cores_this_process_may_use():
    assert launch.cores_of_this_process() >= 1
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(launch.cores_of_this_process() + 3)
        weights.set_threads(None)
        assert torch.get_num_threads() == launch.cores_of_this_process()
        weights.set_threads(1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
