"""Tables in the terminal, as Markdown and as CSV, and a comparison's numbers in words."""

from __future__ import annotations

import csv
import io
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fly.analysis.statistics import Comparison, Demand, Interval, Ratio

WIDTH = 100
_COLOURS = {
    "held": "green", "unchanged": "green", "fell": "red", "not enough evidence": "yellow",
}  # fmt: skip
_TEXTS = ("task", "verdict", "documents", "settings")  # whose words may take several lines
_NUMBERS = (
    "score", "lost/won", "p", "tokens x", "tok/s", "passes saved", "tau", "tau/doc", "AL", "AL/doc",
    "tokens/pass",
)  # fmt: skip
# what a narrow terminal has no room for, the least missed first
_LEFT_OUT_FIRST = (
    "p", "p more texts", "accepted by position", "AL/doc", "tau/doc", "texts: rounding",
    "the run's", "AL", "passes saved", "tok/s", "tokens x", "p more", "lost/won",
    "tokens/pass", "end to end x", "value",
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """In a grouped table the first cell of a group's first row names the group, and is empty or
    the same in its other rows."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]]
    widths: Mapping[str, int] = field(default_factory=dict)  # of columns, where they are fixed

    def groups(self) -> list[Table]:
        """A table per group, whose title is the group's name."""
        found: list[Table] = []
        for name, *cells in self.rows:
            if name and not (found and found[-1].title == name):
                found.append(Table(name, self.columns[1:], [], self.widths))
            found[-1].rows.append(cells)
        return found

    def fit(self, width: int) -> tuple[list[Table], list[str]]:
        """The table in so many characters, its words whole: as a table per task where tasks have no
        room, without some columns where that is not enough; and the names of these."""
        parts, left_out = [self], list[str]()
        if width >= WIDTH and (self.widths or self._least() < width):
            return parts, left_out
        if "task" in self.columns and self._least() >= width:
            parts = self.groups()
            title = f"{self.title}: " if self.title else ""
            parts = [replace(part, title=title + part.title) for part in parts]
        for name in _LEFT_OUT_FIRST:
            if all(part._without(left_out)._least() < width for part in parts):
                break
            left_out += [name] if name in self.columns else []
        return [part._without(left_out) for part in parts], left_out

    def _without(self, names: Sequence[str]) -> Table:
        kept = [i for i, column in enumerate(self.columns) if column not in names]
        rows = [[row[i] for i in kept] for row in self.rows]
        return Table(self.title, [self.columns[i] for i in kept], rows)

    def _least(self) -> int:
        return sum(self._least_width(column) + 2 for column in self.columns)

    def _least_width(self, name: str) -> int:
        """Without breaking a word, or a cell that is no text."""
        at = self.columns.index(name)
        cells = [name, *(row[at] for row in self.rows)]
        cut = str.split if name in _TEXTS else str.splitlines
        parts = [part for cell in cells for part in cut(cell)]
        least = min(14, max(map(cell_len, cells))) if name == "verdict" else 0
        return max(least, *map(cell_len, parts))

    def in_terminal(self) -> RichTable:
        table = RichTable(
            title=Text(visible(self.title), style="bold"),  # names are no markup
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for name in self.columns:
            width = self.widths.get(name)
            table.add_column(
                name,
                justify="right" if name in _NUMBERS else "left",
                overflow="fold",
                width=width,
                no_wrap=width is None and name not in _TEXTS,
                min_width=None if width else self._least_width(name),
            )
        for row in self.rows:
            table.add_row(*map(_colour, row))
        return table

    def as_markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            shown = (visible(cell).replace("\n", "<br>").replace("|", "\\|") for cell in cells)
            return f"| {' | '.join(shown)} |"

        title = [f"### {visible(self.title)}", ""] if self.title else []
        head = [line(self.columns), "|" + "---|" * len(self.columns)]
        return "\n".join([*title, *head, *map(line, self.rows)])


def print_tables(
    tables: Sequence[Table], notes: Sequence[str], heading: str = "", width: int = WIDTH
) -> None:
    """Narrower terminals get a table per task, and fewer columns. width: of other outputs."""
    console = Console(width=None if sys.stdout.isatty() else width, highlight=False)
    fitted = [table.fit(console.width) for table in tables]
    missing = dict.fromkeys(name for _, names in fitted for name in names)
    shown = [table for parts, _ in fitted for table in parts]
    if heading or any(table.title for table in shown[:1]):
        console.print(f"\n{visible(heading)}\n" if heading else "", markup=False)
    for table in shown:
        console.print(table.in_terminal())
    for line in notes:
        console.print(visible(line), markup=False)
    if missing:
        console.print(f"left out at this width: {', '.join(missing)}", markup=False)


def as_markdown(tables: Sequence[Table], notes: Sequence[str]) -> str:
    """For a pull request or a job's summary."""
    lines = "\n".join(f"- {visible(line)}" for line in notes)
    return "\n\n".join([*(table.as_markdown() for table in tables if table.rows), lines]) + "\n"


def as_csv(rows: Iterable[Mapping[str, Any]], first: Iterable[str] = ()) -> str:
    """One line per row, with the keys of all of them, `first` before others; what a row lacks, and
    None, is empty."""
    found = [*rows]
    text = io.StringIO()
    names = dict.fromkeys([*first, *(name for row in found for name in row)])
    writer = csv.DictWriter(text, [*names], lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


def visible(text: str) -> str:
    """The text without what terminals obey and XML refuses: control characters, lone surrogates."""
    return "".join(
        "\ufffd" if unicodedata.category(c) in ("Cc", "Cs", "Cn") and c != "\n" else c for c in text
    )


def _colour(cell: str) -> Text:
    text = Text(visible(cell))
    for verdict, colour in _COLOURS.items():
        if cell.startswith(verdict):
            text.stylize(colour, 0, len(verdict))
    return text


# --------------------------------------------------------------------------- numbers in words


@dataclass(frozen=True)
class ScoreTexts:
    """One row's numbers, as every table and file for people writes them."""

    score: str = "-"
    recovery: str = "-"  # with its interval
    changed: str = "-"  # documents lost and won
    p: str = "-"
    bound: str = ""  # the largest loss that scores without any leave possible; else empty


def score_texts(scores: Comparison, p: float | None = None) -> ScoreTexts:
    """p: instead of the row's own, corrected for more rows."""
    if scores.other is None:
        return ScoreTexts()
    p, recovery = scores.p if p is None else p, "undefined"
    if scores.recovery is not None:
        recovery = f"{scores.recovery:.3f}{interval_text(scores.interval, 3)}"
    return ScoreTexts(
        score=f"{scores.other:.4g}",
        recovery=recovery,
        changed=f"{scores.lost} / {scores.won}",
        p=f"{p:.3f}" if p >= 0.001 else "<0.001",
        bound=f"{scores.bound:.1%}" if scores.bound else "",
    )


def ratio_text(ratio: Ratio | None) -> str:
    return f"{ratio.value:.2f}{interval_text(ratio.interval, 2)}" if ratio else "-"


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
