"""Runs model-written programs outside fly's process, isolated as far as the machine allows."""

from fly.harness.sandbox.isolation import Isolation, describe, isolation_level
from fly.harness.sandbox.runner import (
    Limits,
    Outcome,
    Program,
    run_program,
    run_programs,
    used_isolation,
)

__all__ = [
    "Isolation",
    "Limits",
    "Outcome",
    "Program",
    "describe",
    "isolation_level",
    "run_program",
    "run_programs",
    "used_isolation",
]
