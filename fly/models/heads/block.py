"""The published formats of block heads: DFlash and DSpark.

z-lab's DFlash (arXiv 2602.06036), DeepSpec's DFlash and DSpark, SpecForge's, and both as saved by
speculators. Tensors have the same names everywhere; configurations differ in where their keys are,
in how they number the target's layers, and in which position of the block drafts the first token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from transformers import Qwen3Config

from fly.errors import FlyError
from fly.models.draft_vocabulary import DraftVocabulary
from fly.models.heads.checkpoint import Checkpoint, TargetShape
from fly.reading import shown

_ARCHITECTURES = ("DFlashDraftModel", "Qwen3DSparkModel", "DSparkDraftModel")
_SPECULATORS = ("dflash", "dspark")
# Keys by which variants compute something else, and their values where they do not.
_KNOWN: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "causal": (None, False),
    "is_causal": (None, False),
    "use_swa": (None, False),
    "attention_sink_bias": (None, False),
    "attention_mode": (None, "gqa", "mha"),
    "projector_type": (None, "dflash", "dspark"),
    "shift_label": (None, False),
    "final_logit_softcapping": (None,),
}


@dataclass(frozen=True)
class BlockSpec:
    """What a block head is, whoever published it.

    decoder: of its layers, for transformers' modules of Qwen3. layers: hidden states of the
    target that it reads, as fly.execution.model_runner counts them. block_size: positions of a
    block, the last committed token first, then masks. from_anchor: whether that token's position
    drafts the first token, and every position the token after it; else every mask drafts the token
    in its own place. vocabulary: of a head that has ids of its own. markov_rank: 0 without a Markov
    head. confidence: what the confidence head reads; None without one.
    """

    decoder: Qwen3Config
    layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    from_anchor: bool
    vocabulary: DraftVocabulary | None
    markov_rank: int
    confidence: Literal["hidden", "hidden and markov"] | None

    @property
    def most_drafts(self) -> int:
        """Tokens that one pass drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1

    def check_drafts(self, spd_k: int) -> None:
        """Raise FlyError if the head cannot draft so many tokens."""
        if spd_k > self.most_drafts:
            raise FlyError(
                f"spd_k={spd_k}: this head drafts at most {self.most_drafts} tokens (block_size="
                f"{self.block_size}): set spd_k to {self.most_drafts} or lower"
            )


def kind_of(config: Mapping[str, Any]) -> Literal["dflash", "dspark"]:
    """Which of the two a block head's config.json says it is. DeepSpec's DFlash is a DSpark head
    without its Markov and confidence heads, and goes by that name."""
    kind = config.get("speculators_model_type")
    is_dflash = kind == "dflash" or "DFlashDraftModel" in (config.get("architectures") or ())
    return "dflash" if is_dflash else "dspark"


def parse(
    checkpoint: Checkpoint, target: TargetShape, override: tuple[int, ...] | None = None
) -> BlockSpec:
    """override: the configuration's `head_layer_ids`.

    Raises FlyError for a checkpoint of another kind, one that does not fit the target, and one that
    computes what fly does not.
    """
    config = checkpoint.config
    d2t = checkpoint.tensors.get("d2t")
    with checkpoint.reading_config():
        is_named = any(name in _ARCHITECTURES for name in config.get("architectures") or ())
        if not is_named and config.get("speculators_model_type") not in _SPECULATORS:
            raise checkpoint.refuse(
                f"no DFlash or DSpark head (architectures={shown(config.get('architectures'))}): "
                "name one, or choose another drafter"
            )
        shape: Mapping[str, Any] = config.get("transformer_layer_config") or config
        # SpecForge has all keys of the method in dflash_config, z-lab some
        keys = {**shape, **config, **(config.get("dflash_config") or {})}
        _refuse_unsupported(checkpoint, keys)
        spec = BlockSpec(
            decoder=_decoder(checkpoint, shape),
            layers=checkpoint.layers_of(_layers(keys), target, override),
            block_size=keys["block_size"],
            mask_token_id=keys["mask_token_id"],
            from_anchor=bool(keys.get("sample_from_anchor", _is_from_anchor(config))),
            vocabulary=None if d2t is None else checkpoint.vocabulary_of(d2t, target),
            markov_rank=keys.get("markov_rank") or 0,
            confidence=_confidence(keys),
        )
        _check_fits(checkpoint, spec, target)
    return spec


def _decoder(checkpoint: Checkpoint, shape: Mapping[str, Any]) -> Qwen3Config:
    heads, hidden = shape["num_attention_heads"], shape["hidden_size"]
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=shape["intermediate_size"],
        num_hidden_layers=shape["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=shape["num_key_value_heads"],
        head_dim=shape.get("head_dim") or hidden // heads,
        max_position_embeddings=shape["max_position_embeddings"],
        rms_norm_eps=shape["rms_norm_eps"],
        attention_bias=bool(shape.get("attention_bias", False)),
        **checkpoint.rope(shape),
    )


def _is_from_anchor(config: Mapping[str, Any]) -> bool:
    """Where files do not say it: true of DSpark, and of DeepSpec's DFlash, a DSpark without its
    heads. False of z-lab's DFlash, and of what speculators saved before it had the key (#760)."""
    kind = config.get("speculators_model_type")
    return kind is None and "DFlashDraftModel" not in config["architectures"]


def _layers(keys: Mapping[str, Any]) -> list[int]:
    """speculators numbers hidden states. The others number layers whose outputs are read, which is
    one less, with -1 for the embeddings."""
    if "speculators_model_type" in keys:
        return list(keys["aux_hidden_state_layer_ids"])
    numbers = keys.get("target_layer_ids") or _spread(
        keys["num_target_layers"], keys["num_hidden_layers"]
    )
    return [number + 1 for number in numbers]


def _spread(target_layers: int, layers: int) -> list[int]:
    """z-lab's layers where its files name none: from the second to the fourth last, evenly."""
    if layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers)]


def _confidence(keys: Mapping[str, Any]) -> Literal["hidden", "hidden and markov"] | None:
    if not keys.get("enable_confidence_head"):
        return None
    return "hidden and markov" if keys.get("confidence_head_with_markov") else "hidden"


def own_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """Without copies of the target's embedding and output head. Keys and values of a layer become
    one product (`kv_proj`), apart from the queries, which the context has none of."""
    shared = {"embed_tokens.weight", "d2t", "t2d"}
    if "d2t" not in checkpoint.tensors:
        shared.add("lm_head.weight")
    found = {name: x for name, x in checkpoint.tensors.items() if name not in shared}
    for name in [name for name in found if ".k_proj." in name]:
        values = found.pop(name.replace("k_proj", "v_proj"), None)
        if values is not None:
            keys = found.pop(name)
            found[name.replace("k_proj", "kv_proj")] = torch.cat([keys, values])
    return replace(checkpoint, tensors=found)


def _refuse_unsupported(checkpoint: Checkpoint, keys: Mapping[str, Any]) -> None:
    found = [f"{kind} layers" for kind in keys.get("layer_types") or () if kind != "full_attention"]
    # every published Markov head is a vanilla one
    if keys.get("markov_rank") and keys.get("markov_head_type", "vanilla") != "vanilla":
        found.append(f"markov_head_type={keys['markov_head_type']!r}")
    found += [
        f"{name}={shown(keys[name])}"
        for name, known in _KNOWN.items()
        if keys.get(name) not in known
    ]
    if found:
        raise checkpoint.refuse(f"a head with {found[0]} is not supported yet: choose another one")


def _check_fits(checkpoint: Checkpoint, spec: BlockSpec, target: TargetShape) -> None:
    hidden = spec.decoder.hidden_size
    if hidden != target.hidden_size:
        raise checkpoint.refuse(
            f"its hidden size is {hidden}, the target's {target.hidden_size}: choose the head of "
            "this target"
        )
    if not 0 <= spec.mask_token_id < target.vocabulary:
        raise checkpoint.refuse(
            f"mask_token_id={spec.mask_token_id}: the target has {target.vocabulary} ids"
        )
    if spec.most_drafts < 1:
        raise checkpoint.refuse(f"block_size={spec.block_size} drafts nothing")
