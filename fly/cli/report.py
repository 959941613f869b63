"""`fly report RUN... [--output report.html]`."""

from __future__ import annotations

import argparse
from typing import Any

from fly import api
from fly.cli import outputs
from fly.paths import expanded


def add_command(subparsers: Any) -> None:
    """Register the subcommand with the CLI's parser."""
    parser = subparsers.add_parser(
        "report",
        help="Write finished runs as one HTML page",
        description="Write finished runs as one HTML page that needs no network. The others are "
        "compared with the target-only run, else with the first.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folder or results file of a finished run; NAME=PATH names it",
    )
    parser.add_argument(
        "--output", default="report.html", metavar="FILE", help="default: %(default)s"
    )
    outputs.add_force(parser)
    parser.add_argument(
        "--traces",
        type=int,
        default=200,
        metavar="N",
        help="documents whose traces the page holds (default: %(default)s); the charts use all",
    )
    parser.set_defaults(func=_report)


def _report(args: argparse.Namespace) -> None:
    output = expanded(args.output)
    outputs.check(args, {"--output": output})
    api.report(*args.runs, output=output, traces=args.traces)
    print(f"report: {output} ({output.stat().st_size / 1e6:.1f} MB)")
