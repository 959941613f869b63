"""How the cost of a pass grows with the tokens in it, by a fixed rule per way to compute it.

Weights are read once, however many tokens there are; then arithmetic takes over. Where, depends on
the instructions at hand. The figures are benchmarks/passes.py's, rounded (docs/performance.md).
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from fly.execution import kernels
from fly.execution.packed_linear import NARROW_ROWS, Int4Linear, PackedLinear

# ways as in `preparation.Preparation`: (tokens that cost what one does, tokens more that double it)
_GROWTH = {
    "kernels-amx": (16, 60),
    "kernels-avx512": (6, 14),
    "kernels-avx2": (1, 7),
    "onednn": (1, 24),
    "graphs": (1, 256),
    "eager": (1, 7),
}
_INT4 = 0.6  # of an int8 pass: what a narrow pass over int4 weights costs


def growth(way: str) -> tuple[int, int]:
    """(tokens that cost what one token does, tokens more that double it)."""
    return _GROWTH.get(way.split()[0], _GROWTH["eager"])


def relative_cost(way: str, tokens: int) -> float:
    """What a pass over so many tokens costs, in passes over one token (int4's: over int8)."""
    if way.endswith("int4") and tokens <= NARROW_ROWS:
        return _INT4
    free, more = growth(way)
    return 1 + max(0, tokens - free) / more


def way_of(model: PreTrainedModel, device: torch.device) -> str:
    """How a loaded model's passes are computed on its device, by what its linears are."""
    if device.type != "cpu":
        return "graphs"
    kinds = {type(module) for module in model.modules()}
    if kinds & {kernels.Bfloat16Linear, kernels.Int8Linear}:
        return f"kernels-{kernels.instructions()}"
    if Int4Linear in kinds:
        return "onednn int4"
    return "onednn" if PackedLinear in kinds else "eager"
