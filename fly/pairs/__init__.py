"""Embedded pairs: `fly pair fetch NAME` once, then `pair:NAME/draft` and `pair:NAME/target`.

Importing this package is cheap; torch and transformers load only while a pair is converted.
"""

from fly.pairs.store import PairPaths, fetch, locate, resolve_model_path

__all__ = ["PairPaths", "fetch", "locate", "resolve_model_path"]
