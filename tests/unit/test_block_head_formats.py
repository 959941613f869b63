"""Block heads as their publishers save them: one form of all, one line for what is not."""

import re

import pytest
import torch

from fly.errors import FlyError
from fly.execution.heads.block import BlockHead
from fly.models.heads import block
from fly.models.heads.checkpoint import Checkpoint, TargetShape
from tests import block_heads, tiny

TARGET = tiny.model(0, layers=4)
SHAPE = TargetShape.of(TARGET.config)


def parse(kind, tensors=None, override=None, **changes):
    config = block_heads.config(kind, TARGET, **changes)
    return block.parse(Checkpoint(kind, config, tensors or {}), SHAPE, override)


def test_the_three_formats_mean_the_same_layers():
    """DFlash and DeepSpec number layers, whose outputs are read; speculators hidden states."""
    for kind in block_heads.KINDS:
        head = parse(kind)
        assert head.layers == (1, 2, 3, 4)
        assert head.mask_token_id == block_heads.MASK
    assert parse("dspark", target_layer_ids=[-1, 2]).layers == (0, 3)
    assert parse("dspark", override=(0, 1, 2, 3)).layers == (0, 1, 2, 3)


def test_dflash_drafts_in_place_and_dspark_the_token_after():
    assert (parse("dflash").from_anchor, parse("dflash").most_drafts) == (False, 5)
    assert (parse("dspark").from_anchor, parse("dspark").most_drafts) == (True, 5)
    assert (parse("speculators").from_anchor, parse("speculators").most_drafts) == (False, 4)
    assert parse("speculators", sample_from_anchor=True).most_drafts == 5
    config = block_heads.config("speculators", TARGET)
    del config["sample_from_anchor"]  # saved before there was the key
    assert not block.parse(Checkpoint("x", config, {}), SHAPE).from_anchor


def test_files_say_which_of_the_two_a_head_is():
    """As vLLM names its methods; DeepSpec's DFlash goes by DSpark's name."""
    found = [block.kind_of(block_heads.config(kind, TARGET)) for kind in block_heads.KINDS]
    assert found == ["dflash", "dspark", "dspark"]
    assert block.kind_of({"speculators_model_type": "dflash"}) == "dflash"


def test_deepspecs_dflash_is_a_dspark_without_its_heads():
    head = parse("dspark", markov_rank=0, enable_confidence_head=False)
    assert (head.from_anchor, head.markov_rank, head.confidence) == (True, 0, None)


@pytest.mark.parametrize(
    ("layers", "own", "expected"), [(36, 5, (2, 10, 18, 26, 34)), (28, 1, (15,))]
)
def test_layers_that_z_labs_files_do_not_name_are_spread(layers, own, expected):
    config = block_heads.config("dflash", TARGET, num_target_layers=layers, num_hidden_layers=own)
    del config["dflash_config"]["target_layer_ids"]
    shape = TargetShape(SHAPE.hidden_size, SHAPE.vocabulary, layers)
    assert block.parse(Checkpoint("x", config, {}), shape).layers == expected


def test_a_published_checkpoint_loads_with_the_targets_own_tensors_left_out():
    checkpoint = block_heads.published("dspark", TARGET)
    copies = {"embed_tokens.weight": torch.ones(64, 32), "lm_head.weight": torch.ones(64, 32)}
    checkpoint = Checkpoint("x", checkpoint.config, checkpoint.tensors | copies)
    head = BlockHead.from_checkpoint(checkpoint, SHAPE)
    assert block_heads.as_published(head).keys() == checkpoint.tensors.keys() - copies.keys()
    keys = head.layers[1].self_attn.kv_proj.weight[:32]
    torch.testing.assert_close(keys, checkpoint.tensors["layers.1.self_attn.k_proj.weight"])


def test_a_head_with_ids_of_its_own_keeps_its_output_head():
    checkpoint = block_heads.published("speculators", TARGET, drafted=[2, 5, 9, 40])
    head = BlockHead.from_checkpoint(checkpoint, SHAPE)
    assert head.spec.vocabulary.to_target_D.tolist() == [2, 5, 9, 40]
    assert head.lm_head.weight.shape == (4, 32)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"no DFlash or DSpark head .*choose another"),
        ({"hidden_size": 48}, r"its hidden size is 48, the target's 32"),
        ({"layer_types": ["sliding_attention"] * 2}, r"sliding_attention layers is not supported"),
        ({"markov_rank": 4, "markov_head_type": "rnn"}, r"markov_head_type='rnn'"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu'"),
        ({"is_causal": True}, r"is_causal=True"),
        ({"dflash_config": {"projector_type": "domino"}}, r"projector_type='domino'"),
        ({"mask_token_id": 64, "dflash_config": {}}, r"mask_token_id=64: the target has 64 ids"),
        ({"block_size": 1}, r"block_size=1 drafts nothing"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [4]}}, r"\[5\].*0 to 4"),
        ({"dflash_config": {"target_layer_ids": [1]}}, r"config.json lacks 'mask_token_id'"),
        ({"layer_types": 5}, r"config.json makes no sense: TypeError"),
        ({"architectures": 5}, r"config.json makes no sense: TypeError"),
    ],
)
def test_what_does_not_fit_is_one_line(changes, told):
    with pytest.raises(FlyError, match=told) as refused:
        parse("dflash", **changes)
    assert re.match(r"pretrained=dflash: .+$", str(refused.value))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda x: x.pop("layers.0.mlp.up_proj.weight"), r"lacks layers.0.mlp.up_proj.weight"),
        (lambda x: x.update(mask_embedding=torch.ones(32)), r"mask_embedding is not supported"),
        (
            lambda x: x.update({"fc.weight": torch.ones(32, 64)}),
            r"fc.weight is 32 x 64, not 32 x 128: by its config.json and the target",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(damage, told):
    checkpoint = block_heads.published("dflash", TARGET)
    tensors = dict(checkpoint.tensors)
    damage(tensors)
    with pytest.raises(FlyError, match=told):
        BlockHead.from_checkpoint(Checkpoint("x", checkpoint.config, tensors), SHAPE)


def test_a_d2t_that_leaves_the_targets_vocabulary_is_refused():
    with pytest.raises(FlyError, match=r"its d2t .* 0 to 63"):
        parse("speculators", {"d2t": torch.tensor([0, 70])})


def test_rope_is_read_from_old_and_new_files_alike():
    old = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    new = {"rope_theta": None, "rope_parameters": scaled}
    frequencies = []
    for changes in (old, new, {"rope_theta": 5e5}):
        head = parse("dflash", **changes)
        frequencies.append(BlockHead(head, 64).rotary_emb.inv_freq)
    torch.testing.assert_close(frequencies[0], frequencies[1])
    torch.testing.assert_close(frequencies[0] * 2, frequencies[2])
