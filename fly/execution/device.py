"""What a run computes on: facts for the results file, and the memory it has taken."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch


def device_facts(device: torch.device) -> dict[str, Any]:
    """Name and size of what the target runs on, for comparing runs."""
    facts: dict[str, Any] = {"type": str(device), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["name"] = properties.name
        facts["memory_bytes"] = properties.total_memory
    else:
        facts["name"] = cpu_name() or platform.processor() or platform.machine()
        facts["capability"] = torch.backends.cpu.get_cpu_capability()
    return facts


def timing_facts(device: torch.device) -> dict[str, Any]:
    """The part of `device_facts` that seconds depend on: GPUs of one kind are interchangeable."""
    facts = {**device_facts(device), "type": device.type}
    if device.type == "cuda":
        del facts["threads"]
    return facts


def machine_facts() -> dict[str, Any]:
    """What seconds depend on, as far as it is known before a model is loaded."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"accelerators": sorted(set(names))} if names else timing_facts(torch.device("cpu"))


def peak_memory_bytes(device: torch.device) -> int:
    """CUDA: most memory allocated at once on the device. CPU: the process's peak resident set."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # does not exist on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def cpu_name() -> str:
    """The CPU's model name as the system gives it; empty if it gives none."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    fields = [line.partition(":") for line in lines]
    found = {name.strip(): value.strip() for name, _, value in reversed(fields)}
    if "model name" in found:
        return found["model name"]
    arm = [found[name] for name in ("CPU implementer", "CPU part") if name in found]
    return f"ARM {' '.join(arm)}" if arm else ""
