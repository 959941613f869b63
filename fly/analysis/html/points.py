"""Numbers of the figures over many runs, which docs/report.md defines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fly.analysis.matrix import Cell, Scored
from fly.analysis.statistics import Interval
from fly.runs import run_settings
from fly.runs.reader import Run
from fly.runs.records import TIMED, mean_lengths


def of_runs(runs: Sequence[Scored], cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """A point per task and run with records.

    curve: what sets the run apart besides its batch size; series: besides K, for runs with a draft.
    tok_s_user, tok_s_gpu: None for records without wall_seconds. time_x: None unless `cells` relate
    the run to its own target's.
    """
    timed = [each for each in runs if any(task.work for task in each[1].tasks.values())]
    curves = _labels([run for run, _ in timed], "batch_size")
    drafted = [run for run, _ in timed if "spd_k" in run_settings.in_force(run)]
    series = {run.path: label for run, label in zip(drafted, _labels(drafted, "spd_k"))}
    speeds = {(cell.run, cell.row.task): cell.speed for cell in cells}
    found = []
    for (run, measured), curve in zip(timed, curves):
        for name, task in measured.tasks.items():
            if not task.work:
                continue
            speed = speeds.get((measured.name, name))
            tok_s_user, tok_s_gpu = _rates(run, name)
            found.append({
                "run": measured.name, "task": name, "curve": curve, "batch_size": run.batch_size,
                "series": series.get(run.path), "k": run_settings.in_force(run).get("spd_k"),
                "tau": mean_lengths([work.lengths for work in task.work.values()])["tau"],
                "time_x": speed.end_to_end.value if speed and speed.end_to_end else None,
                "tok_s_user": tok_s_user, "tok_s_gpu": tok_s_gpu,
            })  # fmt: skip
    return found


def _labels(runs: list[Run], without: str) -> list[str]:
    """What sets the runs apart besides one setting, with their engines if these are several."""
    labels = run_settings.labels(runs, without=(without,))
    engines = len({run.engine for run in runs}) > 1
    named = [label or run_settings.name_mode(run) for run, label in zip(runs, labels)]
    return [f"{name}, {run.engine}" if engines else name for run, name in zip(runs, named)]


def _rates(run: Run, task: str) -> tuple[float | None, float | None]:
    """(tokens per second of a user, and of a GPU) on a task; None without wall_seconds."""
    records = [record for record in run.requests if record["task"] == task]
    walls = [record.get("wall_seconds") for record in records]
    seconds: list[Any] = [record["seconds"] for record in records]
    busy = sum(each[phase] for each in seconds for phase in TIMED)
    known = [wall for wall in walls if wall is not None]
    if run.entry is None or len(known) < len(walls) or not (sum(known) and busy):
        return None, None
    emitted = sum(record["emitted"] for record in records)
    # seconds of processes side by side add up: busy is of all of them
    return emitted / sum(known), emitted / busy / run.entry.get("devices", 1)


def frontier(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """By task and metric, the runs that have both a recovery and a time x, and their targets alone.

    is_best: no other has more of both (the Pareto front).
    """
    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in cells:
        scores, ratio = cell.row.scores, cell.speed.end_to_end if cell.speed else None
        if ratio is None or scores.recovery is None:
            continue
        points = panels.setdefault((cell.row.task, cell.row.metric), [])
        if all(point["run"] != cell.baseline for point in points):
            points.append(_point(cell.baseline, 1.0, None, 1.0, None))
        points.append(
            _point(cell.run, scores.recovery, scores.interval, ratio.value, ratio.interval)
        )
    for points in panels.values():
        _mark_best(points)
    return [
        {"task": task, "metric": metric, "points": points}
        for (task, metric), points in panels.items()
    ]


def _point(
    run: str, recovery: float, kept: Interval | None, time_x: float, faster: Interval | None
) -> dict[str, Any]:
    return {
        "run": run,
        "recovery": recovery,
        "recovery_interval": asdict(kept) if kept else None,
        "time_x": time_x,
        "time_x_interval": asdict(faster) if faster else None,
    }


def _mark_best(points: list[dict[str, Any]]) -> None:
    highest = float("-inf")
    for point in sorted(points, key=lambda p: (p["time_x"], p["recovery"]), reverse=True):
        point["is_best"] = point["recovery"] > highest
        highest = max(highest, point["recovery"])
