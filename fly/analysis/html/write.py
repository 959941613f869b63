"""From finished runs to the page."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import fly
from fly.analysis import acceptance, scores
from fly.analysis.compare import choose_baseline
from fly.analysis.html import comparison, documents, points, summary, traces
from fly.analysis.html.page import render
from fly.runs.reader import Run


def page(runs: list[Run], max_traces: int = 200) -> bytes:
    """The whole file. The others are compared with the target-only run, else the first.

    max_traces: how many documents' traces the page holds, those that changed before others; its
    charts use every trace.
    """
    named = zip(runs, summary.distinct_names(runs))
    found = [(run, scores.measure(run).model_copy(update={"name": name})) for run, name in named]
    baseline = choose_baseline([measured for _, measured in found])
    found.sort(key=lambda each: each[1] is not baseline)
    runs, measured = [run for run, _ in found], [measured for _, measured in found]
    samples, table = documents.collect(runs, measured)
    shown, summaries = traces.Shown(runs, max_traces), list[dict[str, Any]]()
    for number, (run, own) in enumerate(zip(runs, measured)):
        requests = shown.keep(number, documents.row_numbers(samples, number))
        summaries.append(summary.of_run(run, own, acceptance.measure(requests)))
    comparisons, notes = comparison.against_first(measured)
    matrix, cells = comparison.of_families(found)
    return render(
        f"fly report: {', '.join(each.name for each in measured)}",
        {
            "data-summary": {
                "version": fly.__version__,
                "created": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
                "runs": summaries,
                "scores": summary.scores(runs),
                "comparisons": comparisons,
                "notes": notes,
                "matrix": matrix,
                "frontier": points.frontier(cells),
                "points": points.of_runs(found, cells),
                "traced": {"shown": shown.rows, "all": len(shown.traced)},
            },
            "data-documents": iter(table),
            "data-texts": documents.texts(samples),
            "data-traces": shown.block(),
        },
    )
