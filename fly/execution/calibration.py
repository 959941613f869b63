"""What was timed on this machine, kept in FLY_HOME for a month: later runs decide as this one.

Costs of passes come from short passes of the loaded models, rounded to coarse steps.
"""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from fly.errors import FlyError
from fly.execution.device import cpu_name, device_facts
from fly.execution.model_runner import ModelRunner
from fly.execution.pass_costs import NO_DRAFT, PairCosts, PassCosts, growth, round_cost
from fly.models.fingerprint import hash_json
from fly.paths import fly_home, write_whole
from fly.version import VERSION

logger = logging.getLogger(__name__)

_SIZES = (1, 4, 6, 9, 12, 24, 48, 96)  # tokens of the passes that are timed
_BUDGET = 1.5  # seconds after which no further pass of a model is started
_STEPS = 8  # costs are rounded to powers of 2 ** (1 / _STEPS), some nine percent
_MOST_AGE = 30 * 24 * 3600.0  # seconds after which it is timed again


def read(identity: dict[str, Any]) -> Any:
    """What is kept of this identity, a JSON value; None if nothing is, or it is old or damaged."""
    try:
        path = _path(identity)
        if time.time() - path.stat().st_mtime > _MOST_AGE:
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, FlyError):  # FlyError: there is no home folder
        return None


def keep(identity: dict[str, Any], found: Any) -> None:
    """Without a place to write every run times anew, as a log line says."""
    try:
        path = _path(identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(found))
    except (OSError, FlyError) as error:
        logger.info("what was timed here cannot be kept: %s", error)


def _path(identity: dict[str, Any]) -> Path:
    """identity: what the timings depend on beside the machine."""
    depends_on = {
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "fly": VERSION,
        "torch": torch.__version__,
        "lib": transformers.__version__,
        **identity,
    }
    return fly_home() / "calibration" / f"{hash_json(depends_on)}.json"


def calibrate(
    target: ModelRunner, draft: ModelRunner | None, identity: dict[str, Any]
) -> PairCosts:
    """Time a few passes of both models, or take what an earlier run on this machine kept.

    identity: what the costs depend on beside the machine. The runners are emptied.
    """
    identity = {"sizes": _SIZES, "steps": _STEPS, **identity}
    runners = [runner for runner in (target, draft) if runner is not None]
    if target.device.type != "cpu":
        identity["devices"] = [device_facts(runner.device)["name"] for runner in runners]
    a_round = round_cost(target.way)
    if (kept := _costs_of(read(identity), a_round)) is not None:
        return kept
    seconds = _seconds(target)
    alone = seconds[0]
    costs = PairCosts(
        _coarse(seconds, alone, target.way),
        NO_DRAFT if draft is None else _coarse(_seconds(draft), alone, draft.way),
        "calibration",
        a_round,
    )
    # passes that could not be captured were eager ones: of this run alone
    if not any(passes and passes.failure for r in runners for passes in (r.static, r.uniform)):
        keep(identity, costs.as_dict())
    return costs


def _costs_of(data: Any, a_round: float) -> PairCosts | None:
    """What `as_dict` wrote; None for anything else."""
    try:
        tables = {}
        for role in ("target", "draft"):
            sizes, costs = zip(*sorted((int(n), float(cost)) for n, cost in data[role].items()))
            tables[role] = PassCosts(sizes, costs)
        return PairCosts(tables["target"], tables["draft"], "cache", a_round)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _seconds(runner: ModelRunner) -> list[float]:
    """Of passes over `_SIZES` tokens, as many as the budget allows, each the best of some."""
    start, found, slots = time.perf_counter(), list[float](), runner.slots
    runner.resize(1)  # there may be no memory for all: the engine then goes on with fewer
    runner.prefill(0, [0])
    for tokens in _SIZES:
        if found and time.perf_counter() - start > _BUDGET:
            break
        count = 1
        if runner.device.type != "cpu":  # the first captures a graph; the host waits once for many
            _pass_seconds(runner, tokens, 1)
            count = max(1, min(8, int(0.05 / _pass_seconds(runner, tokens, 1))))
        repeats = 3 if tokens == 1 else 2 if tokens < 12 else 1  # narrow ones vary most
        found.append(min(_pass_seconds(runner, tokens, count) for _ in range(repeats)))
    runner.resize(slots)
    return found


def _pass_seconds(runner: ModelRunner, tokens: int, count: int) -> float:
    """Of one of `count` passes, one after the other."""
    before = time.perf_counter()
    for _ in range(count):
        logits_BQV = runner.extend([[0] * tokens])
    logits_BQV[0, 0, 0].item()
    return (time.perf_counter() - before) / count


def _coarse(seconds: list[float], alone: float, way: str) -> PassCosts:
    """Relative to `alone`, in coarse steps; more tokens never cost less.

    After the last size that was timed costs grow as the rule for `way` says, or as they did last if
    that is more: large models are timed at a few sizes only, where width may still be free.
    """
    costs: list[float] = []
    for value in seconds:
        step = 2 ** (round(_STEPS * math.log2(value / alone)) / _STEPS)
        costs.append(max([round(step, 3), *costs]))
    sizes = [*_SIZES[: len(costs)]]
    free, more = growth(way)
    slope = costs[0] / more
    if len(costs) > 1:
        slope = max(slope, (costs[-1] - costs[-2]) / (sizes[-1] - sizes[-2]))
    if sizes[-1] < free:
        sizes.append(free)
        costs.append(costs[-1])
    return PassCosts((*sizes, sizes[-1] + more), (*costs, round(costs[-1] + slope * more, 3)))
