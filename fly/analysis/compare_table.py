"""A comparison's tables, and a short one with the verdicts in words for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

from fly.analysis.compare import Against, CurvePoint, Result, ScoreRow, Speed, find_speed
from fly.analysis.tables import (
    Table,
    as_csv,
    as_markdown,
    in_words,
    print_tables,
    ratio_text,
    score_texts,
)
from fly.runs.records import by_position
from fly.runs.run_settings import with_drafts

Categories = Sequence[dict[str, Any]]
_SCORES = ("task", "run", "score", "recovery [95 %]", "lost/won", "p", "verdict")
_WIDTHS = {"run": 14, "score": 7, "recovery [95 %]": 20, "lost/won": 8, "p": 6, "verdict": 33}
_SPEED = ("task", "run", "decoding x", "end to end x", "tokens x", "tok/s", "passes saved")
_LENGTHS = ("task", "run", "tau", "tau/doc", "AL", "AL/doc", "accepted by position")
_CATEGORIES = (
    "task: category", "run", "score", "recovery", "lost/won", "equal texts", "tau", "AL",
    "decoding x",
)  # fmt: skip
_GATES = ("task", "run", "gate", "value", "verdict")
_NOISE = (
    "task", "run", "documents", "scores: rounding", "run's", "p more", "texts: rounding",
    "the run's", "p more texts",
)  # fmt: skip
_SHORT = ("task", "run", "score", "decoding x", "end to end x", "tokens/pass")
_SAYS = {
    "held": "the score held", "unchanged": "every score is the same", "fell": "the score FELL",
    "not enough evidence": "not enough evidence", "decides nothing": "decides nothing",
}  # fmt: skip
_CURVE = ("run", "requests at once", "tok/s for all", "tok/s per user", "verdict")


def print_result(result: Result, categories: Categories = ()) -> None:
    """A table of scores per task, one of speeds, and the notes. 100 columns suffice. categories:
    what `categories.rows` gives."""
    scores, *others = _tables(result, categories)
    heading = scores.title if scores.rows else ""
    print_tables([*scores.groups(), *others], _notes(result), heading=heading)


def markdown(result: Result, categories: Categories = ()) -> str:
    """The tables for a pull request or a job's summary."""
    return as_markdown(_tables(result, categories), _notes(result))


def _tables(result: Result, categories: Categories) -> list[Table]:
    """The scores, and whatever else was asked for or measured."""
    demand = result.demand
    scores = (
        f"Scores, against {result.baseline}: held is a recovery of at least "
        f"{demand.min_recovery:g}, with confidence {demand.confidence:g}"
    )
    curve = [
        [point.run, str(point.concurrency), f"{point.tok_s:.1f}", f"{point.tok_s_per_user:.1f}",
         point.verdict]
        for point in result.curve
    ]  # fmt: skip
    noise = "Noise floor: documents that differ from the baseline's"
    others = [
        Table("By category", _CATEGORIES, [*_category_rows(categories)]),
        Table(f"Gates, with confidence {demand.confidence:g}", _GATES, [*_gate_rows(result)]),
        Table(f"Time x, against {result.baseline}", _SPEED, [*_speed_rows(result)]),
        Table("Mean acceptance lengths", _LENGTHS, [*_length_rows(result)]),
        Table("Throughput against interactivity", _CURVE, curve),
        Table(noise, _NOISE, [*_noise_rows(result)]),
    ]
    found = Table(scores, _SCORES, [*_score_rows(result)], _WIDTHS)
    return [found, *(table for table in others if table.rows)]


def curve_csv(result: Result) -> str:
    """The curve for a plotting program."""
    return as_csv(map(asdict, result.curve), [field.name for field in fields(CurvePoint)])


def _gate_rows(result: Result) -> Iterator[list[str]]:
    for other in result.others:
        for row in other.gates:
            verdict = row.verdict + (f": {row.reason}" if row.reason else "")
            value = ratio_text(row.value)
            yield [row.gate.task or "overall", other.name, row.gate.label, value, verdict]


def _score_rows(result: Result) -> Iterator[list[str]]:
    """Task by task, the baseline's row, which names the task, then every other run's."""
    for rows in zip(*(other.all_rows for other in result.others)):
        row, scores = rows[0], rows[0].scores
        label = f"{row.task}: {row.metric}" + ("" if row.higher_is_better else " (lower is better)")
        count = f"{scores.documents:,} document{'s' if scores.documents != 1 else ''}"
        if scores.clusters is not None:
            count += f" in {scores.clusters:,} clusters"
        yield [label, result.baseline, f"{scores.baseline:.4g}", "", "", "", count]
        for other, row in zip(result.others, rows):
            texts = score_texts(row.scores)
            verdict = "\n".join([row.verdict, *in_words(row.scores, result.demand)])
            yield ["", other.name, texts.score, texts.recovery, texts.changed, texts.p, verdict]


def _by_task(result: Result) -> Iterator[tuple[str, str, Speed]]:
    """(task, run, its speed); a task's name stands in its first row only."""
    runs = [(result.baseline, result.baseline_speeds)]
    runs += [(other.name, other.speeds) for other in result.others]
    for task in dict.fromkeys(speed.task for _, speeds in runs for speed in speeds):
        label = task
        for name, speeds in runs:
            for speed in (speed for speed in speeds if speed.task == task):
                yield label, name, speed
                label = ""


def _speed_rows(result: Result) -> Iterator[list[str]]:
    for label, name, speed in _by_task(result):
        shown, pace = with_drafts(name, speed.from_earlier_runs), speed.pace
        tokens = f"{speed.tokens.value:.2f}" if speed.tokens else "-"
        ratios = [ratio_text(speed.decode), ratio_text(speed.end_to_end), tokens]
        rate = f"{pace.decode_tok_s:.1f}" if pace.decode_tok_s else "-"
        saved = f"{pace.saved:.0%}" if pace.saved is not None else "-"
        yield [label, shown, *(["1"] * 3 if name == result.baseline else ratios), rate, saved]


def _length_rows(result: Result) -> Iterator[list[str]]:
    for label, name, speed in _by_task(result):
        pace = speed.pace
        lengths = (pace.tau, pace.tau_document_mean, pace.al, pace.al_document_mean)
        cells = ["-" if value is None else f"{value:.2f}" for value in lengths]
        yield [label, name, *cells, by_position(pace.positions.unconditional) or "-"]


def _category_rows(categories: Categories) -> Iterator[list[str]]:
    last = ""
    for row in categories:
        label = f"{row['task']}: {row['category']} ({row['documents']:,})"
        changed = "" if row["lost"] is None else f"{row['lost']} / {row['won']}"
        numbers = [row[key] for key in ("score", "recovery", "tau", "al", "decode_x")]
        score, recovery, *rest = ("-" if n is None else f"{n:.3g}" for n in numbers)
        equal = "" if row["equal_texts"] is None else f"{row['equal_texts']:,}"
        yield ["" if label == last else label, row["run"], score, recovery, changed, equal, *rest]
        last = label


def _noise_rows(result: Result) -> Iterator[list[str]]:
    for row in result.noise:
        cells = [row.task, row.run, f"{row.scores.documents:,}"]
        for changed in (row.scores, row.texts):
            if changed is None:
                cells += ["-", "-", "-"]
            else:
                cells += [f"{changed.by_rounding:,}", f"{changed.by_run:,}", f"{changed.p:.3f}"]
        yield cells


def _notes(result: Result) -> list[str]:
    lines = ["lost / won: documents that score worse / better than the baseline's."]
    if result.baseline_speeds:
        lines.append(
            f"time x: seconds of {result.baseline} over the run's for the same documents [95 %]; "
            "tokens x: emitted tokens over its."
        )
        lines.append(
            "tau: tokens per round; AL: 1 + accepted draft tokens per draft; both of all tokens, "
            "so that long outputs weigh more. /doc: means over documents. By position: shares of "
            "all drafts."
        )
    else:
        lines.append(f"no time x: {result.baseline} has no records of requests")
    if result.noise:
        lines.append(
            "noise floor: the baseline's decoding again, with another number of sequences, changes "
            "so many documents by rounding alone; p more: the chance that a run would change so "
            "many more if it, too, only rounded. Where p is large, a loss need not be the rule's."
        )
    if result.verdicts > 1:
        doubt = 1 - result.demand.confidence
        lines.append(
            f"{result.verdicts} rows are judged together: fell leaves a doubt of at most "
            f"{doubt:.3g} / {result.verdicts}."
        )
    return [*lines, *result.notes]


# ---------------------------------------------------------------------------------- on one screen


def print_short(result: Result) -> None:
    """`fly compare --details` prints the tables that this leaves out."""
    several = len({row.task for other in result.others for row in other.all_rows}) > 1
    table = Table("", _SHORT, [*_short_rows(result)])
    lines = [line for other in result.others for line in _short_verdict(other, result, several)]
    lines += [f"note: {note}" for note in result.notes]
    print_tables([table], [*lines, "all numbers and intervals: the same command with --details"])


def _short_rows(result: Result) -> Iterator[list[str]]:
    for rows in zip(*(other.all_rows for other in result.others)):
        task, base = rows[0].task, rows[0].scores
        if not (rows[0].primary or task == "overall"):
            continue
        count = base.documents
        label = f"{task}, {count} document{'s' if count != 1 else ''}"
        length = _length(find_speed(result.baseline_speeds, task))
        yield [label, result.baseline, _solved(base.baseline, count), "1", "1", length]
        for other, row in zip(result.others, rows):
            speed, mean = find_speed(other.speeds, task), row.scores.other
            score = "-" if mean is None else _solved(mean, count)
            shown = with_drafts(other.name, speed is not None and speed.from_earlier_runs)
            ratios = (speed.decode, speed.end_to_end) if speed else (None, None)
            yield ["", shown, score, *map(ratio_text, ratios), _length(speed)]
    scored = {row.task for other in result.others for row in other.all_rows}
    for label, name, speed in _by_task(result):
        if speed.task not in scored:
            ratios = speed.decode, speed.end_to_end
            cells = ["1", "1"] if name == result.baseline else map(ratio_text, ratios)
            shown = with_drafts(name, speed.from_earlier_runs)
            yield [label, shown, "-", *cells, _length(speed)]


def _solved(mean: float, count: int) -> str:
    solved = mean * count
    is_count = 0 <= mean <= 1 and abs(solved - round(solved)) < 1e-6
    return f"{round(solved)} of {count}" if is_count else f"{mean:.4g}"


def _length(speed: Speed | None) -> str:
    return f"{speed.pace.tau:.2f}" if speed and speed.pace.tau else "-"


def _short_verdict(other: Against, result: Result, several: bool) -> Iterator[str]:
    for row in other.all_rows:
        if row.primary or row.task == "overall" or row.verdict == "fell":
            where = f" on {row.task}" if several else ""
            yield f"{other.name}{where}: {'. '.join(_in_short(row, result))}."


def _in_short(row: ScoreRow, result: Result) -> Iterator[str]:
    recovery = f" (recovery {score_texts(row.scores).recovery})"
    yield _SAYS[row.verdict] + recovery * (row.verdict not in ("decides nothing", "unchanged"))
    for line in filter(None, in_words(row.scores, result.demand)):
        if line != row.scores.reason or row.verdict != "unchanged":  # said already
            yield line[0].upper() + line[1:]
