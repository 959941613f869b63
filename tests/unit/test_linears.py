"""Which weights are packed, and only where that applies."""

import pytest
import torch
from torch import nn

from fly import launch
from fly.config import build
from fly.errors import FlyError
from fly.execution import kernels, packed_linear, weights
from tests import tiny

needs_kernels = pytest.mark.skipif(kernels.why_not() is not None, reason=str(kernels.why_not()))


@needs_kernels
def test_every_plain_linear_is_replaced_and_no_other():
    class Adapter(nn.Linear):
        pass

    model = tiny.model(1).bfloat16()
    model.model.layers[0].mlp.up_proj = Adapter(32, 64)
    packed_linear.use_kernels(model, kernels.Bfloat16Linear)
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert isinstance(model.model.layers[0].mlp.up_proj, Adapter)


def config(**values):
    return build({"target_model_path": "t", **values}, "test")


def test_float32_stays_as_it_is():
    target, draft = tiny.model(1), tiny.model(2)
    done = weights.pack(target, draft, config())
    assert (done.target, done.draft) == ("eager", "eager")
    assert type(target.lm_head) is nn.Linear


@needs_kernels
def test_the_draft_alone_is_quantised():
    target, draft = tiny.model(1).bfloat16(), tiny.model(2).bfloat16()
    parameters = draft.num_parameters()
    done = weights.pack(target, draft, config())
    assert (done.draft_parameters, done.draft_weight) == (parameters, 0.5)
    assert type(target.lm_head) is kernels.Bfloat16Linear
    assert type(draft.lm_head) is kernels.Int8Linear


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"compile": "off"}, "eager"),
        ({"execution": "eager"}, "eager"),
        ({"draft_quantization": "none"}, "kernels"),
        ({"draft_quantization": "int8"}, "kernels int8"),
    ],
)
@needs_kernels
def test_each_lever_can_be_switched_off(values, expected):
    draft = tiny.model(2).bfloat16()
    done = weights.pack(tiny.model(1).bfloat16(), draft, config(**values)).draft
    assert done == expected.replace("kernels", f"kernels-{kernels.instructions()}")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, "only bfloat16 is packed, the model is in float32"),
        ({"execution": "eager"}, "compile=off and execution=eager leave"),
        ({"compile": "off"}, "compile=off and execution=eager leave"),
    ],
)
def test_int8_without_kernels_is_refused(values, reason):
    with pytest.raises(FlyError, match=rf"draft_quantization=int8: {reason}.*set it to none or"):
        weights.pack_draft(tiny.model(2), config(draft_quantization="int8", **values))


def test_int8_on_a_gpu_is_a_checkpoint_s():
    draft = tiny.model(2).bfloat16().to("meta")  # stands for a device that is no CPU
    with pytest.raises(FlyError, match=r"draft_quantization=int8: .*name a quantised checkpoint"):
        weights.pack_draft(draft, config(draft_quantization="int8"))
    assert weights.pack_draft(draft, config()) == "eager"


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
