"""`fly history`'s page: every series' numbers over time. It draws with the report's scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from fly.analysis import history
from fly.analysis.history import Series
from fly.analysis.html.page import render

_MOST = 400  # points of a line; a browser draws them as fast as one looks


def page(series: Sequence[Series]) -> bytes:
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
