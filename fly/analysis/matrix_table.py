"""A matrix as a table per task in the terminal, as Markdown, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator

from fly.analysis.matrix import Cell, Matrix
from fly.analysis.tables import Table, as_markdown, print_tables, ratio_text, score_texts

_CELL = 22  # columns of the terminal; the drafters' column takes the rest
_AT_ONCE = 3  # rules beside each other: more do not fit
_DRAFTER = "target, drafter"


def print_matrix(matrix: Matrix) -> None:
    """A table per task and three rules, and the notes. 100 columns suffice."""
    print_tables([*_tables(matrix, _AT_ONCE)], _notes(matrix))


def markdown(matrix: Matrix) -> str:
    """The tables for a pull request or a job's summary."""
    return as_markdown([*_tables(matrix, len(matrix.cells))], _notes(matrix))


def as_json(matrix: Matrix) -> str:
    """The cells for programs; docs/compare.md defines the keys."""
    return json.dumps(matrix.as_dict, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _tables(matrix: Matrix, at_once: int) -> Iterator[Table]:
    """at_once: the rules beside each other in one table."""
    for (task, metric), cells in matrix.tables.items():
        lower = "" if cells[0].row.higher_is_better else " (lower is better)"
        rules = list(dict.fromkeys(cell.rule for cell in cells))
        for start in range(0, len(rules), at_once):
            shown = rules[start : start + at_once]
            rows, widths = [*_rows(cells, shown)], dict.fromkeys(shown, _CELL)
            yield Table(f"{task}: {metric}{lower}", [_DRAFTER, *shown], rows, widths)


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
    texts = score_texts(scores, cell.p)
    lines = [texts.recovery]
    if texts.bound:
        lines = [f"{scores.recovery:.3f}", f"loss <= {texts.bound}"]
    lines.append(f"{texts.changed}, p {texts.p}")
    if speed:
        lines.append(f"x {ratio_text(speed.end_to_end)}")
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
    return [*lines, *matrix.notes]
