"""fly: evaluate LLMs several times faster, and prove that the scores held."""

__version__ = "0.1.0"
