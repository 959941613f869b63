"""Static ensemble verification (arXiv 2604.07622; transformers, pull request 45979).

v = w p + (1 - w) q: a token drafted from q stands with probability min(1, v/q), and the one in its
place is drawn from max(0, v - q). Greedy: it stands if it is v's likeliest token, else that token
takes its place. w = 1 is exact verification. Output follows v where something was drafted, and p
after a draft that stands whole. The dynamic ensemble (DIVERSED) learns w and is not here.

Drafts from texts have no q and are verified exactly.
"""

from __future__ import annotations

from torch import Tensor

from fly.speculation.rules.revised import RevisedRule
from fly.speculation.rules.settings import EnsembleSettings


class EnsembleRule(RevisedRule):
    judges = "all"
    settings: EnsembleSettings

    def revise(self, p_BKV: Tensor, q_BKV: Tensor, token_BK1: Tensor) -> Tensor:
        weight = self.settings.assistant_ensemble_weight
        return weight * p_BKV + (1 - weight) * q_BKV
