"""Drafters, verification rules and engines by name: a new one is a file of its own and a line here.

Entries are `module:class`, imported when they are first used, so that reading a configuration or a
finished run loads no torch. docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from fly.errors import FlyError


@dataclass(frozen=True)
class DrafterEntry:
    """A drafter."""

    where: str  # its class
    needs_draft_model: bool = True
    from_texts: bool = False  # earlier runs' outputs among them
    head: str | None = None  # its draft's class, if that is a head (fly/execution/heads/base.py)
    of_vllm: bool = False  # vLLM's own, which fly's engine has not
    has_q: bool = True  # its drafts come with the draft's probabilities


@dataclass(frozen=True)
class RuleEntry:
    """A verification rule."""

    where: str  # its class
    settings: str = "fly.settings:Settings"  # its keys in a pair's JSON
    needs_q: bool = False  # it verifies greedy drafts, too, by the draft's probabilities
    is_lossless: bool = False  # the output is the target's own


DRAFTERS = {
    "model": DrafterEntry("fly.speculation.drafters.draft_model:ModelDrafter"),
    "ngram": DrafterEntry(
        "fly.speculation.drafters.from_texts:TextDrafter",
        needs_draft_model=False,
        from_texts=True,
        has_q=False,
    ),
    "cascade": DrafterEntry("fly.speculation.drafters.cascade:CascadeDrafter", from_texts=True),
    "eagle3": DrafterEntry(
        "fly.speculation.drafters.eagle3:Eagle3Drafter",
        head="fly.execution.heads.eagle3:Eagle3Head",
    ),
    "block": DrafterEntry(
        "fly.speculation.drafters.block:BlockDrafter", head="fly.execution.heads.block:BlockHead"
    ),
    "mtp": DrafterEntry("", needs_draft_model=False, of_vllm=True),
    "suffix": DrafterEntry("", needs_draft_model=False, of_vllm=True),
}
RULES = {
    "fly": RuleEntry("fly.speculation.rules.fly:FlyRule", "fly.settings:FlySettings"),
    "exact": RuleEntry("fly.speculation.rules.exact:ExactRule", is_lossless=True),
    "typical": RuleEntry(
        "fly.speculation.rules.typical:TypicalRule", "fly.settings:TypicalSettings"
    ),
    "top_k": RuleEntry("fly.speculation.rules.top_k:TopKRule", "fly.settings:TopKSettings"),
    "accept_all": RuleEntry("fly.speculation.rules.base:Rule", "fly.settings:PlaceSettings"),
    **{
        name: RuleEntry(
            f"fly.speculation.rules.{name}:{kind}Rule",
            f"fly.speculation.rules.settings:{kind}Settings",
            needs_q=name in ("ensemble", "fsd"),
        )
        for name, kind in {
            "cascade": "Cascade",
            "ensemble": "Ensemble",
            "mars": "Mars",
            "asd": "Asd",
            "cactus": "Cactus",
            "fsd": "Fsd",
            "entropy_ratio": "EntropyRatio",
            "sglang": "Sglang",
        }.items()
    },
    "block": RuleEntry("fly.speculation.rules.block:BlockRule", is_lossless=True),
}
ENGINES: dict[str, str] = {  # by the name that lm-eval registers
    "fly": "fly.harness.hf:FlyLM",
    "fly_vllm": "fly.harness.vllm:FlyVLLM",
    "server": "fly.harness.server:ServerLM",
}
# lm-eval's models in whose place an engine decodes where model_args name a pair's file
IN_PLACE_OF = {"hf": "fly", "hf-auto": "fly", "huggingface": "fly", "vllm": "fly_vllm"}


def load(where: str) -> Any:
    """The class at `module:class`."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


def engine_of(model: str, model_args: Mapping[str, Any]) -> str | None:
    """The engine that `--model` means; None for a model of lm-eval's own."""
    if "config_path" in model_args:
        model = IN_PLACE_OF.get(model, model)
    return model if model in ENGINES else None


def load_engine(name: str) -> Any:
    """The engine's class, which lm-eval knows from then on. Raises FlyError without a package that
    it needs."""
    try:
        return load(ENGINES[name])
    except ImportError as error:
        asked = next((model for model, engine in IN_PLACE_OF.items() if engine == name), name)
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        asked_for = {asked: asked, "openai": "'fly-eval[server]'"}
        remedy = f"pip install {asked_for[missing]}" if missing in asked_for else str(error)
        raise FlyError(f"--model {asked}: {asked} cannot be imported here: {remedy}") from None
