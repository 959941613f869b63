"""Verification rules: which draft tokens stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fly import registry
from fly.speculation.rules.places import Places

if TYPE_CHECKING:
    from fly.config import FlyConfig
    from fly.speculation.rules.base import Rule


def rule_of(config: FlyConfig, tokenizer: Any = None) -> Rule:
    """The verification rule in force. tokenizer: the target's, which relax_in needs."""
    kind = registry.load(registry.RULES[config.rule].where)
    rule: Rule = kind(config.rule_settings)
    rule.name, rule.places = config.rule, Places.of(config.rule_settings, tokenizer)
    return rule
