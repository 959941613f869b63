"""A comparison for people: two tables in the terminal, the same as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from fly.evaluation.compare import Against, Pace, Result, Row
from fly.evaluation.statistics import Comparison, Ratio, bound_of_no_loss

_WIDTH = 100
_COLOURS = {"held": "green", "fell": "red", "not enough evidence": "yellow"}
_SCORES = ("task", "run", "score", "recovery [95 %]", "lost/won", "p", "verdict")
_SPEED = ("task", "run", "tok/s", "decoding x [95 %]", "end to end x [95 %]", "tau", "saved")


def print_result(result: Result) -> None:
    """Both tables, what the columns mean in a line, and the notes. 100 columns suffice."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    console.print()
    console.print(_table(_title(result), _SCORES, _score_rows(result, colours=True)))
    speed = list(_speed_rows(result))
    if speed:
        console.print(_table(f"speed, against {result.baseline}", _SPEED, speed))
    for line in _notes(result):
        console.print(line, markup=False, soft_wrap=False)


def markdown(result: Result) -> str:
    """The tables for a pull request or a job's summary."""
    parts = [f"### {_title(result)}", _markdown(_SCORES, _score_rows(result))]
    speed = list(_speed_rows(result))
    if speed:
        parts += [f"Speed, against {result.baseline}:", _markdown(_SPEED, speed)]
    return "\n\n".join([*parts, *(f"- {line}" for line in _notes(result))]) + "\n"


def _table(
    title: str, header: tuple[str, ...], rows: Iterator[list[str]] | list[list[str]]
) -> Table:
    table = Table(title=title, title_justify="left", pad_edge=False)
    for name in header:
        number = name in ("score", "lost/won", "p", "tok/s", "tau", "saved")
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _markdown(header: tuple[str, ...], rows: Iterator[list[str]] | list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        cells = [cell.replace("\n", "<br>").replace("|", "\\|") for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _title(result: Result) -> str:
    demand = result.demand
    return (
        f"scores, against {result.baseline}: held if recovery is at least "
        f"{demand.min_recovery:g}, with confidence {demand.confidence:g}"
    )


def _score_rows(result: Result, colours: bool = False) -> Iterator[list[str]]:
    """Task by task: the baseline's line, then every other run's."""
    for index, row in enumerate(result.others[0].judged):
        first = row.scores
        task = f"{row.task}\n{row.metric}" + ("" if row.higher_is_better else "\n(lower is better)")
        yield [task, result.baseline, f"{first.baseline:.4g}", "", "", "", _documents(first)]
        for other in result.others:
            yield ["", other.name, *_cells(_same(other, index), result, colours)]


def _same(other: Against, index: int) -> Row:
    return other.judged[index]


def _documents(scores: Comparison) -> str:
    return f"{scores.documents:,} document{'s' if scores.documents != 1 else ''}"


def _cells(row: Row, result: Result, colours: bool) -> list[str]:
    scores = row.scores
    recovery = "undefined"
    if scores.recovery is not None:
        recovery = f"{scores.recovery:.3f}"
        if scores.interval is not None:
            recovery += f" [{scores.interval.low:.3f}, {scores.interval.high:.3f}]"
    verdict = scores.verdict
    text = f"[{_COLOURS[verdict]}]{verdict}[/]" if colours else verdict
    recovery = recovery.replace("[", r"\[") if colours else recovery
    return [
        f"{scores.other:.4g}",
        recovery,
        f"{scores.lost} / {scores.won}",
        f"{scores.p:.3f}" if scores.p >= 0.001 else "<0.001",
        "\n".join([text, *in_words(scores, result.demand.confidence)]),
    ]


def in_words(scores: Comparison, confidence: float) -> list[str]:
    """What stands below a verdict: why, or how many documents would decide."""
    if scores.recovery is None:
        return [scores.reason]
    if scores.verdict == "held" and scores.lost == 0:
        bound = bound_of_no_loss(scores.documents, confidence)
        shown = "" if scores.decides is None else f"; {scores.decides:,} for the demand"
        return [scores.reason, f"shows loss < {bound:.1%}{shown}"]
    if scores.verdict != "not enough evidence":
        return []
    if scores.decides is None:
        return ["no number of documents would decide"]
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
                    ratios = ["1", "1"] if name == result.baseline else ratios
                    tau, saved = _tau(speed.pace)
                    rate = speed.pace.decode_tok_s
                    yield [label, name, f"{rate:.1f}" if rate else "-", *ratios, tau, saved]
                    label = ""


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    if ratio.interval is None:
        return f"{ratio.value:.2f}"
    return f"{ratio.value:.2f} ({ratio.interval.low:.2f} to {ratio.interval.high:.2f})"


def _tau(pace: Pace) -> tuple[str, str]:
    return (
        f"{pace.tau:.2f}" if pace.tau is not None else "-",
        f"{pace.saved:.0%}" if pace.saved is not None else "-",
    )


def _notes(result: Result) -> list[str]:
    lines = ["lost / won: documents that score worse / better than the baseline's."]
    if not result.baseline_speeds:
        lines.append(f"no speed ratios: {result.baseline} has no records of requests")
    return lines + result.notes
