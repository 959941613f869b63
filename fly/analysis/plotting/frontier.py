"""Recovery over time x, a panel per task, with the Pareto front.

Every setting is drawn as its number, in the colour of its mode; the legend says what the numbers
are. Points carry ids, `point-...`, in the SVG.
"""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from fly.analysis.plotting import style
from fly.analysis.plotting.data import TARGET_ONLY, PlotData, Point, pareto


def frontier(data: PlotData) -> Figure | None:
    placed = {task: [p for p in data.of_task(task) if p.is_placed] for task in data.tasks}
    drawn = {t: points for t, points in placed.items() if not all(p.is_baseline for p in points)}
    if not drawn:
        data.notes.append("no frontier: it needs a target-only run and another on its documents")
        return None
    figure, panels = style.grid(len(drawn))
    modes = list(dict.fromkeys([TARGET_ONLY, *(point.run.mode for point in data.points)]))
    numbered = [p for points in drawn.values() for p in points if not p.is_baseline]
    numbered.sort(key=lambda point: modes.index(point.run.mode))
    labels = dict.fromkeys(point.label for point in numbered)
    numbers = {label: number for number, label in enumerate(labels, 1)}
    for axes, (task, points) in zip(panels, drawn.items()):
        _draw(axes, points, modes, numbers)
        axes.set_title(style.text(f"{task} ({points[0].metric})"))
    style.legend(figure, panels, inches=2.3)
    return figure


def _draw(axes: Axes, points: list[Point], modes: list[str], numbers: dict[str, int]) -> None:
    axes.axhline(1, color="0.6", linewidth=0.8)
    xs, ys = zip(*(point.place for point in pareto(points)))
    front: dict[str, Any] = {"color": "0.45", "linestyle": "--", "linewidth": 1, "zorder": 1}
    axes.step(xs, ys, where="pre", label="Pareto front", gid="front", **front)
    for index, mode in enumerate(modes):
        look = {**style.series(index), "linestyle": "none", "zorder": 4, "markeredgewidth": 0.3}
        for count, point in enumerate(p for p in points if p.run.mode == mode):
            _bars(axes, point, look["color"])
            if point.label in numbers:
                number = str(numbers[point.label])
                look |= {"marker": f"${number}$", "markersize": 3 + 3 * len(number)}
            axes.plot(
                *point.place, **look, gid=f"point-{mode}-{count}", label=style.text(point.label)
            )
    axes.margins(0.18)
    axes.set_xlabel("time x over target-only, end to end")
    axes.set_ylabel("recovery (of target-only's score)")
    axes.yaxis.set_major_formatter(PercentFormatter(1))


def _bars(axes: Axes, point: Point, colour: str) -> None:
    """The 95 % intervals, as thin lines through the point."""
    line: dict[str, Any] = {"color": colour, "alpha": 0.45, "linewidth": 0.8, "zorder": 2}
    x, y = point.place
    if point.recovery_interval is not None:
        axes.plot([x, x], [point.recovery_interval.low, point.recovery_interval.high], **line)
    if point.speedup_interval is not None:
        axes.plot([point.speedup_interval.low, point.speedup_interval.high], [y, y], **line)
