"""The report's numbers about whole runs. Counts and rates are fly's own (docs/definitions.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from fly.analysis.acceptance import Acceptance, measure
from fly.runs.reader import Run, TaskRun
from fly.runs.replay import Generation

LEVEL = 0.95  # of intervals
_BINS = 20
# What tells runs of one mode apart, in the order in which people think of it.
_KEYS = ("spd_k", "win_len", "entropy_thre", "drafter", "target_model_path", "draft_model_path")


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """The runs' names; equal ones get the settings that differ, or else a number."""
    names = [run.name for run in runs]
    for name, count in Counter(names).items():
        if count > 1:
            same = [number for number, other in enumerate(names) if other == name]
            for number, words in zip(same, _differences([runs[number] for number in same])):
                names[number] = f"{name} ({words})" if words else name
    seen: Counter[str] = Counter()
    for number, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[number] = f"{name} #{seen[name]}"
    return names


def _differences(runs: list[Run]) -> list[str]:
    configs = [(run.entry or {}).get("config", {}) for run in runs]
    known = sorted({key for config in configs for key in config if key != "trace"})
    keys = [*_KEYS, *(key for key in known if key not in _KEYS)]
    differing = [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]
    return [", ".join(f"{key}={config.get(key)}" for key in differing[:3]) for config in configs]


def of_run(run: Run, name: str, replayed: list[Generation]) -> dict[str, Any]:
    """One run: what it was, how fast, and what its trace says. Missing parts are None."""
    entry = run.entry or {}
    measured = measure(replayed) if replayed else None
    return {
        "name": name,
        "mode": run.mode,
        "settings": _settings(run),
        "stats": entry.get("stats") if (entry.get("stats") or {}).get("requests") else None,
        "traced": len(replayed),
        "acceptance": _acceptance(measured),
        "entropy": _entropies(measured, entry.get("config", {})),
    }


def _settings(run: Run) -> dict[str, str]:
    """For the table of runs: only what the run says of itself."""
    entry, own = run.entry or {}, run.results["config"]
    config = entry.get("config", {})
    model = config.get("target_model_path") or (own.get("model_args") or {}).get("pretrained")
    drafter = entry.get("drafter")
    relaxed = run.mode == "fly"
    across = "yes" if config.get("defer_across_rounds") else "no"
    found = {
        "target": model,
        "draft": config.get("draft_model_path") if drafter in ("model", "cascade") else None,
        "drafter": drafter,
        "K": config.get("spd_k") if drafter else None,
        "W": config.get("win_len") if relaxed else None,
        "theta": config.get("entropy_thre") if relaxed else None,
        "windows across rounds": across if relaxed else None,
        "dtype": entry.get("dtype") or own.get("model_dtype"),
        "batch size": own.get("batch_size"),
        "device": _device(entry.get("device", {})),
        "configuration": entry.get("config_hash"),
        "results": run.path.name,
    }
    return {key: str(value) for key, value in found.items() if value is not None}


def _device(device: dict[str, Any]) -> str | None:
    if not device:
        return None
    kind = device.get("type", "")
    threads = f", {device.get('threads')} threads" if kind == "cpu" else ""
    return f"{kind} ({device.get('name')}{threads})"


def _acceptance(measured: Acceptance | None) -> dict[str, Any] | None:
    if measured is None:
        return None
    longest = max(measured.blocks, default=0)
    return {
        "positions": [vars(position) for position in measured.positions],
        "blocks": [measured.blocks[length] for length in range(longest + 1)],
    }


def _entropies(measured: Acceptance | None, config: dict[str, Any]) -> dict[str, Any] | None:
    """Histograms over one axis; None where no mismatch was traced."""
    if measured is None:
        return None
    groups = {
        "stood": measured.stood,
        "rolled_back": measured.rolled_back,
        "rejected": measured.rejected,
    }
    everything = np.concatenate([np.asarray(values, float) for values in groups.values()])
    if not everything.size:
        return None
    edges = np.linspace(0, max(float(everything.max()), 1e-3), _BINS + 1)
    kind = config.get("entropy_kind", "top3")
    return {
        "unit": "0 to 1" if kind == "normalized" else "nats",
        "kind": kind,
        "theta": config.get("entropy_thre") if measured.stood or measured.rolled_back else None,
        "edges": edges.tolist(),
        "counts": {
            name: np.histogram(values, edges)[0].tolist() for name, values in groups.items()
        },
        "medians": {
            name: float(np.median(values)) if values else None for name, values in groups.items()
        },
    }


def scores(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """By task, filter and metric, in the order of the runs: each run's score and interval."""
    wanted = {
        (task.name, task.filter, metric): task
        for run in runs
        for task in run.tasks.values()
        for metric in task.aggregated
    }
    return [
        {
            "task": task,
            "filter": filter_name,
            "metric": metric,
            "higher_is_better": found.higher_is_better.get(metric, True),
            "runs": [_score(run.tasks.get((task, filter_name)), metric) for run in runs],
        }
        for (task, filter_name, metric), found in wanted.items()
    ]


def _score(task: TaskRun | None, metric: str) -> dict[str, Any] | None:
    """`low`, `high`: at LEVEL. Wilson's for right-or-wrong scores, else from lm-eval's error."""
    if task is None or metric not in task.aggregated:
        return None
    value, error = task.aggregated[metric]
    values = [sample.scores[metric] for sample in task.samples.values() if metric in sample.scores]
    found: dict[str, Any] = {"value": value, "documents": len(task.samples)}
    if values and set(values) <= {0.0, 1.0} and abs(np.mean(values) - value) < 1e-6:
        right = int(sum(values))
        interval = stats.binomtest(right, len(values)).proportion_ci(LEVEL, "wilson")
        found |= {"low": interval.low, "high": interval.high, "right": right}
    elif error is not None:
        margin = float(stats.norm.ppf((1 + LEVEL) / 2)) * error
        found |= {"low": value - margin, "high": value + margin}
    return found
