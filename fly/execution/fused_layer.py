"""Decoder layers of the Llama, Mistral, Qwen2 and Qwen3 families with fly's kernels in between.

transformers' layers run some fifty small operations between their products, which take two fifths
of a small draft model's pass on a CPU, and two thirds on a GPU. These layers make nine calls. The
first one is checked against transformers' own when they are made; transformers' own still serve
passes without fly's cache (loglikelihood) and those whose rows are tokens.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fly.errors import reason_of
from fly.execution import kernels, packed_linear
from fly.execution.grouped_attention import grouped_attention
from fly.execution.kv_cache import SlotCache
from fly.execution.merged_linear import Sibling, concatenate, merge
from fly.execution.oom import is_out_of_memory

logger = logging.getLogger(__name__)

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_LARGEST_HEAD = 128  # of Triton's kernels: beyond, a tile does not fit into a multiprocessor


class FusedLayer(nn.Module):
    """One decoder layer; `original`, whose weights it uses, must have merged linears.

    run: kernels.LayerKernels, or on a GPU triton_layer.TritonKernels. most_in_place: in passes of
    at most so many tokens per sequence its attention reads the cache in place.
    """

    def __init__(self, original: nn.Module, run: Any, *, most_in_place: int) -> None:
        super().__init__()
        self._most_in_place = most_in_place
        self.original = original
        attention: Any = original.self_attn
        mlp: Any = original.mlp
        if hasattr(original, "attention_type"):  # transformers 4 chooses the mask by it
            self.attention_type = original.attention_type
        self._run = run
        self._attention = attention
        self._joined = attention.q_proj.product
        self._output = attention.o_proj
        self._gate_up, self._down = mlp.gate_proj.product, mlp.down_proj
        self._norms = (_norm(original.input_layernorm), _norm(original.post_attention_layernorm))
        self._size = attention.head_dim
        self._heads = attention.q_proj.out_features // self._size
        self._kv_heads = attention.k_proj.out_features // self._size
        has_head_norms = getattr(attention, "q_norm", None) is not None  # Qwen3
        norms = (attention.q_norm, attention.k_norm) if has_head_norms else ()
        self._head_norms = [_norm(norm) for norm in norms]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        past_key_values: Any = None,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(past_key_values, SlotCache) or past_key_values.is_of_tokens:
            return self.original(
                hidden_states,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_embeddings=position_embeddings,
                **kwargs,
            )
        hidden = hidden_states.contiguous()
        _, normed = self._run.norm(hidden, *self._norms[0])
        joined = self._normed_heads(self._joined(normed))
        index = self._attention.layer_idx
        keys, values = past_key_values.layer(index, self._kv_heads, self._size, joined)
        place, scaling = past_key_values.destination, self._attention.scaling
        query = self._run.rotate(joined, position_embeddings, (keys, values), *place, self._heads)
        if query.shape[2] <= self._most_in_place:
            read = past_key_values.read_length
            mixed = self._run.attention(query, (keys, values), *place, scaling, read)
        else:
            keys, values = past_key_values.readable(index)
            mixed, _ = grouped_attention(
                self._attention, query, keys, values, attention_mask, scaling=scaling
            )
        output = self._output(mixed.flatten(-2))
        hidden, normed = self._run.norm(hidden, *self._norms[1], delta=output)
        return hidden.add_(self._down(self._run.gated(self._gate_up(normed))))

    def _normed_heads(self, joined: Tensor) -> Tensor:
        """Queries and keys normalised per head, if the family does so."""
        if not self._head_norms:
            return joined
        sizes = [heads * self._size for heads in (self._heads, self._kv_heads, self._kv_heads)]
        query, key, value = joined.split(sizes, dim=-1)
        parts = []
        for part, norm in zip((query, key), self._head_norms):
            heads = part.contiguous().view(-1, self._size)
            parts.append(self._run.norm(heads, *norm)[1].view(part.shape))
        return torch.cat([*parts, value], dim=-1)


def _norm(norm: Any) -> tuple[Tensor, float]:
    """What `LayerKernels.norm` takes of an RMS norm."""
    return norm.weight.detach().float(), norm.variance_epsilon


def replace(model: PreTrainedModel, *, is_invariant: bool = False) -> bool:
    """Give a model packed by fly's kernels fused layers, in place; returns whether it was done.

    is_invariant: a token's bits do not depend on what else is in the pass.
    """
    in_place = sys.maxsize if is_invariant else 0
    return why_not(model) is None and _replace(model, kernels.LayerKernels(), in_place)


def replace_on_gpu(model: PreTrainedModel) -> bool:
    """Merge a model's linears and give it fused layers by Triton's kernels, in place; returns
    whether it was done. The model computes the same, but for rounding, in any case."""
    is_gpu_build = torch.version.cuda is not None or torch.version.hip is not None
    layers = getattr(model.get_decoder(), "layers", ())
    if not (is_gpu_build and find_spec("triton") and layers and all(map(_is_of_family, layers))):
        return False
    if getattr(model, "is_quantized", False) or packed_linear.has_adapters(model):
        return False  # linears that look plain may hold quantised weights
    if max(getattr(layer.self_attn, "head_dim", 0) for layer in layers) > _LARGEST_HEAD:
        return False
    merge(model, concatenate)
    if why_not(model) is not None:
        return False
    try:
        run = import_module("fly.execution.triton_layer").TritonKernels()
        return _replace(model, run, sys.maxsize)
    except Exception as error:  # a compiler's errors are of any kind
        if is_out_of_memory(error):
            raise
        logger.warning(
            "%s: the model's own layers: Triton: %s", model.name_or_path, reason_of(error)
        )
        return False


@torch.inference_mode()
def _replace(model: PreTrainedModel, run: Any, most_in_place: int) -> bool:
    layers: Any = model.get_decoder().layers
    fused = [FusedLayer(layer, run, most_in_place=most_in_place) for layer in layers]
    if not _agrees(model, fused[0]):
        logger.warning(
            "%s: fly's layers do not agree with transformers': the model's own are used",
            model.config.model_type,
        )
        return False
    for index, layer in enumerate(fused):
        layers[index] = layer
    return True


def why_not(model: PreTrainedModel) -> str | None:
    """Why a model with merged linears cannot have fused layers; None if it can, should they agree
    with its own."""
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None or not all(_is_known(layer) for layer in layers):
        return f"{model.config.model_type} keeps transformers' layers"
    for layer in layers:
        sizes = (
            ("head_dim", layer.self_attn.head_dim, 32),
            ("hidden_size", layer.self_attn.o_proj.out_features, 16),
            ("intermediate_size", layer.mlp.gate_proj.out_features, 16),
        )
        for name, size, step in sizes:
            if size % step:
                return f"{name} is {size}, which is no multiple of {step}"
    return None


def _is_of_family(layer: Any) -> bool:
    known = tuple(f"transformers.models.{family}." for family in _FAMILIES)
    return type(layer).__module__.startswith(known)


def _is_known(layer: Any) -> bool:
    if not _is_of_family(layer):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    joined = (attention.q_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)
    if not all(isinstance(linear, Sibling) for linear in joined):
        return False
    return isinstance(mlp.act_fn, nn.SiLU) or type(mlp.act_fn).__name__ == "SiLUActivation"


def _agrees(model: PreTrainedModel, fused: FusedLayer) -> bool:
    """Whether the layer gives and caches what transformers' does, for two rows at their own
    positions."""
    config, device = model.config.get_text_config(), model.device
    dtype = model.dtype if device.type == "cuda" else kernels.activation_dtype()
    width = 64 if device.type == "cuda" else 5  # the largest tile of attention, which may not fit
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, width, config.hidden_size, generator=generator).to(device, dtype)
    places = torch.arange(width + 3, device=device)
    positions = torch.stack([places[:-3], places[3:]])
    mask = torch.where(places > positions[:, :, None], -1e4, 0.0).to(dtype)[:, None]
    angles = model.get_decoder().rotary_emb(hidden, positions)
    results: list[list[Tensor]] = []
    for layer in (fused.original, fused):
        cache = SlotCache(2)
        cache.reserve(len(places))
        cache.begin(0, positions)
        result = layer(
            hidden.clone(),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            position_embeddings=angles,
        )
        output = result[0] if isinstance(result, tuple) else result
        results.append([output.float(), *(part.float() for part in cache.readable(0))])
    # rounded inputs may round to their neighbour for a difference in the last bit before
    rounds = dtype != torch.float32 or kernels.rounds_inputs(fused)
    limit = 2e-2 if rounds else 1e-4
    return all(
        bool((ours - theirs).norm() <= limit * theirs.norm()) for theirs, ours in zip(*results)
    )
