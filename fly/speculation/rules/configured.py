"""From a configuration to the verification rule that the engine applies."""

from __future__ import annotations

from fly.config import FlyConfig
from fly.speculation.rules.gates import (
    DistanceGate,
    EntropyGate,
    Gate,
    MarginGate,
    RankGate,
    RatioGate,
    TypicalGate,
)
from fly.speculation.rules.verification import Relaxation


def relaxation(config: FlyConfig) -> Relaxation | None:
    """The configuration's rule; None is exact verification.

    fly: arXiv 2511.22972. typical: Medusa, arXiv 2401.10774. top_k: TensorRT-LLM's relaxed
    acceptance. accept_all: whatever is drafted stands.
    """
    if config.rule == "fly":
        return _fly(config)
    rivals: dict[str, tuple[Gate, ...]] = {
        "typical": (TypicalGate(config.typical_epsilon, config.typical_delta),),
        "top_k": (RankGate(config.relaxed_top_k), DistanceGate(config.relaxed_delta)),
        "accept_all": (),
    }
    if config.rule not in rivals:
        return None
    return Relaxation(rivals[config.rule], window=0, room=0, by_gates_alone=True)


def _fly(config: FlyConfig) -> Relaxation:
    window = room = config.window
    if config.window_rule == "reference" and window:
        window -= 1
    return Relaxation(gates(config), window, None if config.defer_across_rounds else room)


def gates(config: FlyConfig) -> tuple[Gate, ...]:
    """FLy's gates that are switched on; a mismatch must pass all of them."""
    result: list[Gate] = []
    if config.entropy_thre is not None:
        result.append(EntropyGate(config.entropy_thre, config.entropy_kind))
    if config.margin_thre is not None:
        result.append(MarginGate(config.margin_thre))
    if config.draft_ratio_thre is not None:
        result.append(RatioGate(config.draft_ratio_thre))
    if config.draft_rank_max is not None:
        result.append(RankGate(config.draft_rank_max))
    return tuple(result)
