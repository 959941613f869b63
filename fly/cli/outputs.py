"""The files that a command's flags name: checked before the work, which may take hours."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fly.errors import FlyError
from fly.paths import expanded
from fly.runs import context

# How what each flag writes begins. No file of a run does, nor does a pair's JSON.
_BEGINNINGS = {
    "--json": rb'{\n  "(verdict|tests)": ',
    "--markdown": rb"(### |<!-- fly compare -->)",
    "--csv": rb"(run,concurrency|series,title|task,document),",
    "--junit": rb"<\?xml version='1.0' encoding='[\w-]+'\?>\n<testsuites name=\"fly compare\"",
    "--history": rb'{"format":1,"date":',
    "--save-baseline": rb'{"format":1,"name":',
    "--output": rb"<!doctype html>\n(<.*>\n){3}<meta http-equiv=\"Content-Security-Policy\"",
}
_LONGEST = 1000  # bytes of these


def add_file(parser: Any, flag: str, help: str, **more: Any) -> None:
    """Add a flag that names a file; `~` is the user's home folder, also in `--csv=~/x.csv`."""
    parser.add_argument(flag, type=_path, metavar="FILE", help=help, **more)


def _path(text: str) -> Path:
    try:
        return expanded(text)
    except FlyError as error:  # argparse says which flag it is
        raise argparse.ArgumentTypeError(str(error)) from None


def add_force(parser: Any) -> None:
    parser.add_argument(
        "--force", action="store_true", help="replace files that the same flag did not write, too"
    )


def check(args: argparse.Namespace, files: Mapping[str, Path | None]) -> None:
    """Raise FlyError for a file that cannot be written, that two flags name, or, without --force,
    that is something else than what the flag writes. files: by flag."""
    flags: dict[Path, str] = {}
    for flag, path in files.items():
        if path is None:
            continue
        if path.is_dir():
            raise FlyError(f"{flag} {path}: is a folder: give a file")
        if path.exists() and not path.is_file():
            continue  # a pipe or a terminal
        if (other := flags.setdefault(path.resolve(), flag)) != flag:
            raise FlyError(f"{flag} {path}: {other} names the same file: choose another")
        if path.exists() and not args.force:
            with open(path, "rb") as file:
                head = file.read(_LONGEST)
            if head and not re.match(_BEGINNINGS[flag], head):
                raise FlyError(
                    f"{flag} {path}: is there already and holds something else than {flag} writes: "
                    "choose another file, or add --force"
                )
        context.check_writable(path.absolute().parent, flag)
