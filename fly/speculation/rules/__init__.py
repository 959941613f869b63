"""Verification rules: which draft tokens stand."""
