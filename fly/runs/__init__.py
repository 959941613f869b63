"""A run on disk: what is written while it lasts, and how it is read again."""
