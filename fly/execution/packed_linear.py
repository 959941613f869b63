"""Swaps a model's linear layers for fly's kernels, whose weights lie as they are read.

Decoding reads every weight once per pass, so a pass costs its bytes. A draft may have int8 weights:
their errors cost acceptance, never the exactness of exact verification.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fly.execution import calibration, kernels
from fly.execution.kernels import gguf
from fly.execution.merged_linear import concatenate, merge
from fly.models.gguf import GgufWeight

logger = logging.getLogger(__name__)

_SAMPLE = 6  # products that are timed
_FASTER = 0.95  # of the time, below which unpacked weights are worth their memory
_MOST = 0.9  # share of the weights that has to be packed if the rest becomes float32


def why_no_kernels(model: PreTrainedModel) -> str | None:
    """Why fly's own kernels cannot serve this model; None if they can."""
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        return f"the model is on {', '.join(sorted(devices))}"
    if model.dtype != torch.bfloat16:
        return f"only bfloat16 is packed, the model is in {str(model.dtype).split('.')[-1]}"
    plain = {m.weight.dtype for m in model.modules() if type(m) is nn.Linear}
    if plain - {torch.bfloat16}:
        return "some of its linear layers are not in bfloat16"
    if has_adapters(model):
        return "it has adapters (peft)"
    if (reason := kernels.why_not()) is not None:
        return reason
    modules: list[Any] = [m for m in model.modules() if type(m) in (nn.Linear, nn.Embedding)]
    packed = {id(m.weight): m.weight.numel() for m in modules}  # tied ones count once
    is_little = sum(packed.values()) < _MOST * model.num_parameters()
    if is_little and kernels.activation_dtype() != model.dtype:
        return "most of its weights are not in plain linear layers, and would double in float32"
    return None


def has_adapters(model: nn.Module) -> bool:
    return any(type(module).__module__.startswith("peft.") for module in model.modules())


def _swap(model: nn.Module, old: type[Any], new: Callable[[Any], nn.Module]) -> None:
    """Put `new(module)` in the place of every module of exactly the type `old`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is old:
                setattr(module, name, new(child))


def restore_weights(model: nn.Module) -> None:
    """Give every module that keeps its weight in a GGUF file the bfloat16 values of it."""
    restored: dict[int, nn.Parameter] = {}  # tied weights stay so
    for module in model.modules():
        kept = getattr(module, "gguf_weight", None)
        if kept is not None:
            if id(kept) not in restored:
                restored[id(kept)] = nn.Parameter(gguf.unpack(kept), requires_grad=False)
            module.weight = restored[id(kept)]
            del module.gguf_weight


def _is_faster_unpacked(model: nn.Module) -> bool:
    """Whether products with a GGUF file's weights are faster here when the weights are unpacked
    once, and there is memory for it. Results are the same bits.

    Without tiles, unpacking takes a core about as long as reading bfloat16 takes two. What was
    timed is kept: runs that are compared should compute alike.
    """
    linears: list[Any] = [m for m in model.modules() if type(m) is nn.Linear]
    weights: list[GgufWeight] = [m.gguf_weight for m in linears if hasattr(m, "gguf_weight")]
    unpacked = sum(2 * weight.in_features * weight.out_features for weight in weights)
    is_short = psutil.virtual_memory().available < 2 * unpacked
    if not weights or kernels.instructions() == "amx" or is_short:
        return False
    sizes = Counter((weight.format, weight.in_features, weight.out_features) for weight in weights)
    largest = max(sizes, key=lambda size: sizes[size] * size[1] * size[2])
    products_of = sorted((*size, count) for size, count in sizes.items())
    identity = {"instructions": kernels.instructions(), "products": products_of}
    if isinstance(kept := calibration.read(identity), bool):
        return kept
    sample = [w for w in weights if (w.format, w.in_features, w.out_features) == largest]
    products = {
        is_unpacked: [gguf.GgufProduct([w], is_unpacked=is_unpacked) for w in sample[:_SAMPLE]]
        for is_unpacked in (True, False)
    }
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for rows in (1, 9) * 3:
        x = torch.ones(rows, largest[1], dtype=kernels.activation_dtype())
        for is_unpacked, each in products.items():
            start = time.perf_counter()
            for product in each:  # from memory: the others' weights have been read in between
                product(x)
            seconds[is_unpacked].append(time.perf_counter() - start)
    # the least of several: another program may take a core for a while
    least = {way: min(taken[::2]) + min(taken[1::2]) for way, taken in seconds.items()}
    is_faster = least[True] < _FASTER * least[False]
    calibration.keep(identity, is_faster)
    return is_faster


def _pack(linears: Sequence[nn.Linear], kind: kernels.Kind, *, is_unpacked: bool) -> nn.Module:
    """Linears that take the same input, as one product."""
    if kind is kernels.Bfloat16Linear and all(hasattr(linear, "gguf_weight") for linear in linears):
        own: list[Any] = [linear.gguf_weight for linear in linears]
        kept = [replace(weight, bias=linear.bias) for weight, linear in zip(own, linears)]
        if all(weight.out_features % gguf.PANEL == 0 for weight in kept[:-1]):
            return gguf.GgufProduct(kept, is_unpacked=is_unpacked)
    for linear in linears:
        restore_weights(linear)
    return kind(linears[0] if len(linears) == 1 else concatenate(linears))


def use_kernels(model: PreTrainedModel, kind: kernels.Kind) -> bool:
    """Swap every plain nn.Linear in place, freeing its weight; the rest of the model computes in
    the kernels' dtype. Returns whether products read weights as they lie in a GGUF file.

    Siblings that share an input become one product (fly/execution/merged_linear.py). Embeddings
    tied to the output head keep their own, row-major copy. Subclasses of nn.Linear (quantised
    layers, adapters) stay as they are.
    """
    is_unpacked = kind is kernels.Bfloat16Linear and _is_faster_unpacked(model)
    if is_unpacked:
        logger.info("the GGUF file's weights are unpacked to bfloat16, which is faster here")
    merge(model, lambda linears: _pack(linears, kind, is_unpacked=is_unpacked))
    _swap(model, nn.Linear, lambda linear: _pack([linear], kind, is_unpacked=is_unpacked))
    dtype, stored = kernels.activation_dtype(), model.dtype
    is_kept = any(type(m) is nn.Embedding and hasattr(m, "gguf_weight") for m in model.modules())
    if dtype != stored or is_kept:
        _swap(model, nn.Embedding, lambda embedding: PackedEmbedding(embedding, dtype))
    tables = {id(m.weight) for m in model.modules() if isinstance(m, PackedEmbedding)}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in tables:
            # always a copy: what is left of the checkpoint would keep its file in memory
            other = tensor.dtype != stored
            tensor.data = tensor.data.to(tensor.dtype if other else dtype, copy=True)
    products = [module for module in model.modules() if isinstance(module, gguf.GgufProduct)]
    return any(not product.is_unpacked for product in products)


class PackedEmbedding(nn.Module):
    """An embedding that keeps its table, maybe in a GGUF file, and gives its rows in another
    dtype."""

    weight: Tensor

    def __init__(self, embedding: nn.Embedding, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        # transformers takes a model's dtype and device from its first parameter, and where norms
        # have no weights (OLMo) nothing else is left of them
        self.of = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        self._kept: GgufWeight | None = getattr(embedding, "gguf_weight", None)
        weight = embedding.weight.detach()
        table = weight.clone() if self._kept is None else weight
        self.register_buffer("weight", table, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        if self._kept is None:
            return nn.functional.embedding(ids, self.weight).to(self._dtype)
        return gguf.unpack(self._kept, ids).to(self._dtype)
