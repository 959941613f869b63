"""Layers that take the same input, computed as one product.

Query, key and value read one input, gate and up another. One product over their joined weights
costs fewer calls, reads the input once, and quantises it once. The model's own forward stays as it
is: the first of the siblings that is called computes for all, the others hand out their share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

Kind = Callable[[nn.Linear], nn.Module]


class Fused:
    """The joined product of siblings, and the shares of the last one not handed out yet.

    A share is handed out once, only to siblings that come after the one that asked first, and only
    for the very tensor it was computed from, held until then so that no other takes its identity. A
    write into that tensor between two siblings is noticed outside of inference mode only, which
    keeps no count of writes; transformers' models do not do that.
    """

    def __init__(self, product: nn.Module, sizes: list[int]) -> None:
        self.product = product
        self._sizes = sizes
        self._input: Tensor | None = None
        self._version = 0
        self._shares: dict[int, Tensor] = {}

    def share(self, index: int, x: Tensor) -> Tensor:
        """What sibling `index` answers to x, [..., in] -> [..., sizes[index]]."""
        version = 0 if x.is_inference() else x._version  # counts writes into it
        if self._input is not x or self._version != version or index not in self._shares:
            self._input, self._version = x, version
            shares = self.product(x).split(self._sizes, dim=-1)
            self._shares = {later: shares[later] for later in range(index, len(shares))}
        result = self._shares.pop(index)
        if not self._shares:
            self._input = None
        return result


class Sibling(nn.Module):
    """Stands where one of the joined linears stood."""

    def __init__(self, fused: Fused, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.product = fused.product  # a submodule of each sibling, for who looks through modules
        self._share = partial(fused.share, index)

    def forward(self, x: Tensor) -> Tensor:
        return self._share(x)


def fuse(model: nn.Module, kind: Kind) -> int:
    """Join all siblings among a model's plain linears, in place; returns how many were joined.

    `kind` makes the joined linear into what computes it. Siblings that are not plain, or differ in
    input width, dtype or in having a bias, stay as they are. Where siblings turn out to be given
    different inputs (cross-attention), each is answered rightly, at the cost of the joined product.
    """
    count = 0
    for module in list(model.modules()):
        for names in _groups(module):
            linears = [getattr(module, name) for name in names]
            fused = Fused(kind(_joined(linears)), [linear.out_features for linear in linears])
            for index, (name, linear) in enumerate(zip(names, linears)):
                setattr(module, name, Sibling(fused, index, linear))
            count += len(names)
    return count


def _groups(module: nn.Module) -> Iterator[tuple[str, ...]]:
    for names in _SIBLINGS:
        linears = [getattr(module, name, None) for name in names]
        if any(type(linear) is not nn.Linear for linear in linears):
            continue
        traits = {(x.in_features, x.weight.dtype, x.bias is None) for x in linears if x is not None}
        if len(traits) == 1:
            yield names


def _joined(linears: list[nn.Linear]) -> nn.Linear:
    """One linear whose output is those of `linears`, one after the other."""
    first, width = linears[0], sum(linear.out_features for linear in linears)
    has_bias = first.bias is not None
    joined = nn.Linear(first.in_features, width, bias=has_bias, device="meta")
    joined.weight = _cat([linear.weight for linear in linears])
    if has_bias:
        joined.bias = _cat([linear.bias for linear in linears])
    return joined


def _cat(parameters: list[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([p.detach() for p in parameters]), requires_grad=False)
