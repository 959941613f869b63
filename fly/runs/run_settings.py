"""What sets finished runs apart: the settings in force in each, and the ones that differ."""

from __future__ import annotations

import itertools
from collections.abc import Container
from typing import Any

from fly.config import FlyConfig
from fly.runs.reader import Run
from fly.settings import GONE, PlaceSettings, settings_of_rule

_ALWAYS = (
    "target_model_path", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed",
    "total_gen_tok", "compile", "execution", "prefix_reuse", "batch_invariant",
)  # fmt: skip
_WITH_DRAFT = (
    "draft_model_path", "draft_policy", "draft_quantization", "draft_device", "draft_dtype",
    "dual_tok", "head_layer_ids", "confidence_thre",
)  # fmt: skip
_OF_TEXTS = ("max_ngram_size", "min_ngram_size", "num_ngram_pred_tokens", "lookup_k")
_SHORT = {
    "spd_k": "K", "win_len": "W", "entropy_thre": "theta", "entropy_kind": "entropy",
    "margin_thre": "margin", "draft_ratio_thre": "ratio", "draft_rank_max": "rank",
    "defer_across_rounds": "across rounds", "typical_epsilon": "epsilon", "typical_delta": "delta",
    "relaxed_top_k": "top", "relaxed_delta": "delta", "draft_quantization": "draft",
    "draft_policy": "policy", "draft_model_path": "draft model", "batch_size": "batch size",
    "max_ngram_size": "n-gram", "num_ngram_pred_tokens": "n-gram tokens",
    "draft_runs": "earlier runs", "draft_sources": "texts", "lookup_k": "lookup K",
    "exact_first_tokens": "first exact", "exact_pattern": "exact in",
    "batch_invariant": "batch invariant", "relax_in": "relaxed in", "cascade_alpha": "alpha",
    "assistant_ensemble_weight": "weight", "mars_theta": "theta", "asd_budget": "budget",
    "asd_gap": "gap", "asd_max_mismatches": "mismatches", "cactus_delta": "delta",
    "fsd_div_threshold": "threshold", "fsd_div_type": "divergence",
    "posterior_threshold": "threshold", "posterior_alpha": "alpha",
    "speculative_accept_threshold_single": "single", "speculative_accept_threshold_acc": "acc",
}  # fmt: skip


def name_mode(run: Run) -> str:
    """The run's mode, for print."""
    return "FLy" if run.mode == "fly" else run.mode


def in_force(run: Run) -> dict[str, Any]:
    """The settings that matter in this run, by configuration key: W only under FLy's rule, ...

    Besides the configuration's keys: `drafter` (resolved), `dtype`, `device`, `capability` (of a
    CPU), `threads`, `batch_size`. Empty for models that are not fly's.
    """
    if run.entry is None:
        return {}
    config, device = run.entry["config"], run.entry.get("device") or {}
    keys: list[str] = []
    found: dict[str, Any] = {}
    drafter = run.entry.get("drafter")
    if drafter is not None:
        keys += ["spd_k", *_WITH_DRAFT]
        found["drafter"] = drafter
        if drafter in ("ngram", "cascade"):
            keys += _OF_TEXTS
            found["draft_sources"] = config.get("draft_sources") or "all"
        found["draft_runs"] = run.draft_runs or None
    found |= of_rule(run) | {key: config[key] for key in (*keys, *_ALWAYS) if key in config}
    if found.get("batch_invariant") == "auto":
        found["batch_invariant"] = (run.entry.get("preparation") or {}).get("batch_invariant")
    found |= {"dtype": run.entry["dtype"], "device": device.get("name")}
    found |= {key: device[key] for key in ("threads", "capability") if key in device}
    found["batch_size"] = run.batch_size
    return found


def of_rule(run: Run) -> dict[str, Any]:
    """The settings of the run's verification rule, by key; empty for models that are not fly's."""
    return _of_rule(run.mode, run.entry["config"]) if run.entry else {}


def _of_rule(mode: str, config: dict[str, Any]) -> dict[str, Any]:
    keys = sorted(settings_of_rule(mode).model_fields, key=PlaceSettings.model_fields.__contains__)
    known = {*FlyConfig.model_fields, *GONE}
    keys += [key for key in config if key not in known]  # a further rule's
    found = {key: config[key] for key in keys if key in config and key != "abla_no_window"}
    if config.get("abla_no_window") and "win_len" in found:
        found["win_len"] = 0
    if found.get("relax_in", "everywhere") == "everywhere":
        found.pop("think_tokens", None)
    return found


def rule_in_words(mode: str, config: dict[str, Any]) -> list[str]:
    """The rule's settings, so that one run says how it verified: numbers and switches that are in
    use, and whatever else is not the default."""
    known = settings_of_rule(mode).model_fields
    return [
        _in_words(key, value)
        for key, value in _of_rule(mode, config).items()
        if (value and not isinstance(value, str)) or (key in known and value != known[key].default)
    ]


def distinctions(all_settings: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Of every run's settings in force, by key: those in which not all runs agree, in words.

    Earlier runs that were drafted from are always among them: the speed is not the mode's own.
    """
    return [
        {
            key: _in_words(key, value)
            for key, value in settings.items()
            if _differs(key, all_settings) or _is_always_said(key, settings)
        }
        for settings in all_settings
    ]


def labels(runs: list[Run], without: tuple[str, ...] = ()) -> list[str]:
    """One short label per run: its mode if modes differ, and the settings that do (`distinctions`).

    without: keys that no label may hold. Runs that differ in nothing have equal labels.
    """
    all_settings = [
        {key: value for key, value in in_force(run).items() if key not in without} for run in runs
    ]
    several_modes = len({run.mode for run in runs}) > 1
    result = []
    for run, settings, found in zip(runs, all_settings, distinctions(all_settings)):
        is_alone = all(_is_always_said(key, settings) for key in found)
        parts = [name_mode(run), *found.values()] if several_modes or is_alone else found.values()
        result.append(", ".join(parts))
    return result


def with_drafts(name: str, from_earlier_runs: bool) -> str:
    """A run's name where speeds are shown."""
    return f"{name} + earlier runs" if from_earlier_runs else name


def unused_name(name: str, taken: Container[str], mark: str) -> str:
    """The name if it is not taken, else the first free one of name + mark + 2, 3, ..."""
    if name not in taken:
        return name
    numbered = (f"{name}{mark}{number}" for number in itertools.count(2))
    return next(other for other in numbered if other not in taken)


def _differs(key: str, all_settings: list[dict[str, Any]]) -> bool:
    return len({repr(other[key]) for other in all_settings if key in other}) > 1


def _is_always_said(key: str, settings: dict[str, Any]) -> bool:
    return key == "draft_runs" and settings[key] is not None


def _in_words(key: str, value: Any) -> str:
    name = _SHORT.get(key, key)
    if value is None:
        return f"{name} off"
    if isinstance(value, (list, tuple)):
        parts = map(_last_part if key == "draft_runs" else str, value)
        return f"{name} {', '.join(parts)}"
    if isinstance(value, bool):
        return name if value else f"not {name}"
    if isinstance(value, float):
        return f"{name}={value:g}"
    return f"{name}={_last_part(value)}" if value != "" else name


def _last_part(value: Any) -> str:
    return str(value).rstrip("/").rsplit("/", 1)[-1]
