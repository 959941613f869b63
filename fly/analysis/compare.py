"""Finished runs compared: paired by task and document, refused if they do not belong together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from fly.analysis import statistics
from fly.analysis.comparability import Reason, Severity, Subject, check_comparable
from fly.analysis.gates import FLAGS, Gate, GateRow
from fly.analysis.gates import judge as judge_gate
from fly.analysis.noise import NoiseRow, check_noise, noise_rows
from fly.analysis.scores import Measured, Metric, Task, Work
from fly.analysis.statistics import (
    DEFAULT_DEMAND,
    Comparison,
    Demand,
    Ratio,
    Verdict,
    compare_rates,
)
from fly.errors import FlyError
from fly.runs.records import Positions, mean_lengths

_WEAKEST_FIRST: tuple[Verdict, ...] = ("fell", "not enough evidence", "unchanged", "held")
_NOTHING_DRAFTED = "nothing was drafted: any difference is the machine's"
_OF_ALL: tuple[Subject, ...] = ("target", "decoding", "engine")  # in the result's notes alone


@dataclass(frozen=True)
class ScoreRow:
    """One metric of one task."""

    task: str
    metric: str
    primary: bool  # it stands for the task in the overall row
    higher_is_better: bool
    scores: Comparison

    @property
    def verdict(self) -> str:
        return "decides nothing" if self.scores.decides_nothing else self.scores.verdict

    @property
    def label(self) -> str:
        return f"{self.task} {self.metric}"


@dataclass(frozen=True)
class Pace:
    """What a run decoded of a task, and how fast: sums over documents and their rates."""

    tokens: int
    rounds: int
    decode: float  # seconds, without prefill
    end_to_end: float  # seconds, with prefill
    decode_tok_s: float | None
    end_to_end_tok_s: float | None
    tau: float | None  # of all tokens together
    tau_document_mean: float | None  # the mean of each document's own
    al: float | None  # of all tokens together
    al_document_mean: float | None  # the mean of each document's own
    # share of the emitted tokens that took no target pass of their own: 1 - rounds / emitted; None
    # where the rounds are not told
    saved: float | None
    positions: Positions  # empty for earlier runs


@dataclass(frozen=True)
class Speed:
    """A task's pace in a run, and against the baseline.

    A run that talks more takes longer, however many tokens per second it makes. Times are None
    without records of both, and where the runs' seconds do not compare.
    """

    task: str
    pace: Pace
    # time x: the baseline's seconds over the run's for the same documents
    decode: Ratio | None = None
    end_to_end: Ratio | None = None  # the same, with prefill
    tokens: Ratio | None = None  # the run's emitted tokens over the baseline's
    withheld: str = ""  # why the seconds do not compare
    # the seconds are with drafts from earlier outputs, not those of the mode by itself
    from_earlier_runs: bool = False


@dataclass(frozen=True)
class Against:
    """One run against the baseline."""

    name: str
    rows: list[ScoreRow]
    overall: ScoreRow | None  # the mean of the primary scores; None for one task
    speeds: list[Speed]
    notes: list[str]  # what a reader of its scores and its time x has to know
    gates: list[GateRow]

    @property
    def verdict(self) -> Verdict:
        verdicts = [row.scores.verdict for row in self.all_rows if not row.scores.decides_nothing]
        return weakest([*verdicts, *(row.verdict for row in self.gates)])

    @property
    def all_rows(self) -> list[ScoreRow]:
        return [*self.rows, *([self.overall] if self.overall else [])]

    @property
    def main(self) -> ScoreRow | None:
        """The row that stands for the run; None if no task has a score."""
        return self.overall or next((row for row in self.rows if row.primary), None)


@dataclass(frozen=True)
class CurvePoint:
    """Throughput against interactivity: what a server does for all, and for one of its users."""

    run: str
    concurrency: int  # most requests at once
    tok_s: float  # of all requests together
    tok_s_per_user: float  # of one, from its request to its end
    verdict: str  # empty for the baseline


@dataclass(frozen=True)
class Result:
    """All runs against one."""

    baseline: str
    baseline_speeds: list[Speed]
    others: list[Against]
    demand: Demand
    verdicts: int = 1  # how many rows were judged
    notes: list[str] = field(default_factory=list)  # what was left out
    # what rounding alone changes, if that was measured
    noise: list[NoiseRow] = field(default_factory=list)
    curve: list[CurvePoint] = field(default_factory=list)  # of runs that servers answered

    @property
    def verdict(self) -> Verdict:
        return weakest(other.verdict for other in self.others)


def weakest(verdicts: Iterable[Verdict]) -> Verdict:
    """What can be said of all: fell if any fell, held if all held. Not enough evidence if empty."""
    return min(verdicts, key=_WEAKEST_FIRST.index, default="not enough evidence")


def choose_baseline(runs: Sequence[Measured], name: str | None = None) -> Measured:
    """The named run; else the first that is target-only; else the first."""
    if name is None:
        return next((run for run in runs if run.mode == "target-only"), runs[0])
    for run in runs:
        if run.name == name:
            return run
    known = ", ".join(run.name for run in runs)
    raise FlyError(f"--baseline-run {name}: no such run: choose one of {known}")


def split_baseline(
    runs: Sequence[Measured], name: str | None = None
) -> tuple[Measured, list[Measured]]:
    """(`choose_baseline`, the others)."""
    baseline = choose_baseline(runs, name)
    return baseline, [run for run in runs if run is not baseline]


def compare(
    baseline: Measured,
    others: Sequence[Measured],
    demand: Demand = DEFAULT_DEMAND,
    metrics: Sequence[str] | None = None,
    noise: Measured | None = None,
    gates: Sequence[Gate] = (),
) -> Result:
    """Compare every run with the baseline. metrics: only these, by name or `name,filter`. noise:
    the baseline's decoding again, rounded otherwise. gates: for every run that may draft.

    Raises FlyError if documents, prompts, targets or task versions differ, naming the first.
    """
    for gate in gates:
        if gate.task not in (None, *baseline.tasks):
            known = ", ".join(baseline.tasks)
            raise FlyError(f"{FLAGS[gate.kind]} {gate.task}: no such task: choose from {known}")
    reasons = [check_comparable(baseline, other) for other in others]
    chosen = choose_metrics(baseline, metrics)
    notes = list(dict.fromkeys(note for run in (baseline, *others) for note in run.notes))
    for other, found in zip(others, reasons):
        notes += [reason.note for reason in found if reason.subject in _OF_ALL]
        notes += _only_in(other, baseline)
    notes += _texts_of_unscored(baseline, others)
    firsts = {name: first for name, of in chosen.items() if (first := primary(of)) is not None}
    rows_per_run = sum(map(len, chosen.values())) + bool(_choose_overall(firsts))
    verdicts = len(others) * (max(1, rows_per_run) + len(gates))
    terms = _Terms(baseline, chosen, firsts, gates, demand, verdicts)
    compared = [_against(other, found, terms) for other, found in zip(others, reasons)]
    notes += dict.fromkeys(note for each in compared for note in each.notes)
    floor: list[NoiseRow] = []
    if noise is not None:
        check_comparable(baseline, noise)
        check_noise(baseline, noise)
        floor = [*noise_rows(baseline, noise, others, firsts)]
    speeds = measure_speeds(baseline)
    curve = [*_find_curve_point(baseline, speeds, "")]
    for other, against in zip(others, compared):
        curve += _find_curve_point(other, against.speeds, against.verdict)
    return Result(baseline.name, speeds, compared, demand, verdicts, notes, floor, curve)


def find_speed(speeds: Sequence[Speed], task: str) -> Speed | None:
    """The speed of a task, or of `overall`."""
    return next((speed for speed in speeds if speed.task == task), None)


def _find_curve_point(run: Measured, speeds: list[Speed], verdict: str) -> Iterator[CurvePoint]:
    """A server's point; none for other runs."""
    tok_s = speeds[-1].pace.end_to_end_tok_s if speeds else None  # of all tasks
    if run.tok_s_per_user is not None and tok_s is not None:
        concurrency = int(run.machine["batch_size"])
        yield CurvePoint(run.name, concurrency, tok_s, run.tok_s_per_user, verdict)


def choose_metrics(baseline: Measured, wanted: Sequence[str] | None) -> dict[str, list[Metric]]:
    """The metrics to compare, by task: every run has the same rows."""
    found = [metric for task in baseline.tasks.values() for metric in task.metrics]
    for name in wanted or ():
        if not any(name in metric.names for metric in found):
            known = sorted({name for metric in found for name in (metric.name, metric.label)})
            raise FlyError(f"--metric {name}: no such metric: choose from {', '.join(known)}")
    return {
        name: [m for m in task.metrics if m.has_row and (not wanted or m.names & {*wanted})]
        for name, task in baseline.tasks.items()
    }


def _texts_of_unscored(baseline: Measured, others: Sequence[Measured]) -> Iterator[str]:
    """Notes about tasks without scores, which are compared by speed, acceptance and texts."""
    unscored = (name for name, found in choose_metrics(baseline, None).items() if not found)
    for name in unscored:
        for other in others:
            equal = equal_texts(baseline.tasks[name], other.tasks[name])
            words = "the texts of both are not known"
            if equal:
                words = f"{equal[0]:,} of {equal[1]:,} texts equal {baseline.name}'s"
            yield f"{other.name}: {name} has no score to compare: {words}"


def equal_texts(baseline: Task, other: Task) -> tuple[int, int] | None:
    """(documents whose responses are equal, all documents); None without both runs' texts."""
    if not (baseline.texts and other.texts):
        return None
    equal = sum(texts == other.texts.get(i) for i, texts in baseline.texts.items())
    return equal, len(baseline.texts)


def _only_in(other: Measured, baseline: Measured) -> list[str]:
    """Notes about the metrics that the baseline lacks."""
    return [
        f"{other.name}: {name} {metric.label}: {baseline.name} has no such metric; left out"
        for name, task in other.tasks.items()
        for metric in task.metrics
        if baseline.tasks[name].metric(metric.label) is None
    ]


# ------------------------------------------------------------------------------------- scores


@dataclass(frozen=True)
class _Scores:
    """A metric's scores of both runs, document by document."""

    baseline: list[float]
    other: list[float]
    lacking: str = ""  # why other has none
    # the documents' own; empty where every document stands for itself
    clusters: list[str] = field(default_factory=list)


def _pair(ours: Metric, task: Task, clusters: dict[int, str]) -> _Scores:
    theirs = task.metric(ours.label)
    base = list(ours.scores.values())
    if theirs is None:
        return _Scores(base, [], "the run has no such metric")
    if ours.left_out:
        return _Scores(base, [], f"in the baseline {ours.left_out}")
    if theirs.left_out:
        return _Scores(base, [], theirs.left_out)
    if apart := sorted(ours.scores.keys() ^ theirs.scores.keys()):
        return _Scores(base, [], f"only one of the runs has it for document {apart[0]}")
    scores = [theirs.scores[doc_id] for doc_id in ours.scores]
    return _Scores(base, scores, clusters=[clusters[i] for i in ours.scores] if clusters else [])


@dataclass(frozen=True)
class _Terms:
    """What every run is compared with, and by what."""

    baseline: Measured
    metrics: dict[str, list[Metric]]  # those to compare, by task
    firsts: dict[str, Metric]  # those that stand for their tasks
    gates: Sequence[Gate]
    demand: Demand
    verdicts: int  # as in `statistics.compare_tasks`


def _against(other: Measured, reasons: list[Reason], terms: _Terms) -> Against:
    """One run. reasons: what stands between it and the baseline (`check_comparable`)."""
    baseline, no_times = terms.baseline, _why_withheld(reasons, "withhold times")
    gates = []
    for gate in terms.gates if other.mode != "target-only" else ():
        names = [gate.task] if gate.task else [*baseline.tasks]
        base, own = _work_of(baseline, names), _work_of(other, names)
        row = judge_gate(gate, base, own, no_times, terms.demand.confidence, terms.verdicts)
        gates.append(row)
    is_alike = all(r.subject not in ("target", "decoding", "engine", "method") for r in reasons)
    if not no_times and is_alike and other.drafted == 0 and baseline.mode == "target-only":
        no_times = _NOTHING_DRAFTED  # both decoded token by token: it would say nothing of fly
    rows, overall = _judge_rows(other, _why_withheld(reasons, "withhold verdict"), terms)
    speeds = measure_speeds(other, baseline, no_times)
    notes = [
        *(reason.note for reason in reasons if reason.note and reason.subject not in _OF_ALL),
        *(
            f"no time x of {other.name}, {speed.task}: {_NOTHING_DRAFTED}"
            for speed in speeds
            if speed.withheld == _NOTHING_DRAFTED
        ),
        *(
            f"{name}: several documents share one {task.shared}, and are taken as independent: "
            f"--cluster {task.shared} takes those that share it as one"
            for name, task in other.tasks.items()
            if task.shared and not task.clusters
        ),
    ]
    return Against(other.name, rows, overall, speeds, notes, gates)


def _judge_rows(
    other: Measured, withheld: str, terms: _Terms
) -> tuple[list[ScoreRow], ScoreRow | None]:
    """(a row for every metric, the mean's). withheld: why no verdict can be reached."""
    rows, in_overall = list[ScoreRow](), _choose_overall(terms.firsts)
    of_mean: list[_Scores] = []
    for name, metrics in terms.metrics.items():
        clusters = other.tasks[name].clusters or terms.baseline.tasks[name].clusters
        for metric in metrics:
            found, higher = _pair(metric, other.tasks[name], clusters), metric.higher_is_better
            is_first = metric is terms.firsts[name]
            scores = _judge([found], higher, withheld, terms)
            rows.append(ScoreRow(name, metric.label, is_first, higher, scores))
            if is_first and name in in_overall:
                lacking = found.lacking and f"{rows[-1].label}: {found.lacking}"
                of_mean.append(replace(found, lacking=lacking))
    if not of_mean:
        return rows, None
    higher = terms.firsts[in_overall[0]].higher_is_better
    scores = _judge(of_mean, higher, withheld, terms)
    return rows, ScoreRow("overall", f"mean of {len(of_mean)} tasks", False, higher, scores)


def _why_withheld(reasons: list[Reason], what: Severity) -> str:
    """Empty unless it is withheld; the run's own reason, if the baseline has one, too."""
    return next((r.why for r in reversed(reasons) if r.severity == what), "")


def _judge(tasks: list[_Scores], higher: bool, withheld: str, terms: _Terms) -> Comparison:
    lacking = next((task.lacking for task in tasks if task.lacking), "")
    if lacking:  # a mean of the other tasks would hide it
        return Comparison(
            documents=sum(len(task.baseline) for task in tasks),
            baseline=fmean(fmean(task.baseline) for task in tasks),
            reason=lacking,
        )
    pairs = [(task.baseline, task.other) for task in tasks]
    clusters = [task.clusters for task in tasks] if all(task.clusters for task in tasks) else None
    found = statistics.compare_tasks(
        pairs, terms.demand, higher_is_better=higher, verdicts=terms.verdicts, clusters=clusters
    )
    if not withheld:
        return found
    none: Verdict = "not enough evidence"
    return replace(found, verdict=none, decides=None, reason=withheld, withheld=True)


def _choose_overall(firsts: dict[str, Metric]) -> list[str]:
    """The tasks that the mean is of: those where higher is better, or all if there are none such;
    no tasks if it were of one."""
    higher = [name for name, metric in firsts.items() if metric.higher_is_better]
    found = higher or [*firsts]
    return found if len(found) > 1 else []


def primary(metrics: list[Metric]) -> Metric | None:
    """A task's first metric by which the baseline scores anything, else its first; one whose
    scores lie below zero if there is no other."""

    def rank(metric: Metric) -> tuple[bool, bool]:
        scores = metric.scores.values()
        return metric.higher_is_better and max(scores) <= 0, min(scores) < 0

    return min((metric for metric in metrics if metric.has_row), key=rank, default=None)


# -------------------------------------------------------------------------------------- speed


def measure_speeds(
    run: Measured, baseline: Measured | None = None, withheld: str = ""
) -> list[Speed]:
    """By task, and of several tasks together, the last. withheld: why there is no time x; empty if
    there is."""
    names = list((baseline or run).tasks)
    groups = [[name] for name in names] + ([names] if len(names) > 1 else [])
    return [speed for group in groups if (speed := _speed(run, baseline, group, withheld))]


def _speed(
    run: Measured, baseline: Measured | None, names: list[str], withheld: str
) -> Speed | None:
    work = _work_of(run, names)
    if not work:
        return None
    task = names[0] if len(names) == 1 else "overall"
    positions = Positions()
    for name in names:
        positions.add(run.tasks[name].positions)
    pace = _pace(list(work.values()), positions)
    speed = Speed(task, pace, from_earlier_runs=run.is_from_earlier_runs)
    base = _work_of(baseline, names) if baseline else {}
    if base.keys() != work.keys():
        return speed
    pairs = [(base[key], work[key]) for key in work]
    tokens = compare_rates([(own.tokens, theirs.tokens) for theirs, own in pairs])
    if withheld:
        return replace(speed, tokens=tokens, withheld=withheld)
    decode = compare_rates([(theirs.decode, own.decode) for theirs, own in pairs])
    whole = compare_rates([(theirs.end_to_end, own.end_to_end) for theirs, own in pairs])
    return replace(speed, decode=decode, end_to_end=whole, tokens=tokens)


def _work_of(run: Measured, names: list[str]) -> dict[tuple[str, int], Work]:
    return {(name, i): work for name in names for i, work in run.tasks[name].work.items()}


def _pace(work: list[Work], positions: Positions) -> Pace:
    tokens, rounds = sum(item.tokens for item in work), sum(item.rounds for item in work)
    decode, whole = sum(item.decode for item in work), sum(item.end_to_end for item in work)
    return Pace(
        tokens=tokens,
        rounds=rounds,
        decode=decode,
        end_to_end=whole,
        decode_tok_s=tokens / decode if decode else None,
        end_to_end_tok_s=tokens / whole if whole else None,
        **mean_lengths([item.lengths for item in work]),
        saved=1 - rounds / tokens if tokens and rounds else None,
        positions=positions,
    )
