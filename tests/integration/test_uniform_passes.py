"""`batch_invariant` by passes of one shape, as on GPUs; here on the CPU, eager and static ones.

One thread: a CPU's elementwise functions round otherwise where the threads' shares end. Mutants are
tried in float32, as rounding hides most of their differences in so small a model.
"""

import pytest
import torch

from fly.errors import FlyError
from fly.execution import self_check, token_attention, uniform_passes, weights
from fly.execution.model_runner import ModelRunner
from fly.execution.uniform_passes import UniformPasses
from fly.settings import ExecutionSettings
from tests import tiny
from tests.integration.test_architectures import EXACT, build, compare_with_fresh_passes
from tests.integration.test_architectures import exact_model as architecture
from tests.integration.test_architectures import one_thread as one_thread
from tests.integration.test_lm import fly_lm, instances
from tests.invariance import WAYS, differing, make_small
from tests.unit.test_kernels import FAMILIES, family_model

WITH_EXPERTS = {name for name, parts in EXACT.items() if any("experts" in key for key in parts[2])}
FIELD = "target_model_path"


@pytest.fixture(autouse=True)
def small_passes(monkeypatch):
    """A prompt takes several passes, a context several blocks."""
    make_small(monkeypatch)


def uniform(model, slots, capture=None, max_length=256):
    runner = tiny.runner(model, slots, max_length=max_length)
    runner.use_uniform_passes(capture=capture)
    return runner


class UniformRunner(ModelRunner):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.use_uniform_passes(capture=None)


QUICK = ("falcon", "gemma3", "gpt2", "gpt_oss", "llama", "llama_eager", "minicpm3", "phi")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in EXACT]
)
def test_rows_equal_fresh_passes_where_a_model_can_have_them(name):
    """A key too many or too few, a slot or a block that is another's: every architecture."""
    model = architecture(name)
    if reason := uniform_passes.why_not(model):
        assert ("it has experts" in reason) == (name in WITH_EXPERTS)
        assert name in WITH_EXPERTS or "its attention is eager, not sdpa" in reason
        return
    if name.startswith("falcon"):  # its attention is its own
        with pytest.raises(FlyError, match=r"batch_invariant=true does not support .*false"):
            self_check.check_cache_agrees(model, FIELD, uniform=True)
        return
    self_check.check_cache_agrees(model, FIELD, uniform=True)
    compare_with_fresh_passes(model, UniformRunner)


def make(model, capture=None):
    return lambda slots: uniform(model, slots, capture)


@pytest.mark.parametrize(
    ("name", "dtype", "capture"),
    [("phi", torch.bfloat16, None), ("qwen2", torch.bfloat16, False)]
    + [("qwen2", torch.float32, None)]
    + [tiny.slow(x, torch.bfloat16, None) for x in ("gemma", "gpt2", "olmo2", "qwen2", "qwen3")],
)
def test_bits_do_not_depend_on_the_pass(name, dtype, capture):
    model = wide_model(name).to(dtype)
    self_check.check_places(model, FIELD, capture=capture)
    assert not differing(make(model, capture))


def wide_model(name):
    """Wide enough that libraries have several ways to compute it."""
    if name in FAMILIES:
        return family_model(name)
    config, kind, settings = EXACT[name]
    narrow = {key: value for key, value in settings.items() if key not in ("n_embd", "hidden_size")}
    width = {"n_embd": 96} if name == "gpt2" else {"hidden_size": 96}
    return build(config, kind, narrow | width | {"vocab_size": 96})


def test_ordinary_passes_are_caught():
    model = family_model("qwen2")
    assert differing(lambda slots: tiny.runner(model, slots, max_length=256))


def test_passes_that_are_not_padded_are_caught(monkeypatch):
    """The mutant: as wide as what is fed."""
    real = UniformPasses._pass

    def narrow(self, fed, with_logits):
        monkeypatch.setattr(uniform_passes, "WIDTH", len(fed))
        output = real(self, fed, with_logits)
        monkeypatch.setattr(uniform_passes, "WIDTH", 24)
        return output

    monkeypatch.setattr(UniformPasses, "_pass", narrow)
    assert differing(make(family_model("qwen2").float()))


def test_blocks_that_begin_elsewhere_are_caught(monkeypatch):
    """The mutant: the size of a block follows the pass."""
    real = token_attention._in_blocks

    def by_pass(query, key, value, mask, slots, scaling):
        monkeypatch.setattr(token_attention, "BLOCK", 16 if bool((slots == slots[0]).all()) else 32)
        return real(query, key, value, mask, slots, scaling)

    monkeypatch.setattr(token_attention, "_in_blocks", by_pass)
    assert differing(make(family_model("qwen2").float()))


def test_a_prefix_copied_short_is_caught(monkeypatch):
    real = ModelRunner._copy_prefix

    def short(self, slot, tokens):
        count = real(self, slot, tokens)
        for stored in (*self.cache._keys, *self.cache._values):
            stored[slot, :, count - 1] = stored[slot, :, count - 2]
        return count

    monkeypatch.setattr(ModelRunner, "_copy_prefix", short)
    assert differing(make(family_model("qwen2"))) == [WAYS[-1]]


def test_a_device_on_which_the_place_matters_is_refused(monkeypatch):
    model = family_model("qwen2")
    real = model.lm_head.forward

    def by_place(x):
        result = real(x).clone()
        result[7:] = result[7:].nextafter(torch.tensor(9.0, dtype=result.dtype))
        return result

    monkeypatch.setattr(model.lm_head, "forward", by_place)
    with pytest.raises(FlyError, match=r"^batch_invariant=true: target .*place in a pass.*false$"):
        self_check.check_places(model, "target", capture=None)


def test_a_place_that_matters_from_the_second_block_on_is_noticed(monkeypatch):
    real = token_attention._in_blocks

    def by_place(query, key, value, mask, *where):
        output = real(query, key, value, mask, *where)
        if mask.shape[-1] > token_attention.BLOCK:
            output[7:] *= 1.5
        return output

    monkeypatch.setattr(token_attention, "_in_blocks", by_place)
    with pytest.raises(FlyError, match="place in a pass"):
        self_check.check_places(family_model("qwen2"), "target", capture=None)


def test_what_lies_behind_a_sequences_end_is_not_read():
    """A rejected draft may have overflowed there."""
    model, found = tiny.model(seed=0), []
    for damaged in (False, True):
        runner = uniform(model, 2)
        runner.prefill(0, list(range(3, 40)))
        runner.prefill(1, list(range(3, 20)))
        with torch.inference_mode():
            for stored in runner.cache._values if damaged else ():
                stored[0, :, 37:] = torch.inf
                stored[1, :, 17:] = torch.nan
        found.append(runner.extend([[5, 6], [7, 8]]))
    assert torch.equal(*found)


def test_float64_is_computed_in_float64():
    model = tiny.model(seed=0).double()
    runner = uniform(model, 1)
    runner.prefill(0, list(range(3, 40)))
    with torch.inference_mode():
        expected = model(torch.tensor([[*range(3, 40), 5]])).logits[0, -1]
    torch.testing.assert_close(runner.extend([[5]])[0, 0], expected, atol=1e-9, rtol=1e-9)


def outputs_of_several_passes():
    model = tiny.model(seed=0)
    found = []
    for capture in (None, False):
        runner = uniform(model, 2, capture)
        runner.hidden_layers = (1,)
        runner.prefill(0, list(range(3, 40)))
        runner.prefill(1, list(range(3, 60)))
        taken = runner.take_hidden()
        feeds = [list(range(3, 40)), list(range(10, 30))]
        logits = runner.extend(feeds)
        taken = [taken, logits[0], logits[1, :20], runner.take_hidden()[0]]
        found.append([part.clone() for part in taken])
    return all(map(torch.equal, *found))


def test_outputs_of_several_passes_are_kept(monkeypatch):
    """The mutant leaves them to the next pass, which writes over them."""
    assert outputs_of_several_passes()
    monkeypatch.setattr(torch, "clone", lambda tensor: tensor)
    assert not outputs_of_several_passes()


def decode(target, name="none", k=0, slots=1, draft=None, capture=None):
    drafter = tiny.drafter(name, slots, draft)
    engine = tiny.engine(uniform(target, slots, capture), drafter, k)
    return tiny.decode_all(engine, tiny.prompts(vocab=96), 24)


@pytest.mark.parametrize("name", [tiny.slow("model"), tiny.slow("ngram"), "cascade"])
@pytest.mark.parametrize(("k", "slots", "capture"), [(4, 3, False), tiny.slow(8, 1, None)])
def test_exact_equals_target_only_in_bfloat16(name, k, slots, capture):
    target = family_model("qwen2")
    draft = tiny.noisy_copy(family_model("qwen2").float(), 0.01)
    alone, drafted = decode(target), decode(target, name, k, slots, draft, capture)
    assert [record.tokens for record in drafted] == [record.tokens for record in alone]
    assert 0 < tiny.total(drafted, "native_accepted") < tiny.total(drafted, "drafted")


@pytest.mark.parametrize("capture", [None, False], ids=["eager", "static"])
def test_hidden_states_are_those_of_ordinary_passes(capture):
    """Of a prompt in several passes, and of unequal rows."""
    model = tiny.model(seed=0)
    plain = tiny.runner(model, 2)
    found = []
    for runner in (plain, uniform(model, 2, capture)):
        runner.hidden_layers = (0, 1, 2)
        runner.prefill(0, list(range(3, 60)))
        taken = [runner.take_hidden()[0]]
        runner.prefill(1, [5, 6, 7])
        taken.append(runner.take_hidden()[0])
        for feeds in ([[8, 9, 10], [11]], [[12], [13, 14, 15]]):
            runner.extend(feeds)
            hidden_BQF = runner.take_hidden()
            taken += [hidden_BQF[b, : len(feed)] for b, feed in enumerate(feeds)]
        found.append(taken)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("use_sd", [True, False])
def test_a_run_on_a_gpu_has_them_when_asked_to(saved_pair, monkeypatch, use_sd):
    """The way from the key to the passes; only that its device is a CPU is kept from fly."""
    why_not = uniform_passes.why_not
    monkeypatch.setattr(weights, "_why_not_uniform", lambda model, *_: why_not(model))
    ran, texts = [], []
    real = UniformPasses.run
    monkeypatch.setattr(
        UniformPasses, "run", lambda self, fed, **how: ran.append(self) or real(self, fed, **how)
    )
    for wanted in (True, False):
        lm = fly_lm(saved_pair, batch_invariant=wanted, use_sd=use_sd)
        assert bool(ran) == wanted  # the checks at load
        ran.clear()
        texts.append(lm.generate_until(instances({"max_gen_toks": 20})))
        assert bool(ran) == wanted
        ran.clear()
        done = lm.results_entry()["preparation"]
        assert done["batch_invariant"] == done["uniform"] == wanted
    assert texts[0] == texts[1]  # in float32


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["mixtral", "gemma2"])
def test_what_cannot_have_them_is_refused_in_one_line(name, device):
    """A model without memory stands for one on a GPU."""
    model = build(*EXACT[name]).to(device)
    reason = {"mixtral": "it has experts", "gemma2": "its attention is eager"}[name]
    reason = reason if device == "meta" else "its passes are eager here"
    with pytest.raises(FlyError, match=f"^batch_invariant=true: the target: {reason}.*to false$"):
        weights.pack(model, None, ExecutionSettings(batch_invariant=True))


def test_auto_leaves_a_gpus_passes_as_they_are():
    model = tiny.model(seed=0).to("meta")
    assert not weights.pack(model, None, ExecutionSettings()).batch_invariant
    assert weights.pack(model, None, ExecutionSettings(batch_invariant=True)).uniform


def test_static_passes_are_few_and_go_with_the_cache_that_they_read():
    runner = uniform(tiny.model(seed=0), 3, capture=False, max_length=512)
    for slot, length in enumerate((30, 3, 300)):
        runner.prefill(slot, [5] * length)
        for width in (1, 9, 4):
            runner.extend([[6] * width] * (slot + 1))
    assert set(runner.uniform._captured) == {(256, False), (512, False), (512, True)}
    runner.reserve(4000)
    assert not runner.uniform._captured
    made = [runner]
    del runner
    assert tiny.is_freed_at_once(made)
