"""From finished runs to the report's page, and from their series to the history's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fly.analysis import acceptance, history, scores
from fly.analysis.compare import choose_baseline
from fly.analysis.html import comparison, documents, points, summary, traces
from fly.analysis.html.page import render
from fly.analysis.matrix import Scored
from fly.analysis.tables import as_csv
from fly.runs.reader import Run

_SCRIPTS = ("diff.js", "trace.js", "table.js", "report.js")
_MOST = 400  # points of a history's line; a browser draws them as fast as one looks
_COLUMNS = ("score", "change", "same", "parts", "length", "tokens", "tau", "seconds")


def _collect(
    runs: list[Run], by: str | None = None
) -> tuple[list[Scored], documents.Documents, documents.Rows]:
    """The runs with their scores, the one that others are compared with first; their documents,
    and the table's rows."""
    named = zip(runs, summary.distinct_names(runs))
    found = [
        (run, scores.measure(run, by=by).model_copy(update={"name": name})) for run, name in named
    ]
    baseline = choose_baseline([measured for _, measured in found])
    found.sort(key=lambda each: each[1] is not baseline)
    return found, *documents.collect([run for run, _ in found], [own for _, own in found])


def csv(runs: list[Run]) -> str:
    """The documents' table: a line per document and run."""
    found, _, table = _collect(runs)
    return as_csv(
        {
            "task": row["task"], "document": row["doc"], "run": measured.name,
            **dict.fromkeys(_COLUMNS), **cell,
        }
        for row in table
        for (_, measured), cell in zip(found, row["runs"])
        if cell
    )  # fmt: skip


def page(runs: list[Run], max_traces: int = 200, by: str | None = None) -> bytes:
    """The whole file. The others are compared with the target-only run, else the first.

    max_traces: how many documents' traces the page holds, those that changed before others; its
    charts use every trace. by: the documents' field by whose values they are compared, too.
    """
    found, samples, table = _collect(runs, by)
    runs, measured = [run for run, _ in found], [measured for _, measured in found]
    shown, summaries = traces.Shown(runs, max_traces), list[dict[str, Any]]()
    for number, (run, own) in enumerate(zip(runs, measured)):
        requests = shown.keep(number, documents.row_numbers(samples, number))
        summaries.append(summary.of_run(run, own, acceptance.measure(requests)))
    comparisons, notes, by_category = comparison.against_first(measured, by)
    matrix, cells = comparison.of_families(found)
    return render(
        f"fly report: {', '.join(each.name for each in measured)}",
        {
            "runs": summaries,
            "scores": summary.scores(runs),
            "comparisons": comparisons,
            "notes": notes,
            "categories": by_category,
            "matrix": matrix,
            "frontier": points.frontier(cells),
            "points": points.of_runs(found, cells),
            "traced": {"shown": shown.rows, "all": len(shown.traced)},
        },
        *_SCRIPTS,
        documents=iter(table),
        texts=documents.texts(samples),
        traces=shown.block(),
    )


def history_page(series: Sequence[history.Series]) -> bytes:
    """The whole file. Of long series the newest runs are drawn; trends are of all."""
    rows = [*history.as_rows(series)]
    shown = [
        {
            "title": each.title,
            "runs": len(each.lines),
            "trend": asdict(each.trend),
            "words": history.trend_in_words(each),
            "rows": [row for row in rows if row["series"] == number][-_MOST:],
        }
        for number, each in enumerate(series)
    ]
    return render("fly history", {"series": shown}, "history.js")
