"""Labels beside points of a figure, placed so that none covers another or a point."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import Bbox

_RADII = (7, 12, 18, 26, 36, 48, 62, 80)  # of the tried places, in points
_ANGLES = (
    30,
    330,
    150,
    210,
    60,
    300,
    120,
    240,
    0,
    180,
    90,
    270,
)  # degrees; bars run along the axes
_FROM_HERE_A_LINE = 18


def place_labels(axes: Axes, places: list[tuple[float, float]], labels: list[str]) -> list[str]:
    """Write each label next to its place (data coordinates); far ones get a thin line.

    Returns the labels for which there was no room. Call it when the axes' limits and the figure's
    layout are final.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    inside = axes.get_window_extent()
    scale = figure.dpi / 72
    dots = axes.transData.transform(places)
    taken = [_around(x, y, 4 * scale) for x, y in dots]
    left_out = []
    for place, label in zip(places, labels):
        for radius, angle in ((r, a) for r in _RADII for a in _ANGLES):
            text = _write(axes, place, label, radius, math.radians(angle))
            text.get_window_extent()  # puts it in its place
            box = Text.get_window_extent(text)  # without its line
            if _fits(box, inside, taken):
                taken.append(box.padded(1.5 * scale))
                break
            text.remove()
        else:
            left_out.append(label)
    return left_out


def _write(axes: Axes, place: tuple[float, float], label: str, radius: float, angle: float) -> Any:
    x, y = radius * math.cos(angle), radius * math.sin(angle)
    line = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2}
    return axes.annotate(
        label,
        place,
        xytext=(x, y),
        textcoords="offset points",
        ha="center" if abs(x) < 1 else "left" if x > 0 else "right",
        va="center" if abs(y) < 1 else "bottom" if y > 0 else "top",
        fontsize=7,
        arrowprops=line if radius >= _FROM_HERE_A_LINE else None,
        zorder=5,
    )


def _around(x: float, y: float, half: float) -> Bbox:
    return Bbox.from_extents(x - half, y - half, x + half, y + half)


def _fits(box: Bbox, inside: Bbox, taken: list[Bbox]) -> bool:
    contained = (
        box.x0 >= inside.x0 and box.x1 <= inside.x1 and box.y0 >= inside.y0 and box.y1 <= inside.y1
    )
    return contained and not any(box.overlaps(other) for other in taken)
