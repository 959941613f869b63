"""Tiny EAGLE-3 heads: their tensors as producers write them, and one that is right by design."""

import json

import torch
from safetensors.torch import save_file

from fly.execution.heads.eagle3 import Eagle3Head, Eagle3Runner
from fly.models.heads.checkpoint import Checkpoint, TargetShape
from fly.speculation.drafters.eagle3 import Eagle3Drafter
from tests import tiny

SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}


def offsets(drafted: torch.Tensor) -> torch.Tensor:
    """d2t of the target ids that are drafted, in rising order."""
    return drafted - torch.arange(len(drafted))


def tensors(seed=0, drafted=None, vocab=64, reads=3, hidden=32) -> dict[str, torch.Tensor]:
    """A random head's, as SafeAILab names them. drafted: the target ids that it drafts; all by
    default."""
    half, wide = hidden // 2, 3 * hidden // 2
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator) * 0.2

    count = vocab if drafted is None else len(drafted)
    found = {
        "fc.weight": random(hidden, reads * hidden), "lm_head.weight": random(count, hidden)
    }  # fmt: skip
    for name, shape in (
        ("self_attn.q_proj", (hidden, 2 * hidden)),
        ("self_attn.k_proj", (half, 2 * hidden)),
        ("self_attn.v_proj", (half, 2 * hidden)),
        ("self_attn.o_proj", (hidden, hidden)),
        ("mlp.gate_proj", (wide, hidden)),
        ("mlp.up_proj", (wide, hidden)),
        ("mlp.down_proj", (hidden, wide)),
    ):
        found[f"midlayer.{name}.weight"] = random(*shape)
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    for name in ("norm", *(f"midlayer.{norm}" for norm in norms)):
        found[f"{name}.weight"] = 1 + random(hidden)
    if drafted is not None:
        found["d2t"] = offsets(drafted)
        found["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, drafted, True)
    return found


def save(folder, config, found):
    """The folder of a head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in found.items()}, folder / "model.safetensors"
    )
    return folder


def load(target, found, **config) -> Eagle3Head:
    checkpoint = Checkpoint("a head", {**SHAPE, **config}, found)
    return Eagle3Head.from_checkpoint(checkpoint, TargetShape.of(target.config), None).eval()


def drafter(target, head, slots=1, eos=frozenset({tiny.EOS})) -> Eagle3Drafter:
    return Eagle3Drafter(Eagle3Runner(head, target, slots, 512), eos)


def perfect(drafted=None):
    """(a target, a head's tensors, its config.json): the head knows what the target will say.

    The target's second layer is random; the third attends to the token before alone, and reads what
    the second made of it: that is hidden state 2, the head's feature. All else passes states on.
    The head does both at once: its first two attention heads are the second layer's, over tokens,
    its last two the third's, over features. Its pairs lack only a text's first token. Residuals
    that the target does not have are made small: `tiny` is a state's scale where a norm follows.
    """
    target = tiny.model(11, layers=3, rms_norm_eps=1e-12)
    second, third = target.model.layers[1], target.model.layers[2]
    tiny_, weak = 1e-3, 0.05
    generator = torch.Generator().manual_seed(2)
    angles = 10000.0 ** (-torch.arange(3) / 4)  # of three of a head's four pairs of numbers
    here, before = torch.zeros(8), torch.zeros(8)
    here[:3] = before[:3] = 84**0.5
    before[:3], before[4:7] = here[:3] * angles.cos(), -here[:3] * angles.sin()
    with torch.no_grad():
        target.model.embed_tokens.weight.mul_(tiny_)
        for layer in target.model.layers:
            if layer is not second:
                layer.mlp.down_proj.weight.zero_()
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).bias.zero_()
        target.model.layers[0].self_attn.o_proj.weight.zero_()
        second.mlp.down_proj.weight[16:] = 0  # its work is in the first half of a state
        second.self_attn.o_proj.weight[16:] = 0
        second.self_attn.o_proj.weight[:, 16:] = 0
        third.self_attn.q_proj.weight.zero_()
        third.self_attn.k_proj.weight.zero_()
        third.self_attn.q_proj.bias.copy_(before.repeat(4))
        third.self_attn.k_proj.bias.copy_(here.repeat(2))
        third.self_attn.v_proj.weight[:, 16:] = 0
        third.self_attn.o_proj.weight.mul_(weak)
        third.self_attn.o_proj.weight[:16] = 0
        third.self_attn.o_proj.weight[:, :16] = 0
        target.lm_head.weight.normal_(std=0.3, generator=generator)
        target.lm_head.weight[:, 16:].div_(weak)
    found = tensors(0, drafted, reads=1)
    zeros = torch.zeros
    found["fc.weight"] = tiny_ * torch.eye(32)
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        found[f"midlayer.{norm}.weight"] = torch.ones(32)
    found["norm.weight"] = torch.full((32,), tiny_)
    lm_head = target.lm_head.weight.detach() / tiny_
    found["lm_head.weight"] = lm_head if drafted is None else lm_head[drafted]
    of_tokens, of_features = second.self_attn, third.self_attn
    for name, half in (("q_proj", 16), ("k_proj", 8)):
        weight = getattr(of_tokens, name).weight.detach()[:half]
        found[f"midlayer.self_attn.{name}.weight"] = torch.cat(
            [torch.cat([weight, zeros(half, 32)], dim=1), zeros(half, 64)]
        )
        found[f"midlayer.self_attn.{name}.bias"] = torch.cat([zeros(half), here.repeat(half // 8)])
    values = (of_tokens.v_proj.weight.detach()[:8], of_features.v_proj.weight.detach()[8:])
    found["midlayer.self_attn.v_proj.weight"] = torch.block_diag(*values)
    found["midlayer.self_attn.v_proj.bias"] = zeros(16)
    found["midlayer.self_attn.o_proj.weight"] = torch.cat(
        [of_tokens.o_proj.weight.detach()[:, :16], of_features.o_proj.weight.detach()[:, 16:]],
        dim=1,
    )
    found["midlayer.self_attn.o_proj.bias"] = zeros(32)
    for name in ("gate_proj", "up_proj", "down_proj"):
        found[f"midlayer.mlp.{name}.weight"] = getattr(second.mlp, name).weight.detach().clone()
    config = {
        **SHAPE, "intermediate_size": 64, "rms_norm_eps": 1e-12, "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": [1],  # as SpecForge counts: the second layer's output
    }  # fmt: skip
    return target, found, config
