"""MARS, margin-aware verification (arXiv 2601.15498): the target's second choice is
accepted where its logit is close to the first's.

With z1 >= z2 the target's two largest logits: a mismatch stands if it is the second and z2/z1 >
theta (0.9 in the paper, for all models). A ratio of logits depends on where a model's logits lie,
which softmax does not see; with z1 <= 0 it says nothing (both negative: it would exceed 1), so
nothing is let in there. When sampling, exact verification is asked first; temperature leaves the
ratio as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fly.speculation.rules.base import Rule
from fly.speculation.rules.gates import RankGate
from fly.speculation.rules.settings import MarsSettings


@dataclass(frozen=True)
class LogitRatioGate:
    """The second largest logit is more than `theta` of the largest, which is positive."""

    theta: float

    def passes(self, logits_MV: Tensor, token_M: Tensor) -> Tensor:
        first_M, second_M = logits_MV.float().topk(2).values.unbind(-1)
        return (first_M > 0) & (second_M > self.theta * first_M)


class MarsRule(Rule):
    decides_alone = False

    def __init__(self, settings: MarsSettings) -> None:
        self.gates = (LogitRatioGate(settings.mars_theta), RankGate(2))
