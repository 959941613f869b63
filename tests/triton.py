"""Triton's kernels without a GPU: by its interpreter, and by its compilers."""

import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
needs_triton = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install triton"),
]


def run(script, **env):
    """In a process of its own: Triton asks for its interpreter once, when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
