"""`fly pair fetch | list | path | export`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fly.errors import FlyError
from fly.models.pairs import store
from fly.models.pairs.registry import PAIRS


def add_command(subparsers: Any) -> None:
    """Register the subcommand with the CLI's parser."""
    parser = subparsers.add_parser("pair", help="Fetch and list the embedded draft-target pairs")
    commands = parser.add_subparsers(dest="pair_command", metavar="fetch|list|path|export")
    parser.set_defaults(func=lambda args: parser.print_help())
    fetch = commands.add_parser("fetch", help="download and check a pair (once)")
    fetch.add_argument("name", help=f"one of: {', '.join(PAIRS)}")
    fetch.set_defaults(func=_fetch)
    listing = commands.add_parser("list", help="the pairs, and whether they are here")
    listing.set_defaults(func=_list)
    path = commands.add_parser("path", help="where the GGUF files of a fetched pair are")
    path.add_argument("name", metavar="NAME", help="both files; NAME/draft or NAME/target: one")
    path.set_defaults(func=_path)
    export = commands.add_parser(
        "export", help="write a GGUF model as a bfloat16 folder, for vLLM and other programs"
    )
    export.add_argument("model", help="pair:NAME/draft, pair:NAME/target or a .gguf file")
    export.add_argument("folder", type=Path)
    export.set_defaults(func=_export)


def _fetch(args: argparse.Namespace) -> None:
    paths = store.fetch(args.name)
    print(f"{args.name}: draft {paths.draft}, target {paths.target}")


def _list(args: argparse.Namespace) -> None:
    for pair in PAIRS.values():
        state = "fetched" if store.locate(pair.name) else "not fetched"
        size = (pair.draft.size + pair.target.size) / 1e9
        print(f"{pair.name}: {pair.description}; download {size:.1f} GB; {state}")


def _path(args: argparse.Namespace) -> None:
    if "/" in args.name:
        print(store.resolve_model_path(f"pair:{args.name}"))
        return
    for role in ("draft", "target"):
        print(f"{role}: {store.resolve_model_path(f'pair:{args.name}/{role}')}")


def _export(args: argparse.Namespace) -> None:
    from fly.models import gguf
    from fly.models.loading import naming_model
    from fly.models.sources import resolve_source

    file = resolve_source(args.model, "model").file
    if file is None:
        raise FlyError(f"{args.model}: is no GGUF file: name pair:NAME/target or a .gguf file")
    if args.folder.exists():
        raise FlyError(f"{args.folder}: exists: name a new folder")
    with naming_model("model", str(file)):
        gguf.export(file, args.folder)
    print(args.folder)
