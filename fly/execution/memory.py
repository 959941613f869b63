"""What a pair needs of every GPU, computed from the models' shapes: `fly config check --memory`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from fly import registry
from fly.config import FlyConfig
from fly.errors import FlyError
from fly.execution.batch_size import USABLE
from fly.execution.cuda_graphs import CudaGraphRunner
from fly.execution.kv_cache import SlotCache
from fly.models import sources
from fly.models.architectures import (
    Parameter,
    model_config,
    parameters,
    quantised_bits,
    stored_dtype,
    without_weights,
)
from fly.models.heads.checkpoint import TargetShape, read

GIB = 2**30
_COUNTS = (1, 2, 4, 8, 16, 32, 64)  # of GPUs that are tried where a pair does not fit
_DRAFT_BITS = {"int4": 4, "int8": 8, "fp8": 8}  # draft_quantization


@dataclass(frozen=True)
class ModelShape:
    """A model without its weights. plan: how transformers shards its layers (`tp_plan=auto`).
    kept: bytes of a token that are kept beside its K/V, by heads. cached: what a layer caches of a
    token, (heads, numbers of each); None for what the configuration says."""

    name: str
    config: PretrainedConfig = field(repr=False)
    parameters: list[Parameter] = field(repr=False)
    plan: dict[str, str] = field(repr=False)
    count: int
    dtype: str
    kept: int = 0
    cached: tuple[int, int] | None = None

    @property
    def bytes(self) -> int:
        return sum(parameter.bytes for parameter in self.parameters)

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def heads(self) -> int:
        return int(self.config.num_attention_heads)

    @property
    def kv_heads(self) -> int:
        if self.cached is not None:
            return self.cached[0]
        return int(getattr(self.config, "num_key_value_heads", None) or self.heads)

    def kv_bytes(self, kv_heads: int, layers: int) -> int:
        """Bytes of one token's keys and values in so many heads of so many layers."""
        size = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.heads
        numbers = 2 * int(size) if self.cached is None else self.cached[1]
        return layers * kv_heads * numbers * stored_dtype(self.config).itemsize + self.kept


@dataclass(frozen=True)
class Share:
    """Of one model on the fullest GPU, in bytes: its weights, and K/V of one token."""

    weights: int
    kv: int


def whole(model: ModelShape, gpus: int = 1) -> Share:
    return Share(model.bytes, model.kv_bytes(model.kv_heads, model.layers))


def by_layers(model: ModelShape, gpus: int) -> Share:
    """Layers in equal numbers, the embeddings on the first and last GPU (`parallelize=True`)."""
    layers = -(-model.layers // gpus)
    ends = [p.bytes for p in model.parameters if ".layers." not in p.name]
    of_layers = model.bytes - sum(ends)
    weights = -(-of_layers // model.layers) * layers + (sum(ends) if gpus == 1 else max(ends))
    return Share(weights, model.kv_bytes(model.kv_heads, layers))


def by_plan(model: ModelShape, gpus: int) -> Share:
    """As transformers shards it; what its plan does not name is on every GPU."""
    is_latent = model.kv_heads == 1 and hasattr(model.config, "kv_lora_rank")
    # gathered: every GPU computes its share of the keys and then holds all of them
    gathers = any("gather" in style for name, style in model.plan.items() if "k_proj" in name)
    is_whole = is_latent or gathers
    if model.kv_heads % gpus and not is_whole:
        raise FlyError(f"{model.kv_heads} key/value heads cannot be divided by {gpus}")
    weights = sum(
        -(-p.bytes // gpus) if _is_sharded(p, model.plan) else p.bytes for p in model.parameters
    )
    kv_heads = model.kv_heads if is_whole else model.kv_heads // gpus
    return Share(weights, model.kv_bytes(kv_heads, model.layers))


def _is_sharded(parameter: Parameter, plan: dict[str, str]) -> bool:
    pattern = ".".join("*" if part.isdigit() else part for part in parameter.name.split("."))
    layer, _, kind = pattern.rpartition(".")
    if style := plan.get(pattern):  # fused experts are named themselves
        return "colwise" in style or "rowwise" in style
    style = plan.get(layer, "")
    return "colwise" in style or ("rowwise" in style and kind == "weight")


def by_vllm(model: ModelShape, gpus: int) -> Share:
    """vLLM's tensor_parallel_size: matrices are sharded, K/V heads repeated if there are fewer."""
    if model.heads % gpus or max(gpus, model.kv_heads) % min(gpus, model.kv_heads):
        heads = f"{model.heads} attention and {model.kv_heads} key/value heads"
        raise FlyError(f"{heads} cannot be divided by {gpus}")
    kv_gpus = min(gpus, model.kv_heads)
    weights = 0
    for parameter in model.parameters:
        is_kv = any(name in parameter.name for name in (".k_proj.", ".v_proj."))
        shards = kv_gpus if is_kv else gpus if len(parameter.shape) > 1 else 1
        weights += -(-parameter.bytes // shards)
    return Share(weights, model.kv_bytes(model.kv_heads // kv_gpus, model.layers))


@dataclass(frozen=True)
class Layout:
    """How a pair lies on several GPUs. target, draft: the share of the GPU that holds most."""

    name: str
    target: Callable[[ModelShape, int], Share]
    draft: Callable[[ModelShape, int], Share]


ONE_GPU = Layout("one GPU", whole, whole)
LAYOUTS = (
    Layout("all on each (accelerate)", whole, whole),
    Layout("parallelize=True (one machine)", by_layers, whole),
    Layout("tp_plan=auto (torchrun)", by_plan, whole),
    Layout("vllm, tensor_parallel_size", by_vllm, by_vllm),
)


@dataclass(frozen=True)
class Need:
    """Bytes on the fullest GPU; sequence: K/V of both models for the longest one."""

    target: int
    draft: int
    sequence: int

    @property
    def least(self) -> int:
        """Of a GPU on which one sequence runs."""
        return self.target + self.draft + int(self.sequence / USABLE)

    def left(self, gpu: int) -> int:
        return gpu - self.target - self.draft

    def sequences(self, gpu: int) -> int:
        """As `--batch_size auto` counts them, but for the passes' workspace."""
        return max(0, int(USABLE * self.left(gpu) / self.sequence))


@dataclass(frozen=True)
class Pair:
    """What `fly config check --memory` asks about. context: tokens of the longest sequence.

    width: most tokens per sequence in a pass of the target. steps: draft tokens per round.
    """

    target: ModelShape
    draft: ModelShape | None
    context: int
    width: int
    steps: int

    def need(self, layout: Layout, gpus: int) -> Need:
        """Raises FlyError if the pair cannot be laid out so."""
        try:
            target = layout.target(self.target, gpus)
        except FlyError as error:
            raise FlyError(f"the target's {error}") from None
        draft = Share(0, 0)
        if self.draft is not None:
            try:
                draft = layout.draft(self.draft, gpus)
            except FlyError as error:
                raise FlyError(f"the draft's {error}") from None
        target_tokens, draft_tokens = (  # as the engine reserves them
            SlotCache.rounded(self.context + CudaGraphRunner.reach(*past))
            for past in ((self.width, 0), (self.steps + 1, self.steps))
        )
        sequence = target_tokens * target.kv + draft_tokens * draft.kv
        return Need(target.weights, draft.weights, sequence)


def pair_of(config: FlyConfig, where: str, context: int) -> Pair:
    """Raises FlyError for a model whose configuration cannot be had."""
    target, draft = sources.sources(config, where)
    found = _shape(target, "target_model_path", config.target_model_path)
    drafts = None
    if draft is not None:  # it is loaded in the target's dtype, unless its own is given
        dtype = config.draft_dtype or str(stored_dtype(found.config)).removeprefix("torch.")
        bits = _DRAFT_BITS.get(config.draft_quantization)
        name = str(config.draft_model_path)
        if config.head_class is not None:
            drafts = _head(config, draft, found, dtype, bits)
        else:
            drafts = _shape(draft, "draft_model_path", name, dtype, bits)
    drafter = config.drafter_name
    steps = config.spd_k if drafter else 0
    longest = steps
    if drafter and registry.DRAFTERS[drafter].from_texts:
        longest = max(steps, config.longest_lookup)
    return Pair(found, drafts, context, longest + 1, steps)


def _shape(
    source: sources.ModelSource,
    field: str,
    name: str,
    dtype: str | None = None,
    bits: float | None = None,
) -> ModelShape:
    config = model_config(source, field)
    if dtype is not None:
        config.dtype = dtype
    model = without_weights(config, f"{field}={name}")
    plan = dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})
    try:
        bits = bits or quantised_bits(config)
    except FlyError as error:
        raise FlyError(f"{field}={name}: {error}") from None
    return ModelShape(
        name=name,
        config=config,
        parameters=list(parameters(model, bits)),
        plan=plan,
        count=sum(tensor.numel() for tensor in model.parameters()),
        dtype=_in_words(stored_dtype(config), bits),
        cached=_cached(model),
    )


class _FirstUpdateError(Exception):
    """What a model's first layer gives its cache."""


class _Asking(SlotCache):
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise _FirstUpdateError(key_states.shape, value_states.shape)


@torch.no_grad()
def _cached(model: PreTrainedModel) -> tuple[int, int] | None:
    """What the first layer of a model on the meta device caches of a token: (heads, numbers of
    each); None if it cannot be asked. Models name this by keys of their own, and those with latent
    attention (MLA) keep something else than heads."""
    cache = _Asking(1)
    position_11 = torch.zeros(1, 1, dtype=torch.long)
    cache.begin(0, position_11)
    at, mask = position_11.to("meta"), torch.zeros(1, 1, 1, 1, device="meta", dtype=model.dtype)
    try:
        model(at, position_ids=at, attention_mask=mask, past_key_values=cache, use_cache=True)
    except _FirstUpdateError as found:
        (_, heads, _, size), (_, _, _, of_values) = found.args
        return heads, size + of_values
    except Exception:  # what a model does with tensors that hold nothing, nobody knows
        return None
    return None


def _head(
    config: FlyConfig, source: sources.ModelSource, target: ModelShape, dtype: str, bits: int | None
) -> ModelShape:
    """A trained head, by its own files: what its configuration does not say is which of the
    target's tensors it has copies of."""
    name = str(config.draft_model_path)
    if not sources.is_local(source):
        raise FlyError(
            f"draft_model_path={name}: the memory of a head is counted from its files: name the "
            "folder that holds them, or set use_sd=false to count the target's alone"
        )
    assert config.head_class is not None
    head: Any = registry.load(config.head_class).from_checkpoint(
        read(source, name, {}), TargetShape.of(target.config), config.head_layer_ids
    )
    head.to(getattr(torch, dtype))
    head.config.dtype = dtype
    found = ModelShape(
        name=name,
        config=head.config,
        parameters=list(parameters(head, bits)),
        plan={},
        count=sum(tensor.numel() for tensor in head.parameters()),
        dtype=_in_words(head.dtype, bits),
    )
    kept = head.bytes_per_token - found.kv_bytes(found.kv_heads, found.layers)
    return replace(found, kept=kept)


def _in_words(dtype: torch.dtype, bits: float | None) -> str:
    kind = str(dtype).removeprefix("torch.")
    return kind if bits is None else f"{kind}, linear layers {bits:g} bits"


def fitting(pair: Pair, gpu: int) -> list[tuple[Layout, int]]:
    """Every layout with the fewest GPUs of so many bytes on which a sequence runs."""
    found = []
    for layout in LAYOUTS:
        for gpus in _COUNTS:
            try:
                need = pair.need(layout, gpus)
            except FlyError:
                continue
            if need.sequences(gpu):
                found.append((layout, gpus))
                break
    return found
