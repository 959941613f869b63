"""Finished runs compared: paired by task and document, refused if they do not belong together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from fly.analysis import statistics
from fly.analysis.scores import Measured, Metric, Task, Work, why_not_reusable
from fly.errors import FlyError

_WEAKEST_FIRST: tuple[statistics.Verdict, ...] = (
    "fell",
    "not enough evidence",
    "unchanged",
    "held",
)
# Facts of a machine without which seconds do not compare, and those that are only worth a note.
_MACHINE = {"device": "device", "capability": "CPU capability", "threads": "threads"}
_WAY = {
    "processes": "processes", "batch_size": "batch size", "dtype": "dtype",
    "passes": "passes of the target", "compile": "compile",
}  # fmt: skip


@dataclass(frozen=True)
class Demand:
    """What the scores must do: keep this share of the baseline's, shown with this confidence."""

    min_recovery: float = 0.99
    confidence: float = 0.95


@dataclass(frozen=True)
class Row:
    """One metric of one task. primary: it stands for the task in the overall row."""

    task: str
    metric: str
    primary: bool
    higher_is_better: bool
    scores: statistics.Comparison

    @property
    def is_judged(self) -> bool:
        """False where nothing was lost because the baseline scores nothing."""
        scores = self.scores
        nothing = scores.baseline == 0 and scores.lost == 0
        return not (self.higher_is_better and nothing and scores.recovery is None)

    @property
    def verdict(self) -> str:
        """That of its scores, or what people read where it does not judge."""
        return self.scores.verdict if self.is_judged else "decides nothing"

    @property
    def label(self) -> str:
        return f"{self.task} {self.metric}"


@dataclass(frozen=True)
class Pace:
    """What a run decoded of a task, and how fast: rates of sums over documents. None: no records.

    decode, end_to_end: seconds, without and with prefill. saved: share of the emitted tokens that
    took no target pass of their own, 1 - rounds/emitted.
    """

    tokens: int
    rounds: int
    decode: float
    end_to_end: float
    decode_tok_s: float | None
    end_to_end_tok_s: float | None
    tau: float | None
    saved: float | None


@dataclass(frozen=True)
class Speed:
    """A task's pace in a run, and against the baseline; None where there are no records, and where
    the runs' seconds do not compare.

    decode, end_to_end: time x, the baseline's seconds over the run's for the same documents.
    tokens: the run's emitted tokens over the baseline's. A run that talks more takes longer,
    however many tokens per second it makes.
    """

    task: str
    pace: Pace
    decode: statistics.Ratio | None = None
    end_to_end: statistics.Ratio | None = None
    tokens: statistics.Ratio | None = None
    withheld: str = ""  # why there is no time x, though both runs have records


@dataclass(frozen=True)
class Against:
    """One run against the baseline. overall: the mean of the primary scores, None for one row.
    notes: what a reader of its time x has to know."""

    name: str
    rows: list[Row]
    overall: Row | None
    speeds: list[Speed]
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> statistics.Verdict:
        return weakest(row.scores.verdict for row in self.all_rows if row.is_judged)

    @property
    def all_rows(self) -> list[Row]:
        return [*self.rows, *([self.overall] if self.overall else [])]


@dataclass(frozen=True)
class Result:
    """All runs against one. verdicts: how many rows were judged. notes: what was left out."""

    baseline: str
    baseline_speeds: list[Speed]
    others: list[Against]
    demand: Demand
    verdicts: int = 1
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> statistics.Verdict:
        return weakest(other.verdict for other in self.others)


def weakest(verdicts: Iterable[statistics.Verdict]) -> statistics.Verdict:
    """Of several verdicts, what can be said of all: fell if anything fell, held if all held.

    Without any, not enough evidence.
    """
    found = set(verdicts)
    return next((verdict for verdict in _WEAKEST_FIRST if verdict in found), "not enough evidence")


def choose_baseline(runs: Sequence[Measured], name: str | None = None) -> Measured:
    """The named run; else the first that is target-only; else the first."""
    if name is None:
        return next((run for run in runs if run.mode == "target-only"), runs[0])
    for run in runs:
        if run.name == name:
            return run
    known = ", ".join(run.name for run in runs)
    raise FlyError(f"--baseline-run {name}: no such run: choose one of {known}")


def compare(
    baseline: Measured,
    others: Sequence[Measured],
    demand: Demand | None = None,
    metrics: Sequence[str] | None = None,
) -> Result:
    """Compare every run with the baseline. metrics: only these, by name or `name,filter`.

    Raises FlyError if documents, prompts, targets or task versions differ, naming the first.
    """
    demand = demand or Demand()
    for other in others:
        check_pairs(baseline, other)
    _check_metrics(baseline, metrics)
    chosen = _chosen(baseline, metrics)
    notes = list(dict.fromkeys(note for run in (baseline, *others) for note in run.notes))
    for other in others:
        if reason := why_not_reusable(baseline, other):
            notes.append(f"{other.name} against {baseline.name}: {reason}")
    verdicts = len(others) * _count_rows(chosen)
    result = Result(
        baseline=baseline.name,
        baseline_speeds=_speeds(baseline, None),
        others=[_against(baseline, other, demand, chosen, verdicts) for other in others],
        demand=demand,
        verdicts=verdicts,
        notes=notes,
    )
    for against in result.others:
        result.notes.extend(against.notes)
        if not against.rows:
            raise FlyError(f"{against.name}: no metric to compare ({'; '.join(notes) or 'none'})")
    return result


def check_pairs(baseline: Measured, other: Measured) -> None:
    """Raise FlyError, in one line, if the runs did not answer the same questions."""
    who = f"{baseline.name} and {other.name} cannot be compared"
    missing = sorted(baseline.tasks.keys() ^ other.tasks.keys())
    if missing:
        raise FlyError(f"{who}: task {missing[0]} is only in one of them")
    for name, ours in baseline.tasks.items():
        theirs = other.tasks[name]
        for key in ("version", "num_fewshot"):
            if getattr(ours, key) != getattr(theirs, key):
                raise FlyError(
                    f"{who}: {name} has {key} {getattr(ours, key)} and {getattr(theirs, key)}"
                )
        _check_documents(who, name, ours, theirs)


def _check_documents(who: str, name: str, ours: Task, theirs: Task) -> None:
    only = sorted(ours.documents.keys() ^ theirs.documents.keys())
    if only:
        raise FlyError(
            f"{who}: {name} has {len(ours.documents)} and {len(theirs.documents)} documents; "
            f"document {only[0]} is only in one of them: use the same --limit or --samples"
        )
    for doc_id, document in ours.documents.items():
        found = theirs.documents[doc_id]
        for key, what in (("doc", "content"), ("prompt", "prompt"), ("target", "target")):
            if getattr(document, key) != getattr(found, key):
                raise FlyError(f"{who}: {name}, document {doc_id}: the {what} differs")


def _check_metrics(baseline: Measured, wanted: Sequence[str] | None) -> None:
    found = [metric for task in baseline.tasks.values() for metric in task.metrics]
    known = {metric.name for metric in found} | {metric.label for metric in found}
    for name in wanted or ():
        if name not in known:
            raise FlyError(
                f"--metric {name}: no such metric: choose from {', '.join(sorted(known))}"
            )


def _chosen(baseline: Measured, wanted: Sequence[str] | None) -> dict[str, list[Metric]]:
    """The metrics to compare, by task: every run has the same rows."""
    return {
        name: [
            metric
            for metric in task.metrics
            if not metric.left_out
            and (not wanted or metric.name in wanted or metric.label in wanted)
        ]
        for name, task in baseline.tasks.items()
    }


def _find(task: Task, metric: Metric) -> Metric | None:
    same = (m for m in task.metrics if (m.name, m.filter) == (metric.name, metric.filter))
    return next(same, None)


# ------------------------------------------------------------------------------------- scores


def _against(
    baseline: Measured,
    other: Measured,
    demand: Demand,
    chosen: dict[str, list[Metric]],
    verdicts: int,
) -> Against:
    rows = []
    primaries: list[_Primary] = []
    for name, metrics in chosen.items():
        first = primary(metrics)
        for metric in metrics:
            theirs = _find(other.tasks[name], metric)
            better, is_primary = metric.higher_is_better, metric is first
            if theirs is None or theirs.left_out:
                why = theirs.left_out if theirs else "the run has no such metric"
                missing = statistics.Comparison.missing(list(metric.scores.values()), why)
                row = Row(name, metric.label, is_primary, better, missing)
                rows.append(row)
                if is_primary:
                    primaries.append(_Primary(row, list(metric.scores.values()), None))
                continue
            pair = _paired(metric, theirs)
            scores = statistics.compare_scores(
                *pair,
                higher_is_better=better,
                min_recovery=demand.min_recovery,
                confidence=demand.confidence,
                verdicts=verdicts,
            )
            row = Row(name, metric.label, is_primary, better, scores)
            rows.append(row)
            if is_primary:
                primaries.append(_Primary(row, *pair))
    overall = _overall(primaries, demand, verdicts)
    notes = _speed_notes(baseline, other)
    return Against(other.name, rows, overall, _speeds(other, baseline), notes)


@dataclass(frozen=True)
class _Primary:
    """A task's row in the mean over tasks, and its scores; other: None if the run lacks any."""

    row: Row
    baseline: list[float]
    other: list[float] | None


def _count_rows(chosen: dict[str, list[Metric]]) -> int:
    tasks = [metrics for metrics in chosen.values() if metrics]
    return max(1, sum(map(len, tasks)) + (len(tasks) > 1))


def primary(metrics: list[Metric]) -> Metric | None:
    """A task's first metric by which the baseline scores anything, else its first."""
    known = [metric for metric in metrics if not metric.left_out]
    scoring = (m for m in known if not m.higher_is_better or any(m.scores.values()))
    return next(scoring, next(iter(known), None))


def _paired(ours: Metric, theirs: Metric) -> tuple[list[float], list[float]]:
    return list(ours.scores.values()), [theirs.scores[doc_id] for doc_id in ours.scores]


def _overall(primaries: list[_Primary], demand: Demand, verdicts: int) -> Row | None:
    """Tasks where lower is better have no place in a mean of scores, unless all are such."""
    higher = any(primary.row.higher_is_better for primary in primaries)
    tasks = [primary for primary in primaries if primary.row.higher_is_better == higher]
    if len(tasks) < 2:
        return None
    lacking = next((primary.row for primary in tasks if primary.other is None), None)
    if lacking is not None:  # a mean of the other tasks would hide it
        scores = replace(
            lacking.scores,
            documents=sum(len(primary.baseline) for primary in tasks),
            baseline=fmean(fmean(primary.baseline) for primary in tasks),
            reason=f"{lacking.label}: {lacking.scores.reason}",
        )
    else:
        scores = statistics.compare_tasks(
            [(primary.baseline, primary.other or []) for primary in tasks],
            higher_is_better=higher,
            min_recovery=demand.min_recovery,
            confidence=demand.confidence,
            verdicts=verdicts,
        )
    return Row("overall", f"mean of {len(tasks)} tasks", False, higher, scores)


# -------------------------------------------------------------------------------------- speed


def _speeds(run: Measured, baseline: Measured | None) -> list[Speed]:
    names = list((baseline or run).tasks)
    groups = [[name] for name in names] + ([names] if len(names) > 1 else [])
    return [speed for group in groups if (speed := _speed(run, baseline, group))]


def _speed(run: Measured, baseline: Measured | None, names: list[str]) -> Speed | None:
    work = {(name, i): item for name in names for i, item in run.tasks[name].work.items()}
    if not work:
        return None
    label = names[0] if len(names) == 1 else "overall"
    pace = _pace(list(work.values()))
    base = {
        (name, i): item
        for name in names
        for i, item in (baseline.tasks[name].work if baseline else {}).items()
    }
    if baseline is None or base.keys() != work.keys():
        return Speed(label, pace)
    pairs = [(base[key], work[key]) for key in work]
    tokens = statistics.compare_sums([b.tokens for _, b in pairs], [a.tokens for a, _ in pairs])
    if apart := _differences(baseline, run, _MACHINE):
        return Speed(label, pace, tokens=tokens, withheld="; ".join(apart))
    decode = statistics.compare_sums([a.decode for a, _ in pairs], [b.decode for _, b in pairs])
    end_to_end = statistics.compare_sums(
        [a.end_to_end for a, _ in pairs], [b.end_to_end for _, b in pairs]
    )
    return Speed(label, pace, decode, end_to_end, tokens)


def _differences(baseline: Measured, run: Measured, facts: dict[str, str]) -> list[str]:
    """In words, which of these facts of two runs differ; what one of them does not tell does not.

    A stored baseline of an earlier fly tells none.
    """
    ours, theirs = baseline.machine, run.machine
    return [
        f"{words}: {ours[key]} and {theirs[key]}"
        for key, words in facts.items()
        if key in ours and key in theirs and ours[key] != theirs[key]
    ]


def _speed_notes(baseline: Measured, run: Measured) -> list[str]:
    """What a reader of the ratios has to know; nothing where there are none."""
    if not all(any(task.work for task in found.tasks.values()) for found in (baseline, run)):
        return []
    who = f"{baseline.name} and {run.name}"
    if apart := _differences(baseline, run, _MACHINE):
        return [f"no time x: {who} ran on different machines ({'; '.join(apart)})"]
    if not baseline.machine or not run.machine:
        return [f"time x of {who}: it is not known that they ran on one machine"]
    if apart := _differences(baseline, run, _WAY):
        return [f"time x of {who} is not of decoding alone: they differ in {'; '.join(apart)}"]
    return []


def _pace(work: list[Work]) -> Pace:
    tokens, rounds = sum(item.tokens for item in work), sum(item.rounds for item in work)
    decode, whole = sum(item.decode for item in work), sum(item.end_to_end for item in work)
    return Pace(
        tokens=tokens,
        rounds=rounds,
        decode=decode,
        end_to_end=whole,
        decode_tok_s=tokens / decode if decode else None,
        end_to_end_tok_s=tokens / whole if whole else None,
        tau=tokens / rounds if rounds else None,
        saved=1 - rounds / tokens if tokens else None,
    )
