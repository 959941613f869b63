"""`fly compare`'s statistics for the page: every run against the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fly.analysis import matrix
from fly.analysis.compare import Against, ScoreRow, check_pairs, compare
from fly.analysis.scores import Measured
from fly.errors import FlyError


def against_first(runs: Sequence[Measured]) -> list[dict[str, Any]]:
    """One entry per other run, all judged together, as `fly compare` judges them.

    `refused` says why a run cannot be compared.
    """
    baseline, *others = runs
    refused = {run.name: why for run in others if (why := _why_not(baseline, run))}
    judged = [run for run in others if run.name not in refused]
    try:
        entries = {found.name: _entry(found) for found in compare(baseline, judged).others}
    except FlyError as error:  # the runs share no metric
        entries = {}
        refused |= {run.name: str(error) for run in judged}
    return [
        entries.get(run.name) or {"name": run.name, "refused": refused[run.name]} for run in others
    ]


def of_families(runs: Sequence[matrix.Scored]) -> dict[str, Any] | None:
    """The matrix of fly's runs, as `fly compare --matrix` makes it; None unless several draft.

    `refused` says why there is none.
    """
    own = [each for each in runs if each[0].entry is not None]
    if sum(run.mode != "target-only" for run, _ in own) < 2:
        return None
    try:
        return matrix.build(own).as_dict
    except FlyError as error:
        return {"refused": str(error)}


def _why_not(baseline: Measured, other: Measured) -> str | None:
    """Why two runs cannot be compared, in one line; None if they can be."""
    try:
        check_pairs(baseline, other)
    except FlyError as error:
        return str(error)
    return None


def _entry(against: Against) -> dict[str, Any]:
    main = against.overall or next(row for row in against.rows if row.primary)
    deciding, reason = main, main.scores.reason
    if main.verdict != against.verdict:  # without any such row, nothing is judged
        deciding = next((r for r in against.all_rows if r.verdict == against.verdict), main)
    if deciding is not main:
        reason = f"{deciding.label}: {deciding.scores.reason}"
    return {
        "name": against.name,
        "main": _row(main),
        "verdict": against.verdict,
        "reason": reason,
        "decides": deciding.scores.decides,
        "rows": [_row(row) for row in against.all_rows],
        # over all tasks, if there are several
        "speed": asdict(against.speeds[-1]) if against.speeds else None,
        "notes": against.notes,
    }


def _row(row: ScoreRow) -> dict[str, Any]:
    return {"label": row.label, **asdict(row.scores), "verdict": row.verdict}
