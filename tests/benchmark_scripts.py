"""benchmarks/ is no package: its scripts import each other from their own folder."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

_FOLDER = str(Path(__file__).parents[1] / "benchmarks")


def load(name: str) -> ModuleType:
    """The script of that name as a module."""
    sys.path.insert(0, _FOLDER)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(_FOLDER)
