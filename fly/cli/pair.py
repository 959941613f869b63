"""`fly pair fetch | list | path`."""

from __future__ import annotations

import argparse
from typing import Any

from fly.models.pairs import store
from fly.models.pairs.registry import PAIRS


def add_command(subparsers: Any) -> None:
    """Register the subcommand with the CLI's parser."""
    parser = subparsers.add_parser("pair", help="Fetch and list the embedded draft-target pairs")
    commands = parser.add_subparsers(dest="pair_command", metavar="fetch|list|path")
    parser.set_defaults(func=lambda args: parser.print_help())
    fetch = commands.add_parser("fetch", help="download, check and convert a pair (once)")
    fetch.add_argument("name", help=f"one of: {', '.join(PAIRS)}")
    fetch.set_defaults(func=_fetch)
    listing = commands.add_parser("list", help="the pairs, and whether they are here")
    listing.set_defaults(func=_list)
    path = commands.add_parser("path", help="the two folders of a fetched pair")
    path.add_argument("name")
    path.set_defaults(func=_path)


def _fetch(args: argparse.Namespace) -> None:
    paths = store.fetch(args.name)
    print(f"{args.name}: draft {paths.draft}, target {paths.target}")


def _list(args: argparse.Namespace) -> None:
    for pair in PAIRS.values():
        state = "fetched" if store.locate(pair.name) else "not fetched"
        size = (pair.draft.size + pair.target.size) / 1e9
        print(f"{pair.name}: {pair.description}; download {size:.1f} GB; {state}")


def _path(args: argparse.Namespace) -> None:
    print(store.resolve_model_path(f"pair:{args.name}/draft"))
    print(store.resolve_model_path(f"pair:{args.name}/target"))
