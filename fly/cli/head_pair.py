"""What `fly config check` says of a pair whose draft is a trained head of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from transformers import PreTrainedModel

from fly.config import FlyConfig
from fly.errors import FlyError
from fly.harness.vllm_config import BLOCK_METHODS, FIRST_WITH_ALL, speculative_config
from fly.models import architectures, compatibility, sources
from fly.models.heads import block, eagle3
from fly.models.heads.checkpoint import Checkpoint, TargetShape, read_config
from fly.models.sources import ModelSource

T = TypeVar("T")
_TARGET = "target_model_path"
_LATER = "a run downloads it (HF_TOKEN for gated models)"


def explain(config: FlyConfig, where: str) -> Iterator[str]:
    """A line each for the target, the head, its drafts and the two engines.

    Nothing is downloaded: of files that are not here, only what is known without them is said.
    Raises FlyError for local files that are missing or damaged.
    """
    target, draft = sources.sources(config, where)
    assert draft is not None
    refusals: list[str] = []

    def unless_refused(look: Callable[[], T]) -> T | None:
        try:
            return look()
        except FlyError as error:
            refusals.append(str(error))
            return None

    model = unless_refused(lambda: _model(target))
    shape = TargetShape.of(model.config) if model is not None else None
    size = f"{shape.layers} layers of hidden size {shape.hidden_size}; " if shape else ""
    yield f"target {config.target_model_path}: {size}{_place(target)}"
    head = _head_config(draft, config)
    reads = unless_refused(lambda: _reads(config, head, shape))
    yield f"head {config.draft_model_path}: {reads or 'does not fit'}; {_place(draft)}"
    yield f"drafts: {_drafts(config)}"
    if model is not None:
        unless_refused(lambda: _check_decodable(model))
    runs = "runs it" if head and model else "runs it, if the files that are not here fit"
    yield f"--model hf: {f'refuses it: {refusals[0]}' if refusals else runs}"
    yield f"--model vllm: {_of_vllm(config, head)}"


def _place(source: ModelSource) -> str:
    return "here" if sources.is_local(source) else _LATER


def _model(source: ModelSource) -> PreTrainedModel | None:
    """The target without its weights; None if its configuration is not here."""
    if not architectures.is_here(source):
        return None
    config = architectures.model_config(source, _TARGET)
    return architectures.without_weights(config, f"{_TARGET}={source.path}")


def _check_decodable(model: PreTrainedModel) -> None:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1
    compatibility.refuse_unsupported(model, _TARGET, longest)


def _head_config(source: ModelSource, config: FlyConfig) -> dict[str, Any] | None:
    hub = {"revision": config.draft_revision, "local_files_only": True}
    try:
        return read_config(source, str(config.draft_model_path), hub)
    except FlyError:
        return None  # nothing of it was downloaded yet


def _reads(config: FlyConfig, head: Mapping[str, Any] | None, target: TargetShape | None) -> str:
    """What the head is and which hidden states it reads. Raises FlyError if it does not fit."""
    is_block = config.drafter_name == "block"
    kind = "DFlash or DSpark" if is_block else "EAGLE-3"
    layers = config.head_layer_ids
    if head is None or target is None:
        if layers is None and target is not None and not is_block:
            usual = ", ".join(map(str, eagle3.usual_layers(target)))
            return f"{kind}, reads hidden states {usual} unless its files name others"
        named = "the hidden states that its files name" if layers is None else f"{list(layers)}"
        return f"{kind}, reads {named}"
    checkpoint = Checkpoint(str(config.draft_model_path), head, {})
    if is_block:
        spec = block.parse(checkpoint, target, layers)
        spec.check_drafts(config.spd_k)
        kind, layers = f"{block.kind_of(head)} of at most {spec.most_drafts} tokens", spec.layers
    else:
        _, layers = eagle3.parse_config(checkpoint, target, layers)
    return f"{kind}, reads hidden states {', '.join(map(str, layers))}"


def _drafts(config: FlyConfig) -> str:
    tokens, window = config.spd_k, config.win_len
    passes = "in one pass" if config.drafter_name == "block" else "by a pass each"
    said = f"spd_k={tokens} tokens a round, {passes}"
    if config.rule != "fly" or config.abla_no_window:
        return said
    if config.defer_across_rounds:
        return f"{said}; win_len={window} may be filled by later rounds: each may be deferred"
    return f"{said}; with win_len={window} the first {tokens - window} may be deferred"


def _of_vllm(config: FlyConfig, head: Mapping[str, Any] | None) -> str:
    """The speculative_config that it is given, but for the head's name."""
    method = block.kind_of(head) if head is not None and config.drafter_name == "block" else None
    try:
        found = speculative_config(config, None, FIRST_WITH_ALL, method)
    except FlyError as error:
        return f"refuses it: {error}"
    assert found is not None
    found = {"method": " or ".join(BLOCK_METHODS), **found}
    keys = ", ".join(f"{key}={value}" for key, value in found.items() if key != "model")
    return f"{keys} ({FIRST_WITH_ALL.version} or later)"
