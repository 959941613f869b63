"""`fly compare`'s statistics for the page: every run against the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fly.analysis import scores as measured
from fly.analysis.compare import Against, Row, check_pairs, choose_baseline, compare
from fly.analysis.statistics import Interval, Ratio
from fly.errors import FlyError
from fly.runs.reader import Run


def ordered(runs: Sequence[Run], names: Sequence[str]) -> tuple[list[Run], list[measured.Measured]]:
    """The runs with the baseline first (target-only, else the first), and what compare needs."""
    found = [
        measured.measure(run).model_copy(update={"name": name}) for run, name in zip(runs, names)
    ]
    first = found.index(choose_baseline(found))
    order = [first, *(number for number in range(len(runs)) if number != first)]
    return [runs[number] for number in order], [found[number] for number in order]


def against_first(found: Sequence[measured.Measured]) -> list[dict[str, Any]]:
    """One entry per other run, all judged together, as `fly compare` judges them.

    `refused` says why where a run cannot be compared.
    """
    refused = {number: why for number, other in enumerate(found) if (why := _why(found[0], other))}
    others = [other for number, other in enumerate(found) if number and number not in refused]
    try:
        entries = [_entry(against) for against in compare(found[0], others).others]
    except FlyError as error:  # the runs share no metric
        entries = [{"name": other.name, "refused": str(error)} for other in others]
    for number, why in refused.items():
        entries.insert(number - 1, {"name": found[number].name, "refused": why})
    return entries


def _why(baseline: measured.Measured, other: measured.Measured) -> str | None:
    """Why two runs cannot be compared, in one line; None if they can be."""
    try:
        check_pairs(baseline, other)
    except FlyError as error:
        return str(error)
    return None


def _entry(against: Against) -> dict[str, Any]:
    main = against.overall or next(row for row in against.rows if row.primary)
    deciding = main
    if main.verdict != against.verdict:
        same = (row for row in against.all_rows if row.verdict == against.verdict)
        deciding = next(same, main)  # nothing judges: there is not enough evidence
    speed = against.speeds[-1] if against.speeds else None  # over all tasks, if there are several
    return {
        "name": against.name,
        "main": _row(main),
        "verdict": against.verdict,
        "reason": deciding.scores.reason if deciding is main else _of_row(deciding),
        "decides": deciding.scores.decides,
        "rows": [_row(row) for row in against.all_rows],
        "end_to_end": _ratio(speed.end_to_end) if speed else None,
        "decode": _ratio(speed.decode) if speed else None,
        "tokens": _ratio(speed.tokens) if speed else None,
        "withheld": speed.withheld if speed else "",
        "notes": against.notes,
        "saved": speed.pace.saved if speed else None,
    }


def _of_row(row: Row) -> str:
    return f"{row.label}: {row.scores.reason}"


def _row(row: Row) -> dict[str, Any]:
    scores = row.scores
    return {
        "label": row.label,
        "baseline": scores.baseline,
        "other": scores.other,
        "recovery": scores.recovery,
        **_bounds(scores.interval),
        "documents": scores.documents,
        "lost": scores.lost,
        "won": scores.won,
        "p": scores.p,
        "test": scores.test,
        "verdict": row.verdict,
        "decides": scores.decides,
        "reason": scores.reason,
    }


def _ratio(ratio: Ratio | None) -> dict[str, Any] | None:
    return {"value": ratio.value, **_bounds(ratio.interval)} if ratio else None


def _bounds(interval: Interval | None) -> dict[str, float | None]:
    return {"low": interval.low, "high": interval.high} if interval else {"low": None, "high": None}
