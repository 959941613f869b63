"""Exactness on an accelerator, in float32, by eager passes and by captured graphs."""

import pytest
import torch

from tests import tiny

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
