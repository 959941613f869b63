"""Finished runs compared: paired by task and document, refused if they do not belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fly.errors import FlyError
from fly.evaluation import statistics
from fly.evaluation.measured import Measured, Metric, Task, Work, why_not_reusable


@dataclass(frozen=True)
class Demand:
    """What the scores must do: keep this share of the baseline's, shown with this confidence.

    Where no document is worse they have, however few there are, unless the baseline scores zero.
    """

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
    """How fast a run decoded a task: rates of sums over documents. None: no records.

    saved: share of the emitted tokens that took no target pass of their own, 1 - rounds/emitted.
    """

    tokens: int
    rounds: int
    decode_tok_s: float | None
    end_to_end_tok_s: float | None
    tau: float | None
    saved: float | None


@dataclass(frozen=True)
class Speed:
    """A task's pace in a run, and against the baseline; None where there are no records."""

    task: str
    pace: Pace
    decode: statistics.Ratio | None = None
    end_to_end: statistics.Ratio | None = None


@dataclass(frozen=True)
class Against:
    """One run against the baseline. overall: the mean of the primary scores, None for one row."""

    name: str
    rows: list[Row]
    overall: Row | None
    speeds: list[Speed]

    @property
    def verdict(self) -> statistics.Verdict:
        """fell if anything fell; else held if everything held; else not enough evidence."""
        verdicts = {row.verdict for row in self.all_rows if row.is_judged}
        if "fell" in verdicts:
            return "fell"
        return "held" if verdicts == {"held"} else "not enough evidence"

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
        verdicts = {other.verdict for other in self.others}
        if "fell" in verdicts:
            return "fell"
        return "held" if verdicts == {"held"} else "not enough evidence"


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
    chosen = _in_all_runs(baseline, others, metrics)
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


def _in_all_runs(
    baseline: Measured, others: Sequence[Measured], wanted: Sequence[str] | None
) -> dict[str, list[Metric]]:
    """The metrics to compare, by task: so that every run has the same rows."""
    return {
        name: [
            metric
            for metric in task.metrics
            if (not wanted or metric.name in wanted or metric.label in wanted)
            and all(_find(other.tasks[name], metric) for other in others)
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
    primaries = []
    for name, metrics in chosen.items():
        first = primary(metrics)
        for metric in metrics:
            theirs = _find(other.tasks[name], metric)
            assert theirs is not None  # chosen so
            pair = _paired(metric, theirs)
            scores = statistics.compare_scores(
                *pair,
                higher_is_better=metric.higher_is_better,
                min_recovery=demand.min_recovery,
                confidence=demand.confidence,
                verdicts=verdicts,
            )
            better = metric.higher_is_better
            rows.append(Row(name, metric.label, metric is first, better, scores))
            if metric is first:
                primaries.append((metric.higher_is_better, pair))
    return Against(
        other.name, rows, _overall(primaries, demand, verdicts), _speeds(other, baseline)
    )


def _count_rows(chosen: dict[str, list[Metric]]) -> int:
    tasks = [metrics for metrics in chosen.values() if metrics]
    return max(1, sum(map(len, tasks)) + (len(tasks) > 1))


def primary(metrics: list[Metric]) -> Metric | None:
    """A task's first metric by which the baseline scores anything, else its first."""
    scoring = (m for m in metrics if not m.higher_is_better or any(m.scores.values()))
    return next(scoring, next(iter(metrics), None))


def _paired(ours: Metric, theirs: Metric) -> tuple[list[float], list[float]]:
    return list(ours.scores.values()), [theirs.scores[doc_id] for doc_id in ours.scores]


def _overall(
    primaries: list[tuple[bool, tuple[list[float], list[float]]]], demand: Demand, verdicts: int
) -> Row | None:
    """Tasks where lower is better have no place in a mean of scores, unless all are such."""
    higher = any(better for better, _ in primaries)
    pairs = [pair for better, pair in primaries if better == higher]
    if len(pairs) < 2:
        return None
    scores = statistics.compare_tasks(
        pairs,
        higher_is_better=higher,
        min_recovery=demand.min_recovery,
        confidence=demand.confidence,
        verdicts=verdicts,
    )
    return Row("overall", f"mean of {len(pairs)} tasks", False, higher, scores)


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
    if base.keys() != work.keys():
        return Speed(label, pace)
    pairs = [(base[key], work[key]) for key in work]
    ratios = [
        statistics.compare_speed(
            [a.tokens for a, _ in pairs],
            [getattr(a, kind) for a, _ in pairs],
            [b.tokens for _, b in pairs],
            [getattr(b, kind) for _, b in pairs],
        )
        for kind in ("decode", "end_to_end")
    ]
    return Speed(label, pace, *ratios)


def _pace(work: list[Work]) -> Pace:
    tokens, rounds = sum(item.tokens for item in work), sum(item.rounds for item in work)
    decode, whole = sum(item.decode for item in work), sum(item.end_to_end for item in work)
    return Pace(
        tokens=tokens,
        rounds=rounds,
        decode_tok_s=tokens / decode if decode else None,
        end_to_end_tok_s=tokens / whole if whole else None,
        tau=tokens / rounds if rounds else None,
        saved=1 - rounds / tokens if tokens else None,
    )
