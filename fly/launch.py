"""Which of a run's processes this is, as their launcher says (torchrun, accelerate or mpirun), and
its share of the cores."""

from __future__ import annotations

import os
from pathlib import Path

from fly.errors import FlyError

_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_SIZE_HERE = (
    "LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip

_RANK_HERE = "LOCAL_RANK"  # torch connects processes wherever it is set


def check() -> None:
    """Raise FlyError for variables that no launcher sets so: the processes of such a run would wait
    for each other without a word."""
    names = (*_RANK, *_SIZE, *_SIZE_HERE, _RANK_HERE)
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    fix = "start with torchrun or accelerate launch, or unset it"
    for name, value in given.items():
        if not (value.isascii() and value.isdigit()):
            raise FlyError(f"{name}={value}: must be a whole number: {fix}")
    if _RANK_HERE in given and not any(rank in given for rank in _RANK):
        raise FlyError(f"{_RANK_HERE}={given[_RANK_HERE]}: without {_RANK[0]}: {fix}")
    for rank, size, size_here in zip(_RANK, _SIZE, _SIZE_HERE):
        if size not in given:
            continue
        count = int(given[size])
        if count < 1:
            raise FlyError(f"{size}={count}: must be at least 1: {fix}")
        if count > 1 and rank not in given:
            raise FlyError(f"{size}={count}: without {rank}, no process knows its number: {fix}")
        if int(given.get(rank, 0)) >= count:
            last = count - 1
            raise FlyError(f"{rank}={given[rank]}: {size}={count} has ranks 0 to {last}: {fix}")
        if int(given.get(size_here, 0)) > count:
            raise FlyError(f"{size_here}={given[size_here]}: more than {size}={count}: {fix}")


def processes() -> int:
    """How many processes the run has, on all machines."""
    return max(1, _number(_SIZE, 1))


def processes_here() -> int:
    """How many of them share this machine."""
    return max(1, _number(_SIZE_HERE, 1)) if processes() > 1 else 1


def rank() -> int:
    """The number of this process, from 0. The first one writes and shows what all share."""
    return _number(_RANK, 0) if processes() > 1 else 0


def cores_of_this_process() -> int:
    """Its share of the cores that the run may use here, by affinity and control-group quota; at
    least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        if quota != "max":
            cores = min(cores, round(int(quota) / int(period)))
    except (OSError, ValueError):
        pass
    return max(1, cores // processes_here())


def _number(names: tuple[str, ...], default: int) -> int:
    found = [value for name in names if (value := os.environ.get(name, "")).isdigit()]
    return int(found[0]) if found else default
