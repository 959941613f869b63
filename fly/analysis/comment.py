"""A comparison as a comment of a pull request: verdict, one table, changed documents folded.

Model texts stand in code blocks only, whose fences are longer than any in the texts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from urllib.parse import quote

from fly.analysis import compare_table
from fly.analysis.compare import Against, Result, ScoreRow, find_speed
from fly.analysis.scores import Measured
from fly.analysis.tables import Table, ratio_text, score_texts, visible

MARK = "<!-- fly compare -->"  # by which a job finds the comment that it updates
_SIGNS = {"held": "\u2705", "unchanged": "\u2705", "fell": "\u274c"}
_MOST = 30  # changed documents that are shown
_ROOM = 40_000  # characters of their differences: GitHub takes 65,536 in all
_LINES, _WIDTH = 20, 160  # of one document's difference
_COLUMNS = (
    "task", "run", "score", "recovery [95 %]", "lost / won", "time x", "tau", "verdict",
)  # fmt: skip


def markdown(
    result: Result,
    runs: Sequence[Measured],
    link: str | None = None,
    groups: compare_table.Categories = (),
) -> str:
    """The comment. runs: all that were compared. link: address of the report, whose documents are
    linked then. groups: of `categories.rows`."""
    by_name = {run.name: run for run in runs}
    parts = [MARK, *_headlines(result), *([f"[The report]({link})"] if link else [])]
    rows = [*_rows(result)]
    if rows:
        parts.append(Table("", _COLUMNS, rows).as_markdown())
    for other in result.others:
        parts += _changes(other, by_name[result.baseline], by_name[other.name], link)
    parts.append(_fold("All tables and notes", compare_table.markdown(result, groups)))
    return "\n\n".join(parts) + "\n"


def _headlines(result: Result) -> Iterator[str]:
    for other in result.others:
        sign = _SIGNS.get(other.verdict, "\u2754")
        said = "no scores"
        if (main := other.main) is not None:
            texts, label = score_texts(main.scores), _inline(main.label)
            said = f"{label}: recovery {texts.recovery}, {texts.changed} documents lost / won"
        name = _inline(f"{other.name} against {result.baseline}")
        yield f"### {sign} {name}: {other.verdict}\n\n{said}"
        for gate in other.gates:
            if gate.verdict != "held":
                task = f"{_inline(gate.gate.task)}: " if gate.gate.task else ""
                reason = f" ({_inline(gate.reason)})" if gate.reason else ""
                value = ratio_text(gate.value)
                yield f"- {task}{gate.gate.label}: **{gate.verdict}**, {value}{reason}"


def _rows(result: Result) -> Iterator[list[str]]:
    for other in result.others:
        for row in other.all_rows:
            texts, speed = score_texts(row.scores), find_speed(other.speeds, row.task)
            tau = speed.pace.tau if speed else None
            yield [
                row.label, other.name, f"{row.scores.baseline:.4g} \u2192 {texts.score}",
                texts.recovery, texts.changed,
                ratio_text(speed.end_to_end) if speed else "-",
                f"{tau:.2f}" if tau else "-", row.verdict,
            ]  # fmt: skip


def _changes(other: Against, base: Measured, run: Measured, link: str | None) -> Iterator[str]:
    """The folded list of one run's lost and won documents, by every task's first metric."""
    found = [
        (is_won, row.task, doc_id)
        for row in other.rows
        if row.primary
        for is_won, doc_id in _changed(row, base, run)
    ]
    found.sort(key=lambda change: change[0])
    lost = sum(not is_won for is_won, *_ in found)
    shown, room = list[str](), _ROOM
    for is_won, task, doc_id in found[:_MOST]:
        name = f"{task}, document {doc_id}"
        address = f"{link}#document/{quote(task, safe='')}/{doc_id}"
        title = f"[{_inline(name)}]({address})" if link else _inline(name)
        text = f"**{'won' if is_won else 'lost'}**: {title}\n\n"
        text += _difference(base.tasks[task].texts, run.tasks[task].texts, doc_id)
        if (room := room - len(text)) < 0:
            break
        shown.append(text)
    if shown:
        if len(shown) < len(found):
            shown.append(f"{len(found) - len(shown)} more are not shown.")
        head = f"{_inline(run.name)}: {lost} documents lost, {len(found) - lost} won"
        yield _fold(head, "\n\n".join(shown))


def _changed(row: ScoreRow, base: Measured, run: Measured) -> Iterator[tuple[bool, int]]:
    ours, theirs = (each.tasks[row.task].metric(row.metric) for each in (base, run))
    if ours is not None and theirs is not None:
        for doc_id, before in ours.scores.items():
            if (after := theirs.scores.get(doc_id, before)) != before:
                yield (after > before) == row.higher_is_better, doc_id


def _difference(
    base: dict[int, tuple[str, ...]], run: dict[int, tuple[str, ...]], doc_id: int
) -> str:
    """The first pair of texts that differ, line by line; a stored baseline has none."""
    pairs = zip(base.get(doc_id, ()), run.get(doc_id, ()))
    before, after = next(((a, b) for a, b in pairs if a != b), ("", ""))
    if before == after:
        return "No texts that differ are known."
    lines = [*difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1)][2:]
    cut = [line[:_WIDTH] + "\u2026" * (len(line) > _WIDTH) for line in lines[:_LINES]]
    text = visible("\n".join([*cut, *(["\u2026"] if len(lines) > _LINES else [])]))
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}diff\n{text}\n{fence}"


def _fold(head: str, text: str) -> str:
    return f"<details><summary>{head}</summary>\n\n{text.rstrip()}\n\n</details>"


def _inline(text: str) -> str:
    """A name as plain text: no markup, no mention of people."""
    escaped = re.sub(r"([\\`*_\[\]<>|@#~&])", r"\\\1", visible(text).replace("\n", " "))
    return escaped.replace("\\@", "&#64;").replace("\\<", "&lt;")
