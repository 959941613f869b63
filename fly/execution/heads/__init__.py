"""Trained draft heads: their passes, over the target's hidden states."""
