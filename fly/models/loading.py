"""What a model must be able to do, checked while it loads, and what makes two of them a pair."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from fly.errors import FlyError
from fly.execution import memory
from fly.execution.model_runner import ModelRunner, input_device
from fly.models.sources import ModelSource, weight_bytes

logger = logging.getLogger(__name__)

_CHECKED = 64  # tokens of context in the self-check
# Of the largest logit: what passes of other widths may differ by, by the dtype's rounding.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
_COARSEST = 0.05
_LOADED = 1.2  # bytes in memory per byte of weights: an untied copy of the head, quantisation
_WORKSPACE = 10**9  # beside the weights: activations, K/V, libraries
NOT_FINITE = (
    "its weights are damaged, or overflow in this dtype: fetch the model again, or try "
    "dtype=float32 (draft_dtype for the draft)"
)


def warn_if_memory_is_short(target: ModelSource, draft: ModelSource | None, device: str) -> None:
    """Say so before loading if a CPU's memory will hardly hold the models.

    Weights are packed one by one and the checkpoint's own let go, so both are never there whole;
    what is not in memory of a model that lies on a hub is not known.
    """
    if device != "cpu":
        return
    stored = sum(weight_bytes(source) for source in (target, draft) if source is not None)
    needed, free = int(_LOADED * stored) + _WORKSPACE, memory.free_bytes(torch.device("cpu"))
    if stored and needed > free:
        logger.warning(
            "the models will take about %.1f GB of memory and %.1f GB are free: close other "
            "programs, or choose smaller models",
            needed / 1e9,
            free / 1e9,
        )


class WithAllTensors:
    """A transformers auto class whose `from_pretrained` refuses a checkpoint that lacks tensors.

    transformers only warns, and goes on with random ones. Tied weights are stored once.
    """

    def __init__(self, auto_class: Any, field: str) -> None:
        self._auto_class = auto_class
        self._field = field

    def from_pretrained(self, path: str, *args: Any, **kwargs: Any) -> PreTrainedModel:
        """As the auto class's own."""
        model, info = self._auto_class.from_pretrained(
            path, *args, output_loading_info=True, **kwargs
        )
        tensors = model.state_dict(keep_vars=True)
        lacking = set(info["missing_keys"])
        there = {id(tensor) for name, tensor in tensors.items() if name not in lacking}
        absent = sorted(n for n in lacking if n not in tensors or id(tensors[n]) not in there)
        if absent:
            more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
            raise FlyError(
                f"{self._field}={path}: the checkpoint lacks {', '.join(absent[:3])}{more}: fetch "
                "the model again, or name another one"
            )
        loaded: PreTrainedModel = model
        return loaded


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
    """Decode two ragged rows through the cache; compare with plain passes, logit by logit.

    Catches architectures that ignore the mask or the positions fly passes (ALiBi, or positions
    counted by the cache), and passes that compute something else than the model's own. What the
    dtype's rounding explains may differ, and the largest logit only where two are as close.
    """
    config = model.config.get_text_config()
    room = int(getattr(config, "max_position_embeddings", None) or _CHECKED)
    words = max(1, min(config.vocab_size, 1000) - 3)
    tokens = [(index * index * 7 + index * 11) % words + 3 for index in range(min(_CHECKED, room))]
    name = f"{field} ({model.config.model_type})"
    device = input_device(model)
    expected: Any = model(torch.tensor([tokens], device=device)).logits[0].float()
    if not expected.isfinite().all():
        raise FlyError(f"{name}: its logits are not finite (NaN or infinite): {NOT_FINITE}")
    try:
        checked = _through_cache(model, tokens)
    except (ValueError, TypeError, RuntimeError, AttributeError, LookupError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FlyError(
            f"{name}: cannot be decoded through fly's cache ({reason}): this architecture is not "
            "supported yet"
        ) from error
    tolerance = _ROUNDING.get(model.dtype, _COARSEST) * expected.abs().max().item() + 1e-4
    for at, logits in checked:
        difference = (logits - expected[at]).abs().max().item()
        best, ours = (int(values.argmax()) for values in (expected[at], logits))
        gap = (expected[at, best] - expected[at, ours]).item()
        if not difference <= tolerance or gap > tolerance:  # also refuses NaN
            raise FlyError(
                f"{name}: decoding through fly's cache differs from the model's plain pass (at "
                f"token {at} by {difference:.3g}, where rounding explains {tolerance:.3g}): this "
                "architecture is not supported yet"
            )


def _through_cache(model: PreTrainedModel, tokens: list[int]) -> list[tuple[int, torch.Tensor]]:
    """(position, logits [V] there) of two rows, fed in pieces with a rollback in between.

    Between them the rows see every piece of the context: chunks of a prompt, a wide pass, a draft.
    """
    first, second = len(tokens) // 3, len(tokens) // 2
    runner = ModelRunner(model, slots=2, max_length=len(tokens), reuse_prefixes=False)
    runner.prefill(0, tokens[:first], chunk=16)
    runner.prefill(1, tokens[:second], chunk=16)
    # the two fillers are rolled back
    runner.extend([[*tokens[first : first + 2], 1, 1], tokens[second : second + 2]])
    runner.keep(0, first + 2)
    runner.keep(1, second + 2)
    checked = []
    at = [first + 2, second + 2]
    while min(at) < len(tokens):
        pieces = [tokens[start : start + width] for start, width in zip(at, (5, 3))]
        pieces = [piece or tokens[-1:] for piece in pieces]  # a row that is done says it again
        logits_BQV = runner.extend(pieces).float()
        for row, start in enumerate(at):
            fed = tokens[start : start + (5, 3)[row]]
            checked += [(start + i, logits_BQV[row, i]) for i in range(len(fed))]
            at[row] = start + len(fed)
            runner.keep(row, at[row])
    return checked


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """EOS ids of generation_config *and* tokenizer: models name some in the one only."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    found = set(ids if isinstance(ids, (list, tuple)) else [ids])
    found.add(tokenizer.eos_token_id)
    return frozenset(int(index) for index in found if index is not None)
