"""Finds out once, by running a trivial program, how well this machine isolates programs."""

import functools
import shutil
from dataclasses import dataclass

from fly.errors import FlyError
from fly.harness.sandbox.process import Launch, Limits, Outcome, Program, execute

_ALWAYS = ("fresh interpreter", "empty environment", "own folder", "time limits")
# What a user would want to know is missing; each is covered by any one of the features after it.
_GAPS = (
    ("can read the user's files", ("own root", "Landlock reads")),
    ("can write outside its folder", ("own root", "Landlock writes")),
    ("can use the network and local sockets", ("own root", "system call filter")),
    ("can change modes of the user's files", ("own root", "powerless user", "system call filter")),
    ("can signal fly's processes", ("own process table", "Landlock signals", "powerless user")),
    ("can start processes without end until the time limit", ("process limit",)),
    ("can use memory without limit", ("memory limit",)),
)


@dataclass(frozen=True)
class Isolation:
    """The isolation in force.

    name: namespaces, bwrap, landlock or process, strongest first.
    features: what took hold. gaps: what a hostile program could still do.
    """

    name: str
    features: tuple[str, ...]
    gaps: tuple[str, ...]
    launch: Launch

    def __str__(self) -> str:
        text = f"{self.name}: {', '.join(self.features)}"
        return text + (f"; NOT contained: a program {', '.join(self.gaps)}" if self.gaps else "")


@functools.cache
def isolation_level() -> Isolation:
    """The strongest isolation that works here. Raises FlyError if no program can be run at all."""
    bwrap = shutil.which("bwrap")
    launches = [Launch(), *([Launch(namespaces=False, bwrap=bwrap)] if bwrap else [])]
    for launch in launches:
        outcome = _try(launch)
        if outcome.passed and "own root" in outcome.features:
            return _assess(outcome, launch)
    launch = Launch(namespaces=False)
    outcome = _try(launch)
    if not outcome.passed:
        raise FlyError(
            f"sandbox: no program can be run here ({outcome.reason}: {outcome.detail}): "
            "check that sys.executable starts and that the temporary folder is writable"
        )
    return _assess(outcome, launch)


def _try(launch: Launch) -> Outcome:
    return execute(Program("pass"), Limits(wall_seconds=30.0), launch)


def describe() -> str:
    """The isolation in force, in one line."""
    return str(isolation_level())


def _assess(outcome: Outcome, launch: Launch) -> Isolation:
    features = (*_ALWAYS, *outcome.features)
    if launch.bwrap:
        name = "bwrap"
    elif "own process table" in features:
        name = "namespaces"
    elif "Landlock writes" in features:
        name = "landlock"
    else:
        name = "process"
    gaps = tuple(gap for gap, cover in _GAPS if not set(cover) & set(features))
    return Isolation(name, features, gaps, launch)
