"""What K buys, what the batch size buys, and which places in the draft stand."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fly.analysis.plotting import style
from fly.analysis.plotting.data import TARGET_ONLY, PlotData, Point, Positions


def by_k(data: PlotData) -> Figure | None:
    """tau (above) and end-to-end time x (below) over K, a line per setting, a column per task."""
    tasks = [t for t in data.tasks if any(not p.is_baseline for p in data.of_task(t))]
    if not tasks:
        data.notes.append("no figure by K: there is no run with a draft")
        return None
    figure, panels = style.panels(2, len(tasks))
    series = list(dict.fromkeys(p.series for p in data.points if not p.is_baseline))
    for column, task in enumerate(tasks):
        above, below = panels[column], panels[len(tasks) + column]
        above.set_title(style.text(task))
        _lines(above, below, data.of_task(task), series)
    style.legend(figure, panels)
    return figure


def _lines(above: Axes, below: Axes, points: list[Point], series: list[str]) -> None:
    above.set_ylabel("\u03c4 (tokens per target pass)")
    # without a target-only run there is nothing to relate the times to
    related = all(point.speedup is not None for point in points)
    below.set_ylabel("time x over target-only" if related else "seconds per document")
    above.axhline(1, color="0.45", linestyle=":", label=TARGET_ONLY)
    for height in {_height(point, related) for point in points if point.is_baseline}:
        below.axhline(height, color="0.45", linestyle=":", label=TARGET_ONLY)
    for number, name in enumerate(series):
        mine = sorted((p for p in points if p.series == name), key=lambda p: p.k)
        if not mine:
            continue
        ks = [point.k for point in mine]
        look = {**style.series(number), "gid": f"line-{number}", "label": style.text(name)}
        above.plot(ks, [point.tau for point in mine], **look)
        below.plot(ks, [_height(point, related) for point in mine], **look)
    for axes in (above, below):
        axes.set_xlabel("K (most draft tokens per round)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_ylim(bottom=0)
        axes.margins(x=0.1)


def _height(point: Point, related: bool) -> float:
    return point.speedup if related and point.speedup is not None else point.seconds


def throughput(data: PlotData) -> Figure | None:
    """Tokens per second of a GPU over those of a user, a line per curve, batch sizes at its points.

    Drawn where the batch sizes differ.
    """
    if len({point.batch_size for point in data.points}) < 2:
        return None
    measured = [point for point in data.points if point.tok_s_user is not None]
    for point in data.points:
        if point.tok_s_user is None:
            why = "not in throughput: its records have no wall_seconds"
            data.notes.append(f"{point.task}, {point.label}: {why}")
    tasks = list(dict.fromkeys(point.task for point in measured))
    if not tasks:
        return None
    curves = list(dict.fromkeys(point.curve for point in measured))
    figure, panels = style.grid(len(tasks))
    for axes, task in zip(panels, tasks):
        axes.set_title(style.text(task))
        for number, name in enumerate(curves):
            _throughput_curve(
                axes, number, [p for p in measured if (p.task, p.curve) == (task, name)]
            )
        axes.set_xlabel("tokens per second per user")
        axes.set_ylabel("tokens per second per GPU")
        axes.margins(0.15)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    style.legend(figure, panels)
    return figure


def _throughput_curve(axes: Axes, number: int, points: list[Point]) -> None:
    places = sorted((p.tok_s_user or 0.0, p.tok_s_gpu or 0.0, str(p.batch_size)) for p in points)
    if not places:
        return
    look = {**style.series(number), "gid": f"curve-{number}", "label": style.text(points[0].curve)}
    axes.plot([x for x, _, _ in places], [y for _, y, _ in places], **look)
    for x, y, size in places:
        axes.annotate(size, (x, y), xytext=(3, 3), textcoords="offset points", fontsize=6)


def acceptance(data: PlotData) -> Figure | None:
    """The share of drafts that were accepted up to each position."""
    if not data.positions:
        data.notes.append("no acceptance by draft position: no run drafted, or counted it")
        return None
    tasks = list(dict.fromkeys(positions.task for positions in data.positions))
    names = list(dict.fromkeys(positions.label for positions in data.positions))
    figure, panels = style.grid(len(tasks))
    for axes, task in zip(panels, tasks):
        axes.set_title(style.text(task))
        for positions in data.positions:
            if positions.task == task:
                _by_position(axes, positions, names.index(positions.label))
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("drafts accepted up to it")
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    style.legend(figure, panels)
    return figure


def _by_position(axes: Axes, positions: Positions, index: int) -> None:
    shares = positions.counts.unconditional
    look = {**style.series(index), "label": style.text(positions.label), "gid": f"line-{index}"}
    axes.plot(range(1, len(shares) + 1), shares, **look)
