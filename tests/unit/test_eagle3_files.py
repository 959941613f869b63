"""EAGLE-3 heads as each producer writes them, and what does not fit is named."""

import pytest
import torch

from fly.errors import FlyError
from fly.execution.heads.eagle3 import Eagle3Head
from fly.execution.kv_cache import SlotCache
from fly.execution.model_runner import causal_mask
from fly.models.heads.checkpoint import Checkpoint, TargetShape, read
from fly.models.heads.eagle3 import files_of
from fly.models.sources import ModelSource
from tests import heads

TARGET = TargetShape(hidden_size=32, vocabulary=64, layers=8)
DRAFTED = torch.arange(0, 64, 2)
TENSORS = heads.tensors(0, DRAFTED)


def under(prefix, tensors=TENSORS):
    """The tensors with the layer's under another name."""
    return {name.replace("midlayer.", prefix): tensor for name, tensor in tensors.items()}


def quark(tensors):
    """8-bit weights of the layer with a scale per row; fc and lm_head are left out."""
    found = {}
    for name, tensor in tensors.items():
        if not name.startswith("midlayer.") or tensor.dim() == 1:
            found[name] = tensor
            continue
        scale = tensor.abs().amax(dim=1) / 448
        found[name] = (tensor / scale[:, None]).to(torch.float8_e4m3fn)
        found[name.replace(".weight", ".weight_scale")] = scale
    return found


FLAT = {**heads.SHAPE, "draft_vocab_size": 32}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 32,
    "transformer_layer_config": heads.SHAPE,
    "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
}
NVIDIA = {
    **FLAT,
    "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
}
PRODUCERS = {
    "safeailab": ({**FLAT, "architectures": ["LlamaForCausalLM"]}, TENSORS, (2, 4, 5)),
    "specforge": (
        {**FLAT, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, TENSORS, (2, 4, 5)
    ),
    "speculators": (SPECULATORS, under("layers.0."), (1, 4, 6)),
    "nvidia": (NVIDIA, TENSORS, (2, 4, 5)),
    "nvidia-boundaries": (
        {**FLAT, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 6, 8]}},
        TENSORS,
        (4, 6, 8),
    ),
    "deepspec": (
        {**FLAT, "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3",
         "layer_types": ["full_attention"], "target_layer_ids": [1, 3, 4]},
        under("layers.0."), (2, 4, 5),
    ),
    "automodel": (FLAT, {f"model.{name}": t for name, t in TENSORS.items()}, (2, 4, 5)),
    "quark": ({**FLAT, "quantization_config": {}}, quark(TENSORS), (2, 4, 5)),
}  # fmt: skip


@torch.inference_mode()
def logits(head):
    """Of five pairs in one pass."""
    generator = torch.Generator().manual_seed(4)
    positions = torch.arange(5)[None]
    cache = SlotCache(1)
    cache.reserve(5)
    cache.begin(0, positions)
    embeddings = torch.randn(1, 5, 32, generator=generator)
    states = head.project(torch.randn(1, 5, head.fc.in_features, generator=generator))
    hidden = head(embeddings, states, positions, causal_mask(positions, 5, torch.float32), cache)
    return head.predict(hidden)[0]


@pytest.mark.parametrize("producer", PRODUCERS)
def test_every_format_is_the_same_head(producer, tmp_path):
    config, tensors, layers = PRODUCERS[producer]
    folder = heads.save(tmp_path, config, tensors)
    checkpoint = read(ModelSource(str(folder)), producer, {})
    head = Eagle3Head.from_checkpoint(checkpoint, TARGET, None).eval()
    assert head.layers_read == layers
    assert head.vocabulary.to_target_D.tolist() == DRAFTED.tolist()
    tolerance = {"atol": 0.3, "rtol": 0.1} if producer == "quark" else {}
    plain = Eagle3Head.from_checkpoint(Checkpoint("", FLAT, TENSORS), TARGET, None).eval()
    torch.testing.assert_close(logits(head), logits(plain), **tolerance)
    assert Eagle3Head.from_checkpoint(checkpoint, TARGET, (0, 3, 8)).layers_read == (0, 3, 8)


@pytest.mark.parametrize("biased", ["qkv", "qkvo", ""])
def test_biases_are_those_of_the_tensors(biased):
    """Layers of Qwen2 have three of the four, and were refused for the one that they lack."""
    added = {
        f"midlayer.self_attn.{name}_proj.bias": torch.ones(
            TENSORS[f"midlayer.self_attn.{name}_proj.weight"].shape[0]
        )
        for name in biased
    }
    head = Eagle3Head.from_checkpoint(Checkpoint("", FLAT, {**TENSORS, **added}), TARGET, None)
    attention = head.layer.self_attn
    found = [n for n in "qkvo" if getattr(attention, f"{n}_proj").bias is not None]
    assert "".join(found) == biased
    plain = Eagle3Head.from_checkpoint(Checkpoint("", FLAT, TENSORS), TARGET, None)
    assert torch.equal(logits(head.eval()), logits(plain.eval())) == (not biased)


def test_a_pickled_checkpoint_is_read(tmp_path):
    """SafeAILab's are pytorch_model.bin."""
    folder = heads.save(tmp_path, FLAT, {})
    (folder / "model.safetensors").unlink()
    torch.save(TENSORS, folder / "pytorch_model.bin")
    checkpoint = read(ModelSource(str(folder)), "a head", {})
    assert checkpoint.tensors.keys() == TENSORS.keys()


FLAGS = {
    "norm_before_residual": {},
    "norm_before_fc": {"input_norm.weight": torch.rand(96)},
    "fc_norm": {f"fc_norm.{i}.weight": torch.rand(32) for i in range(3)},
}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("where", ["config", "eagle_config"])
def test_flags_change_the_pass(flag, where):
    keys = {flag: True} if where == "config" else {"eagle_config": {flag: True}}
    tensors = {**TENSORS, **FLAGS[flag]}
    checkpoint = Checkpoint("a head", {**FLAT, **keys}, tensors)
    plain = Checkpoint("a head", FLAT, TENSORS)
    flagged, unflagged = (
        logits(Eagle3Head.from_checkpoint(one, TARGET, None)) for one in (checkpoint, plain)
    )
    assert (flagged - unflagged).abs().max() > 0.1


@pytest.mark.parametrize("keys", [
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
    {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "factor": 4.0,
        "rope_theta": 10000.0}},
    {"rope_theta": 500.0},
])  # fmt: skip
def test_rope_is_the_checkpoints(keys):
    """Llama-3.1's scaling in either of transformers' spellings; read at position 500."""
    at = torch.tensor([[500]])
    angles = []
    for config in (FLAT, {**FLAT, **keys}):
        head = Eagle3Head.from_checkpoint(Checkpoint("a head", config, TENSORS), TARGET, None)
        angles.append(head.rotary(torch.zeros(1), at)[0])
    assert (angles[0] - angles[1]).abs().max() > 0.1


def test_llama_3_scaling_is_transformers_own():
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    shape = {**FLAT, "rope_theta": 500000.0, "rope_scaling": scaling}
    llama = files_of(Checkpoint("a head", shape, TENSORS), TARGET).llama
    rope = llama.rope_parameters if hasattr(llama, "rope_parameters") else llama.rope_scaling
    assert {**scaling, "rope_theta": 500000.0}.items() <= rope.items()


def without(*names):
    return {name: tensor for name, tensor in TENSORS.items() if name not in names}


def changed(**keys):
    return {**FLAT, **keys}


REFUSED = [
    (changed(hidden_size=64), TENSORS, "hidden size 64, and the target's is 32"),
    (changed(target_hidden_size=48), TENSORS, "hidden size 48"),
    (changed(vocab_size=5000), TENSORS, "vocabulary of 5000 tokens, and the target has 64"),
    (changed(num_hidden_layers=2), TENSORS, "one layer, this one has 2"),
    (changed(model_type="deepseek_v3"), TENSORS, "deepseek_v3 layers are not supported"),
    (changed(rope_scaling={"type": "dynamic", "factor": 2.0}), TENSORS, "dynamic RoPE"),
    (changed(rope_parameters={"partial_rotary_factor": 0.5}), TENSORS, "partial_rotary_factor=0.5"),
    (changed(sliding_window=16, use_sliding_window=True), TENSORS, "a sliding window"),
    (changed(hidden_size=None), TENSORS, "its config.json makes no sense"),
    (changed(num_attention_heads=0), TENSORS, "makes no sense: ZeroDivisionError"),
    (changed(eagle_aux_hidden_state_layer_ids=["x"]), TENSORS, "makes no sense: TypeError"),
    (changed(eagle_config=5), TENSORS, "makes no sense: AttributeError"),
    (changed(eagle_config={"use_aux_hidden_state": False}), TENSORS, "EAGLE-1's way"),
    (changed(eagle_aux_hidden_state_layer_ids=[2, 5, 9]), TENSORS, "the target has 0 to 8"),
    (changed(eagle_aux_hidden_state_layer_ids=[2, 5]), TENSORS, "is 32 x 96, not 32 x 64"),
    (changed(speculators_model_type="peagle"), TENSORS, "is a peagle head"),
    (changed(intermediate_size=40), TENSORS, "gate_proj.weight is 48 x 32, not 40 x 32"),
    ({"model_type": "llama"}, TENSORS, "lacks 'vocab_size'"),
    (FLAT, without("lm_head.weight"), "lacks lm_head.weight"),
    (FLAT, without("d2t"), "lacks d2t, and drafts 32 tokens only"),
    (FLAT, without("norm.weight", "fc.weight"), "lacks fc.weight, norm.weight"),
    (FLAT, {**TENSORS, "input_norm.weight": torch.ones(96)}, "input_norm.weight is not supported"),
    (FLAT, {**TENSORS, "d2t": DRAFTED}, "d2t does not fit the target"),
    (FLAT, {**TENSORS, "d2t": DRAFTED[:9]}, "d2t names 9 tokens, and lm_head has 32"),
    (FLAT, {**TENSORS, "d2t": TENSORS["d2t"].float()}, "a row of whole numbers, is float32"),
    (FLAT, {**TENSORS, "d2t": TENSORS["d2t"] > 3}, "a row of whole numbers, is bool"),
    (FLAT, {**TENSORS, "d2t": TENSORS["d2t"][:, None]}, "is int64 of 2 axes"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "tensors", "why"), REFUSED, ids=[why for *_, why in REFUSED])
def test_what_does_not_fit_is_named_in_one_line(config, tensors, why):
    with pytest.raises(FlyError) as caught:
        Eagle3Head.from_checkpoint(Checkpoint("some/head", config, tensors), TARGET, None)
    assert str(caught.value).startswith("pretrained=some/head: ")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_override_of_another_length_is_refused():
    with pytest.raises(FlyError, match=r"head_layer_ids=\[2\]: the head reads 3 hidden states"):
        files_of(Checkpoint("a head", FLAT, TENSORS), TARGET, (2,))


def test_8_bit_weights_without_scales_are_refused(tmp_path):
    tensors = {name: t for name, t in quark(TENSORS).items() if not name.endswith("_scale")}
    folder = heads.save(tmp_path, FLAT, tensors)
    with pytest.raises(FlyError, match="without a scale per row"):
        read(ModelSource(str(folder)), "a head", {})


def test_weights_of_integers_are_refused(tmp_path):
    """Their scales were dropped and the integers taken for weights."""
    quantised = {**TENSORS, "fc.weight": TENSORS["fc.weight"].to(torch.int8)}
    quantised["fc.weight_scale"] = torch.ones(len(quantised["fc.weight"]), 1)
    folder = heads.save(tmp_path, FLAT, quantised)
    with pytest.raises(FlyError, match=r"fc\.weight is int8: heads of 16 bits or 8-bit floats"):
        read(ModelSource(str(folder)), "a head", {})
