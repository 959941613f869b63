"""From finished runs to the page."""

from __future__ import annotations

from datetime import datetime, timezone

from fly.analysis import scores
from fly.analysis.compare import choose_baseline
from fly.analysis.html import comparison, documents, points, summary, traces
from fly.analysis.html.page import render
from fly.runs.reader import Run
from fly.version import VERSION


def page(runs: list[Run], max_traces: int = 200) -> str:
    """The whole file's text. The others are compared with the target-only run, else the first.

    max_traces: how many documents' traces the page holds; its charts use every trace.
    """
    named = zip(runs, summary.distinct_names(runs))
    found = [(run, scores.measure(run).model_copy(update={"name": name})) for run, name in named]
    baseline = choose_baseline([measured for _, measured in found])
    found.sort(key=lambda each: each[1] is not baseline)
    runs, measured = [run for run, _ in found], [measured for _, measured in found]
    samples = documents.collect(runs)
    numbers = [documents.row_numbers(samples, run) for run in range(len(runs))]
    per_run = [traces.replayed(run) for run in runs]
    comparisons, notes = comparison.against_first(measured)
    matrix, cells = comparison.of_families(found)
    traced = {
        of_run[document]
        for of_run, done in zip(numbers, per_run)
        for generation in done
        if (document := (generation.task, generation.doc_id)) in of_run
    }
    shown = sorted(traced)[:max_traces]
    return render(
        f"fly report: {', '.join(each.name for each in measured)}",
        {
            "data-summary": {
                "version": VERSION,
                "created": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
                "runs": [summary.of_run(*each) for each in zip(runs, measured, per_run)],
                "scores": summary.scores(runs),
                "comparisons": comparisons,
                "notes": notes,
                "matrix": matrix,
                "frontier": points.frontier(cells),
                "points": points.of_runs(found, cells),
                "traced": {"shown": shown, "all": len(traced)},
            },
            "data-documents": documents.rows(runs, measured, samples),
            "data-texts": documents.texts(samples),
            "data-traces": traces.block(per_run, numbers, set(shown)),
        },
    )
