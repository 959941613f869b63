"""`fly report RUN... [--output report.html]`."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path
from typing import Any

from fly import api
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
        nargs="*",
        metavar="RUN",
        help="folder or results file of a finished run; NAME=PATH names it",
    )
    outputs.add_file(parser, "--output", "default: %(default)s", default="report.html")
    parser.add_argument("--by", metavar="FIELD", help="as in fly compare")
    outputs.add_force(parser)
    parser.add_argument(
        "--traces",
        type=int,
        default=200,
        metavar="N",
        help="documents whose traces the page holds, those that changed first "
        "(default: %(default)s); the charts use all",
    )
    outputs.add_file(parser, "--csv", "write the documents' table there")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument(
        "--watch",
        type=Path,
        metavar="DIR",
        help="serve the page of the run in this folder to this machine alone while it goes on, "
        "beside those of RUN, until Ctrl-C; nothing is written",
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="of --watch (default: any that is free)"
    )
    parser.set_defaults(func=_report)


def _report(args: argparse.Namespace) -> None:
    from fly.analysis.html import write as report
    from fly.runs import reader

    api.check_traces(args.traces)
    if args.watch:
        _watch(args, expanded(args.watch))
        return
    if not args.runs:
        raise FlyError("fly report: name a finished RUN, or use --watch DIR (`fly report --help`)")
    outputs.check(args, {"--output": args.output, "--csv": args.csv})
    loaded = reader.load_all(args.runs)
    page = report.page(loaded, max_traces=args.traces, by=args.by)
    write_output(args.output, page, "--output")
    if args.csv:
        write_output(args.csv, report.csv(loaded), "--csv")
        print(f"csv: {args.csv}")
    print(f"report: {args.output} ({len(page) / 1e6:.1f} MB)")
    if args.open:
        show(args.output.resolve().as_uri())


def _watch(args: argparse.Namespace, folder: Path) -> None:
    from fly.analysis.html import write as report
    from fly.cli import watch
    from fly.runs import reader, unfinished

    others = reader.load_all(args.runs)

    def page() -> tuple[bytes, bool]:
        going = unfinished.read(folder)
        own = going or reader.load(folder)
        if not own.tasks:
            raise FlyError(f"{folder}: no request has ended yet")
        return report.page([*others, own], max_traces=args.traces, by=args.by), going is None

    with watch.server(folder, page, args.port) as server:
        host, port = server.server_address[:2]
        address = f"http://{host!s}:{port}/"
        print(f"watching {folder}: {address} (Ctrl-C ends it)", flush=True)
        if args.open:
            show(address)
        server.serve_forever()


def show(address: str) -> None:
    """Open a page in the user's browser; a machine may have none."""
    if not webbrowser.open(address):
        print(f"--open: no browser was found here: open {address} yourself")
