"""Tests on the embedded pair."""

BUDGET = 96  # new tokens per prompt
EOS = frozenset({151645, 151643})
