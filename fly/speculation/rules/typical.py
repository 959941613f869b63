"""Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1)."""

from __future__ import annotations

from fly.settings import TypicalSettings
from fly.speculation.rules.base import Rule
from fly.speculation.rules.gates import TypicalGate


class TypicalRule(Rule):
    def __init__(self, settings: TypicalSettings) -> None:
        self.gates = (TypicalGate(settings.typical_epsilon, settings.typical_delta),)
