"""How many rows fit into memory: `--batch_size auto`.

A row costs its K/V, exactly known per token, and its share of the widest pass's workspace.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fly.execution.kv_cache import SlotCache

_USABLE = 0.85  # the rest is for fragmentation, other processes, and the scores' own work


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or the one it came of, says that memory ran out, on any device."""
    words = ("out of memory", "can't allocate memory", "alloc_failed")
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    said = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    return said or (error.__context__ is not None and is_out_of_memory(error.__context__))


class Runner(Protocol):
    """What is measured of a model's runner (fly.execution.model_runner.ModelRunner)."""

    model: PreTrainedModel
    cache: SlotCache
    device: torch.device

    @property
    def slots(self) -> int: ...

    def prefill(self, slot: int, tokens: list[int]) -> Any: ...

    def extend(self, tokens: list[list[int]]) -> Tensor: ...

    def resize(self, slots: int) -> None: ...


@dataclass(frozen=True)
class RowWork:
    """What one row asks of a model.

    runner: of one slot, used for the measurement and left empty. width: the widest pass per row, in
    tokens. kept: draft tokens whose distribution a sampling row keeps until they are verified.
    """

    runner: Runner
    width: int
    kept: int = 0


def rows_that_fit(works: Iterable[RowWork], tokens_per_row: int, at_most: int) -> int:
    """Rows of `tokens_per_row` tokens that fit beside the loaded models; 1 to `at_most`.

    Models on one device share its memory.
    """
    needed: dict[torch.device, int] = {}
    for work in works:
        runner = work.runner
        try:
            bytes_per_row = row_bytes(work, tokens_per_row)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                return 1
            raise
        needed[runner.device] = needed.get(runner.device, 0) + bytes_per_row
    fits = (int(_USABLE * free_bytes(device) / need) for device, need in needed.items())
    return max(1, min(at_most, *fits))


def row_bytes(work: RowWork, tokens_per_row: int) -> int:
    """Bytes that one row takes: K/V of its tokens, the widest pass's workspace, distributions.

    The workspace is measured on accelerators. On CPUs, where it cannot be, it is the logits in
    the model's dtype and twice in float32, which is most of it.
    """
    runner, width = work.runner, work.width
    runner.prefill(0, [0])
    on_cuda = runner.device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize(runner.device)
        torch.cuda.reset_peak_memory_stats(runner.device)
        before = torch.cuda.memory_allocated(runner.device)
    logits = runner.extend([[0] * width]).to(torch.float32, copy=True)  # as for sampling rows
    if on_cuda:
        torch.cuda.synchronize(runner.device)
        workspace = torch.cuda.max_memory_allocated(runner.device) - before
    else:
        workspace = logits.numel() * (8 + runner.model.dtype.itemsize)
    bytes_per_token = runner.cache.bytes_per_token
    runner.resize(runner.slots)
    distributions = work.kept * logits.shape[-1] * torch.float32.itemsize
    cached = bytes_per_token * runner.cache.rounded(tokens_per_row + width)
    return cached + workspace + distributions


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
            cached = int(stat[stat.index("inactive_file") + 1])  # given back when asked for
            free = min(free, int(limit) - used + cached)
    except (OSError, ValueError):
        pass
    return max(0, free)


def peak_bytes() -> int:
    """The most memory that this process has had resident at once."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # not there on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
