"""The numbers behind `fly plot`'s figures, from finished runs. docs/plot.md defines them."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fly.analysis import acceptance, scores
from fly.analysis.compare import Against, against, check_pairs
from fly.analysis.scores import Measured
from fly.analysis.statistics import Interval
from fly.errors import FlyError
from fly.paths import write_output
from fly.runs import records, replay, settings
from fly.runs.reader import Run, TaskRun
from fly.runs.records import TIMED

TARGET_ONLY = "target-only"
_NO_BASELINE = "there is no target-only run: add one (use_sd=false)"
_UNDEFINED = "recovery is undefined: a score is below zero, or the denominator is zero"


@dataclass(frozen=True)
class Point:
    """One run on one task. label: what sets it apart; series: the same without K; curve: the same
    without the batch size.

    scores: of the run on this task alone. seconds: of prefill and decoding, per document. speedup:
    time x, the target-only run's seconds over these for the same documents; None without that run,
    as is recovery. The intervals: 95 %, paired by document. tok_s_user, tok_s_gpu: docs/plot.md;
    None of records without wall_seconds.
    """

    run: Run = field(repr=False)
    scores: Measured = field(repr=False)
    task: str
    filter: str
    metric: str
    label: str
    series: str
    curve: str
    k: int
    tau: float
    seconds: float
    score: float
    tok_s_user: float | None
    tok_s_gpu: float | None
    speedup: float | None = None
    speedup_interval: Interval | None = None
    recovery: float | None = None
    recovery_interval: Interval | None = None

    @property
    def is_baseline(self) -> bool:
        return self.run.mode == TARGET_ONLY

    @property
    def batch_size(self) -> str:
        return self.run.batch_size

    @property
    def is_placed(self) -> bool:
        return self.speedup is not None and self.recovery is not None

    @property
    def place(self) -> tuple[float, float]:
        """(speedup, recovery): where it lies in the frontier."""
        assert self.speedup is not None
        assert self.recovery is not None
        return self.speedup, self.recovery

    @property
    def higher_is_better(self) -> bool:
        return self.run.tasks[self.task, self.filter].higher_is_better[self.metric]


@dataclass(frozen=True)
class Positions:
    """One run's drafts on one task, by position in the draft."""

    task: str
    label: str
    counts: records.Positions


@dataclass
class PlotData:
    """notes: what could not be drawn, and why; one line each."""

    points: list[Point] = field(default_factory=list)
    positions: list[Positions] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(point.task for point in self.points))

    def of_task(self, task: str) -> list[Point]:
        return [point for point in self.points if point.task == task]


def collect(runs: list[Run], metric: str | None = None) -> PlotData:
    """Everything that can be drawn of these runs. metric: `NAME` or `NAME,FILTER`; by default each
    task's first by which the target alone scores anything.

    Raises FlyError if nothing can be drawn, or if no task has the metric.
    """
    data = PlotData()
    timed = []
    for run in runs:
        if run.entry is None or not run.requests:
            data.notes.append(f"{run.path}: {run.mode} recorded no speed: left out")
        else:
            timed.append(run)
    drafted = [run for run in timed if run.mode != TARGET_ONLY]  # only these set labels apart
    labels = {path: (label, TARGET_ONLY) for path, label in _of_targets(timed).items()}
    series = settings.labels(drafted, without=("spd_k",))
    labels |= {r.path: (a, b) for r, a, b in zip(drafted, settings.labels(drafted), series)}
    curves = _curves(timed, drafted)
    tasks = {name for run in timed for name, _ in run.tasks}
    wanted_of = {task: metric or _scoring_metric(timed, task) for task in tasks}
    for run in timed:
        label, series_name = labels[run.path]
        measured = scores.measure(run).model_copy(update={"name": label})
        for task in measured.tasks:
            found = _scored(run, task, wanted_of[task])
            if found is not None and measured.tasks[task].work:
                names = (series_name, curves[run.path])
                data.points.append(_point(run, measured, *found, *names))
            elif metric is None or found is not None:
                what = f"has no {wanted_of[task]}" if found is None else "recorded no speed"
                data.notes.append(f"{task}, {label}: {what}: left out")
            data.positions += _positions(run, measured, task)
    if not data.points:
        wanted = f" with the metric {metric!r}" if metric else ""
        raise FlyError(
            f"nothing to draw: no task{wanted} of a run that fly's backend decoded: name "
            "results of `fly --model hf --model_args config_path=... --output_path ...`"
        )
    data.points = [_against_baseline(point, data) for point in data.points]
    return data


def _of_targets(runs: list[Run]) -> dict[Path, str]:
    """By path: the target-only runs' labels, with the settings that set them apart."""
    alone = [run for run in runs if run.mode == TARGET_ONLY]
    apart = settings.labels(alone, without=("batch_size",))
    return {
        run.path: TARGET_ONLY if label in ("", TARGET_ONLY) else f"{TARGET_ONLY}, {label}"
        for run, label in zip(alone, apart)
    }


def _curves(runs: list[Run], drafted: list[Run]) -> dict[Path, str]:
    """By path: what sets a run apart from others at other batch sizes, with its engine if several
    are there."""
    labels = _of_targets(runs)
    in_words = settings.labels(drafted, without=("batch_size",))
    labels |= {run.path: label for run, label in zip(drafted, in_words)}
    if len({run.engine for run in runs}) == 1:
        return labels
    return {run.path: f"{labels[run.path]}, {run.engine}" for run in runs}


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


def _metrics(run: Run, task: str) -> list[tuple[TaskRun, str]]:
    return [
        (task_run, metric)
        for (name, _), task_run in run.tasks.items()
        if name == task
        for metric in task_run.aggregated
    ]


def _scoring_metric(runs: list[Run], task: str) -> str:
    """The task's first `NAME,FILTER` by which the target-only runs, or without one all, score.

    Empty if none does: GSM8K's strict filter, for one, finds nothing in a chat model's answers.
    """
    for run in [run for run in runs if run.mode == TARGET_ONLY] or runs:
        for task_run, metric in _metrics(run, task):
            if task_run.aggregated[metric][0] > 0 or not task_run.higher_is_better[metric]:
                return f"{metric},{task_run.filter}"
    return ""


def _scored(run: Run, task: str, wanted: str) -> tuple[TaskRun, str] | None:
    """The first metric of that name and filter, where these are given."""
    name, _, of_filter = wanted.partition(",")
    fitting = (
        (task_run, metric)
        for task_run, metric in _metrics(run, task)
        if name in ("", metric) and of_filter in ("", task_run.filter)
    )
    return next(fitting, None)


def _point(
    run: Run, measured: Measured, task: TaskRun, metric: str, series: str, curve: str
) -> Point:
    assert run.entry is not None
    tok_s_user, tok_s_gpu = _rates(run, task.name)
    own = measured.tasks[task.name]
    tokens, rounds = (
        sum(getattr(work, key) for work in own.work.values()) for key in ("tokens", "rounds")
    )
    return Point(
        run=run,
        scores=measured.model_copy(update={"tasks": {task.name: own}}),
        task=task.name,
        filter=task.filter,
        metric=metric,
        label=measured.name,
        series=series,
        curve=curve,
        tok_s_user=tok_s_user,
        tok_s_gpu=tok_s_gpu,
        k=0 if run.mode == TARGET_ONLY else int(run.entry["config"]["spd_k"]),
        tau=tokens / rounds if rounds else 0.0,
        seconds=sum(work.end_to_end for work in own.work.values()) / len(own.work),
        score=task.aggregated[metric][0],
    )


def _against_baseline(point: Point, data: PlotData) -> Point:
    """The point with speedup and recovery, if a target-only run allows them; else a note."""
    if point.is_baseline:
        return replace(point, speedup=1.0, recovery=1.0 if point.score else None)
    reason = _NO_BASELINE
    for baseline in reversed(data.of_task(point.task)):  # the newest that fits
        if baseline.is_baseline:
            try:
                return _placed(point, baseline, _compared(point, baseline), data)
            except FlyError as error:
                reason = str(error) if reason == _NO_BASELINE else reason
    data.notes.append(f"{point.task}, {point.label}: not in the frontier: {reason}")
    return point


def _compared(point: Point, baseline: Point) -> Against:
    """As `fly compare` compares them. Raises FlyError if their scores or seconds do not compare."""
    mine, theirs = (
        {**settings.in_force(run), "engine": run.engine} for run in (point.run, baseline.run)
    )
    for key in (
        "engine", "target_model_path", "dtype", "device", "capability", "threads", "batch_size",
    ):  # fmt: skip
        if mine.get(key) != theirs.get(key):
            raise FlyError(f"its {key} is {mine.get(key)}, the target-only run's {theirs.get(key)}")
    check_pairs(baseline.scores, point.scores)
    return against(baseline.scores, point.scores)


def _placed(point: Point, baseline: Point, found: Against, data: PlotData) -> Point:
    """The point where the comparison puts it, with a note where that is nowhere."""
    told = [f"{point.task}, {point.label}: {note}" for note in found.notes]
    data.notes += [note for note in told if note not in data.notes]
    problem = ""
    speedup = found.speeds[0].end_to_end
    if speedup is None:  # answers from lm-eval's cache were not decoded
        problem = "it did not decode the same documents as the target-only run"
    name = point.metric if point.filter == "none" else f"{point.metric},{point.filter}"
    row = next((row for row in found.rows if row.metric == name), None)
    if row is None or row.scores.other is None:
        data.notes.append(f"{point.task}: {point.metric} has no score by document: no interval")
        recovery, interval = _recovery_of_means(baseline, point), None
        problem = problem or (_UNDEFINED if recovery is None else "")
    else:
        recovery, interval = row.scores.recovery, row.scores.interval
        problem = problem or (row.scores.reason if recovery is None else "")
    if problem:
        data.notes.append(f"{point.task}, {point.label}: not in the frontier: {problem}")
    return replace(
        point,
        speedup=speedup.value if speedup else None,
        speedup_interval=speedup.interval if speedup else None,
        recovery=recovery,
        recovery_interval=interval,
    )


def _recovery_of_means(baseline: Point, point: Point) -> float | None:
    """From scores of the whole corpus: below 1 is worse; None where it is undefined."""
    kept, base = point.score, baseline.score
    if not point.higher_is_better:
        kept, base = base, kept
    return kept / base if kept >= 0 and base > 0 else None


def _positions(run: Run, measured: Measured, task: str) -> list[Positions]:
    counts = measured.tasks[task].positions
    if not counts.drafts:  # records of an earlier fly have none
        lines = (line for line in run.rounds if line["task_name"] == task)
        counts = acceptance.measure(replay.generations(lines)).positions
    return [Positions(task, measured.name, counts)] if counts.drafts else []


def pareto(points: list[Point]) -> list[Point]:
    """Of placed points, those that no other beats in both speedup and recovery, slowest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: p.place, reverse=True):
        if not front or point.place[1] > front[-1].place[1]:
            front.append(point)
    return front[::-1]


_COLUMNS = (
    "task", "metric", "label", "k", "tau", "seconds", "speedup", "speedup_low", "speedup_high",
    "score", "recovery", "recovery_low", "recovery_high", "batch_size", "tok_s_user", "tok_s_gpu",
    "path",
)  # fmt: skip


def write_csv(data: PlotData, path: Path) -> None:
    """The figures' numbers, one line per run and task. seconds: per document, end to end.
    speedup: time x."""
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, _COLUMNS)
    writer.writeheader()
    for point in data.points:
        row = {name: getattr(point, name, None) for name in _COLUMNS}
        for name in ("speedup", "recovery"):
            interval: Interval | None = getattr(point, f"{name}_interval")
            if interval is not None:
                row |= {f"{name}_low": interval.low, f"{name}_high": interval.high}
        writer.writerow({**row, "path": point.run.path})
    write_output(path, table.getvalue(), "--output")
