"""How all figures look, and the parts they share. Sizes and fonts are for a page in print.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; markers and line styles
repeat what colours say.
"""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = ("-", "--", "-.", ":")
STYLE: dict[Any, Any] = {
    "font.size": 8, "axes.titlesize": 9, "axes.labelsize": 8, "legend.fontsize": 7,
    "xtick.labelsize": 7, "ytick.labelsize": 7, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "0.92", "axes.axisbelow": True,
    "lines.markersize": 5, "lines.linewidth": 1.2, "legend.frameon": False,
    "svg.fonttype": "none", "svg.hashsalt": "fly", "savefig.dpi": 250,
}  # fmt: skip
PANEL = (3.5, 2.8)  # inches; a column of a two-column page
_WIDE = (5.2, 3.4)  # a figure of one panel


def panels(rows: int, columns: int) -> tuple[Figure, list[Axes]]:
    """A figure and its panels, row by row."""
    width, height = _WIDE if rows * columns == 1 else PANEL
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)  # no window, no display needed
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def grid(count: int) -> tuple[Figure, list[Axes]]:
    """As many panels as asked for, three to a row at most."""
    columns = min(3, count)
    rows = -(-count // columns)
    figure, every = panels(rows, columns)
    for axes in every[count:]:
        axes.remove()
    return figure, every[:count]


def series(index: int) -> dict[str, Any]:
    """The index-th series: colour, marker and line style, all different from its neighbours'."""
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _LINES[index // len(_COLOURS) % len(_LINES)],
    }


def text(label: str) -> str:
    """A label as it is: matplotlib takes what stands between two dollars for mathematics."""
    return label.replace("$", r"\$")


def legend(figure: Figure, every: list[Axes], inches: float = 1.7) -> None:
    """One for all panels, below them; `inches`: the width of an entry."""
    known: dict[str, Any] = {}
    for axes in every:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            known.setdefault(label, handle)
    columns = max(1, min(int(figure.get_figwidth() / inches), len(known)))
    rows = -(-len(known) // columns)
    figure.set_figheight(figure.get_figheight() + 0.16 * (rows - 1))  # it must not cost panels
    figure.legend(list(known.values()), list(known), loc="outside lower center", ncols=columns)
