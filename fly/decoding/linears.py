"""Linear layers at the memory's speed on CPUs: prepacked bfloat16, and int8 for drafts.

Decoding reads every weight once per pass, so a pass costs its bytes. oneDNN reads a weight laid
out in its own blocks about 1.5 times faster than the row-major one (docs/performance.md); int8
halves the bytes of a draft, whose errors cost acceptance and never correctness.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

INT8_ROWS = 4  # ATen's int8 kernel works on blocks of 4 rows; wider passes are faster in bfloat16


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


class Int8Linear(PackedLinear):
    """Weight-only int8, symmetric per output channel, for passes of a few rows.

    Wider passes go through the packed bfloat16 weight, which costs half as much memory again.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        self._int8 = (weight / scale[:, None]).round().to(torch.int8)
        self._scale = scale.to(linear.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] > INT8_ROWS:
            return super().forward(x)
        result = torch._weight_int8pack_mm(rows, self._int8, self._scale)
        if self._bias is not None:
            result = result + self._bias
        return result.view(*x.shape[:-1], self.out_features)


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Why `replace` cannot serve this model; None if it can."""
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        return f"the model is on {', '.join(sorted(devices))}"
    if model.dtype != torch.bfloat16:
        return f"only bfloat16 is packed, the model is in {str(model.dtype).split('.')[-1]}"
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU or build of PyTorch has no oneDNN bfloat16 kernels"
    return None


def replace(model: PreTrainedModel, kind: Callable[[nn.Linear], nn.Module]) -> int:
    """Swap every plain nn.Linear in place, freeing its weight; returns how many.

    Embeddings tied to the output head keep their own, row-major copy. Subclasses of nn.Linear
    (quantised layers, adapters) stay as they are.
    """
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, kind(child))
                count += 1
    return count
