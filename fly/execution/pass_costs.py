"""What a pass costs by the tokens in it, relative to the target's pass over one token.

Weights are read once, however many tokens there are; then arithmetic takes over. Where depends on
the instructions at hand. Costs come from a fixed rule by how passes are computed, which is the same
on every machine, or from a calibration (calibration.py).
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from fly.execution import kernels
from fly.execution.kernels import gguf

# Ways to compute passes, as in `PackedWeights`: (tokens that cost what one does, tokens more that
# double it). The figures are benchmarks/passes.py's, rounded (docs/performance.md).
_GROWTH = {
    "kernels-amx": (16, 60),
    "kernels-amx gguf": (8, 22),
    "kernels-avx512_bf16": (9, 20),
    "kernels-avx512": (6, 14),
    "kernels-avx2": (1, 7),
    "graphs": (1, 256),
    "eager": (1, 7),
}
_OVERHEAD = 0.08  # of a target's pass: what a draft's pass costs beside reading its weights
# of a target's pass: what a round costs beside its passes. A GPU waits for the host meanwhile: on
# an H200 0.45 of a pass of 1.5B weights, less of a larger model's
_ROUND, _ROUND_ON_GPU = 0.03, 0.3


@dataclass(frozen=True)
class PassCosts:
    """Costs of one model's passes: `costs[i]` for `sizes[i]` tokens, lines between and after."""

    sizes: tuple[int, ...]
    costs: tuple[float, ...]

    def at(self, tokens: int) -> float:
        if tokens <= self.sizes[0] or len(self.sizes) == 1:
            return self.costs[0]
        high = min(bisect_left(self.sizes, tokens), len(self.sizes) - 1)
        low = high - 1
        span = self.sizes[high] - self.sizes[low]
        slope = (self.costs[high] - self.costs[low]) / span
        return self.costs[low] + slope * (tokens - self.sizes[low])


@dataclass(frozen=True)
class PairCosts:
    """Costs of both models' passes, in target passes over one token. `source`: rule, calibration
    or cache, for the log and the results. a_round: what a round costs beside its passes. block: the
    draft's one pass of a round is over so many tokens of a sequence and drafts all; None where
    every drafted token takes a pass over one."""

    target: PassCosts
    draft: PassCosts
    source: str
    a_round: float = _ROUND
    block: int | None = None

    def drafting(self, steps: int, sequences: int) -> float:
        """Of a draft of `steps` tokens that the draft makes."""
        if self.block is None:
            return steps * self.draft.at(sequences)
        return self.draft.at(sequences * self.block) if steps else 0.0

    def of_round(self, width: int, steps: int, sequences: int) -> float:
        """Of a draft of `steps` tokens that the draft makes and a target pass over `width` draft
        tokens of each sequence."""
        drafting = self.drafting(steps, sequences)
        return self.target.at(sequences * (width + 1)) + drafting + self.a_round

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "target": dict(zip(map(str, self.target.sizes), self.target.costs)),
            "draft": dict(zip(map(str, self.draft.sizes), self.draft.costs)),
        }


NO_DRAFT = PassCosts((1,), (0.0,))


def growth(way: str) -> tuple[int, int]:
    """(tokens that cost what one token does, tokens more that double it)."""
    return _GROWTH.get(way) or _GROWTH.get(way.split()[0], _GROWTH["eager"])


@functools.cache
def _rule(way: str, alone: float = 1.0) -> PassCosts:
    """Costs of passes that are computed so, of which one over one token costs `alone`."""
    free, more = growth(way)
    return PassCosts((free, free + more), (alone, 2 * alone))


def by_rule(target: str, draft: str | None, weight: float) -> PairCosts:
    """Costs by how passes are computed (`PackedWeights.target` and `.draft`).

    weight: bytes of the draft's weights over the target's; 0 for a drafter without a model.
    """
    return PairCosts(_rule(target), _rule(draft, weight + _OVERHEAD) if draft else NO_DRAFT, "rule")


def round_cost(way: str) -> float:
    """What a round costs beside its passes, where the target's are computed this way."""
    return _ROUND_ON_GPU if way == "graphs" else _ROUND


def relative_cost(way: str, tokens: int) -> float:
    """What a pass over so many tokens costs, in passes over one token."""
    return _rule(way).at(tokens)


def way_of(model: PreTrainedModel, device: torch.device) -> str:
    """How a loaded model's passes are computed on its device, by what its linears are."""
    if device.type != "cpu":
        return "graphs"
    kinds = {type(module) for module in model.modules()}
    of_kernels = kinds & {*kernels.LINEARS.values(), gguf.GgufProduct}
    return f"kernels-{kernels.instructions()}" if of_kernels else "eager"
