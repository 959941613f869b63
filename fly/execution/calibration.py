"""What was timed on this machine, kept in FLY_HOME for a month: later runs decide as this one."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from fly.errors import FlyError
from fly.execution.device import cpu_name
from fly.models.fingerprint import hash_json
from fly.paths import fly_home, write_whole
from fly.version import VERSION

logger = logging.getLogger(__name__)

_MOST_AGE = 30 * 24 * 3600.0  # seconds after which it is timed again


def read(identity: dict[str, Any]) -> Any:
    """What is kept of this identity, a JSON value; None if nothing is, or it is old or damaged."""
    try:
        path = _path(identity)
        if time.time() - path.stat().st_mtime > _MOST_AGE:
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, FlyError):  # FlyError: there is no home folder
        return None


def keep(identity: dict[str, Any], found: Any) -> None:
    """Without a place to write every run times anew, as a log line says."""
    try:
        path = _path(identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(found))
    except (OSError, FlyError) as error:
        logger.info("what was timed here cannot be kept: %s", error)


def _path(identity: dict[str, Any]) -> Path:
    """identity: what the timings depend on beside the machine."""
    depends_on = {
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "fly": VERSION,
        "torch": torch.__version__,
        "lib": transformers.__version__,
        **identity,
    }
    return fly_home() / "calibration" / f"{hash_json(depends_on)}.json"
