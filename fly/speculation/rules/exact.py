"""Exact verification: no mismatch stands, so the output is the target's own."""

from __future__ import annotations

from fly.speculation.rules.base import Rule


class ExactRule(Rule):
    decides_alone = False
    gates = None
