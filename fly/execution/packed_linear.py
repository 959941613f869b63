"""Swaps a model's linear layers for packed ones: fly's kernels, or oneDNN's prepacked bfloat16, and
int8 or int4 for drafts.

Decoding reads every weight once per pass, so a pass costs its bytes. oneDNN reads a weight in its
own blocked layout about 1.5 times faster than a row-major one (docs/performance.md). A draft may
have fewer bits: its errors cost acceptance, never the exactness of exact verification.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fly.execution import kernels
from fly.execution.merged_linear import merge

NARROW_ROWS = 4  # ATen's int4 kernel works on blocks of 4 rows; wider passes are faster in int8
_INT4_GROUP = 32
_INT4_CHANNELS = 16  # output channels must be a multiple for ATen's kernel
_MOST = 0.9  # share of the weights that has to be packed if the rest becomes float32
_TINY = torch.finfo(torch.float32).tiny


class PackedLinear(nn.Module):
    """A bfloat16 linear whose weight lies in oneDNN's blocked layout. [..., in] -> [..., out]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return result


@functools.cache
def _levels() -> int:
    """The largest int8 weight.

    Without VNNI oneDNN adds the products of two neighbours in 16 bits, where 2 * 255 * 127 is cut
    off without a word and 2 * 255 * 63 is not. So the worst sum is tried.
    """
    inputs, channels, rows = 64, 64, 16
    packed = torch.ops.onednn.qlinear_prepack(
        torch.full((channels, inputs), 127, dtype=torch.int8), None
    )
    sums = torch.ops.onednn.qlinear_pointwise(
        torch.full((rows, inputs), 255, dtype=torch.uint8), 1.0, 0, packed, torch.ones(channels),
        torch.zeros(channels, dtype=torch.long), None, 1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    return 127 if bool((sums == 255 * 127 * inputs).all()) else 63


class Int8Linear(nn.Module):
    """int8 weights, symmetric per output channel, times int8 activations, scaled per row.

    oneDNN's int8 kernels take unsigned activations: 128 is added. Every row has its own scale, so
    that rows do not influence each other.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._dtype = linear.weight.dtype
        self._bias = linear.bias
        weight = linear.weight.detach().float()
        self._scale = weight.abs().amax(dim=1).clamp_min(_TINY) / _levels()
        int8 = (weight / self._scale[:, None]).round().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(int8, None)
        self._zero = torch.zeros(self.out_features, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        scale = rows.abs().amax(dim=1, keepdim=True).float().clamp_min_(_TINY).div_(127)
        # 128 stands for zero; the cast truncates, so adding a half rounds
        unsigned = (rows / scale).add_(128.5).to(torch.uint8)
        result = torch.ops.onednn.qlinear_pointwise(
            unsigned, 1.0, 128, self._packed, self._scale, self._zero, None,
            1.0, 0, self._dtype, "none", [], "",
        )  # fmt: skip
        return self._finish(result * scale.to(x.dtype), x)

    def _finish(self, result: Tensor, x: Tensor) -> Tensor:
        if self._bias is not None:
            result = result + self._bias
        return result.view(*x.shape[:-1], self.out_features)


class Int4Linear(Int8Linear):
    """int4 weights, with scale and offset per group of 32 inputs, for passes of a few rows.

    Wider passes go through int8: together the two take three quarters of a bfloat16 weight.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        groups = linear.weight.detach().float().unflatten(1, (-1, _INT4_GROUP))
        low, high = groups.amin(dim=-1), groups.amax(dim=-1)
        scale = (high - low).clamp_min(_TINY) / 15
        levels = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15)
        self._int4 = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            levels.flatten(1).to(torch.int32), 1
        )
        # The kernel computes (level - 8) * scale + offset; groups come before channels.
        pairs = torch.stack([scale, low + 8 * scale], dim=-1)
        self._scale_and_offset = pairs.transpose(0, 1).contiguous().to(self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] > NARROW_ROWS:
            return super().forward(x)
        result = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, self._int4, _INT4_GROUP, self._scale_and_offset
        )
        return self._finish(result, x)


def _int4(linear: nn.Linear) -> nn.Module:
    """The linear in int4 where its shape allows it, else in int8."""
    fits = linear.in_features % _INT4_GROUP == 0 and linear.out_features % _INT4_CHANNELS == 0
    return Int4Linear(linear) if fits else Int8Linear(linear)


# of oneDNN's passes, by quantisation
ONEDNN: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "none": PackedLinear,
    "int8": Int8Linear,
    "int4": _int4,
}


def why_no_kernels(model: PreTrainedModel) -> str | None:
    """Why fly's own kernels cannot serve this model; None if they can."""
    if (reason := _why_not(model) or kernels.why_not()) is not None:
        return reason
    if kernels.activation_dtype() != model.dtype and _packed_share(model) < _MOST:
        return "most of its weights are not in plain linear layers, and would double in float32"
    return None


def _packed_share(model: PreTrainedModel) -> float:
    """Share of a model's parameters that lie in plain linears and embeddings."""
    modules: list[Any] = [m for m in model.modules() if type(m) in (nn.Linear, nn.Embedding)]
    plain = {id(m.weight): m.weight.numel() for m in modules}  # tied ones count once
    return sum(plain.values()) / model.num_parameters()


def _why_not(model: PreTrainedModel) -> str | None:
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        return f"the model is on {', '.join(sorted(devices))}"
    if model.dtype != torch.bfloat16:
        return f"only bfloat16 is packed, the model is in {str(model.dtype).split('.')[-1]}"
    plain = {m.weight.dtype for m in model.modules() if type(m) is nn.Linear}
    if plain - {torch.bfloat16}:
        return "some of its linear layers are not in bfloat16"
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        return "it has adapters (peft)"
    return None


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Why oneDNN's packed linears cannot serve this model; None if they can."""
    if (reason := _why_not(model)) is not None:
        return reason
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU or build of PyTorch has no oneDNN bfloat16 kernels"
    return None


def replace(model: PreTrainedModel, kind: Callable[[nn.Linear], nn.Module]) -> int:
    """Swap every plain nn.Linear in place, freeing its weight; returns how many.

    Siblings that share an input become one product (fly/execution/merged_linear.py). Embeddings
    tied to the output head keep their own, row-major copy. Subclasses of nn.Linear (quantised
    layers, adapters) stay as they are.
    """
    return merge(model, kind) + _swap(model, nn.Linear, kind)


def _swap(model: nn.Module, old: type[Any], new: Callable[[Any], nn.Module]) -> int:
    """Put `new(module)` in the place of every module of exactly the type `old`."""
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is old:
                setattr(module, name, new(child))
                count += 1
    return count


def use_kernels(model: PreTrainedModel, kind: Callable[[nn.Linear], nn.Module]) -> None:
    """`replace`, and let the rest of the model compute in the kernels' dtype."""
    replace(model, kind)
    dtype, stored = kernels.activation_dtype(), model.dtype
    if dtype != stored:
        _swap(model, nn.Embedding, lambda embedding: CastEmbedding(embedding, dtype))
    tables = {id(m.weight) for m in model.modules() if isinstance(m, CastEmbedding)}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in tables:
            # always a copy: what is left of the checkpoint would keep its file in memory
            other = tensor.dtype != stored
            tensor.data = tensor.data.to(tensor.dtype if other else dtype, copy=True)


class CastEmbedding(nn.Module):
    """An embedding that keeps its table and gives its rows in another dtype."""

    weight: Tensor

    def __init__(self, embedding: nn.Embedding, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        # transformers takes a model's dtype and device from its first parameter, and where norms
        # have no weights (OLMo) nothing else is left of them
        self.of = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        self.register_buffer("weight", embedding.weight.detach().clone(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight).to(self._dtype)
