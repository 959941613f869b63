"""The isolation levels as launches, strongest first, and hostile programs run at one of them."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from fly.harness.sandbox import Limits, Outcome, Program
from fly.harness.sandbox.process import Launch, execute

BRIEF = Limits(wall_seconds=1.5, cpu_seconds=1.5)
LEVELS = {
    "namespaces": Launch(),
    "bwrap": Launch(namespaces=False, bwrap=shutil.which("bwrap")),
    "landlock": Launch(namespaces=False),
    "process": Launch(namespaces=False, landlock=False, filter=False),
}
_MARKS = {
    "namespaces": "own root",
    "bwrap": "own root",
    "landlock": "Landlock reads",
    "process": "memory limit",
}


def launch_of(level: str) -> Launch:
    """The level's launch; skips the test where this machine does not have it."""
    launch = LEVELS[level]
    if level == "bwrap" and launch.bwrap is None:
        pytest.skip("bubblewrap is not installed")
    outcome = execute(Program("pass"), Limits(), launch)
    if not outcome.passed or _MARKS[level] not in outcome.features:
        pytest.skip(f"this machine has no {level}: {outcome.detail}")
    return launch


def run_all(programs: dict[str, Program], launch: Launch) -> dict[str, Outcome]:
    """Run them beside each other: most of those that take long only wait."""
    with ThreadPoolExecutor(6) as pool:
        outcomes = pool.map(
            lambda name: execute(
                programs[name], Limits() if name.startswith("control") else BRIEF, launch
            ),
            programs,
        )
        return dict(zip(programs, outcomes))
