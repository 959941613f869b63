"""What Python code calls: `fly.compare` and `fly.report`, as the commands of these names."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fly.errors import FlyError

if TYPE_CHECKING:
    from fly.analysis.compare import Result
    from fly.runs.reader import Run


@dataclass(frozen=True)
class Page:
    """A report that was written; notebooks show it where it is a cell's value."""

    path: Path

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 700px; border: 0"></iframe>'


def compare(
    *runs: str | Path,
    min_recovery: float = 0.99,
    confidence: float = 0.95,
    metrics: Sequence[str] | None = None,
    baseline: str | None = None,
    pair_by: Literal["prompt", "document"] = "prompt",
) -> Result:
    """Compare finished runs with one of them: scores, recovery, time x and a verdict.

    runs: folders or results files, at least two; NAME=PATH names one. min_recovery: share of the
    baseline's score that a run must keep. confidence: how sure a verdict must be. metrics: only
    these. baseline: a run's name; default: the target-only run, else the first. pair_by:
    `document` compares runs whose prompts differ in form. `result.verdict`
    is the weakest of all; `result.others` has the rows of each run (docs/compare.md).

    Raises FlyError for runs that cannot be read, or that did not answer the same questions.
    """
    from fly.analysis import compare as comparison
    from fly.analysis import scores
    from fly.analysis.alignment import pair_by_document
    from fly.analysis.statistics import Demand
    from fly.harness.arguments import check_flags
    from fly.runs import reader

    check_flags({"min_recovery": min_recovery, "confidence": confidence}, "fly.compare")
    if pair_by not in ("prompt", "document"):
        raise FlyError(f"fly.compare: pair_by={pair_by!r}: choose prompt or document")
    metrics = [metrics] if isinstance(metrics, str) else metrics
    if len(runs) < 2:
        raise FlyError("fly.compare: give at least two runs")
    named = [reader.named(str(run)) for run in runs]
    measured = [scores.measure(run) for run in read_runs(named)]
    if pair_by == "document":
        measured = pair_by_document(measured)
    first, others = comparison.split_baseline(measured, baseline)
    return comparison.compare(first, others, Demand(min_recovery, confidence), metrics)


def report(*runs: str | Path, output: str | Path = "report.html", traces: int = 200) -> Page:
    """Write runs as one HTML page that needs no network; an existing file is replaced.

    runs: as in `compare`; one is enough. traces: documents whose traces the page holds.

    Raises FlyError for runs that cannot be read, and for a file that cannot be written.
    """
    from fly.analysis.html import write
    from fly.paths import expanded, write_output
    from fly.runs import reader

    if not runs:
        raise FlyError("fly.report: give at least one run")
    check_traces(traces)
    path = expanded(str(output))
    write_output(path, write.page(reader.load_all(runs), max_traces=traces), "output")
    return Page(path)


def check_traces(count: int) -> None:
    if count < 0:
        raise FlyError(f"--traces {count}: must be at least 0")


def read_runs(
    runs: Iterable[tuple[str | None, str | Path]], taken: Sequence[str] = ()
) -> Iterator[Run]:
    """Finished runs at these (name, path), under unique names: a second `fly` becomes `fly-2`.
    taken: names that are not free."""
    from fly.runs import reader, run_settings

    names = list(taken)
    for name, path in runs:
        run = reader.load(path, name)
        unique = run_settings.unused_name(run.name, names, "-")
        names.append(unique)
        yield replace(run, name=unique)
