"""A comparison on one screen: a small table, and the verdicts in words."""

from __future__ import annotations

from collections.abc import Iterator

from fly.analysis.compare import Against, Result, ScoreRow, Speed
from fly.analysis.tables import Table, in_words, print_tables, ratio_text, score_texts
from fly.runs.run_settings import with_drafts

_COLUMNS = ("task", "run", "score", "decoding x", "end to end x", "tokens/pass")
_SAYS = {
    "held": "the score held", "unchanged": "every score is the same", "fell": "the score FELL",
    "not enough evidence": "not enough evidence", "decides nothing": "decides nothing",
}  # fmt: skip


def print_result(result: Result) -> None:
    """`fly compare --details` prints the tables that this leaves out."""
    several = len({row.task for other in result.others for row in other.all_rows}) > 1
    table = Table("", _COLUMNS, [*_rows(result)])
    lines = [line for other in result.others for line in _verdict(other, result, several)]
    lines += [f"note: {note}" for note in result.notes]
    print_tables([table], [*lines, "all numbers and intervals: the same command with --details"])


def _rows(result: Result) -> Iterator[list[str]]:
    runs = [(other.name, other.all_rows, other.speeds) for other in result.others]
    for number, first in enumerate(result.others[0].all_rows):
        if not (first.primary or first.task == "overall"):
            continue
        base = _speed_of(result.baseline_speeds, first.task)
        count = first.scores.documents
        label = f"{first.task}, {count} document{'s' if count != 1 else ''}"
        yield [
            label,
            result.baseline,
            _score(first.scores.baseline, count),
            "1",
            "1",
            _length(base),
        ]
        for name, rows, speeds in runs:
            speed = _speed_of(speeds, first.task)
            score = rows[number].scores.other
            yield [
                "",
                with_drafts(name, speed is not None and speed.from_earlier_runs),
                "-" if score is None else _score(score, count),
                ratio_text(speed.decode if speed else None),
                ratio_text(speed.end_to_end if speed else None),
                _length(speed),
            ]


def _speed_of(speeds: list[Speed], task: str) -> Speed | None:
    return next((speed for speed in speeds if speed.task == task), None)


def _score(mean: float, count: int) -> str:
    solved = mean * count
    is_count = 0 <= mean <= 1 and abs(solved - round(solved)) < 1e-6
    return f"{round(solved)} of {count}" if is_count else f"{mean:.4g}"


def _length(speed: Speed | None) -> str:
    return f"{speed.pace.tau:.2f}" if speed and speed.pace.tau else "-"


def _verdict(other: Against, result: Result, several: bool) -> Iterator[str]:
    for row in other.all_rows:
        if row.primary or row.task == "overall" or row.verdict == "fell":
            where = f" on {row.task}" if several else ""
            yield f"{other.name}{where}: {'. '.join(_says(row, result))}."


def _says(row: ScoreRow, result: Result) -> Iterator[str]:
    texts = score_texts(row.scores)
    recovery = f" (recovery {texts.recovery}{texts.interval})"
    yield _SAYS[row.verdict] + recovery * (row.is_judged and row.verdict != "unchanged")
    for line in filter(None, in_words(row.scores, result.demand)):
        if line != row.scores.reason or row.verdict != "unchanged":  # said already
            yield line[0].upper() + line[1:]
