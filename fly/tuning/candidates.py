"""The configurations that are tried: a list, made from the given one."""

from __future__ import annotations

from itertools import product
from typing import Any

from fly import config as fly_config
from fly.config import FlyConfig

Keys = dict[str, Any]

# What a candidate sets, whatever the given configuration says of it.
_PLAIN: Keys = {
    "use_sd": True, "verification": None, "window_rule": "paper", "abla_no_window": False,
    "entropy_kind": "top3", "margin_thre": None, "draft_policy": "fixed",
}  # fmt: skip
_WINDOWS: tuple[Keys, ...] = tuple(
    {"defer_across_rounds": across, "spd_k": k, "win_len": window}
    for across, k, window in (
        (False, 8, 2), (False, 8, 6), (False, 12, 6), (True, 4, 2), (True, 8, 2), (True, 12, 6),
    )
)  # fmt: skip
_GATES: tuple[Keys, ...] = (
    {"entropy_thre": 0.3, "draft_ratio_thre": None, "draft_rank_max": None},
    {"entropy_thre": None, "draft_ratio_thre": 0.15, "draft_rank_max": 2},
)
_EXACT_PLACES: tuple[Keys, ...] = (
    {"exact_first_tokens": 0, "exact_pattern": None},
    {"exact_first_tokens": 16, "exact_pattern": None},
    {"exact_first_tokens": 64, "exact_pattern": ("numbers", "code_fences", r"[+*/=<>$%\\-]")},
)
_LIST: list[Keys] = [
    *({"enable_fly": False, "defer_across_rounds": False, "spd_k": k} for k in (4, 6, 8, 10, 12)),
    *(
        {"enable_fly": True, **window, **gate, **places}
        for window, gate, places in product(_WINDOWS, _GATES, _EXACT_PLACES)
    ),
]


def candidates(given: FlyConfig) -> list[FlyConfig]:
    """All that are tried, without the given configuration itself.

    Exact verification with `spd_k` from 4 to 12; FLy within and across rounds, by the entropy gate
    and by ratio and rank, with more and more places that stay exact. Other keys are the given ones.
    """
    base = {**given.model_dump(), **_PLAIN}
    found = [fly_config.build({**base, **keys}, "tune") for keys in _LIST]
    return [config for config in found if config != given]


def changes(base: FlyConfig, config: FlyConfig) -> Keys:
    """The keys in which a configuration differs from the given one."""
    old, new = base.model_dump(), config.model_dump()
    return {key: new[key] for key in new if new[key] != old[key]}


def kind(config: FlyConfig) -> str:
    """The class of rule, for print."""
    if config.rule != "fly":
        return config.rule
    return "fly across rounds" if config.defer_across_rounds else "fly within a round"
