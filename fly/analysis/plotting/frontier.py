"""Recovery over time x, a panel per task, with the Pareto front.

A few settings are written beside their points; more get numbers, and the legend says what they
are. Points carry ids, `point-...`, in the SVG.
"""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from fly.analysis.plotting import style
from fly.analysis.plotting.data import TARGET_ONLY, PlotData, Point, pareto
from fly.analysis.plotting.labelling import place_labels
from fly.runs.settings import MODES

_MOST_IN_WORDS = 5  # settings; beyond, points are numbered


def frontier(data: PlotData) -> Figure | None:
    tasks = [task for task in data.tasks if any(map(_is_compared, data.of_task(task)))]
    if not tasks:
        data.notes.append("no frontier: it needs a target-only run and another on its documents")
        return None
    figure, panels = style.grid(len(tasks))
    modes = list(dict.fromkeys(point.run.mode for point in data.points))
    modes.sort(key=lambda mode: mode != TARGET_ONLY)
    numbers = _numbers(data)
    drawn = [[point for point in data.of_task(task) if point.is_placed] for task in tasks]
    for axes, task, points in zip(panels, tasks, drawn):
        _draw(axes, points, modes, numbers)
        axes.set_title(f"{task} ({points[0].metric})")
    style.legend(figure, panels, inches=2.3 if numbers else 1.7)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # labels are placed on what must not move any more
    for axes, points in zip(panels, drawn):
        _label(axes, points, numbers, data)
    return figure


def _is_compared(point: Point) -> bool:
    return point.is_placed and not point.is_baseline


def _numbers(data: PlotData) -> dict[str, int]:
    """A number per setting, if there are too many to write them out; else none."""
    labels = dict.fromkeys(point.label for point in data.points if _is_compared(point))
    if len(labels) <= _MOST_IN_WORDS:
        return {}
    return {label: number for number, label in enumerate(labels, 1)}


def _draw(axes: Axes, points: list[Point], modes: list[str], numbers: dict[str, int]) -> None:
    axes.axhline(1, color="0.6", linewidth=0.8)
    _front(axes, [point.place for point in pareto(points)])
    for index, mode in enumerate(modes):
        look = {**style.look(index), "linestyle": "none", "markersize": 4, "zorder": 4}
        for count, point in enumerate(p for p in points if p.run.mode == mode):
            _bars(axes, point, look["color"])
            name = MODES.get(mode, mode)
            if point.label in numbers:
                name = f"{numbers[point.label]}: {point.label}"
            axes.plot(*point.place, **look, gid=f"point-{mode}-{count}", label=name)
    axes.margins(0.18)
    axes.set_xlabel("time x over target-only, end to end")
    axes.set_ylabel("recovery (of target-only's score)")
    axes.yaxis.set_major_formatter(PercentFormatter(1))


def _front(axes: Axes, places: list[tuple[float, float]]) -> None:
    xs, ys = zip(*places)
    look: dict[str, Any] = {"color": "0.45", "linestyle": "--", "linewidth": 1, "zorder": 1}
    axes.step(xs, ys, where="pre", label="Pareto front", gid="front", **look)


def _bars(axes: Axes, point: Point, colour: str) -> None:
    """The 95 % intervals, as thin lines through the point."""
    look: dict[str, Any] = {"color": colour, "alpha": 0.45, "linewidth": 0.8, "zorder": 2}
    x, y = point.place
    if point.recovery_interval is not None:
        interval = point.recovery_interval
        axes.plot([x, x], [interval.low, interval.high], **look)
    if point.speedup_interval is not None:
        interval = point.speedup_interval
        axes.plot([interval.low, interval.high], [y, y], **look)


def _label(axes: Axes, points: list[Point], numbers: dict[str, int], data: PlotData) -> None:
    chosen = [point for point in points if not point.is_baseline]
    labels = [str(numbers.get(point.label, point.label)) for point in chosen]
    for label in place_labels(axes, [point.place for point in chosen], labels):
        data.notes.append(f"{points[0].task}: no room for the label {label!r}: see points.csv")
