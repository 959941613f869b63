"""TensorRT-LLM's relaxed acceptance: among the likeliest tokens, and not far behind the first."""

from __future__ import annotations

from fly.settings import TopKSettings
from fly.speculation.rules.base import Rule
from fly.speculation.rules.gates import DistanceGate, RankGate


class TopKRule(Rule):
    def __init__(self, settings: TopKSettings) -> None:
        self.gates = (RankGate(settings.relaxed_top_k), DistanceGate(settings.relaxed_delta))
