"""Exactness on an accelerator, in float32, by eager passes and by captured graphs."""

import pytest
import torch

from fly.decoding.runner import ModelRunner
from fly.drafters.model import CascadeDrafter, ModelDrafter
from fly.drafters.ngram import NgramDrafter
from tests import tiny

pytestmark = pytest.mark.gpu

EOS = frozenset({tiny.EOS})


@pytest.fixture(scope="module")
def pair():
    torch.backends.cuda.matmul.allow_tf32 = False
    target = tiny.model(seed=0).cuda()
    return target, tiny.noisy_copy(target, 0.01)


def runner(model, slots, graphs):
    result = ModelRunner(model, slots, 512)
    if graphs:
        result.use_static_passes(capture=True)
    return result


def drafter(name, model, slots, graphs):
    if name == "none":
        return tiny.NoDrafter()
    if name == "ngram":
        return NgramDrafter(slots, 1, 4, 6, EOS)
    draft = runner(model, slots, graphs)
    return ModelDrafter(draft, EOS) if name == "model" else CascadeDrafter(draft, EOS, 1, 4, 6)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", ["none", "model", "ngram", "cascade"])
def test_strict_equals_generate_on_the_device(pair, name, slots, graphs):
    target, draft = pair
    expected = [tiny.generate(target, prompt, 60) for prompt in tiny.prompts()]
    k = 0 if name == "none" else 6
    engine = tiny.engine(target, drafter(name, draft, slots, graphs), k, slots=slots)
    engine._target = runner(target, slots, graphs)
    records = tiny.decode_all(engine, tiny.prompts())
    assert [record.tokens for record in records] == expected
    if graphs:
        assert engine._target.static.failure is None
        assert engine._target.static._captured
