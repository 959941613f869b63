"""What a pass costs by the tokens in it, relative to the target's pass over one token.

Two sources: a rule by how passes are computed, the same on every machine; and a calibration, short
passes of the loaded models, rounded to coarse steps and kept, so that the next run on the machine
decides as this one does. docs/performance.md has the figures behind the rule.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from fly import __version__
from fly.execution.cost_rule import growth
from fly.execution.model_runner import ModelRunner
from fly.paths import fly_home, write_whole

logger = logging.getLogger(__name__)

_SIZES = (1, 4, 6, 9, 12, 24, 48, 96)  # tokens of the passes that a calibration times
_BUDGET = 1.5  # seconds after which one model's calibration starts no further pass
_STEPS = 8  # costs are rounded to powers of 2 ** (1 / _STEPS), some nine percent
_MOST_AGE = 30 * 24 * 3600.0  # seconds after which a kept calibration is made again
_OVERHEAD = 0.08  # of a target's pass: what a draft's pass costs beside reading its weights


@dataclass(frozen=True)
class PassCosts:
    """Costs of one model's passes: `costs[i]` for `sizes[i]` tokens, lines between and after."""

    sizes: tuple[int, ...]
    costs: tuple[float, ...]

    def at(self, tokens: int) -> float:
        if tokens <= self.sizes[0] or len(self.sizes) == 1:
            return self.costs[0]
        high = next((i for i, size in enumerate(self.sizes) if size >= tokens), -1)
        high = len(self.sizes) - 1 if high < 0 else high
        low = high - 1
        span = self.sizes[high] - self.sizes[low]
        slope = (self.costs[high] - self.costs[low]) / span
        return self.costs[low] + slope * (tokens - self.sizes[low])


@dataclass(frozen=True)
class PairCosts:
    """Costs of both models' passes, in target passes over one token. `source`: rule, calibration
    or cache, for the log and the results."""

    target: PassCosts
    draft: PassCosts
    source: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "target": dict(zip(map(str, self.target.sizes), self.target.costs)),
            "draft": dict(zip(map(str, self.draft.sizes), self.draft.costs)),
        }


def by_rule(target: str, draft: str | None, weight: float) -> PairCosts:
    """Costs by how passes are computed (`Preparation.target` and `.draft`).

    weight: bytes of the draft's weights over the target's; 0 for a drafter without a model.
    """
    return PairCosts(
        _grown(target, 1.0),
        _grown(draft, weight + _OVERHEAD) if draft else PassCosts((1,), (0.0,)),
        "rule",
    )


def _grown(passes: str, alone: float) -> PassCosts:
    free, more = growth(passes)
    return PassCosts((free, free + more), (alone, 2 * alone))


def calibrate(
    target: ModelRunner, draft: ModelRunner | None, identity: dict[str, Any]
) -> PairCosts:
    """Time a few passes of both models, or take what an earlier run on this machine kept.

    identity: what the costs depend on beside the machine. The runners are emptied.
    """
    form = {"sizes": _SIZES, "steps": _STEPS}
    versions = {"fly": __version__, "torch": torch.__version__, "lib": transformers.__version__}
    path = _kept_at({**_machine(), **identity, **form, **versions})
    if (kept := _read(path)) is not None:
        return kept
    target_seconds = _seconds(target)
    alone = target_seconds[0]
    draft_costs = PassCosts((1,), (0.0,))
    if draft is not None:
        draft_costs = _coarse(_seconds(draft), alone, draft.way)
    costs = PairCosts(_coarse(target_seconds, alone, target.way), draft_costs, "calibration")
    _write(path, costs)
    return costs


def _seconds(runner: ModelRunner) -> list[float]:
    """Of passes over `_SIZES` tokens, as many as the budget allows; the narrow ones, which matter
    most and vary most, the best of two or three."""
    start, found = time.perf_counter(), list[float]()
    runner.prefill(0, [0])
    for tokens in _SIZES:
        if found and time.perf_counter() - start > _BUDGET:
            break
        best = math.inf
        for _ in range(3 if tokens == 1 else 2 if tokens < 12 else 1):
            before = time.perf_counter()
            runner.extend([[0] * tokens])
            best = min(best, time.perf_counter() - before)
        found.append(best)
    runner.resize(runner.slots)
    return found


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


def _machine() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def cpu_name() -> str:
    """The CPU's model name as the system gives it; empty where it does not."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    fields = [line.partition(":") for line in lines]
    found = {name.strip(): value.strip() for name, _, value in reversed(fields)}
    if "model name" in found:
        return found["model name"]
    arm = [found[name] for name in ("CPU implementer", "CPU part") if name in found]
    return f"ARM {' '.join(arm)}" if arm else ""


def _kept_at(identity: dict[str, Any]) -> Path:
    text = json.dumps(identity, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return fly_home() / "calibration" / f"{digest}.json"


def _read(path: Path) -> PairCosts | None:
    """What is kept there, unless it is too old or damaged."""
    try:
        if time.time() - path.stat().st_mtime > _MOST_AGE:
            return None
        data = json.loads(path.read_text(encoding="utf-8"))
        models = {}
        for role in ("target", "draft"):
            pairs = sorted((int(size), float(cost)) for size, cost in data[role].items())
            sizes, costs = zip(*pairs)
            models[role] = PassCosts(sizes, costs)
        return PairCosts(models["target"], models["draft"], "cache")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(path: Path, costs: PairCosts) -> None:
    """Keep them; without a writable home every run calibrates anew."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(costs.as_dict()))
    except OSError as error:
        logger.info("the calibration of pass costs cannot be kept in %s: %s", path.parent, error)
