"""Whatever is drafted stands: the lower bound of accuracy."""

from __future__ import annotations

from fly.speculation.rules.base import Rule


class AcceptAllRule(Rule):
    """No gates."""
