"""`fly compare`'s statistics for the page: every run against the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fly.analysis import categories, matrix
from fly.analysis.comparability import find_reasons
from fly.analysis.compare import Against, compare, equal_texts
from fly.analysis.compare_files import against_as_dict
from fly.analysis.scores import Measured
from fly.analysis.statistics import Demand
from fly.analysis.tables import in_words
from fly.errors import FlyError


def against_first(
    runs: Sequence[Measured], by: str | None = None
) -> tuple[list[dict[str, Any]], list[str], list[dict[str, Any]]]:
    """One entry per other run, all judged together, as `fly compare` judges them; its notes that
    are of no one run; and its rows by the values of the field `by`.

    An entry has the keys of `--json` (docs/compare.md), `main`, the number of the row that stands
    for the run (None without scores), `reason`, why its verdict is what it is, and `texts`, how
    many differ; or only `refused`, why the run cannot be compared.
    """
    baseline, *others = runs
    refused = {
        run.name: reason.note
        for run in others
        for reason in find_reasons(baseline, run)
        if reason.severity == "refuse"
    }
    judged = [run for run in others if run.name not in refused]
    result = compare(baseline, judged)
    entries = {
        run.name: {**_entry(found, result.demand), "texts": _count_texts(baseline, run)}
        for run, found in zip(judged, result.others)
    }
    told = {note for found in result.others for note in found.notes}
    found = [
        entries.get(run.name) or {"name": run.name, "refused": refused[run.name]} for run in others
    ]
    by_category = categories.rows(baseline, judged) if by else []
    return found, [note for note in result.notes if note not in told], by_category


def of_families(runs: Sequence[matrix.Scored]) -> tuple[dict[str, Any] | None, list[matrix.Cell]]:
    """The matrix of fly's runs, as `fly compare --matrix` makes it, and its cells; None unless
    several draft.

    A run that cannot be related to its target's own is left out with a note. `refused` says why
    there is no matrix; there may be cells all the same.
    """
    own = [each for each in runs if each[0].entry is not None]
    if sum(run.mode != "target-only" for run, _ in own) < 2:
        return None, []
    left_out, cells = list[str](), list[matrix.Cell]()
    try:
        cells, notes = matrix.relate(own, left_out=left_out)
        if left_out and not cells:
            return {"refused": "; ".join(left_out)}, []
        return matrix.arrange(cells, [*left_out, *notes]).as_dict, cells
    except FlyError as error:
        return {"refused": "; ".join([*left_out, str(error)])}, cells


def _count_texts(baseline: Measured, run: Measured) -> dict[str, int]:
    """Of how many documents both runs have texts, and how many of these differ."""
    found = [equal_texts(task, run.tasks[name]) for name, task in baseline.tasks.items()]
    known = [each for each in found if each is not None]
    return {"differ": sum(of - equal for equal, of in known), "of": sum(of for _, of in known)}


def _entry(against: Against, demand: Demand) -> dict[str, Any]:
    main = against.main
    if main is None:
        reason = "its tasks have no score to compare"
        return {**against_as_dict(against), "main": None, "reason": reason}
    deciding = main
    if main.verdict != against.verdict:  # without any such row, nothing is judged
        deciding = next((r for r in against.all_rows if r.verdict == against.verdict), main)
    # why, and what `fly compare` says below the verdict
    parts = [deciding.scores.reason, *in_words(deciding.scores, demand)]
    reason = "; ".join(dict.fromkeys(parts))
    if deciding is not main:
        reason = f"{deciding.label}: {reason}"
    return {**against_as_dict(against), "main": against.all_rows.index(main), "reason": reason}
