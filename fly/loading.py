"""Where models come from, and the checks that make a draft and a target a pair."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from fly import pairs
from fly.decoding import memory
from fly.decoding.runner import ModelRunner, input_device
from fly.errors import FlyError

logger = logging.getLogger(__name__)

_LOADED = 1.2  # bytes in memory per byte of weights: an untied copy of the head, quantisation
_WORKSPACE = 10**9  # beside the weights: activations, K/V, libraries
_DEQUANTISED = 3.5  # a 4-bit GGUF file's weights as bfloat16


@dataclass(frozen=True)
class ModelSource:
    """What `from_pretrained` is given: a hub id or folder, and the GGUF file in it, if any."""

    path: str
    gguf_file: str | None = None


def resolve_source(text: str, field: str) -> ModelSource:
    """A model named in the configuration. `field` is the key that errors speak of.

    Accepts a hub id, a local folder, a .gguf file, or pair:NAME/draft and pair:NAME/target.
    Raises FlyError for local paths that are not there or hold no model.
    """
    text = pairs.resolve_model_path(text)
    path = Path(text).expanduser()
    if text.endswith(".gguf"):
        if not path.is_file():
            raise FlyError(f"{field}={text}: no such file: give the path of a GGUF file")
        return ModelSource(str(path.parent), path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FlyError(f"{field}={text}: the folder has no config.json: give a model's folder")
        return ModelSource(str(path))
    looks_local = text.startswith(("/", ".", "~")) or text.count("/") > 1
    if looks_local:
        raise FlyError(f"{field}={text}: no such folder: give a hub id or a model's folder")
    return ModelSource(text)


def warn_if_memory_is_short(target: ModelSource, draft: ModelSource | None, device: str) -> None:
    """Say so before loading if a CPU's memory will hardly hold the models.

    Weights are packed one by one and the checkpoint's own let go, so both are never there whole;
    what is not in memory of a model that lies on a hub is not known.
    """
    if device != "cpu":
        return
    stored = sum(_weight_bytes(source) for source in (target, draft) if source is not None)
    needed, free = int(_LOADED * stored) + _WORKSPACE, memory.free_bytes(torch.device("cpu"))
    if stored and needed > free:
        logger.warning(
            "the models will take about %.1f GB of memory and %.1f GB are free: close other "
            "programs, or choose smaller models",
            needed / 1e9,
            free / 1e9,
        )


def _weight_bytes(source: ModelSource) -> int:
    """Bytes of a local model's weights, as they are loaded; 0 if it is on a hub."""
    folder = Path(source.path)
    if source.gguf_file is not None:
        return int((folder / source.gguf_file).stat().st_size * _DEQUANTISED)
    for pattern in ("*.safetensors", "*.bin"):
        files = [f for f in folder.glob(pattern) if not f.name.startswith("consolidated")]
        if files:
            return sum(file.stat().st_size for file in files)
    return 0


def check_dtype(field: str, dtype: object) -> None:
    """Refuse a name that is no torch dtype before anything loads."""
    if not isinstance(dtype, str) or dtype == "auto":
        return
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise FlyError(f"{field}={dtype}: no such dtype: use e.g. bfloat16, float16, float32")


def check_same_vocabulary(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Draft tokens are the target's tokens only if both map every id to the same string."""
    target_vocab, draft_vocab = target.get_vocab(), draft.get_vocab()
    if target_vocab == draft_vocab:
        return
    by_id_target = {index: token for token, index in target_vocab.items()}
    by_id_draft = {index: token for token, index in draft_vocab.items()}
    for index in range(max(*by_id_target, *by_id_draft) + 1):
        ours, theirs = by_id_target.get(index), by_id_draft.get(index)
        if ours != theirs:
            raise FlyError(
                f"draft and target have different vocabularies ({len(draft_vocab)} and "
                f"{len(target_vocab)} tokens): token {index} is {theirs!r} in the draft and "
                f"{ours!r} in the target: choose a draft of the target's family"
            )
    raise FlyError(
        "draft and target have different vocabularies: choose a draft of the target's family"
    )


def refuse_unsupported(model: PreTrainedModel, field: str, max_length: int) -> None:
    """Refuse what the ragged cache would decode wrongly: never silently wrong.

    Layers that do not attend to the whole past (sliding window, linear attention, recurrent
    state) do not roll back by length; kernels without free-form masks cannot serve ragged rows.
    """
    config = model.config.get_text_config()
    name = f"{field} ({model.config.model_type})"
    if model.config.is_encoder_decoder:
        raise FlyError(f"{name}: encoder-decoder models are not supported: use lm-eval's hf")
    if getattr(model, "_is_stateful", False):
        raise FlyError(f"{name}: recurrent models cannot roll back rejected tokens")
    window = _narrowest_window(config)
    if window is not None and window < max_length:
        raise FlyError(
            f"{name}: layers with a sliding window of {window} tokens are not supported yet: "
            f"set max_length={window} or lower, or choose another model"
        )
    if (other := _other_layers(config)) is not None:
        raise FlyError(
            f"{name}: {other} layers are not supported yet (only full attention): choose another "
            "model, or lm-eval's hf (leave out config_path)"
        )
    limit = _rope_switches_at(config)
    if limit is not None and limit < max_length:
        raise FlyError(
            f"{name}: its rotary frequencies change after {limit} tokens, which cached keys "
            f"cannot follow: set max_length={limit} or lower, or choose another model"
        )
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise FlyError(
            f"attn_implementation={attention} for {name}: fly needs per-row masks: "
            "use attn_implementation=sdpa or eager"
        )


def _layer_types(config: PretrainedConfig) -> set[str]:
    """The kinds of attention layers; GPT-Neo has its own key and names."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    return set(kinds or ())


def _narrowest_window(config: PretrainedConfig) -> int | None:
    """Tokens that some layer's sliding window sees; None if no layer has one."""
    kinds = _layer_types(config)
    if "local" in kinds:
        return int(config.window_size)
    if hasattr(config, "keep_window_size"):  # Doge attends to that many chosen keys
        return int(config.keep_window_size)
    window = getattr(config, "sliding_window", None)
    by_flag = getattr(config, "use_sliding_window", True)
    slides = "sliding_attention" in kinds if kinds else by_flag
    return int(window) if slides and window is not None else None


def _other_layers(config: PretrainedConfig) -> str | None:
    """A kind of layer that neither attends to the whole past nor to a window of it."""
    known = {"full_attention", "sliding_attention", "global", "local"}
    unknown = _layer_types(config) - known
    if "sliding_attention" in _layer_types(config) and not getattr(config, "sliding_window", None):
        return "sliding_attention"
    if not unknown and getattr(config, "attn_temperature_tuning", False):  # Llama 4
        return "temperature-tuned"
    return min(unknown) if unknown else None


def _rope_switches_at(config: PretrainedConfig) -> int | None:
    """Context length after which longrope and dynamic RoPE change every frequency."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    per_layer = [value for value in (parameters or {}).values() if isinstance(value, dict)]
    limits = []
    for rope in per_layer or [parameters or {}]:
        if rope.get("rope_type", rope.get("type")) in ("longrope", "dynamic", "su"):
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limits.append(int(original or config.max_position_embeddings))
    return min(limits, default=None)


@torch.inference_mode()
def check_cache_agrees(model: PreTrainedModel, field: str) -> None:
    """Decode two ragged rows of a few tokens through the cache; compare with plain passes.

    Catches architectures that ignore the mask or the positions fly passes (ALiBi, or positions
    counted by the cache).
    """
    tokens = [index % 50 + 3 for index in range(0, 91, 7)]
    device = input_device(model)
    expected: Any = model(torch.tensor([tokens], device=device)).logits[0].float()
    try:
        checked = _through_cache(model, tokens)
    except (ValueError, TypeError, RuntimeError, AttributeError, LookupError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FlyError(
            f"{field} ({model.config.model_type}): cannot be decoded through fly's cache "
            f"({reason}): this architecture is not supported yet"
        ) from error
    tolerance = 0.1 * expected.abs().max().item() + 1e-4
    difference = max((logits - expected[at]).abs().max().item() for at, logits in checked)
    if not difference <= tolerance:  # also refuses NaN
        raise FlyError(
            f"{field} ({model.config.model_type}): decoding through fly's cache differs from the "
            f"model's plain pass (by {difference:.3g}): this architecture is not supported yet"
        )


def _through_cache(model: PreTrainedModel, tokens: list[int]) -> list[tuple[int, torch.Tensor]]:
    """(position, logits [V] there) of two rows, fed in pieces with a rollback in between."""
    runner = ModelRunner(model, slots=2, max_length=len(tokens), reuse_prefixes=False)
    runner.prefill(0, tokens[:4])
    runner.prefill(1, tokens[:7])
    runner.extend([[*tokens[4:6], 1, 1], tokens[7:9]])  # the two fillers are rolled back
    runner.keep(0, 6)
    runner.keep(1, 9)
    logits_BQV = runner.extend([tokens[6:10], tokens[9:12]]).float()
    return [(6 + at, logits_BQV[0, at]) for at in range(4)] + [
        (9 + at, logits_BQV[1, at]) for at in range(3)
    ]


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """EOS ids of generation_config *and* tokenizer: models name some in the one only."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    found = set(ids if isinstance(ids, (list, tuple)) else [ids])
    found.add(tokenizer.eos_token_id)
    return frozenset(int(index) for index in found if index is not None)
