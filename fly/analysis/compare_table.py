"""A comparison for people: two tables in the terminal, the same as Markdown."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fly.analysis.compare import Result, ScoreRow, Speed
from fly.analysis.statistics import Comparison, Demand, Interval, Ratio
from fly.runs.records import by_position
from fly.runs.settings import with_drafts

WIDTH = 100
_COLOURS = {
    "held": "green", "unchanged": "green", "fell": "red", "not enough evidence": "yellow",
}  # fmt: skip
# The columns, with their widths where they are fixed.
_SCORES: dict[str, int | None] = {
    "run": 14, "score": 7, "recovery [95 %]": 20, "lost/won": 8, "p": 6, "verdict": 33,
}  # fmt: skip
_SPEED: dict[str, int | None] = dict.fromkeys(
    ("task", "run", "decoding x", "end to end x", "tokens x", "tok/s", "saved")
)
_LENGTHS: dict[str, int | None] = dict.fromkeys(
    ("task", "run", "tau", "tau/doc", "AL", "AL/doc", "accepted by position")
)
_NOISE: dict[str, int | None] = dict.fromkeys(
    ("task", "run", "documents", "scores: rounding", "run's", "p more", "texts: rounding",
     "the run's", "p more texts")
)  # fmt: skip
# a task name may fold, an interval may not
_UNFOLDED = ("decoding x", "end to end x", "accepted by position")
_NUMBERS = (
    "score", "lost/won", "p", "tokens x", "tok/s", "saved", "tau", "tau/doc", "AL", "AL/doc",
)  # fmt: skip


def visible(text: str) -> str:
    """The text without what terminals obey and XML refuses: control characters, lone surrogates."""
    return "".join(
        "\ufffd" if unicodedata.category(c) in ("Cc", "Cs", "Cn") and c != "\n" else c for c in text
    )


def print_result(result: Result) -> None:
    """A table of scores per task, one of speeds, and the notes. 100 columns suffice."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(f"\n{_title(result)}\n", markup=False)
    for label, rows in _score_rows(result):
        console.print(table(label, _SCORES, rows))
    if speed := list(_speed_rows(result)):
        console.print(table(f"time x, against {result.baseline}", _SPEED, speed))
        console.print(table("mean acceptance lengths", _LENGTHS, list(_length_rows(result))))
    if result.noise:
        title = "noise floor: documents that differ from the baseline's"
        console.print(table(title, _NOISE, [*_noise_rows(result)]))
    for line in _notes(result):
        console.print(line, markup=False)


def markdown(result: Result) -> str:
    """The tables for a pull request or a job's summary."""
    rows = [
        [label if index == 0 else "", *row]
        for label, group in _score_rows(result)
        for index, row in enumerate(group)
    ]
    parts = [f"### {_title(result)}", markdown_table(["task", *_SCORES], rows)]
    if speed := list(_speed_rows(result)):
        parts += [f"Time x, against {visible(result.baseline)}:", markdown_table([*_SPEED], speed)]
        lengths = list(_length_rows(result))
        parts += ["Mean acceptance lengths:", markdown_table([*_LENGTHS], lengths)]
    if result.noise:
        title = "Noise floor, documents that differ from the baseline's:"
        parts += [title, markdown_table([*_NOISE], [*_noise_rows(result)])]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in _notes(result))]) + "\n"


def table(title: str, columns: dict[str, int | None], rows: list[list[str]]) -> Table:
    table = Table(
        title=Text(visible(title), style="bold"),  # names are no markup
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name, width in columns.items():
        table.add_column(
            name,
            justify="right" if name in _NUMBERS else "left",
            overflow="fold",
            width=width,
            no_wrap=name in _UNFOLDED,
        )
    for row in rows:
        table.add_row(*(_coloured(cell) for cell in row))
    return table


def _coloured(cell: str) -> Text:
    text = Text(visible(cell))
    for verdict, colour in _COLOURS.items():
        if cell.startswith(verdict):
            text.stylize(colour, 0, len(verdict))
    return text


def markdown_table(header: Sequence[str], rows: list[list[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        shown = (visible(cell).replace("\n", "<br>").replace("|", "\\|") for cell in cells)
        return f"| {' | '.join(shown)} |"

    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])


def _title(result: Result) -> str:
    demand = result.demand
    return (
        f"Scores, against {visible(result.baseline)}: held is a recovery of at least "
        f"{demand.min_recovery:g}, with confidence {demand.confidence:g}"
    )


def _score_rows(result: Result) -> Iterator[tuple[str, list[list[str]]]]:
    """Task by task, a label and lines: the baseline's, then every other run's."""
    for rows in zip(*(other.all_rows for other in result.others)):
        row, scores = rows[0], rows[0].scores
        label = f"{row.task}: {row.metric}" + ("" if row.higher_is_better else " (lower is better)")
        count = f"{scores.documents:,} document{'s' if scores.documents != 1 else ''}"
        baseline = [result.baseline, f"{scores.baseline:.4g}", "", "", "", count]
        others = [
            [other.name, *_score_cells(row, result)] for other, row in zip(result.others, rows)
        ]
        yield label, [baseline, *others]


def _score_cells(row: ScoreRow, result: Result) -> list[str]:
    scores = row.scores
    if scores.other is None:
        return ["-", "-", "-", "-", f"{row.verdict}\n{scores.reason}"]
    recovery = "undefined"
    if scores.recovery is not None:
        recovery = f"{scores.recovery:.3f}{interval_text(scores.interval, 3)}"
    return [
        f"{scores.other:.4g}",
        recovery,
        f"{scores.lost} / {scores.won}",
        f"{scores.p:.3f}" if scores.p >= 0.001 else "<0.001",
        "\n".join([row.verdict, *in_words(scores, result.demand)]),
    ]


def interval_text(interval: Interval | None, digits: int) -> str:
    return f" [{interval.low:.{digits}f}, {interval.high:.{digits}f}]" if interval else ""


def in_words(scores: Comparison, demand: Demand) -> list[str]:
    """What stands below a verdict: why, or how many documents would decide."""
    if scores.recovery is None or scores.withheld:
        return [scores.reason]
    if scores.bound is not None and scores.verdict != "held":
        lines = [scores.reason]
        if scores.bound < 1:
            lines.append(f"this rules out a loss above {scores.bound:.1%} of the score")
        if scores.decides is not None and scores.decides > scores.documents:
            lines.append(f"{scores.decides:,} documents would show {demand.min_recovery:g}")
        return lines
    if scores.verdict != "not enough evidence":
        return []
    if scores.decides is None:
        return ["no number would decide"]
    return [f"~{scores.decides:,} documents would decide"]


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
        shown = with_drafts(name, speed.from_earlier_runs)
        yield [label, shown, *_speed_cells(speed, name == result.baseline)]


def _length_rows(result: Result) -> Iterator[list[str]]:
    for label, name, speed in _by_task(result):
        pace = speed.pace
        lengths = (pace.tau, pace.tau_document_mean, pace.al, pace.al_document_mean)
        cells = ["-" if value is None else f"{value:.2f}" for value in lengths]
        yield [label, name, *cells, by_position(pace.positions.unconditional) or "-"]


def _noise_rows(result: Result) -> Iterator[list[str]]:
    for row in result.noise:
        cells = [row.task, row.run, f"{row.scores.documents:,}"]
        for changed in (row.scores, row.texts):
            if changed is None:
                cells += ["-", "-", "-"]
            else:
                cells += [f"{changed.by_rounding:,}", f"{changed.by_run:,}", f"{changed.p:.3f}"]
        yield cells


def _speed_cells(speed: Speed, is_baseline: bool) -> list[str]:
    def ratio(found: Ratio | None) -> str:
        return f"{found.value:.2f}{interval_text(found.interval, 2)}" if found else "-"

    pace = speed.pace
    tokens = f"{speed.tokens.value:.2f}" if speed.tokens else "-"
    return [
        *(["1"] * 3 if is_baseline else [ratio(speed.decode), ratio(speed.end_to_end), tokens]),
        f"{pace.decode_tok_s:.1f}" if pace.decode_tok_s else "-",
        f"{pace.saved:.0%}" if pace.saved is not None else "-",
    ]


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
    return [visible(line) for line in [*lines, *result.notes]]
