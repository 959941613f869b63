"""Joined products of sibling layers: the same values, and never those of another input."""

import copy
import weakref

import pytest
import torch
from torch import nn

from fly.execution import kernels, merged_linear
from tests import tiny
from tests.unit.test_linears import needs_kernels


class Block(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.q_proj = nn.Linear(32, 64, bias=bias)
        self.k_proj = nn.Linear(32, 16, bias=bias)
        self.v_proj = nn.Linear(32, 16, bias=bias)


NAMES = ("q_proj", "k_proj", "v_proj")


def answers(block, *inputs):
    return [getattr(block, name)(x) for name, x in zip(NAMES, inputs)]


@pytest.fixture(params=[True, False], ids=["inference", "versions"])
def inference(request):
    with torch.inference_mode(request.param):
        yield request.param


def merged_in(model):
    return sum(isinstance(module, merged_linear.Sibling) for module in model.modules())


def pair(bias=True):
    """A block, and the same one joined."""
    torch.manual_seed(0)
    plain, joined = Block(bias), Block(bias)
    joined.load_state_dict(plain.state_dict())
    merged_linear.merge(joined, merged_linear.concatenate)
    assert merged_in(joined) == 3
    return plain, joined


@pytest.mark.parametrize("bias", [True, False])
def test_joined_products_are_the_siblings_own(bias, inference):
    plain, joined = pair(bias)
    for shape in ((1, 1, 32), (3, 5, 32), (7, 32)):
        x = torch.randn(shape)
        for actual, expected in zip(answers(joined, x, x, x), answers(plain, x, x, x)):
            torch.testing.assert_close(actual, expected)


@needs_kernels
@pytest.mark.parametrize("kind", [kernels.Bfloat16Linear, kernels.Int8Linear])
def test_every_kind_of_linear_can_be_joined(kind):
    """A channel's bits are the same in a joined product."""
    torch.manual_seed(0)
    plain = Block().bfloat16()
    joined = copy.deepcopy(plain)
    alone = [kind(getattr(plain, name)) for name in NAMES]
    merged_linear.merge(joined, lambda many: kind(merged_linear.concatenate(many)))
    assert merged_in(joined) == 3
    assert type(joined.k_proj.product) is kind
    x = torch.randn(5, 32).to(kernels.activation_dtype())
    with torch.inference_mode():
        for actual, layer in zip(answers(joined, x, x, x), alone):
            assert torch.equal(actual, layer(x))


def test_one_product_per_input(inference):
    _, joined = pair()
    calls = []
    joined.q_proj.product.register_forward_hook(lambda *args: calls.append(1))
    for count in (1, 2):
        x = torch.randn(2, 32)
        answers(joined, x, x, x)
        assert len(calls) == count


def test_no_share_outlives_its_input(inference):
    """Other tensors, one tensor asked twice, the same tensor with other values in a later pass."""
    plain, joined = pair()
    x, y = torch.randn(2, 32), torch.randn(2, 32)
    for inputs in ((x, y, y), (x, y, x), (y, y, x), (x, x, x), (x, x.clone(), x)):
        for actual, expected in zip(answers(joined, *inputs), answers(plain, *inputs)):
            torch.testing.assert_close(actual, expected)
    for _ in range(2):  # q alone, as layers do that keep their keys
        x.mul_(2)
        torch.testing.assert_close(joined.q_proj(x), plain.q_proj(x))
    answers(joined, y, y, y)
    y.mul_(2)
    for actual, expected in zip(answers(joined, y, y, y), answers(plain, y, y, y)):
        torch.testing.assert_close(actual, expected)


def test_a_write_between_siblings_is_noticed_where_tensors_count_them():
    plain, joined = pair()
    with torch.no_grad():
        x = torch.randn(2, 32)
        joined.q_proj(x)
        x.mul_(2)
        torch.testing.assert_close(joined.k_proj(x), plain.k_proj(x))


def test_a_mutant_that_remembers_by_shape_is_caught(monkeypatch):
    def share(self, index, x):
        if self._input is None or self._input.shape != x.shape:
            self._input = x
            self._shares = dict(enumerate(self.product(x).split(self._sizes, dim=-1)))
        return self._shares[index]

    _check_two_inputs(*pair())
    monkeypatch.setattr(merged_linear.MergedProduct, "share", share)
    with pytest.raises(AssertionError):
        _check_two_inputs(*pair())


def _check_two_inputs(plain, joined):
    for x in (torch.randn(2, 32), torch.randn(2, 32)):
        for actual, expected in zip(answers(joined, x, x, x), answers(plain, x, x, x)):
            torch.testing.assert_close(actual, expected)


def test_nothing_is_kept_once_all_shares_are_out(inference):
    _, joined = pair()
    x = torch.randn(2, 32)
    answers(joined, x, x, x)
    fused = joined.q_proj._merged
    assert fused._input is None
    assert not fused._shares


@pytest.mark.parametrize("change", ["width", "bias", "kind", "absent"])
def test_siblings_that_do_not_match_stay(change):
    block = Block()
    if change == "width":
        block.v_proj = nn.Linear(16, 16)
    elif change == "bias":
        block.k_proj = nn.Linear(32, 16, bias=False)
    elif change == "kind":
        block.k_proj = type("Adapter", (nn.Linear,), {})(32, 16)
    else:
        del block.v_proj
    merged_linear.merge(block, merged_linear.concatenate)
    assert merged_in(block) == 0


def test_a_joined_model_decodes_what_generate_does():
    target = tiny.model(1)
    draft = tiny.noisy_copy(target, 0.01)
    expected = [tiny.generate(target, prompt, 40) for prompt in tiny.prompts()]
    for model in (target, draft):
        merged_linear.merge(model, merged_linear.concatenate)
        assert merged_in(model) == 2 * 5
    engine = tiny.engine(target, tiny.drafter("cascade", 3, draft), 6, slots=3)
    records = tiny.decode_all(engine, tiny.prompts(), 40)
    assert [record.tokens for record in records] == expected
    assert 0 < tiny.total(records, "native_accepted") < tiny.total(records, "drafted")


def test_linears_are_freed_as_they_are_merged():
    """Weights of a large model, kept beside the merged ones, would not fit on its GPU."""
    attentions = nn.ModuleList(nn.Module() for _ in range(8))
    for attention in attentions:
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(attention, name, nn.Linear(4, 4))
    originals = [weakref.ref(attention.q_proj) for attention in attentions]
    alive = []

    def kind(linears):
        alive.append(sum(original() is not None for original in originals))
        return merged_linear.concatenate(linears)

    merged_linear.merge(attentions, kind)
    assert merged_in(attentions) == 24
    assert alive == [8, 7, 6, 5, 4, 3, 2, 1]
