"""Histories: one line per finished run, grouped into series, and each series tested for decline.

docs/history.md says what the lines hold and how the test works.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from scipy import stats

from fly import reading
from fly.analysis.compare import Against, Speed, find_speed, measure_speeds, primary
from fly.analysis.scores import Measured, Metric, Task
from fly.analysis.statistics import DEFAULT_DEMAND, Demand, Verdict
from fly.errors import FlyError
from fly.models.fingerprint import hash_json
from fly.runs import run_settings
from fly.runs.reader import Run, date_of

_MODELS = ("target_model_path", "draft_model_path")
_MACHINE = ("device", "capability", "threads", "batch_size")
_FEWEST = 4  # runs of a series that can be tested
_COMMITS = ("GITHUB_SHA", "CI_COMMIT_SHA")


class OfTask(BaseModel):
    """One task of a run, by its first metric by which the baseline scores anything."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    metric: str
    higher_is_better: bool
    documents: str  # hash of the documents and their prompts
    ids: list[int] | None = None  # the documents' numbers; None: from 0 on
    # by document; a digit each where all are 0 or 1
    scores: Annotated[str, Field(pattern="^[01]+$")] | Annotated[list[float], Field(min_length=1)]
    recovery: float | None = None  # against the comparison's baseline
    interval: tuple[float, float] | None = None
    tau: float | None = None
    time_x: float | None = None  # end to end
    tok_s: float | None = None  # end to end
    truncated: float | None = None  # share of answers that ended at the length limit

    @property
    def values(self) -> NDArray[np.float64]:
        """The scores, [documents]."""
        return np.array([float(score) for score in self.scores])


class Line(BaseModel):
    """One run. Keys of later versions are ignored."""

    model_config = ConfigDict(frozen=True)

    format: Literal[1] = 1
    date: str
    name: str
    mode: str
    commit: str | None = None
    target: str | None
    revision: str | None = None  # of the target, or the fingerprint of its files
    draft: str | None = None
    settings: dict[str, str]  # those in force, without models and machine
    machine: dict[str, str]
    tasks: dict[str, OfTask]

    @property
    def models(self) -> tuple[str | None, str | None]:
        """What the series is called by: target and draft, or the name that the run was given, so
        that models may lie in another folder every night."""
        is_given = not re.fullmatch(rf"{re.escape(self.mode)}(-\d+)?", self.name)
        return (self.name, None) if is_given else (self.target, self.draft)


def line_of(run: Run, measured: Measured, against: Against | None = None) -> Line:
    """A finished run's line. against: its comparison with a baseline, if there is one."""
    found = run_settings.in_force(run)
    speeds = measure_speeds(measured)  # of all its documents, not of those that were compared
    commit = next((os.environ[name] for name in _COMMITS if os.environ.get(name)), None)
    apart = {*_MODELS, *_MACHINE}
    return Line(
        date=date_of(run.path),
        name=measured.name,
        mode=measured.mode,
        commit=commit or run.results.get("git_hash"),
        target=measured.target["name"],
        revision=measured.target["revision"] or measured.target["files"],
        draft=found.get("draft_model_path"),
        settings={k: str(v) for k, v in found.items() if k not in apart and v is not None},
        machine={k: str(found[k]) for k in _MACHINE if found.get(k) is not None},
        tasks={
            name: _of_task(run, name, task, first, against, find_speed(speeds, name))
            for name, task in measured.tasks.items()
            if (first := primary(task.metrics)) and not first.left_out
        },
    )


def _of_task(
    run: Run, name: str, task: Task, metric: Metric, against: Against | None, speed: Speed | None
) -> OfTask:
    ids = sorted(metric.scores)
    values = [metric.scores[doc_id] for doc_id in ids]
    hashes = {doc_id: [task.documents[doc_id].doc, task.documents[doc_id].prompt] for doc_id in ids}
    reasons: list[Any] = [r.get("finish_reason") for r in run.requests if r["task"] == name]
    rows = against.rows if against else []
    row = next((row for row in rows if (row.task, row.metric) == (name, metric.label)), None)
    interval = row.scores.interval if row else None
    compared = find_speed(against.speeds, name) if against else None
    return OfTask(
        metric=metric.label,
        higher_is_better=metric.higher_is_better,
        documents=hash_json(hashes),
        ids=None if ids == [*range(len(ids))] else ids,
        scores="".join(f"{v:.0f}" for v in values) if {*values} <= {0, 1} else values,
        recovery=row.scores.recovery if row else None,
        interval=(interval.low, interval.high) if interval else None,
        tau=speed.pace.tau if speed else None,
        time_x=compared.end_to_end.value if compared and compared.end_to_end else None,
        tok_s=speed.pace.end_to_end_tok_s if speed else None,
        truncated=reasons.count("length") / len(reasons) if any(reasons) else None,
    )


def append(path: Path, lines: Sequence[Line]) -> None:
    """Add the runs to a history file, each as a line of its own, so that branches merge."""
    text = "".join(line.model_dump_json(exclude_none=True) + "\n" for line in lines)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                text = text if file.read(1) == b"\n" else "\n" + text
            file.write(text.encode(errors="replace"))
    except OSError as error:
        raise FlyError(f"--history {path}: cannot be written: {error.strerror}") from None


def read(path: Path) -> Iterator[Line]:
    """The runs in a history file."""
    for number, text in enumerate(reading.iterate_lines(path), 1):
        if not text.strip():
            continue
        where = f"{path}, line {number}, not of fly compare --history"
        try:
            found = Line.model_validate_json(text, strict=True)
        except ValidationError as error:
            reading.parse(text, where)  # says what is wrong with the JSON itself
            raise FlyError(reading.problem(error, where)) from None
        yield found


# ------------------------------------------------------------------------------------ decline


@dataclass(frozen=True)
class Trend:
    """What a series of one task says, from its good run on."""

    verdict: Verdict
    reason: str
    p: float | None = None  # one-sided, of the documents' own trends; None for short series
    level: float | None = None  # that p must reach at this length
    change: float | None = None  # of the mean score from the good run to the last, by the trend
    first_lost: tuple[int, int] | None = None  # (document, run), if one is lost to the end


@dataclass(frozen=True)
class Series:
    """Runs of one pair, task and settings, the oldest first."""

    title: str
    task: str
    lines: list[Line]
    trend: Trend
    good: int = 0  # the run that the trend begins with


def group(
    lines: Sequence[Line], good: str | None = None, demand: Demand = DEFAULT_DEMAND
) -> list[Series]:
    """The series of all runs and tasks. good: name, date, commit or revision, or its beginning, of
    the run that trends begin with; without it the first of each series."""
    groups: dict[Any, list[Line]] = defaultdict(list)
    for line in sorted(lines, key=lambda line: (line.date, line.name)):
        for name, task in line.tasks.items():
            pair = (*line.models, line.mode, *sorted(line.settings.items()))
            key = (pair, name, task.metric, task.documents)
            if not groups[key] or groups[key][-1] != line:  # a merge may hold a line twice
                groups[key].append(line)
    if good and not any(_is_named(line, good) for line in lines):
        raise FlyError(f"--good {good}: no run has such a name, date, commit or revision")
    found = []
    for (pair, name, metric, _), own in groups.items():
        start = next((at for at, line in enumerate(own) if good and _is_named(line, good)), 0)
        values = [line.tasks[name].values for line in own]
        if odd := next((at for at, each in enumerate(values) if len(each) != len(values[0])), 0):
            raise FlyError(
                f"{own[odd].date} {own[odd].name}: {name} has {len(values[odd])} scores, and "
                f"{len(values[0])} in {own[0].date}, of the same documents: remove one of the lines"
            )
        scores, task = np.array(values[start:]), own[0].tasks[name]
        trend = find_trend(scores if task.higher_is_better else -scores, demand)
        if trend.first_lost:
            at, run = trend.first_lost
            trend = replace(trend, first_lost=(task.ids[at] if task.ids else at, start + run))
        models = " + ".join(Path(model).name for model in pair[:2] if model)
        title = f"{name} {metric}: {models}, {pair[2]}"
        found.append(Series(title, name, own, trend, start))
    return found


def _is_named(line: Line, text: str) -> bool:
    known = (line.date, line.commit or "", line.revision or "")
    return line.name == text or any(value.startswith(text) for value in known)


def level_at(runs: int, confidence: float) -> float:
    """The p that a series of so many runs must reach, so that a series that is tested after every
    run raises a false alarm with a chance of at most 1 - confidence.

    Every doubling of the length, from the second on, spends 1 / (j (j - 1)) of it, for some four
    independent looks.
    """
    doublings = int(math.log2(runs))
    return (1 - confidence) / (4 * doublings * (doublings - 1))


def find_trend(scores_RN: NDArray[np.float64], demand: Demand = DEFAULT_DEMAND) -> Trend:
    """Test a series for decline. scores_RN: by run and document, higher is better.

    Every document's own slope over the runs is one observation; were there no decline, it would be
    as likely of the other sign. So a document that once changed and stays so counts once, however
    many runs follow.
    """
    runs, documents = scores_RN.shape
    if runs < _FEWEST or documents < 2:
        why = f"{runs} of at least {_FEWEST} runs, {documents} of at least 2 documents"
        return Trend("not enough evidence", why)
    if not np.ptp(scores_RN, axis=0).any():
        return Trend("unchanged", "every document scored the same in all runs", p=1.0, change=0.0)
    times = np.arange(runs) - (runs - 1) / 2
    # what each document gained from the first run to the last, by its line of least squares
    gains = times @ scores_RN / (times @ times) * (runs - 1)
    p = _decline(gains)
    level = level_at(runs, demand.confidence)
    change, spread = float(gains.mean()), float(gains.std(ddof=1) / math.sqrt(documents))
    # the largest fall that the documents allow, with confidence
    limit = -change + float(stats.t.ppf(demand.confidence, documents - 1)) * spread
    allowed = (1 - demand.min_recovery) * abs(float(scores_RN[0].mean()))
    told: dict[str, Any] = {"p": p, "level": level, "change": change}
    if p <= level:
        return Trend("fell", "the scores decline", **told, first_lost=_first_lost(scores_RN))
    if limit <= allowed:
        return Trend("held", "no decline larger than allowed", **told)
    return Trend("not enough evidence", "the documents do not tell", **told)


def _decline(gains: NDArray[np.float64]) -> float:
    """One-sided p of sign flips: that documents without a decline gain so little, or less.

    The normal tail of the flips; for few documents that changed, no less than they can show.
    """
    changed = gains[np.abs(gains) > 1e-12]
    z = -changed.sum() / math.sqrt((changed**2).sum()) if len(changed) else 0.0
    return max(float(stats.norm.sf(z)), 2.0 ** -len(changed))


def _first_lost(scores_RN: NDArray[np.float64]) -> tuple[int, int] | None:
    """(document, run) of the earliest loss against the first run that lasts to the end."""
    is_lost = scores_RN < scores_RN[0]
    lasting = np.flip(np.logical_and.accumulate(np.flip(is_lost, 0)), 0)
    begins = np.where(lasting.any(axis=0), lasting.argmax(axis=0), len(scores_RN))
    document = int(begins.argmin())
    return (document, int(begins[document])) if begins[document] < len(scores_RN) else None


def as_rows(series: Sequence[Series]) -> Iterator[dict[str, Any]]:
    """For the page and for CSV: one row per series and run."""
    for number, each in enumerate(series):
        for line in each.lines:
            task = line.tasks[each.task]
            yield {
                "series": number, "title": each.title, "date": line.date, "run": line.name,
                "commit": line.commit, "revision": line.revision, "documents": len(task.scores),
                "score": float(task.values.mean()), "recovery": task.recovery,
                "recovery_low": task.interval[0] if task.interval else None,
                "recovery_high": task.interval[1] if task.interval else None,
                "tau": task.tau, "time_x": task.time_x, "tok_s": task.tok_s,
                "truncated": task.truncated, "machine": ", ".join(line.machine.values()),
            }  # fmt: skip


def trend_in_words(series: Series) -> str:
    """One line for people."""
    trend = series.trend
    parts = [trend.reason]
    if trend.change is not None and trend.p is not None and trend.level is not None:
        parts.append(f"the trend moves the mean score by {trend.change:+.4f}")
        runs = len(series.lines) - series.good
        parts.append(f"p {trend.p:.2g} where {trend.level:.2g} is asked of {runs} runs")
    if trend.first_lost:
        doc_id, run = trend.first_lost
        line = series.lines[run]
        commit = f", commit {line.commit[:10]}" if line.commit else ""
        parts.append(f"it began with document {doc_id} in the run of {line.date[:19]}{commit}")
    return "; ".join(parts)
