"""A comparison for people: two tables in the terminal, the same as Markdown."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from fly.analysis.compare import Demand, Pace, Result, Row
from fly.analysis.statistics import Comparison, Interval, Ratio, bound_of_no_loss

_WIDTH = 100
_COLOURS = {
    "held": "green", "unchanged": "green", "fell": "red", "not enough evidence": "yellow",
}  # fmt: skip
_SCORES = ("run", "score", "recovery [95 %]", "lost/won", "p", "verdict")
_SPEED = ("task", "run", "decoding x", "end to end x", "tokens x", "tok/s", "tau", "saved")
_INTERVALS = ("decoding x", "end to end x")
_WIDTHS = {"run": 14, "score": 7, "recovery [95 %]": 20, "lost/won": 8, "p": 6, "verdict": 33}
_NUMBERS = ("score", "lost/won", "p", "tokens x", "tok/s", "tau", "saved")


def visible(text: str) -> str:
    """The text without what terminals obey and XML refuses: control characters, lone surrogates."""
    return "".join(
        "\ufffd" if unicodedata.category(c) in ("Cc", "Cs", "Cn") and c != "\n" else c for c in text
    )


def print_result(result: Result) -> None:
    """A table of scores per task, one of speeds, and the notes. 100 columns suffice."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    console.print(f"\n{_title(result)}\n", markup=False)
    for label, rows in _score_rows(result):
        console.print(_table(label, _SCORES, rows))
    speed = list(_speed_rows(result))
    if speed:
        console.print(_table(f"time x, against {result.baseline}", _SPEED, speed))
    for line in _notes(result):
        console.print(line, markup=False)


def markdown(result: Result) -> str:
    """The tables for a pull request or a job's summary."""
    rows = [
        [label if index == 0 else "", *row]
        for label, group in _score_rows(result)
        for index, row in enumerate(group)
    ]
    parts = [f"### {_title(result)}", _markdown(("task", *_SCORES), rows)]
    speed = list(_speed_rows(result))
    if speed:
        parts += [f"Time x, against {visible(result.baseline)}:", _markdown(_SPEED, speed)]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in _notes(result))]) + "\n"


def _table(title: str, header: tuple[str, ...], rows: list[list[str]]) -> Table:
    table = Table(
        title=Text(visible(title), style="bold"),  # names are no markup
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in header:
        justify: JustifyMethod = "right" if name in _NUMBERS else "left"
        width = _WIDTHS.get(name) if header is _SCORES else None
        whole = name in _INTERVALS  # rather a folded task name than a folded interval
        table.add_column(name, justify=justify, overflow="fold", width=width, no_wrap=whole)
    for row in rows:
        table.add_row(*(_coloured(cell) for cell in row))
    return table


def _coloured(cell: str) -> Text:
    text = Text(visible(cell))
    for verdict, colour in _COLOURS.items():
        if cell.startswith(verdict):
            text.stylize(colour, 0, len(verdict))
    return text


def _markdown(header: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        cells = [visible(cell).replace("\n", "<br>").replace("|", "\\|") for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _title(result: Result) -> str:
    demand = result.demand
    return (
        f"Scores, against {visible(result.baseline)}: held is a recovery of at least "
        f"{demand.min_recovery:g}, with confidence {demand.confidence:g}"
    )


def _score_rows(result: Result) -> Iterator[tuple[str, list[list[str]]]]:
    """Task by task, a label and lines: the baseline's, then every other run's."""
    for index, row in enumerate(result.others[0].all_rows):
        first = row.scores
        label = f"{row.task}: {row.metric}" + ("" if row.higher_is_better else " (lower is better)")
        count = f"{first.documents:,} document{'s' if first.documents != 1 else ''}"
        lines = [[result.baseline, _number(first.baseline), "", "", "", count]]
        for other in result.others:
            lines.append([other.name, *_cells(other.all_rows[index], result)])
        yield label, lines


def _number(score: float) -> str:
    return f"{score:.4g}"


def _cells(row: Row, result: Result) -> list[str]:
    scores = row.scores
    if scores.other is None:
        return ["-", "-", "-", "-", f"{row.verdict}\n{scores.reason}"]
    recovery = "undefined"
    if scores.recovery is not None:
        recovery = f"{scores.recovery:.3f}{_interval(scores.interval, 3)}"
    return [
        _number(scores.other),
        recovery,
        f"{scores.lost} / {scores.won}",
        f"{scores.p:.3f}" if scores.p >= 0.001 else "<0.001",
        "\n".join([row.verdict, *in_words(scores, result.demand)]),
    ]


def _interval(interval: Interval | None, digits: int) -> str:
    if interval is None:
        return ""
    return f" [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def in_words(scores: Comparison, demand: Demand) -> list[str]:
    """What stands below a verdict: why, or how many documents would decide."""
    if scores.recovery is None:
        return [scores.reason]
    if scores.lost == 0 and scores.verdict != "held":
        bound = bound_of_no_loss(scores.documents, demand.confidence)
        lines = [scores.reason, f"this rules out losses above {bound:.1%}"]
        if scores.decides is not None and scores.decides > scores.documents:
            lines.append(f"{scores.decides:,} documents would show {demand.min_recovery:g}")
        return lines
    if scores.verdict != "not enough evidence":
        return []
    if scores.decides is None:
        return ["no number would decide"]
    return [f"~{scores.decides:,} documents would decide"]


def _speed_rows(result: Result) -> Iterator[list[str]]:
    runs = [(result.baseline, result.baseline_speeds)]
    runs += [(other.name, other.speeds) for other in result.others]
    tasks = dict.fromkeys(speed.task for _, speeds in runs for speed in speeds)
    for task in tasks:
        label = task
        for name, speeds in runs:
            for speed in speeds:
                if speed.task == task:
                    ratios = [_ratio(speed.decode), _ratio(speed.end_to_end)]
                    ratios.append(f"{speed.tokens.value:.2f}" if speed.tokens else "-")
                    ratios = ["1"] * 3 if name == result.baseline else ratios
                    tau, saved = _tau(speed.pace)
                    rate = speed.pace.decode_tok_s
                    yield [label, name, *ratios, f"{rate:.1f}" if rate else "-", tau, saved]
                    label = ""


def _ratio(ratio: Ratio | None) -> str:
    return "-" if ratio is None else f"{ratio.value:.2f}{_interval(ratio.interval, 2)}"


def _tau(pace: Pace) -> tuple[str, str]:
    return (
        f"{pace.tau:.2f}" if pace.tau is not None else "-",
        f"{pace.saved:.0%}" if pace.saved is not None else "-",
    )


def _notes(result: Result) -> list[str]:
    lines = ["lost / won: documents that score worse / better than the baseline's."]
    if result.baseline_speeds:
        lines.append(
            f"time x: seconds of {result.baseline} over the run's for the same documents [95 %]; "
            "tokens x: emitted tokens over its."
        )
    if not result.baseline_speeds:
        lines.append(f"no time x: {result.baseline} has no records of requests")
    if result.verdicts > 1:
        doubt = 1 - result.demand.confidence
        lines.append(
            f"{result.verdicts} rows are judged together: fell leaves a doubt of at most "
            f"{doubt:.3g} / {result.verdicts}."
        )
    return [visible(line) for line in [*lines, *result.notes]]
