"""What a run reports: versions and devices for the results file, and the table after lm-eval's."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fly
from fly.execution import memory
from fly.execution.pass_costs import cpu_name
from fly.runs.records import TIMED

_PACKAGES = ("torch", "transformers", "lm-eval", "accelerate", "tokenizers", "numpy")


def versions() -> dict[str, str]:
    found = {"fly": fly.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


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
    """What of `device_facts` a run's seconds depend on: any GPU of a kind is as good as another."""
    facts = {**device_facts(device), "type": device.type}
    if device.type == "cuda":
        del facts["threads"]
    return facts


def machine_facts() -> dict[str, Any]:
    """What times depend on, as far as it can be told before a model is loaded."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"accelerators": sorted(set(names))} if names else timing_facts(torch.device("cpu"))


def peak_memory_bytes(device: torch.device) -> int:
    """CUDA: most memory allocated at once on the device. Else: the process's peak resident set."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return memory.peak_bytes()


def print_summary(entry: dict[str, Any]) -> None:
    """The speed table, below lm-eval's own table."""
    stats = entry["stats"]
    if not stats["requests"]:
        return
    seconds = stats["seconds"]
    total = sum(value for phase, value in seconds.items() if phase != "compile") or 1.0
    config = entry["config"]
    title = f"fly: {entry['mode']}"
    if entry["drafter"]:
        title += f", drafter {entry['drafter']}, K={config['spd_k']}"
    title += "".join(f", {part}" for part in _rule_in_words(entry["mode"], config))
    table = Table(title=title, title_justify="left", show_header=False)
    if resumed := entry["resumed"]:
        again = f"{resumed['requests']} requests were finished before"
        table.add_row(f"resumed ({len(resumed['at'])} times)", again)
    for name, value in _rows(stats, seconds, total):
        table.add_row(name, value)
    Console(width=100 if not sys.stdout.isatty() else None).print(table)


def _rule_in_words(mode: str, config: dict[str, Any]) -> list[str]:
    """The settings of the rule in force, so that runs under different rules do not look alike."""
    if mode == "typical":
        return [f"epsilon={config['typical_epsilon']}", f"delta={config['typical_delta']}"]
    if mode == "top_k":
        return [f"top_k={config['relaxed_top_k']}", f"delta={config['relaxed_delta']}"]
    if mode != "fly":
        return []
    parts = ["W=0" if config["abla_no_window"] else f"W={config['win_len']}"]
    gates = {"theta": "entropy_thre", "margin": "margin_thre", "ratio": "draft_ratio_thre"}
    gates["rank"] = "draft_rank_max"
    parts += [f"{name}={config[key]}" for name, key in gates.items() if config[key] is not None]
    parts += ["across rounds"] if config["defer_across_rounds"] else []
    return parts + (["reference windows"] if config["window_rule"] == "reference" else [])


def _rows(stats: dict[str, Any], seconds: dict[str, float], total: float) -> list[tuple[str, str]]:
    split = ", ".join(
        f"{phase} {100 * seconds[phase] / total:.0f} %" for phase in (*TIMED, "recording")
    )
    return [
        ("requests", f"{stats['requests']} ({stats['prompt_tokens']} prompt tokens)"),
        ("emitted tokens / rounds = tau", _tau(stats)),
        ("decode tok/s", f"{stats['decode_tok_s'] or 0:.2f}"),
        ("end-to-end tok/s", f"{stats['end_to_end_tok_s'] or 0:.2f}"),
        ("drafted", str(stats["drafted"])),
        ("native accepted", str(stats["native_accepted"])),
        ("deferred accepted / rolled back", _pair(stats)),
        ("provisional tokens dropped", str(stats["discarded"])),
        ("corrections / bonus", f"{stats['corrections']} / {stats['bonus']}"),
        ("time", split),
        ("peak memory", f"{stats['peak_memory_bytes'] / 2**30:.1f} GiB"),
    ]


def _tau(stats: dict[str, Any]) -> str:
    return f"{stats['emitted']} / {stats['rounds']} = {stats['tau'] or 0:.2f}"


def _pair(stats: dict[str, Any]) -> str:
    return f"{stats['deferred_accepted']} / {stats['deferred_rolled_back']}"
