"""pass@k for code tasks, on fly's sandbox instead of running programs in this process.

lm-eval scores one document at a time. So that programs still run in parallel, a task's filter
registers them all, and the first score that is asked for runs every registered one; the rest
are looked up. Registering runs nothing: under --predict_only no metric is called.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fly.errors import FlyError
from fly.harness import sandbox

_registered: dict[sandbox.Program, None] = {}  # an ordered set
_passed: dict[sandbox.Program, bool] = {}


def register(programs: Iterable[sandbox.Program]) -> None:
    """Announce programs whose outcome will be asked for."""
    _registered.update(dict.fromkeys(programs))


def passes(program: sandbox.Program) -> bool:
    """Whether it and its tests run to their end; the first call runs all registered programs."""
    if program not in _passed:
        register([program])
        waiting = [item for item in _registered if item not in _passed]
        outcomes = sandbox.run_programs(waiting)
        _passed.update({item: outcome.passed for item, outcome in zip(waiting, outcomes)})
        _registered.clear()
    return _passed[program]


def estimate_pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374)."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def pass_at_k(candidates: Sequence[sandbox.Program], ks: Sequence[int]) -> dict[str, float]:
    """{"pass@k": estimate} of one document's candidates. Raises FlyError if they are too few."""
    check_samples("the task", len(candidates), ks)
    correct = sum(passes(candidate) for candidate in candidates)
    return {f"pass@{k}": estimate_pass_at_k(len(candidates), correct, k) for k in ks}


def check_samples(task: str, repeats: int, ks: Sequence[int]) -> None:
    """Raises FlyError if `repeats` samples of each document are too few for pass@k of these k."""
    if max(ks) > repeats:
        raise FlyError(
            f"{task}: pass@{max(ks)} takes {max(ks)} samples of each document, repeats is "
            f"{repeats}: raise repeats, or lower k, in its file"
        )
