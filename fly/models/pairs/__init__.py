"""Embedded pairs: `fly pair fetch NAME` once, then `pair:NAME/draft` and `pair:NAME/target`.

Importing this package is cheap: neither torch nor transformers is loaded.
"""

from fly.models.pairs.store import (
    PairPaths,
    fetch,
    how_to_fetch,
    locate,
    resolve_model_path,
    role_of,
)

__all__ = ["PairPaths", "fetch", "how_to_fetch", "locate", "resolve_model_path", "role_of"]
