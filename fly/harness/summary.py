"""The speed table that a run prints below lm-eval's own."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from fly.runs.records import TIMED, Positions, by_position
from fly.runs.run_settings import rule_in_words
from fly.runs.shapes import DraftedFrom, DraftRuns

_UNTOLD = "not told by the server"
_TARGETS = {True: " (of this target)", False: " (of another target)", None: ""}


def print_summary(entry: dict[str, Any]) -> None:
    """The speed table, below lm-eval's own table. entry: `config.fly` of the results."""
    stats, resumed = entry["stats"], entry["resumed"]
    if not stats["requests"]:
        return
    if server := entry.get("server"):
        kind = f"{server['kind']} {server['version'] or ''}".strip()
        at_once = f"at most {server['num_concurrent']} requests at once"
        title = f"fly: {kind}, {server['model']}, {at_once}"
        _print_rows(_server_rows(stats, server), title, resumed)
        return
    seconds = stats["seconds"]
    total = sum(value for phase, value in seconds.items() if phase != "compile") or 1.0
    split = (f"{phase} {100 * seconds[phase] / total:.0f} %" for phase in (*TIMED, "recording"))
    rows = {
        "requests": f"{stats['requests']} ({stats['prompt_tokens']} prompt tokens)",
        **_length_rows(stats),
        "decode tok/s": f"{stats['decode_tok_s'] or 0:.2f}",
        "end-to-end tok/s": f"{stats['end_to_end_tok_s'] or 0:.2f}",
        **_draft_rows(stats, entry.get("draft_runs")),
        **_position_rows(Positions(**stats["positions"])),
        "matches accepted": str(stats["native_accepted"]),
        "deferred accepted / rolled back": f"{stats['deferred_accepted']} / "
        f"{stats['deferred_rolled_back']}",
        "provisional tokens dropped": str(stats["discarded"]),
        "recovered / bonus tokens": f"{stats['corrections']} / {stats['bonus']}",
        "time": ", ".join(split),
    }
    if peak := stats["peak_memory_bytes"]:  # vLLM's own processes do not tell
        rows["peak memory"] = f"{peak / 2**30:.1f} GiB"
    title = f"fly: {in_words(entry['mode'], entry['drafter'], entry['config'])}"
    _print_rows(rows, title, resumed)


def _print_rows(rows: dict[str, str], title: str, resumed: dict[str, Any] | None) -> None:
    if resumed:
        before = f"{resumed['requests']} requests were finished before"
        rows = {f"resumed ({len(resumed['at'])} times)": before, **rows}
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    Console(width=100 if not sys.stdout.isatty() else None).print(table)


def _server_rows(stats: dict[str, Any], server: dict[str, Any]) -> dict[str, str]:
    """What a server does not tell is said to be so, and never computed from something else."""
    drafted, positions = stats["drafted"], Positions(**stats["positions"])
    of_counters = server["counters"]
    rows = {
        "requests": f"{stats['requests']} ({stats['prompt_tokens']} prompt tokens)",
        "tokens": f"{stats['emitted']}, {stats['end_to_end_tok_s'] or 0:.2f} per second",
        "tau": _UNTOLD if stats["tau"] is None else f"{stats['tau']:.2f}",
        "AL": _UNTOLD if stats["al"] is None else f"{stats['al']:.2f}",
        "accepted / drafted": f"{stats['native_accepted']} / {drafted} = "
        f"{stats['native_accepted'] / drafted:.4f}"
        if drafted
        else "none drafted, or not told by the server",
        **(_position_rows(positions) or {"accepted by position": _UNTOLD}),
    }
    if of_counters.get("num_drafts"):
        accepted, drafts = of_counters["num_accepted_tokens"], of_counters["num_drafts"]
        rows["the server's counters"] = (
            f"accepted {accepted:.0f} of {of_counters['num_draft_tokens']:.0f}, "
            f"AL 1 + {accepted:.0f} / {drafts:.0f} = {1 + accepted / drafts:.2f}"
        )
    return rows


def _length_rows(stats: dict[str, Any]) -> dict[str, str]:
    """Mean acceptance lengths: of all tokens, and the means over documents; by task, if several."""
    rows = {
        "emitted tokens / rounds = tau": f"{stats['emitted']} / {stats['rounds']} = "
        f"{stats['tau'] or 0:.2f}{_document_mean(stats, 'tau')}"
    }
    if stats["al"] is not None:
        positions = Positions(**stats["positions"])
        rows["1 + accepted / drafts = AL"] = (
            f"1 + {sum(positions.accepted)} / {positions.drafts} = {stats['al']:.2f}"
            f"{_document_mean(stats, 'al')}"
        )
    if len(stats["tasks"]) > 1:
        for name, task in stats["tasks"].items():
            rows[f"  {name}"] = ", ".join(
                f"{label} {task[key]:.2f}{_document_mean(task, key)}"
                for key, label in (("tau", "tau"), ("al", "AL"))
                if task[key] is not None
            )
    return rows


def _document_mean(lengths: dict[str, Any], name: str) -> str:
    mean = lengths[f"{name}_document_mean"]
    return "" if mean is None else f" (mean over documents {mean:.2f})"


def _position_rows(positions: Positions) -> dict[str, str]:
    if not positions.drafts:
        return {}
    return {
        "accepted by position": f"{by_position(positions.unconditional)} of all drafts",
        "if all before was": f"{by_position(positions.conditional)} of those that reached it",
    }


def _draft_rows(stats: dict[str, Any], earlier: DraftRuns | None) -> dict[str, str]:
    """How much was drafted, and from what, unless that is a single source of this run's own."""
    rows = {"drafted": str(stats["drafted"])}
    sources: dict[str, DraftedFrom] = stats.get("sources", {})
    if len(sources) > 1 or (sources and earlier):
        rows["drafted from"] = _sources_in_words(sources)
    if earlier:
        rows["earlier runs"] = _earlier_runs_in_words(earlier)
    return rows


def _sources_in_words(sources: dict[str, DraftedFrom]) -> str:
    """The sources of draft tokens, the one that drafted most first."""
    by_size = sorted(sources.items(), key=lambda item: item[1]["drafted"], reverse=True)
    parts = [
        f"{key.replace('_', ' ')} {counts['accepted']:,} of {counts['drafted']:,}"
        for key, counts in by_size
    ]
    return ", ".join([f"{parts[0]} accepted", *parts[1:]])


def _earlier_runs_in_words(earlier: DraftRuns) -> str:
    """For how many requests the earlier runs had an output, and why not for the others."""
    why_not = {
        "with another prompt": earlier["changed"],
        "missing": earlier["missing"],
        "without token ids": earlier["untokenized"],
    }
    runs = f"{len(earlier['runs'])}{_TARGETS[earlier['same_target']]}"
    found, asked = earlier["matched"], earlier["matched"] + sum(why_not.values())
    others = [f"{count:,} {why}" for why, count in why_not.items() if count]
    return ", ".join([f"{runs}: {found:,} of {asked:,} requests found", *others])


def in_words(mode: str, drafter: str | None, config: dict[str, Any]) -> str:
    """How a run decodes, such as `fly, drafter model, K=15, theta=0.3, W=6`."""
    drafts = [f"drafter {drafter}", f"K={config['spd_k']}"] if drafter else []
    sources = config.get("draft_sources")
    if drafter and config.get("draft_runs") and (sources is None or "runs" in sources):
        drafts.append("drafts from earlier runs")
    return ", ".join([mode, *drafts, *rule_in_words(mode, config)])
