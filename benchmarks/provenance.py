"""Which code a benchmark measured."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str:
    """The commit of this checkout, `-dirty` with changes in it; empty outside of git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
