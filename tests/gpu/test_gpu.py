"""Exactness on an accelerator: in float32 by eager passes and by captured graphs, in bfloat16 by
passes of one shape."""

import pytest
import torch

from fly.execution import self_check
from tests import tiny
from tests.invariance import differing
from tests.unit.test_kernels import FAMILIES, family_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def pair():
    torch.backends.cuda.matmul.allow_tf32 = False
    target = tiny.model(seed=0).cuda()
    return target, tiny.noisy_copy(target, 0.01)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", ["none", "model", "ngram", "cascade"])
def test_exact_equals_generate_on_the_device(pair, name, slots, graphs):
    target, draft = pair
    expected = [tiny.generate(target, prompt, 60) for prompt in tiny.prompts()]
    k = 0 if name == "none" else 6
    capture = True if graphs else None
    drafter = tiny.drafter(name, slots, draft, capture=capture)
    engine = tiny.engine(tiny.runner(target, slots, capture), drafter, k)
    records = tiny.decode_all(engine, tiny.prompts())
    assert [record.tokens for record in records] == expected
    if graphs:
        assert engine._target.static.failure is None
        assert engine._target.static._captured


def test_hidden_states_of_graphs_are_those_of_eager_passes(pair):
    """A graph writes over its outputs: what was taken must stay as it was."""
    taken = {}
    for capture in (None, True):
        runner = tiny.runner(pair[0], 2, capture)
        runner.hidden_layers = (0, 1, 2)
        runner.prefill(0, list(range(3, 40)))
        runner.prefill(1, [5, 6, 7])
        runner.take_hidden()
        taken[capture] = []
        for feeds in ([[8, 9, 10], [11]], [[12], [13, 14, 15]]):
            runner.extend(feeds)
            hidden_BQF = runner.take_hidden()
            taken[capture].append([hidden_BQF[b, : len(feed)] for b, feed in enumerate(feeds)])
    assert runner.static.failure is None
    assert runner.static._captured
    torch.testing.assert_close(taken[True], taken[None], atol=1e-4, rtol=1e-4)


def uniform(model, slots, capture):
    runner = tiny.runner(model, slots, max_length=256)
    runner.use_uniform_passes(capture=True if capture else None)
    return runner


@pytest.mark.parametrize("capture", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_the_pass(family, capture):
    model = family_model(family).cuda()
    self_check.check_places(model, "target_model_path")
    assert not differing(lambda slots: uniform(model, slots, capture))


def test_ordinary_passes_are_caught():
    """The mutant: the widths of the passes choose the kernels."""
    model = family_model("qwen2").float().cuda()
    assert differing(lambda slots: tiny.runner(model, slots, max_length=256))


@pytest.mark.parametrize("capture", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", ["model", "ngram", "cascade"])
@pytest.mark.parametrize(("k", "slots"), [(4, 3), (8, 1)])
def test_exact_equals_target_only_in_bfloat16(name, k, slots, capture):
    target = family_model("qwen2").cuda()
    draft = tiny.noisy_copy(target, 0.01)
    outputs = []
    for runner, who, drafted in (
        (uniform(target, 1, False), "none", 0),
        (uniform(target, slots, capture), name, k),
    ):
        drafter = tiny.drafter(who, runner.slots, draft, capture=True if capture else None)
        records = tiny.decode_all(tiny.engine(runner, drafter, drafted), tiny.prompts(vocab=96), 40)
        outputs.append([record.tokens for record in records])
    assert outputs[0] == outputs[1]
    assert runner.uniform.failure is None
    assert bool(runner.uniform._captured) == capture
