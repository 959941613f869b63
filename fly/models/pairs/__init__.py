"""Embedded pairs: `fly pair fetch NAME` once, then `pair:NAME/draft` and `pair:NAME/target`.

Importing its modules is cheap: neither torch nor transformers is loaded.
"""
