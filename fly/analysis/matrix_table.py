"""A matrix as a table per task in the terminal, as Markdown, and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from rich.console import Console

from fly.analysis.compare_table import WIDTH, interval_text, markdown_table, table, visible
from fly.analysis.matrix import Cell, Matrix

_CELL = 22  # columns of the terminal; the drafters' column takes the rest
_AT_ONCE = 3  # rules beside each other: more do not fit
_DRAFTER = "target, drafter"


def print_matrix(matrix: Matrix) -> None:
    """A table per task and three rules, and the notes. 100 columns suffice."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    for title, cells in _titled(matrix):
        rules = list(dict.fromkeys(cell.rule for cell in cells))
        for start in range(0, len(rules), _AT_ONCE):
            shown = rules[start : start + _AT_ONCE]
            columns: dict[str, int | None] = {_DRAFTER: None, **dict.fromkeys(shown, _CELL)}
            console.print(table(title, columns, list(_rows(cells, shown))))
    for line in _notes(matrix):
        console.print(line, markup=False)


def markdown(matrix: Matrix) -> str:
    """The tables for a pull request or a job's summary."""
    parts = []
    for title, cells in _titled(matrix):
        rules = list(dict.fromkeys(cell.rule for cell in cells))
        parts += [
            f"### {visible(title)}",
            markdown_table([_DRAFTER, *rules], [*_rows(cells, rules)]),
        ]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in _notes(matrix))]) + "\n"


def as_json(matrix: Matrix) -> str:
    """The cells for programs; docs/compare.md defines the keys."""
    return json.dumps(matrix.as_dict, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _titled(matrix: Matrix) -> Iterator[tuple[str, list[Cell]]]:
    for (task, metric), cells in matrix.tables.items():
        lower = "" if cells[0].row.higher_is_better else " (lower is better)"
        yield f"{task}: {metric}{lower}", cells


def _rows(cells: list[Cell], rules: list[str]) -> Iterator[list[str]]:
    """Target by target: a row of the target alone, then one per drafter."""
    for target in dict.fromkeys(cell.target for cell in cells):
        family = [cell for cell in cells if cell.target == target]
        yield [f"{target}\nalone: {_alone(family[0])}", *[""] * len(rules)]
        for drafter in dict.fromkeys(cell.drafter for cell in family):
            by_rule = {cell.rule: _text(cell) for cell in family if cell.drafter == drafter}
            if any(rule in by_rule for rule in rules):
                yield [drafter, *(by_rule.get(rule, "") for rule in rules)]


def _alone(cell: Cell) -> str:
    scores = cell.row.scores
    words = [f"{scores.baseline:.4g}", f"{scores.documents:,} documents"]
    if cell.alone and cell.alone.pace.end_to_end_tok_s:
        words.append(f"{cell.alone.pace.end_to_end_tok_s:.1f} tok/s")
    return ", ".join(words)


def _text(cell: Cell) -> str:
    scores, speed = cell.row.scores, cell.speed
    if cell.p is None:
        return f"-\n{scores.reason}"
    recovery = "undefined"
    if scores.recovery is not None:
        recovery = f"{scores.recovery:.3f}"
        recovery += "" if scores.bound else interval_text(scores.interval, 3)
    p = f"{cell.p:.3f}" if cell.p >= 0.001 else "<0.001"
    lines = [recovery, f"{scores.lost} / {scores.won}, p {p}"]
    if scores.bound:
        lines.insert(1, f"loss <= {scores.bound:.1%}")
    if speed:
        ratio = speed.end_to_end
        lines.append(f"x {ratio.value:.2f}{interval_text(ratio.interval, 2)}" if ratio else "x -")
        lines.append(f"tau {speed.pace.tau:.2f}" if speed.pace.tau else "tau -")
    return "\n".join(lines)


def _notes(matrix: Matrix) -> list[str]:
    several = f" over all {matrix.tests} cells" if matrix.tests > 1 else ""
    lines = [
        "Every run against its target alone. Recovery: the share of the score that is kept [95 %]; "
        "lost / won: documents that score worse / better, and p.",
        f"p: that the two score the same, corrected by Holm{several}. A large p does not say that "
        "scores held: the interval says how much may be lost, and, where no document was, "
        "`loss <=` the share of the score that so few documents leave possible [95 %].",
        "x: seconds of the target alone over the run's, end to end [95 %]; tau: tokens per round.",
    ]
    return [visible(line) for line in [*lines, *matrix.notes]]
