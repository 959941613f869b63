"""Linear layers that take the same input, computed as one product.

Query, key and value read one input, gate and up another. One product over their merged weights
takes fewer calls, reads the input once, and quantises it once. The model's own forward is
unchanged: the first sibling that is called computes for all, the others return their share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class MergedProduct:
    """The merged product of siblings, and the parts of its last result that nobody took yet.

    A part is handed out once, to a sibling that comes after the one that asked first, and only for
    the very tensor that it was computed from; that tensor is held until then, so that no other one
    gets its identity. Inference mode does not count writes: there, a write into the tensor between
    two siblings goes unnoticed. transformers' models do no such thing.
    """

    def __init__(self, product: nn.Module, sizes: list[int]) -> None:
        self.product = product
        self._sizes = sizes
        self._input: Tensor | None = None
        self._version = 0
        self._shares: dict[int, Tensor] = {}

    def share(self, index: int, x: Tensor) -> Tensor:
        """The output of sibling `index` for x, [..., in] -> [..., sizes[index]]."""
        version = 0 if x.is_inference() else x._version  # counts writes into x
        if self._input is not x or self._version != version or index not in self._shares:
            self._input, self._version = x, version
            shares = self.product(x).split(self._sizes, dim=-1)
            self._shares = {later: shares[later] for later in range(index, len(shares))}
        result = self._shares.pop(index)
        if not self._shares:
            self._input = None
        return result


class Sibling(nn.Module):
    """Takes the place of one of the merged linears."""

    def __init__(self, merged: MergedProduct, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.product = merged.product  # so that a walk over the modules finds it
        self._merged, self._index = merged, index

    def forward(self, x: Tensor) -> Tensor:
        return self._merged.share(self._index, x)


def merge(model: nn.Module, kind: Callable[[Sequence[nn.Linear]], nn.Module]) -> None:
    """Merge all siblings among a model's plain linears, in place.

    `kind` makes the module that computes siblings side by side. Siblings that are not plain, or
    that differ in input width, dtype or bias, stay as they are. Siblings that are called with
    different inputs (cross-attention) stay correct, at the cost of the whole product each.
    """
    # only these are listed: the linears that were merged are freed one by one
    first = [names[0] for names in _SIBLINGS]
    parents = [m for m in model.modules() if any(hasattr(m, name) for name in first)]
    for module, names in itertools.product(parents, _SIBLINGS):
        linears = [getattr(module, name, None) for name in names]
        plain = [linear for linear in linears if type(linear) is nn.Linear]
        traits = {(x.in_features, x.weight.dtype, x.bias is None) for x in plain}
        if len(plain) == len(names) and len(traits) == 1:
            sizes = [linear.out_features for linear in plain]
            merged = MergedProduct(kind(plain), sizes)
            for index, (name, linear) in enumerate(zip(names, plain)):
                setattr(module, name, Sibling(merged, index, linear))


def concatenate(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One linear whose output is those of `linears`, one after the other."""
    first, width = linears[0], sum(linear.out_features for linear in linears)
    joined = nn.Linear(first.in_features, width, bias=first.bias is not None, device="meta")
    for name, _ in first.named_parameters():
        parts = torch.cat([getattr(linear, name).detach() for linear in linears])
        setattr(joined, name, nn.Parameter(parts, requires_grad=False))
    return joined
