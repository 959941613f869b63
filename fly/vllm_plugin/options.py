"""What vLLM's additional_config says to the plugin. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fly import config as fly_config
from fly import registry
from fly.config import FlyConfig
from fly.errors import FlyError

KEY = "fly"  # in additional_config
RECORD_KEY = "fly_record"  # there, too: true keeps each request's rounds for `take_fly_rounds`
VERSIONS = ("0.32", "0.33")  # of vLLM: those that the plugin knows


def supports(version: str) -> bool:
    """Whether the plugin can run in this version of vLLM."""
    return ".".join(version.split(".")[:2]) in VERSIONS


def read(additional: Any, target: str, draft_tokens: int | None, version: str) -> FlyConfig | None:
    """The configuration whose rule verifies; None if the plugin is not asked for.

    additional: vLLM's additional_config. draft_tokens: its num_speculative_tokens, which spd_k is;
    None without speculation. Raises FlyError for what cannot be done within vLLM.
    """
    given = additional.get(KEY) if isinstance(additional, Mapping) else None
    if given is None:
        return None
    if isinstance(given, str):
        given = {"config_path": given}
    if not isinstance(given, Mapping):
        raise FlyError(
            f"additional_config {KEY}={given!r}: give keys of a pair's file, or its path"
        )
    if not supports(version):
        known = " and ".join(VERSIONS)
        raise FlyError(
            f"additional_config {KEY}: fly's rules run in vLLM {known}, not in {version}: install "
            f"one of these, or leave the key out"
        )
    if draft_tokens is None:
        raise FlyError(f"additional_config {KEY}: nothing is drafted: add a speculative_config")
    own = {"target_model_path": target, **given}
    path = own.pop("config_path", None)
    if path is not None:  # the file's target may be another copy of the same model
        own.pop("target_model_path")
    config = fly_config.resolve(path, {**own, "spd_k": draft_tokens}, log=False)
    check(config)
    return config


def check(config: FlyConfig) -> None:
    """Raise FlyError for a rule that needs tokens back that vLLM has given away."""
    if config.rule == "fly" and config.defer_across_rounds:
        raise FlyError(
            "defer_across_rounds=True: vLLM gives tokens away at the end of each round: set it to "
            "false (win_len must be below spd_k then), or use --model hf"
        )
    if registry.RULES[config.rule].needs_q:
        raise FlyError(
            f"verification={config.rule}: vLLM drafts without the draft's probabilities: set "
            "another rule, or use --model hf"
        )
