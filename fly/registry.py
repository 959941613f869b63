"""Drafters, verification rules and engines by name: a new one is a file of its own and a line here.

Entries are `module:class`, imported when they are first used, so that reading a configuration or a
finished run loads no torch. docs/adding_a_drafter.md, adding_a_rule.md and adding_an_engine.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Drafter:
    """Where a drafter's class is, whether it needs the draft model to be loaded, and whether it
    drafts from texts, earlier runs' outputs among them."""

    where: str
    needs_draft_model: bool = True
    from_texts: bool = False


DRAFTERS = {
    "model": Drafter("fly.speculation.drafters.draft_model:ModelDrafter"),
    "ngram": Drafter(
        "fly.speculation.drafters.from_texts:TextDrafter", needs_draft_model=False, from_texts=True
    ),
    "cascade": Drafter("fly.speculation.drafters.cascade:CascadeDrafter", from_texts=True),
}
RULES: dict[str, str] = {
    "fly": "fly.speculation.rules.fly:FlyRule",
    "exact": "fly.speculation.rules.exact:ExactRule",
    "typical": "fly.speculation.rules.typical:TypicalRule",
    "top_k": "fly.speculation.rules.top_k:TopKRule",
    "accept_all": "fly.speculation.rules.accept_all:AcceptAllRule",
}
ENGINES: dict[str, str] = {  # by the name that lm-eval registers; `--model hf` with a pair is fly
    "fly": "fly.harness.hf:FlyLM",
}


def load(where: str) -> Any:
    """The class at `module:class`."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)
