"""`fly history DIR_OR_FILE... [--output history.html]`: runs over time, tested for decline."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fly.cli import outputs
from fly.cli.compare import add_demand, exit_with, read_demand
from fly.errors import FlyError
from fly.paths import expanded, write_output

if TYPE_CHECKING:
    from fly.analysis.history import Line


def add_command(subparsers: Any) -> None:
    """Register the subcommand with the CLI's parser."""
    parser = subparsers.add_parser(
        "history",
        help="Write finished runs over time as one HTML page, and test them for decline",
        description="Write finished runs over time as one HTML page, and test every series of them "
        "for a slow decline (docs/history.md). With --min-recovery, --confidence or "
        "--allow-inconclusive the exit status is the verdict: 0 no decline, 1 fell, 3 not enough "
        "evidence; 2: bad usage.",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="DIR_OR_FILE",
        help="folders or results files of finished runs; files of fly compare --history FILE",
    )
    outputs.add_file(parser, "--output", "default: %(default)s", default="history.html")
    outputs.add_file(parser, "--csv", "write the runs' numbers there")
    parser.add_argument(
        "--good",
        metavar="RUN",
        help="name, date, commit or revision of the run that trends begin with (default: first)",
    )
    add_demand(parser, "the first run's score that must be kept")
    outputs.add_force(parser)
    parser.set_defaults(func=_history)


def _history(args: argparse.Namespace) -> None:
    from fly.analysis import compare, history
    from fly.analysis.html import write
    from fly.analysis.tables import as_csv

    demand = read_demand(args, "fly history")
    outputs.check(args, {"--output": args.output, "--csv": args.csv})
    lines = [line for path in args.paths for line in _lines(path)]
    series = history.group(lines, args.good, demand)
    if not series:
        raise FlyError(f"{args.paths[0]}: holds no runs with scores")
    write_output(args.output, write.history_page(series), "--output")
    if args.csv:
        write_output(args.csv, as_csv(history.as_rows(series)), "--csv")
        print(f"csv: {args.csv}")
    for each in series:
        count = f"{len(each.lines)} run{'s' if len(each.lines) > 1 else ''}"
        print(f"{each.title}, {count}: {each.trend.verdict}: {history.trend_in_words(each)}")
    print(f"history: {args.output}")
    exit_with(compare.weakest(each.trend.verdict for each in series), args)


def _lines(path: str) -> list[Line]:
    """The runs that a path of the command line names: a history file's, or one finished run."""
    from fly.analysis import history, scores
    from fly.runs import reader

    name, place = reader.named(path)
    if expanded(place).suffix == ".jsonl":
        return [*history.read(expanded(place))]
    run = reader.load(place, name)
    return [history.line_of(run, scores.measure(run))]
