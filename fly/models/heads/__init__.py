"""Trained draft heads: what their publishers' files say, in one form."""
