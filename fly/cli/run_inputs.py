"""Hashes of the files that a comparison's runs read: what decides whether a run is made anew."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fly.errors import FlyError
from fly.harness.task_data import DATA_DIR
from fly.models.fingerprint import hash_files
from fly.paths import data_dir, expanded

_WRITTEN = ("json", "markdown", "junit", "csv", "save_baseline", "baseline", "history")  # flags


def hash_inputs(args: argparse.Namespace, output: Path, samples: Any) -> dict[str, dict[str, str]]:
    """Fingerprints of the files that define tasks, their data and the chosen documents, by the flag
    that names them. samples: of --samples, as given.

    What the command itself writes is left out: it would make every mode anew at the next call.
    """
    tasks = args.tasks.split(",") if isinstance(args.tasks, str) else args.tasks
    files = [task for task in tasks if isinstance(task, str) and task and Path(task).is_file()]
    include = args.include_path
    named = {
        "--tasks": [Path(file).parent for file in files],  # with the functions beside them
        "--config": [args.config],
        "--samples": [samples if isinstance(samples, str) else None],
        "--include_path": include if isinstance(include, list) else [include],
        DATA_DIR: [os.environ.get(DATA_DIR)],
        "fly's tasks": [data_dir("lm_eval_tasks")],
    }
    is_own = _written_here(args, output)
    found: dict[str, dict[str, str]] = {}
    for flag, paths in named.items():
        found[flag] = {}
        for path in filter(None, paths):
            try:
                hashed = hash_files(expanded(path).resolve(), without=is_own)
            except OSError as error:
                raise FlyError(f"{flag} {path}: cannot be read: {error}") from None
            found[flag] |= {f"{path}: {name}": digest for name, digest in hashed.items()}
    return found


def _written_here(args: argparse.Namespace, output: Path) -> Callable[[Path], bool]:
    """Whether a file is one of the comparison's own: of its runs, of its flags, or its log."""
    named = [getattr(args, name) for name in _WRITTEN]
    own = [path.resolve() for path in (output, *named) if path]
    cache = str(Path(args.use_cache).resolve()) + "_" if args.use_cache else None
    log = set()
    for descriptor in (1, 2):
        with suppress(OSError):  # it may be closed
            log.add(_inode(os.fstat(descriptor)))

    def is_own(file: Path) -> bool:
        is_cache = cache is not None and str(file).startswith(cache)
        in_own = any(file.is_relative_to(path) for path in own)
        return is_cache or in_own or _inode(file.stat()) in log

    return is_own


def _inode(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
