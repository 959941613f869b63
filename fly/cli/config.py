"""`fly config check | show | schema`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from fly import config
from fly.errors import FlyError
from fly.harness.arguments import key_values
from fly.models.sources import check_names


def add_command(subparsers: Any) -> None:
    """Register the subcommand with the CLI's parser."""
    parser = subparsers.add_parser("config", help="Check, show or describe a pair's JSON")
    commands = parser.add_subparsers(dest="config_command", metavar="check|show|schema")
    parser.set_defaults(func=lambda args: parser.print_help())
    check = commands.add_parser("check", help="validate a file")
    check.add_argument("file")
    check.set_defaults(func=_check)
    show = commands.add_parser("show", help="print the resolved configuration")
    show.add_argument("file")
    show.add_argument("overrides", nargs="*", metavar="key=value")
    show.set_defaults(func=_show)
    schema = commands.add_parser("schema", help="print the JSON schema")
    schema.set_defaults(func=lambda args: print(json.dumps(config.schema(), indent=2)))


def _check(args: argparse.Namespace) -> None:
    found = config.load(args.file)
    check_names(found, args.file)
    print(f"{args.file}: valid ({found.mode}, drafter {found.drafter_name}, {found.hash()})")


def _show(args: argparse.Namespace) -> None:
    for item in args.overrides:
        if "=" not in item:
            raise FlyError(f"override {item!r}: write it as key=value")
    overrides: dict[str, Any] = {}
    for item in args.overrides:
        overrides |= key_values(item, "override")
    own, unknown = config.split_model_args(overrides)
    found = config.load(args.file, {**own, **unknown})
    check_names(found, args.file)
    print(json.dumps(found.model_dump(), indent=2))
