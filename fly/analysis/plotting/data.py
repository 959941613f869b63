"""The numbers behind `fly plot`'s figures, from finished runs. docs/plot.md defines them."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field, replace
from pathlib import Path

from fly import reading
from fly.analysis.acceptance import Position, measure
from fly.analysis.scores import Work, work
from fly.analysis.statistics import Interval, compare_scores, compare_sums
from fly.errors import FlyError
from fly.paths import write_output
from fly.runs import replay, settings, shapes
from fly.runs.reader import Run, TaskRun
from fly.runs.records import TIMED

TARGET_ONLY = "target-only"


@dataclass(frozen=True)
class Point:
    """One run on one task. label: what sets it apart; series: the same without K.

    seconds: of prefill and decoding, per document. work: by document; empty without records.
    speedup: time x, the target-only run's seconds over these for the same documents; None without
    that run, as is recovery. The intervals: 95 %, paired by document.
    """

    run: Run = field(repr=False)
    task: str
    filter: str
    metric: str
    label: str
    series: str
    k: int
    tau: float
    seconds: float
    score: float
    work: dict[int, Work] = field(repr=False)
    speedup: float | None = None
    speedup_interval: Interval | None = None
    recovery: float | None = None
    recovery_interval: Interval | None = None

    @property
    def is_baseline(self) -> bool:
        return self.run.mode == TARGET_ONLY

    @property
    def is_placed(self) -> bool:
        return self.speedup is not None and self.recovery is not None

    @property
    def place(self) -> tuple[float, float]:
        """(speedup, recovery): where it lies in the frontier."""
        assert self.speedup is not None
        assert self.recovery is not None
        return self.speedup, self.recovery


@dataclass(frozen=True)
class Positions:
    """What stood of one run's drafts on one task, by place in the draft, from its trace."""

    task: str
    label: str
    places: list[Position]


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
    """Everything that can be drawn of these runs. metric: `NAME` or `NAME,FILTER`; else each task's
    first by which the target alone scores anything.

    Raises FlyError if nothing can be drawn, or if no task has the metric.
    """
    data = PlotData()
    timed = []
    for run in runs:
        if run.entry is not None:
            reading.check_shape(run.entry, shapes.DRAWN, f"{run.path}, config.fly")
        if run.entry is None or not run.entry["stats"]["requests"]:
            data.notes.append(f"{run.path}: {run.mode} recorded no speed: left out")
        else:
            timed.append(run)
    names = _labels(timed)
    tasks = {name for run in timed for name, _ in run.tasks}
    wanted_of = {task: metric or _scoring_metric(timed, task) for task in tasks}
    for run in timed:
        done = work(run)
        for task in dict.fromkeys(name for name, _ in run.tasks):
            wanted = wanted_of[task]
            point = _point(run, task, wanted, done.get(task, {}), *names[run.path])
            if point is not None:
                data.points.append(point)
            elif metric is None:
                data.notes.append(f"{task}, {names[run.path][0]}: has no {wanted}: left out")
            if run.rounds:
                data.positions += _positions(run, task, names[run.path][0])
    if not data.points:
        wanted = f" with the metric {metric!r}" if metric else ""
        raise FlyError(
            f"nothing to draw: no task{wanted} of a run that fly's backend decoded: name "
            "results of `fly --model hf --model_args config_path=... --output_path ...`"
        )
    data.points = [_against_baseline(point, data) for point in data.points]
    return data


def _labels(runs: list[Run]) -> dict[Path, tuple[str, str]]:
    """(label, label without K) by path; the target-only runs do not make others differ."""
    drafted = [run for run in runs if run.mode != TARGET_ONLY]
    result = {run.path: (TARGET_ONLY, TARGET_ONLY) for run in runs}
    for run, label, series in zip(
        drafted, settings.labels(drafted), settings.labels(drafted, without=("spd_k",))
    ):
        result[run.path] = (label, series)
    return result


def _point(
    run: Run, task: str, metric: str | None, done: dict[int, Work], label: str, series: str
) -> Point | None:
    scored = _scored(run, task, metric)
    if scored is None:
        return None
    task_run, name = scored
    assert run.entry is not None
    stats = run.entry["stats"]
    tau, seconds = stats["tau"] or 0.0, _whole_run(run)
    if done:  # of this task alone
        tau, seconds = _sums(list(done.values()))
    return Point(
        run, task, task_run.filter, name, label, series,
        k=0 if run.mode == TARGET_ONLY else int(run.entry["config"]["spd_k"]),
        tau=tau, seconds=seconds,
        score=task_run.aggregated[name][0], work=done,
    )  # fmt: skip


def _scoring_metric(runs: list[Run], task: str) -> str | None:
    """The task's first `NAME,FILTER` by which the target-only runs, or without one all, score.

    None if none does: GSM8K's strict filter, for one, finds nothing in a chat model's answers.
    """
    for run in [run for run in runs if run.mode == TARGET_ONLY] or runs:
        for (name, filter_name), task_run in run.tasks.items():
            for known, (value, _) in task_run.aggregated.items():
                if name == task and (value or not task_run.higher_is_better[known]):
                    return f"{known},{filter_name}"
    return None


def _scored(run: Run, task: str, metric: str | None) -> tuple[TaskRun, str] | None:
    wanted, _, of_filter = (metric or "").partition(",")
    for (name, filter_name), task_run in run.tasks.items():
        if name == task and of_filter in ("", filter_name):
            for known in task_run.aggregated:
                if wanted in ("", known):
                    return task_run, known
    return None


def _whole_run(run: Run) -> float:
    """Seconds per request of all the run's tasks: all there is without records of requests."""
    assert run.entry is not None
    stats = run.entry["stats"]
    seconds = sum(stats["seconds"][phase] for phase in TIMED)
    return float(seconds / stats["requests"])


def _sums(done: list[Work]) -> tuple[float, float]:
    """(tau, seconds per document)"""
    tokens, rounds = sum(item.tokens for item in done), sum(item.rounds for item in done)
    seconds = sum(item.end_to_end for item in done)
    return tokens / rounds if rounds else 0.0, seconds / len(done)


def _against_baseline(point: Point, data: PlotData) -> Point:
    """The point with speedup and recovery, if a target-only run allows them; else a note."""
    if point.is_baseline:
        return replace(point, speedup=1.0, recovery=1.0 if point.score else None)
    candidates = [p for p in data.of_task(point.task) if p.is_baseline]
    reasons = [_unlike(point, candidate) for candidate in candidates]
    if None not in reasons:
        why = (
            reasons[-1] or "" if reasons else "there is no target-only run: add one (use_sd=false)"
        )
        data.notes.append(f"{point.task}, {point.label}: not in the frontier: {why}")
        return point
    baseline = candidates[len(reasons) - 1 - reasons[::-1].index(None)]  # the newest that fits
    speedup, interval = baseline.seconds / point.seconds if point.seconds else None, None
    if baseline.work.keys() == point.work.keys():
        numbers = sorted(point.work)
        paired = compare_sums(
            [baseline.work[number].end_to_end for number in numbers],
            [point.work[number].end_to_end for number in numbers],
        )
        interval = paired.interval if paired else None
    else:  # answers from lm-eval's cache were not decoded
        speedup = None
        missing = next((p for p in (baseline, point) if not p.work), None)
        why = (
            f"{missing.label} has no records of its requests"
            if missing
            else "it did not decode the same documents as the target-only run"
        )
        data.notes.append(f"{point.task}, {point.label}: not in the frontier: {why}")
    scores = _paired_scores(baseline, point)
    if scores is None:
        data.notes.append(f"{point.task}: {point.metric} has no score by document: no interval")
        recovery = _recovery(baseline, point)
        if recovery is None:
            data.notes.append(f"{point.task}, {point.label}: not in the frontier: {_UNDEFINED}")
        return replace(point, speedup=speedup, recovery=recovery)
    compared = compare_scores(*scores, higher_is_better=_higher_is_better(point))
    if compared.recovery is None:
        data.notes.append(f"{point.task}, {point.label}: not in the frontier: {compared.reason}")
    return replace(
        point,
        speedup=speedup,
        speedup_interval=interval,
        recovery=compared.recovery,
        recovery_interval=compared.interval,
    )


_UNDEFINED = "recovery is undefined: a score is below zero, or the denominator is zero"


def _recovery(baseline: Point, point: Point) -> float | None:
    """Of scores of the whole corpus: below 1 is worse; None where it is undefined."""
    kept, base = point.score, baseline.score
    if not _higher_is_better(point):
        kept, base = base, kept
    return kept / base if kept >= 0 and base > 0 else None


def _unlike(point: Point, baseline: Point) -> str | None:
    """Why the two cannot be compared; None if they can."""
    mine, theirs = settings.in_force(point.run), settings.in_force(baseline.run)
    for key in ("target_model_path", "dtype", "device", "capability", "threads", "batch_size"):
        if mine.get(key) != theirs.get(key):
            return f"its {key} is {mine.get(key)}, the target-only run's {theirs.get(key)}"
    if baseline.seconds <= 0:
        return "the target-only run recorded no time"
    documents = [
        {number: sample.hashes for number, sample in _task_run(p).samples.items()}
        for p in (point, baseline)
    ]
    if documents[0] != documents[1]:
        return "its documents or prompts are not the target-only run's"
    return None


def _task_run(point: Point) -> TaskRun:
    return next(
        task_run
        for (name, filter_name), task_run in point.run.tasks.items()
        if name == point.task and filter_name == point.filter
    )


def _higher_is_better(point: Point) -> bool:
    return _task_run(point).higher_is_better[point.metric]


def _paired_scores(baseline: Point, point: Point) -> tuple[list[float], list[float]] | None:
    samples = [_task_run(p).samples for p in (baseline, point)]
    try:
        first, second = ([of[n].scores[point.metric] for n in sorted(of)] for of in samples)
    except KeyError:  # a metric of the whole corpus
        return None
    return first, second


def _positions(run: Run, task: str, label: str) -> list[Positions]:
    lines = (line for line in run.rounds if line["task_name"] == task)
    places = measure(replay.generations(lines)).positions
    return [Positions(task, label, places)] if places else []


def pareto(points: list[Point]) -> list[Point]:
    """Those that no other point beats in speedup and recovery at once, slowest first.

    points: placed ones.
    """
    front: list[Point] = []
    best = float("-inf")
    for point in sorted(points, key=lambda p: p.place, reverse=True):
        if point.place[1] > best:
            front.append(point)
            best = point.place[1]
    return front[::-1]


_COLUMNS = (
    "task", "metric", "label", "k", "tau", "seconds", "speedup", "speedup_low", "speedup_high",
    "score", "recovery", "recovery_low", "recovery_high", "path",
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
