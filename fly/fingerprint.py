"""A cheap identity of a model, to notice that it is another one than before."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from fly.loading import ModelSource

_SUFFIXES = {".json", ".safetensors", ".bin", ".gguf", ".model", ".txt", ".jinja", ".py"}
_END = 2**20  # bytes; of larger files (weights) only the first and the last so many are read


def of_model(source: ModelSource, revision: str | None = None) -> dict[str, Any]:
    """Where a model lies, and its files there; of a hub id the commit, if it is in the cache."""
    folder = Path(source.path)
    if source.gguf_file is not None:
        name = source.gguf_file
        return {"path": str(folder / name), "files": {name: _of_file(folder / name)}}
    if folder.is_dir():
        return {"path": str(folder), "files": of_folder(folder)}
    try:
        cached = try_to_load_from_cache(source.path, "config.json", revision=revision)
    except HFValidationError:  # no hub id either: a folder that is no longer there
        cached = None
    commit = Path(cached).parent.name if isinstance(cached, str) else None
    return {"path": source.path, "commit": commit}


def of_value(value: Any) -> str:
    """16 hex digits of the SHA-256 of its JSON; what JSON lacks goes by its text."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def of_folder(folder: Path) -> dict[str, str]:
    """By name: the size, and a hash of the content or, if that is large, of its two ends."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    return {path.name: _of_file(path) for path in files if path.is_file()}


def _of_file(path: Path) -> str:
    size = path.stat().st_size
    with open(path, "rb") as file:
        ends = file.read(_END)
        file.seek(max(_END, size - _END))
        ends += file.read(_END)
    return f"{size} bytes, sha256 {hashlib.sha256(ends).hexdigest()[:16]}"
