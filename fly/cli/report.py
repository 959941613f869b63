"""`fly report RUN... [--output report.html]`."""

from __future__ import annotations

import argparse
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
    parser.add_argument("--by", metavar="FIELD", help="as in fly compare")
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
    from fly.analysis.html import write as report
    from fly.runs import reader

    if args.traces < 0:
        raise FlyError(f"--traces {args.traces}: must be at least 0")
    output = expanded(args.output)
    outputs.check(args, {"--output": output})
    paths = [reader.named(text) for text in args.runs]
    loaded = [reader.load(path, name) for name, path in paths]
    # half of a surrogate pair, which a JSON escape may spell, has no UTF-8
    page = report.page(loaded, max_traces=args.traces, by=args.by).encode(errors="replace")
    write_output(output, page, "--output")
    print(f"report: {output} ({len(page) / 1e6:.1f} MB)")
