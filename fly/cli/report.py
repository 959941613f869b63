"""`fly report RUN... [--output report.html]`."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path
from typing import Any

from fly.cli import outputs
from fly.errors import FlyError
from fly.paths import expanded, write_output


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
        help="documents whose traces the page holds, those that changed first "
        "(default: %(default)s); the charts use all",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.set_defaults(func=_report)


def _report(args: argparse.Namespace) -> None:
    from fly.analysis.html import write as report
    from fly.runs import reader

    if args.traces < 0:
        raise FlyError(f"--traces {args.traces}: must be at least 0")
    output = expanded(args.output)
    outputs.check(args, {"--output": output})
    paths = [reader.named(text) for text in args.runs]
    loaded = [reader.load(path, name) for name, path in paths]
    page = report.page(loaded, max_traces=args.traces)
    write_output(output, page, "--output")
    print(f"report: {output} ({len(page) / 1e6:.1f} MB)")
    if args.open:
        show(output)


def show(page: Path) -> None:
    """Open a page in the user's browser; a machine may have none."""
    if not webbrowser.open(page.resolve().as_uri()):
        print("--open: no browser was found here: open the file yourself")
