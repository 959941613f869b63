"""Runs programs in parallel on the cores there are, and says once how they are isolated."""

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from fly.harness.sandbox.isolation import isolation_level
from fly.harness.sandbox.process import Limits, Outcome, Program, execute

__all__ = ["Limits", "Outcome", "Program", "run_program", "run_programs", "used_isolation"]

_logger = logging.getLogger("fly.harness.sandbox")
_used: str | None = None


def run_program(source: str, tests: str = "", limits: Limits | None = None) -> Outcome:
    """Run one program: it passes if it and its tests run to their end and no thread outlives it."""
    return run_programs([Program(source, tests)], limits)[0]


def run_programs(
    programs: Sequence[Program], limits: Limits | None = None, workers: int | None = None
) -> list[Outcome]:
    """Run the programs, `workers` at a time (None: one per core). Outcomes in the given order."""
    global _used
    if not programs:
        return []
    level = isolation_level()
    if _used is None:
        _used = str(level)
        # A warning, so that it is shown whatever the log level of the run is.
        _logger.warning("running model-written code isolated by %s", _used)
    limits = limits or Limits()
    with ThreadPoolExecutor(workers or _cores()) as pool:
        outcomes = list(pool.map(lambda item: execute(item, limits, level.launch), programs))
    unjudged = [outcome for outcome in outcomes if outcome.reason == "sandbox"]
    if unjudged:
        _logger.warning(
            "%d of %d programs could not be judged and count as failed; the first: %s",
            len(unjudged), len(outcomes), unjudged[0].detail,
        )  # fmt: skip
    return outcomes


def used_isolation() -> str | None:
    """The isolation under which this process ran programs; None if it ran none."""
    return _used


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
