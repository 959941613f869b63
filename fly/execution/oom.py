"""Running out of memory: how to recognise it, and how much memory is free."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

_WORDS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "alloc_failed",
    "bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it came from, says that memory ran out, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS):
        return True
    return error.__context__ is not None and is_out_of_memory(error.__context__)


def free_bytes(device: torch.device) -> int:
    """Memory that may still be allocated on the device (for a CPU: within its control group)."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + held)
    free = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            stat = Path("/sys/fs/cgroup/memory.stat").read_text().split()
            cached = int(stat[stat.index("inactive_file") + 1])  # freed as soon as it is needed
            free = min(free, int(limit) - used + cached)
    except (OSError, ValueError):
        pass
    return max(0, free)
