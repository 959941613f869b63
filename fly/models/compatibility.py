"""Which models fly can decode, judged by their configuration."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel

from fly.errors import FlyError


def refuse_unsupported(model: PreTrainedModel, field: str, max_length: int) -> None:
    """Raise FlyError for a model that the ragged cache would decode wrongly.

    Layers that do not attend to the whole past (sliding window, linear attention, recurrent
    state) cannot be rolled back by length; kernels without free-form masks cannot serve sequences
    of different lengths. `field` is the configuration key that errors name, `max_length` the
    longest context of the run: windows and RoPE limits beyond it do no harm.
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
    if (layers := _unsupported_layers(config)) is not None:
        raise FlyError(
            f"{name}: {layers} layers are not supported yet (only full attention): choose another "
            "model, or lm-eval's hf (leave out config_path)"
        )
    limit = _rope_limit(config)
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
    """The kinds of attention layers; GPT-Neo uses its own key and names."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    return set(kinds or ())


def _narrowest_window(config: PretrainedConfig) -> int | None:
    """The size in tokens of the narrowest sliding window; None if no layer has one."""
    kinds = _layer_types(config)
    if "local" in kinds:
        return int(config.window_size)
    window = getattr(config, "sliding_window", None)
    enabled = getattr(config, "use_sliding_window", True)
    slides = "sliding_attention" in kinds if kinds else enabled
    # Doge attends to so many selected keys, and may slide as well
    found = [getattr(config, "keep_window_size", None), window if slides else None]
    return min((int(size) for size in found if size is not None), default=None)


def _unsupported_layers(config: PretrainedConfig) -> str | None:
    """A kind of layer that attends neither to the whole past nor to a window of known size."""
    kinds = _layer_types(config)
    unknown = kinds - {"full_attention", "sliding_attention", "global", "local"}
    if "sliding_attention" in kinds and not getattr(config, "sliding_window", None):
        return "sliding_attention"
    if not unknown and getattr(config, "attn_temperature_tuning", False):  # Llama 4
        return "temperature-tuned"
    return min(unknown, default=None)


def _rope_limit(config: PretrainedConfig) -> int | None:
    """The context length beyond which longrope and dynamic RoPE change every frequency."""
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
