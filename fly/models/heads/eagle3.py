"""EAGLE-3 heads (arXiv 2503.01840) as they are published, in one form.

- SafeAILab, SpecForge, AngelSlim, TorchSpec: one flat config.json, tensors under `midlayer.`.
- speculators (vLLM): the layer's shape under `transformer_layer_config`, tensors under `layers.0.`.
- NVIDIA: as SpecForge, with layer ids and flags under `eagle_config`.
- DeepSpec: flat, tensors under `layers.0.`, the target's layers under `target_layer_ids`.
- AMD Quark: any of them with 8-bit weights (fly.models.heads.checkpoint dequantises them).

Two conventions number the hidden states that a head reads. EAGLE's code, vLLM and speculators index
hidden_states, as fly does; SpecForge, DeepSpec and NVIDIA's ModelOpt number layers by their
outputs, one less. But for DeepSpec's, the same key holds either, so the first id tells them apart,
as in SGLang (its pull request 25454): 1 is never read as an index.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from fly.models.draft_vocabulary import NONE, DraftVocabulary
from fly.models.heads.checkpoint import Checkpoint, TargetShape

_IDS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_FAMILIES = ("llama", "qwen2", "qwen3")
_PADDING = 512  # ids that models of one tokenizer may pad their vocabularies by
_PREFIXES = re.compile(r"^(?:model\.)?(?:midlayer\.|layers\.0\.)?")


@dataclass(frozen=True)
class Eagle3Files:
    """A head's files in one form.

    llama: the shape of its layer, whose attention takes 2 * hidden_size inputs. layers: numbers of
    the target's hidden states that it reads, of `feature_size` each. norm_before_residual: the
    residual is the normalised state. norm_before_fc: one norm over all features. fc_norm: one per
    hidden state. norm_output: the state that is fed back is normalised. tensors: names as of
    fly.execution.heads.eagle3.Eagle3Head.
    """

    llama: LlamaConfig
    layers: tuple[int, ...]
    feature_size: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    vocabulary: DraftVocabulary
    tensors: Mapping[str, Tensor]


def files_of(
    checkpoint: Checkpoint, target: TargetShape, override: tuple[int, ...] | None = None
) -> Eagle3Files:
    """override: `head_layer_ids` of the run's configuration.

    Raises FlyError, in one line, for what is no EAGLE-3 head or does not fit the target.
    """
    config = checkpoint.config
    tensors = {_name(name): tensor for name, tensor in checkpoint.tensors.items()}
    tensors.pop("t2d", None)
    renamed = replace(checkpoint, tensors=tensors)
    with renamed.reading_config():
        eagle = config.get("eagle_config") or {}
        shape = config.get("transformer_layer_config") or config
        _check_kind(renamed, shape, eagle)
        llama = _llama(renamed, shape)
        _check_fits(renamed, llama, config.get("target_hidden_size"), target)
        layers = renamed.layers_of(_layers(config, eagle, target), target, override)
        flags = {name: bool(config.get(name) or eagle.get(name)) for name in _FLAGS}
    return Eagle3Files(
        llama=llama,
        layers=layers,
        feature_size=target.hidden_size,
        **flags,
        vocabulary=_vocabulary(renamed, tensors.pop("d2t", None), llama.vocab_size, target),
        tensors=tensors,
    )


def _name(name: str) -> str:
    """A tensor's name in Eagle3Head, whose one layer is `layer.`."""
    rest = _PREFIXES.sub("", name)
    prefix = name.removesuffix(rest)
    return f"layer.{rest}" if "layer" in prefix else rest


def _check_kind(checkpoint: Checkpoint, shape: Mapping[str, Any], eagle: Mapping[str, Any]) -> None:
    kind = checkpoint.config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise checkpoint.refuse(f"is a {kind} head, not EAGLE-3: choose another head or drafter")
    family = shape.get("model_type") or "llama"
    if family not in _FAMILIES:
        raise checkpoint.refuse(
            f"EAGLE-3 heads of {family} layers are not supported: {', '.join(_FAMILIES)} are"
        )
    if (layers := shape.get("num_hidden_layers", 1)) != 1:
        raise checkpoint.refuse(f"EAGLE-3 heads have one layer, this one has {layers}")
    by_flag = shape.get("use_sliding_window") and shape.get("sliding_window")
    if "sliding_attention" in (shape.get("layer_types") or ()) or by_flag:
        raise checkpoint.refuse("heads with a sliding window are not supported")
    if eagle.get("use_aux_hidden_state") is False:
        raise checkpoint.refuse(
            "reads the target's last state after its norm only (use_aux_hidden_state=false), which "
            "is EAGLE-1's way: choose an EAGLE-3 head"
        )


def _layers(
    config: Mapping[str, Any], eagle: Mapping[str, Any], target: TargetShape
) -> tuple[int, ...]:
    if outputs := config.get("target_layer_ids"):  # DeepSpec's
        return tuple(layer + 1 for layer in outputs)
    found = tuple(config.get(_IDS) or eagle.get(_IDS) or ())
    if not found:
        return usual_layers(target)
    counts_outputs = found[0] == 1 and "speculators_model_type" not in config
    return tuple(layer + 1 for layer in found) if counts_outputs else found


def usual_layers(target: TargetShape) -> tuple[int, ...]:
    """What a head reads whose files name no layers: EAGLE's own choice."""
    return (2, target.layers // 2, target.layers - 3)


def _llama(checkpoint: Checkpoint, shape: Mapping[str, Any]) -> LlamaConfig:
    """The layer's shape for transformers' modules; biases as its tensors have them."""
    optional: dict[str, Any] = {
        key: shape[key]
        for key in ("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps")
        if shape.get(key) is not None
    }
    return LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_attention_heads=shape["num_attention_heads"],
        num_hidden_layers=1,
        max_position_embeddings=shape.get("max_position_embeddings") or 2048,
        mlp_bias="layer.mlp.gate_proj.bias" in checkpoint.tensors,
        **optional,
        **checkpoint.rope(shape),
    )


def _check_fits(
    checkpoint: Checkpoint, llama: LlamaConfig, feature_size: int | None, target: TargetShape
) -> None:
    made_for = feature_size or llama.hidden_size
    if made_for != target.hidden_size:
        raise checkpoint.refuse(
            f"is made for a target of hidden size {made_for}, and the target's is "
            f"{target.hidden_size}: choose the head of this target"
        )
    if abs(llama.vocab_size - target.vocabulary) >= _PADDING:
        raise checkpoint.refuse(
            f"is made for a vocabulary of {llama.vocab_size} tokens, and the target has "
            f"{target.vocabulary}: choose the head of this target"
        )
    if llama.hidden_size != target.hidden_size and "embed_tokens.weight" not in checkpoint.tensors:
        raise checkpoint.refuse("the checkpoint lacks embed_tokens, and the target's do not fit")


def _vocabulary(
    checkpoint: Checkpoint, d2t_D: Tensor | None, vocabulary: int, target: TargetShape
) -> DraftVocabulary:
    if "lm_head.weight" not in checkpoint.tensors:
        raise checkpoint.refuse("the checkpoint lacks lm_head.weight")
    count = len(checkpoint.tensors["lm_head.weight"])
    if d2t_D is None:
        if count < vocabulary:
            raise checkpoint.refuse(f"the checkpoint lacks d2t, and drafts {count} tokens only")
        ids_D = torch.arange(count)
        return DraftVocabulary(
            ids_D.masked_fill(ids_D >= target.vocabulary, NONE), target.vocabulary
        )
    if len(d2t_D) != count:
        raise checkpoint.refuse(f"d2t names {len(d2t_D)} tokens, and lm_head has {count}")
    return checkpoint.vocabulary_of(d2t_D, target)
