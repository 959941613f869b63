"""Runs model-written programs outside fly's process, isolated as far as the machine allows."""

from fly.harness.sandbox.process import Limits, Outcome, Program
from fly.harness.sandbox.runner import isolation_level, run_programs, used_isolation

__all__ = ["Limits", "Outcome", "Program", "isolation_level", "run_programs", "used_isolation"]
