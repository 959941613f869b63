"""Exactness on an accelerator: in float32 by eager passes and by captured graphs, in bfloat16 by
passes of one shape."""

import pytest
import torch

from fly.execution import fused_layer, self_check, token_attention
from fly.execution.calibration import calibrate
from fly.execution.model_runner import ModelRunner, causal_mask
from tests import tiny
from tests.invariance import differing, make_small
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


def test_passes_are_timed_without_capturing_their_graphs(pair, monkeypatch, tmp_path):
    """Capturing takes as long as dozens of passes."""
    monkeypatch.setenv("FLY_HOME", str(tmp_path))
    target, draft = (tiny.runner(model, 1, True) for model in pair)
    costs = calibrate(target, draft, {})
    assert target.static.failure is None
    assert costs.target.costs[0] == 1.0
    assert 0.5 <= costs.draft.at(1) <= 2
    assert costs.target.at(9) <= 4


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


def test_a_model_that_makes_the_host_wait_is_never_captured(pair, monkeypatch):
    """PyTorch does not recover from a capture that fails half way: the next one would fail, too."""
    honest = ModelRunner.static_pass

    def waits(self, ids, lengths, read_length):
        return honest(self, ids, lengths, read_length + 0 * int(lengths.max()))

    runners = [tiny.runner(pair[0], 1, True) for _ in range(2)]
    for runner in runners:
        runner.prefill(0, [5, 6, 7])
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "static_pass", waits)
        runners[0].extend([[8]])
    assert "synchronizing" in runners[0].static.failure
    runners[1].extend([[8]])
    assert runners[1].static.failure is None


def uniform(model, slots, capture, max_length=256):
    runner = tiny.runner(model, slots, max_length=max_length)
    runner.use_uniform_passes(capture=True if capture else None)
    return runner


@pytest.mark.parametrize("capture", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("products", [False, True], ids=["kernel", "products"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_the_pass(family, products, capture, monkeypatch):
    """Several passes to a prompt; by Triton's kernel, and by PyTorch's products in its place."""
    make_small(monkeypatch)
    model = family_model(family).cuda()
    if products:
        monkeypatch.setattr(token_attention, "reads_in_place", lambda *where: False)
    self_check.check_places(model, "target_model_path", capture=capture or None)
    assert not differing(lambda slots: uniform(model, slots, capture))
    assert not token_attention._failures


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_attends_as_products_do(dtype):
    torch.manual_seed(0)
    query = torch.randn(9, 12, 64, device="cuda", dtype=dtype)
    key, value = (torch.randn(3, 2, 512, 64, device="cuda", dtype=dtype) for _ in range(2))
    slots = torch.arange(9, device="cuda") % 3
    positions = torch.tensor([0, 1, 63, 64, 65, 255, 256, 400, 511], device="cuda")
    mask = causal_mask(positions[:, None], 512, dtype)
    products = token_attention._in_blocks(query, key, value, mask, slots, 0.2)
    kernel = token_attention._triton().attention(query, key, value, slots, positions, 0.2)
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(kernel, products, atol=limit, rtol=limit)


@pytest.mark.parametrize("capture", [False, True], ids=["eager", "graphs"])
def test_bits_at_the_sizes_of_real_models(capture):
    """Wide layers, whose sums libraries may cut into parts; contexts of several blocks and growing
    caches; whole passes."""
    sizes = {"hidden_size": 2048, "head_dim": 128, "max_position_embeddings": 2048}
    model = tiny.model(seed=0, vocab=32000, **sizes).bfloat16().cuda()
    self_check.check_places(model, "target_model_path", capture=capture or None)
    tokens = [3 + index * index % 5000 for index in range(900)]
    logits = []
    for slots, widths in ((1, [1] * 40), (3, [9, 9, 9, 9, 4])):
        runner = uniform(model, slots, capture, max_length=2048)
        for slot in range(slots - 1):
            runner.prefill(slot, tokens[5 : 300 + slot])
        runner.prefill(slots - 1, tokens[:860])
        found, start = [], 860
        for width in widths:
            feeds = [[7] * (1 + slot) for slot in range(slots - 1)]
            found.append(runner.extend([*feeds, tokens[start : start + width]])[-1, :width].clone())
            start += width
            runner.truncate(slots - 1, start)
        logits.append(torch.cat(found))
    assert torch.equal(*logits)


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


def as_fused(model):
    model = model.cuda()
    assert fused_layer.replace_on_gpu(model)
    return model


@pytest.mark.parametrize("capture", [None, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_decode_as_the_models_own(family, dtype, capture):
    prompt = [3 + index * index % 90 for index in range(200)]
    with torch.inference_mode():
        expected = family_model(family).double()(torch.tensor([prompt])).logits[0]
    model = as_fused(family_model(family).to(dtype))
    self_check.check_cache_agrees(model, "target_model_path", capture=capture)
    runner = tiny.runner(model, 3, capture, max_length=256)
    lengths = (150, 11, 60)  # the first goes over the end of a part of the keys
    for slot, length in enumerate(lengths):
        runner.prefill(slot, prompt[:length])
    limit = (1e-4 if dtype == torch.float32 else 5e-2) * expected.abs().max()
    for width in (1, 9, 40):
        feeds = [prompt[start : start + width] for start in lengths]
        logits_BQV = runner.extend(feeds).double().cpu()
        for row, start in enumerate(lengths):
            assert (logits_BQV[row] - expected[start : start + width]).abs().max() < limit
    if capture:
        assert runner.static.failure is None
        assert runner.static._captured


@pytest.mark.parametrize("capture", [None, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", ["model", "cascade"])
@pytest.mark.parametrize("slots", [1, 3])
def test_exact_equals_target_only_by_fused_layers(name, slots, capture):
    """In float32, where widths of passes change no choice."""
    target = as_fused(family_model("qwen2").float())
    draft = as_fused(tiny.noisy_copy(family_model("qwen2").float(), 0.01))
    outputs = []
    for who, rows, drafted in (("none", 1, 0), (name, slots, 6)):
        drafter = tiny.drafter(who, rows, draft, capture=capture)
        engine = tiny.engine(tiny.runner(target, rows, capture), drafter, drafted)
        records = tiny.decode_all(engine, tiny.prompts(vocab=96), 40)
        outputs.append([record.tokens for record in records])
    assert outputs[0] == outputs[1]


def test_a_wrong_kernel_is_not_used(monkeypatch, caplog):
    """The mutant: a rotation in the wrong direction."""
    from fly.execution.triton_layer import TritonKernels

    real = TritonKernels.rotate
    monkeypatch.setattr(
        TritonKernels,
        "rotate",
        lambda self, x, angles, *rest: real(self, x, (angles[0], -angles[1]), *rest),
    )
    assert not fused_layer.replace_on_gpu(family_model("qwen2").cuda())
    assert "do not agree" in caplog.text
