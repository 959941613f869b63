"""A cheap identity of a model, to notice that it is another one than before."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from fly.loading import ModelSource

_SUFFIXES = {".json", ".safetensors", ".bin", ".gguf", ".model", ".txt", ".jinja", ".py"}
_READ_UP_TO = 2**24  # bytes; larger files (weights) by size and date


def of_model(source: ModelSource, revision: str | None = None) -> dict[str, Any]:
    """Where a model lies, and its files there; of a hub id the commit, if it is in the cache."""
    folder = Path(source.path)
    if source.gguf_file is not None:
        name = source.gguf_file
        return {"path": str(folder / name), "files": {name: _of_file(folder / name)}}
    if folder.is_dir():
        return {"path": str(folder), "files": of_folder(folder)}
    cached = try_to_load_from_cache(source.path, "config.json", revision=revision)
    commit = Path(cached).parent.name if isinstance(cached, str) else None
    return {"path": source.path, "commit": commit}


def of_folder(folder: Path) -> dict[str, str]:
    """By name: a hash of a small file's content, a large file's size and date."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    return {path.name: _of_file(path) for path in files if path.is_file()}


def _of_file(path: Path) -> str:
    facts = path.stat()
    if facts.st_size > _READ_UP_TO:
        return f"{facts.st_size} bytes of {facts.st_mtime_ns / 1e9:.3f}"
    return "sha256 " + hashlib.sha256(path.read_bytes()).hexdigest()[:16]
