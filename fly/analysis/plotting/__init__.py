"""The figures of `fly plot`, through matplotlib. docs/plot.md says what they show."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from fly.analysis.plotting.curves import acceptance, by_k, throughput
from fly.analysis.plotting.data import PlotData
from fly.analysis.plotting.frontier import frontier
from fly.analysis.plotting.style import STYLE
from fly.paths import write_output

_FIGURES = {"frontier": frontier, "by_k": by_k, "throughput": throughput, "acceptance": acceptance}


def draw(data: PlotData) -> dict[str, Figure]:
    """Every figure that the data allows, by name; adds notes on those it does not."""
    with mpl.rc_context(STYLE):
        made = {name: make(data) for name, make in _FIGURES.items()}
    return {name: figure for name, figure in made.items() if figure is not None}


def save(figures: dict[str, Figure], folder: Path) -> list[Path]:
    """Each as PNG and SVG; the same runs give the same files."""
    written = []
    with mpl.rc_context(STYLE):
        for name, figure in figures.items():
            for suffix in ("png", "svg"):
                path = folder / f"{name}.{suffix}"
                drawn = io.BytesIO()
                undated = {"Date": None} if suffix == "svg" else None
                figure.savefig(drawn, format=suffix, metadata=undated)
                write_output(path, drawn.getvalue(), "--output")
                written.append(path)
    return written
