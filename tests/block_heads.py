"""Tiny block heads: random ones in their publishers' formats, and ones trained in a few seconds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from fly.execution.heads.block import BlockHead, BlockRunner
from fly.execution.kv_cache import SlotCache
from fly.models.heads import block
from fly.models.heads.checkpoint import Checkpoint, TargetShape
from fly.speculation.drafters.block import BlockDrafter
from tests import tiny

MASK = 63  # an id that the tiny target has and prompts do not
KINDS = ("dflash", "dspark", "speculators")


def config(kind: str, target, **changes) -> dict:
    """config.json as z-lab, DeepSpec and speculators write it, for a target of `tiny.model`."""
    of_target = target.config
    decoder = {
        "vocab_size": of_target.vocab_size,
        "hidden_size": of_target.hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    mask = min(MASK, of_target.vocab_size - 1)
    layers = list(range(of_target.num_hidden_layers))
    if kind == "dflash":
        result = decoder | {
            "architectures": ["DFlashDraftModel"],
            "block_size": 6,
            "num_target_layers": len(layers),
            "dflash_config": {"mask_token_id": mask, "target_layer_ids": layers},
        }
    elif kind == "dspark":
        result = decoder | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 5,
            "mask_token_id": mask,
            "target_layer_ids": layers,
            "markov_rank": 8,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    else:
        result = {
            "speculators_model_type": "dspark",
            "transformer_layer_config": decoder,
            "block_size": 5,
            "mask_token_id": mask,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
            "sample_from_anchor": False,
            "markov_rank": 8,
            "enable_confidence_head": False,
        }
    return result | changes


def published(kind: str, target, seed: int = 0, drafted=None, **changes) -> Checkpoint:
    """A random checkpoint. drafted: the target's ids that it knows; None for all."""
    keys = config(kind, target, **changes)
    own = {} if drafted is None else {"d2t": torch.tensor(drafted) - torch.arange(len(drafted))}
    spec = block.parse(Checkpoint(kind, keys, own), TargetShape.of(target.config))
    torch.manual_seed(seed)
    head = BlockHead(spec, target.config.vocab_size)
    for name, parameter in head.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.25)
    return Checkpoint(kind, keys, own | as_published(head))


def as_published(head: BlockHead) -> dict:
    """The head's tensors under their publishers' names."""
    found = {}
    for name, tensor in head.state_dict().items():
        if ".kv_proj." in name:
            keys, values = tensor.chunk(2)
            found[name.replace("kv_proj", "k_proj")] = keys.clone()
            found[name.replace("kv_proj", "v_proj")] = values.clone()
        else:
            found[name] = tensor.clone()
    return found


def save(checkpoint: Checkpoint, folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(checkpoint.config)))
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def runner(checkpoint: Checkpoint, target, slots: int, layers=None) -> BlockRunner:
    """layers: the hidden states to read, in the place of those that the checkpoint names."""
    head = BlockHead.from_checkpoint(checkpoint, TargetShape.of(target.config), layers)
    return BlockRunner(head.eval(), target, slots)


def drafter(checkpoint, target, slots, kind=BlockDrafter, layers=None, eos=tiny.EOS, **keys):
    eos_ids = frozenset() if eos is None else frozenset({eos})
    return kind(runner(checkpoint, target, slots, layers), eos_ids, **keys)


def features(target, layers, tokens: list[int]):
    """Of all tokens, by one fresh pass, [1, N, F]."""
    reader = tiny.runner(target, 1)
    reader.hidden_layers = layers
    reader.prefill(0, tokens)
    return reader.take_hidden()


def trained(kind: str, target, texts, steps=(120,), seed: int = 0) -> list[Checkpoint]:
    """A head that learned these texts of the target by heart: (prompt length, tokens) each.

    As it is after so many steps, and so many.
    """
    checkpoint = published(kind, target, seed)
    head = BlockHead.from_checkpoint(checkpoint, TargetShape.of(target.config))
    optimiser = torch.optim.AdamW(head.parameters(), lr=3e-3)
    places = [
        (seen, tokens, at)
        for start, tokens in texts
        for seen in [features(target, head.spec.layers, tokens)[0].clone()]
        for at in range(start - 1, len(tokens) - head.spec.most_drafts)
    ]
    generator = torch.Generator().manual_seed(seed)
    found = []
    for step in range(max(steps)):
        batch = [places[i] for i in torch.randint(len(places), (48,), generator=generator)]
        loss = _loss(head, target, batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step + 1 in steps:
            found.append(Checkpoint(kind, checkpoint.config, as_published(head)))
    return found


def _loss(head, target, batch):
    """Cross-entropy of the blocks that begin at the batch's places."""
    at_B1 = torch.tensor([[at] for _, _, at in batch])
    width, drafts = head.spec.block_size, head.spec.most_drafts
    most = int(at_B1.max())
    context = torch.stack(
        [torch.nn.functional.pad(f[:at], (0, 0, 0, most - at)) for f, _, at in batch]
    )
    cache = SlotCache(len(batch))
    cache.reserve(most + width)
    positions = torch.arange(most).expand(len(batch), -1)
    if most:
        cache.begin(0, positions)
        head.write_context(context, positions, cache)
    positions = at_B1 + torch.arange(width)
    cache.begin(0, positions)
    ids = torch.full_like(positions, head.spec.mask_token_id)
    ids[:, 0] = torch.tensor([tokens[at] for _, tokens, at in batch])
    hidden = torch.arange(most + width) > positions[:, -1:]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -1e30)[:, None, None]
    embedded = target.get_input_embeddings()(ids).detach()
    states = head(embedded, positions, mask.expand(-1, -1, width, -1), cache)
    logits = target.lm_head(states[:, width - drafts :])
    labels = torch.tensor([tokens[at + 1 : at + 1 + drafts] for _, tokens, at in batch])
    if head.markov_head is not None:
        before = torch.tensor([tokens[at : at + drafts] for _, tokens, at in batch])
        logits = logits + head.markov_head.markov_w2(head.markov_head.markov_w1(before))
    return cross_entropy(logits.flatten(0, 1), labels.flatten())
