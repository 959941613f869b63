"""Runs programs in parallel on the cores there are, isolated as well as this machine allows."""

import functools
import logging
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fly.errors import FlyError
from fly.harness.sandbox.process import Launch, Limits, Outcome, Program, execute
from fly.launch import cores_of_this_process

_logger = logging.getLogger("fly.harness.sandbox")
_used: str | None = None

_ALWAYS = ("fresh interpreter", "empty environment", "own folder", "time limits")
# What a program can do where none of these features took hold.
_GAPS = (
    ("can read the user's files", ("own root", "Landlock reads")),
    ("can write outside its folder", ("own root", "Landlock writes")),
    ("can use the network and local sockets", ("own root", "system call filter")),
    ("can change modes of the user's files", ("own root", "powerless user", "system call filter")),
    ("can signal fly's processes", ("own process table", "Landlock signals", "powerless user")),
    ("can start processes without end until the time limit", ("process limit",)),
    ("can use memory without limit", ("memory limit",)),
    ("can have fly killed when memory runs out", ("killed before fly",)),
    ("can fill the disk until the time limit", ("size-limited folder",)),
)


@dataclass(frozen=True)
class Isolation:
    """The isolation in force."""

    name: str  # namespaces, bwrap, landlock or process, strongest first
    features: tuple[str, ...]  # what took hold, beside _ALWAYS
    launch: Launch

    @property
    def gaps(self) -> str:
        """What a hostile program could still do, as the end of a line; empty if nothing."""
        found = [gap for gap, covered_by in _GAPS if not {*covered_by} & {*self.features}]
        return f"; NOT contained: a program {', '.join(found)}" if found else ""

    def __str__(self) -> str:
        return f"{self.name}: {', '.join((*_ALWAYS, *self.features))}{self.gaps}"


@functools.cache
def isolation_level() -> Isolation:
    """The strongest isolation that runs a trivial program here. Raises FlyError if none does."""
    bubblewrap = Launch(namespaces=False, bwrap=shutil.which("bwrap"))
    weakest = Launch(namespaces=False)
    for launch in dict.fromkeys((Launch(), bubblewrap, weakest)):
        outcome = execute(Program("pass"), Limits(wall_seconds=30.0), launch)
        own_root = "own root" in outcome.features
        if outcome.passed and (own_root or launch == weakest):
            if own_root:
                name = "bwrap" if launch.bwrap else "namespaces"
            else:
                name = "landlock" if "Landlock writes" in outcome.features else "process"
            return Isolation(name, outcome.features, launch)
    raise FlyError(
        f"sandbox: no program can be run here ({outcome.reason}: {outcome.detail}): "
        "check that sys.executable starts and that the temporary folder is writable"
    )


def run_programs(
    programs: Sequence[Program], limits: Limits | None = None, workers: int | None = None
) -> list[Outcome]:
    """Run the programs, `workers` at a time (None: one per core). Outcomes in the given order.

    A program passes if it and its tests run to their end and none of its threads outlives them.
    Raises FlyError if the machine, or the isolation that it had before, fails one of them twice.
    """
    global _used
    if not programs:
        return []
    level = isolation_level()
    if _used is None:
        _used = str(level)
        # A warning, so that it is shown whatever the log level of the run is. What holds is in the
        # results' config.fly.sandbox.
        _logger.warning("running model-written code, isolated by %s%s", level.name, level.gaps)
    limits = limits or Limits()
    run = functools.partial(execute, limits=limits, launch=level.launch, needed=level.features)
    with ThreadPoolExecutor(workers or cores_of_this_process()) as pool:
        outcomes = list(pool.map(run, programs))
    for index, outcome in enumerate(outcomes):
        if outcome.reason == "machine":  # alone it may have what it lacked beside others
            outcomes[index] = run(programs[index])
        if outcomes[index].reason == "machine":
            raise FlyError(
                f"sandbox: a program could not be run ({outcomes[index].detail}), which says "
                "nothing about it: free processes, memory or disk space, then score again "
                "(`fly --resume` does, without decoding)"
            )
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
