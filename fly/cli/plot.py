"""`fly plot RUN... --output DIR`: the paper's figures for one's own pair. docs/plot.md."""

from __future__ import annotations

import argparse
from typing import Any

from fly.errors import FlyError
from fly.paths import expanded


def add_command(subparsers: Any) -> None:
    """Register the subcommand with the CLI's parser."""
    parser = subparsers.add_parser(
        "plot", help="Draw finished runs: frontier, mean acceptance length (tau) by K, acceptance"
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a results_*.json, or a folder: all runs in it"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="where the figures go")
    parser.add_argument(
        "--metric",
        metavar="NAME[,FILTER]",
        help="the score to draw (default: the first that is not zero)",
    )
    parser.set_defaults(func=_plot)


def _plot(args: argparse.Namespace) -> None:
    try:
        import matplotlib  # noqa: F401  only whether it is there
    except ImportError:
        raise FlyError("fly plot needs matplotlib: pip install matplotlib") from None
    from fly.analysis import plotting
    from fly.analysis.plotting import data as plot_data
    from fly.runs import context, reader

    found = {run.path.resolve(): run for path in args.runs for run in reader.load_all(path)}
    runs = sorted(found.values(), key=lambda run: reader.date_of(run.path))
    data = plot_data.collect(runs, args.metric)
    drawn = plotting.draw(data)
    folder = expanded(args.output)
    context.check_writable(folder, "output")
    written = plotting.save(drawn, folder)
    plot_data.write_csv(data, folder / "points.csv")
    print(f"{len(found)} runs, {len(data.tasks)} tasks")
    for note in data.notes:
        print(f"note: {note}")
    for path in [*written, folder / "points.csv"]:
        print(path)
