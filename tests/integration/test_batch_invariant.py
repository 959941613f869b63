"""`batch_invariant`: a token's logits and K/V have the same bits in every pass, in bfloat16."""

from functools import partial

import pytest
import torch

from fly.errors import FlyError
from fly.execution import kernels, weights
from fly.execution.kernels import Bfloat16Linear, LayerKernels
from fly.settings import ExecutionSettings
from tests import invariance, tiny
from tests.invariance import WAYS
from tests.unit.test_kernels import FAMILIES, family_model

pytestmark = pytest.mark.skipif(kernels.why_not() is not None, reason="no kernels here")


def packed(family, **settings):
    model = family_model(family)
    weights.pack(model, None, ExecutionSettings(**{"batch_invariant": True, **settings}))
    return model


def differing(model):
    return invariance.differing(partial(tiny.runner, model, max_length=256))


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_the_pass(family):
    assert not differing(packed(family))


@pytest.mark.parametrize("group", [1, 3, 5, 7, 12])
def test_a_head_has_the_same_bits_beside_those_that_share_its_keys(group, monkeypatch):
    dtype = kernels.activation_dtype()
    query = torch.randn(2, 2 * group, 3, 32).to(dtype)
    cached = (torch.randn(2, 2, 40, 32).to(dtype), torch.randn(2, 2, 40, 32).to(dtype))
    positions = torch.tensor([[0, 1, 2], [30, 31, 32]])
    run = LayerKernels()
    together = run.attention(query, cached, positions, 0, 0.2, 40)
    for head in range(2 * group):
        own = tuple(part[:, head // group, None].contiguous() for part in cached)
        alone = run.attention(query[:, head, None].contiguous(), own, positions, 0, 0.2, 40)
        assert torch.equal(together[:, :, head], alone[:, :, 0])
    monkeypatch.setattr(kernels, "_SCORES", 40)  # room for one head's at a time
    assert torch.equal(together, run.attention(query, cached, positions, 0, 0.2, 40))
    keys, values = (part.float().repeat_interleave(group, 1) for part in cached)
    unseen = torch.arange(40) > positions[:, None, :, None]
    scores = (query.float() @ keys.mT * 0.2).masked_fill(unseen, -torch.inf)
    expected = (scores.softmax(-1) @ values).transpose(1, 2)
    torch.testing.assert_close(together.float(), expected, rtol=0.01, atol=0.01)


def over_real_chunks(monkeypatch, model):
    """What differs for a prompt of several chunks, in other chunks and copied across a border."""
    tokens = torch.randint(3, 96, (330,), generator=torch.Generator().manual_seed(4)).tolist()
    copied = [{"slots": 2, "slot": 1, "copied": count} for count in (25, 270)]
    monkeypatch.setattr(invariance, "TOKENS", tokens)
    monkeypatch.setattr(invariance, "PROMPT", 300)
    monkeypatch.setattr(invariance, "WAYS", [{"chunk": 13}, {"chunk": 100}, *copied])
    return invariance.differing(partial(tiny.runner, model, max_length=512))


def test_bits_do_not_depend_on_chunks_of_real_size(monkeypatch):
    assert not over_real_chunks(monkeypatch, packed("qwen2"))


def test_torchs_attention_is_caught(monkeypatch):
    """With inputs in float32: rounding them hides most of its differences in so small a model."""
    monkeypatch.setattr(kernels, "instructions", lambda: "avx2")
    assert differing(packed("qwen2", batch_invariant=False))


def test_a_product_chosen_by_width_is_caught(monkeypatch):
    real = Bfloat16Linear.forward

    def by_width(self, x):
        if x.numel() // x.shape[-1] < 5:
            return real(self, x)
        even, odd = x.clone(), x.clone()  # the same sum in another order
        even[..., 1::2], odd[..., ::2] = 0, 0
        return real(self, even) + real(self, odd)

    model = packed("qwen2")
    monkeypatch.setattr(Bfloat16Linear, "forward", by_width)
    assert differing(model)


def attention_of_a_key_less(beyond):
    """Wider passes than `beyond` do not see the last key."""
    real = LayerKernels.attention

    def attention(self, query, cached, positions, slot, scaling, read_length):
        shift = int(query.shape[2] > beyond)
        return real(
            self, query, cached, (positions - shift).clamp_min(0), slot, scaling, read_length
        )

    return attention


def test_an_attention_that_sees_the_pass_is_caught(monkeypatch):
    model = packed("qwen2")
    monkeypatch.setattr(LayerKernels, "attention", attention_of_a_key_less(beyond=5))
    assert differing(model)


def test_an_attention_chosen_by_a_wide_pass_is_caught(monkeypatch):
    model = packed("qwen2")
    monkeypatch.setattr(LayerKernels, "attention", attention_of_a_key_less(beyond=128))
    assert over_real_chunks(monkeypatch, model)


def attention_in_two_parts(border):
    """Sums over the keys before `border(positions)` and over the others, added in the end.

    Products and sums are of the same shapes for every query, so nothing else depends on the pass.
    """

    def attention(self, query, cached, positions, slot, scaling, read_length):
        group = query.shape[1] // cached[0].shape[1]
        keys, values = (
            part[slot : slot + len(query)].float().repeat_interleave(group, 1)[:, :, None]
            for part in cached
        )
        place = torch.arange(keys.shape[3])
        unseen = place > positions[:, None, :, None]
        scores = (keys * query.float()[..., None, :]).sum(-1) * scaling
        scores = scores.masked_fill(unseen, -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        values = values.masked_fill((place > positions.max())[:, None], 0.0)  # not written yet
        mixed, whole = 0, 0
        for is_part in (place < border(positions), place >= border(positions)):
            part = weights * is_part
            mixed = mixed + (values.mT * part[..., None, :]).sum(-1)
            whole = whole + part.sum(-1, keepdim=True)
        return (mixed / whole).to(query.dtype).transpose(1, 2).contiguous()

    return attention


def test_sums_that_part_where_a_chunk_begins_are_caught(monkeypatch):
    """Those that part at a fixed key are not."""
    monkeypatch.setattr(kernels, "instructions", lambda: "avx2")
    model = packed("qwen2")
    monkeypatch.setattr(LayerKernels, "attention", attention_in_two_parts(lambda positions: 16))
    assert not differing(model)
    monkeypatch.setattr(
        LayerKernels, "attention", attention_in_two_parts(lambda positions: int(positions.min()))
    )
    assert {"chunk": 13} in differing(model)


def test_a_prefix_copied_short_is_caught(monkeypatch):
    model, real = packed("qwen2"), tiny.ModelRunner._copy_prefix

    def short(self, slot, tokens):
        count = real(self, slot, tokens)
        for stored in (*self.cache._keys, *self.cache._values):
            stored[slot, :, count - 1] = stored[slot, :, count - 2]
        return count

    monkeypatch.setattr(tiny.ModelRunner, "_copy_prefix", short)
    assert differing(model) == [WAYS[-1]]


def decode(target, name="none", k=0, slots=1, draft=None):
    drafter = tiny.drafter(name, slots, draft)
    engine = tiny.engine(tiny.runner(target, slots, max_length=256), drafter, k)
    return [record.tokens for record in tiny.decode_all(engine, tiny.prompts(vocab=96), 40)]


@pytest.fixture(scope="module")
def alone():
    """The target, and what it says by itself, one sequence after the other."""
    target = packed("qwen2")
    return target, decode(target)


@pytest.mark.parametrize("name", ["model", "ngram", "cascade"])
@pytest.mark.parametrize(("k", "slots"), [(4, 3), tiny.slow(8, 1)])
def test_exact_equals_target_only_in_bfloat16(alone, name, k, slots):
    target, expected = alone
    draft = tiny.noisy_copy(family_model("qwen2").float(), 0.01)
    assert decode(target, name, k, slots, draft) == expected


def test_several_sequences_of_the_target_alone_are_each_its_own(alone):
    target, expected = alone
    assert decode(target, slots=3) == expected


def test_auto_has_it_wherever_it_can_be_had():
    def auto(model, **settings):
        return weights.pack(model, None, ExecutionSettings(**settings)).batch_invariant

    model = family_model("qwen2")
    assert auto(model)
    assert not differing(model)
    assert not auto(family_model("qwen2"), compile="off")
    assert not auto(family_model("qwen2").float())
    assert not auto(family_model("qwen2"), batch_invariant=False)


SIZES = [
    ({"head_dim": 24}, "head_dim is 24, which is no multiple of 32"),
    ({"hidden_size": 72}, "hidden_size is 72, which is no multiple of 16"),
    ({"intermediate_size": 200}, "intermediate_size is 200, which is no multiple of 16"),
]


def test_where_it_cannot_be_had_one_line_says_so():
    settings = ExecutionSettings(batch_invariant=True)
    with pytest.raises(FlyError, match=r"batch_invariant=true: .*only bfloat16 is packed.*false"):
        weights.pack(family_model("qwen2").float(), None, settings)
    for sizes, said in SIZES:
        with pytest.raises(FlyError, match=rf"^batch_invariant=true: the target: {said}: .*false$"):
            weights.pack(family_model("qwen2", **sizes), None, settings)
    off = settings.model_copy(update={"compile": "off"})
    with pytest.raises(FlyError, match="batch_invariant=true: the target: its passes are eager"):
        weights.pack(family_model("qwen2"), None, off)
