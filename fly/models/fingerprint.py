"""Fingerprints of models and other files, by which a later run notices that they have changed.

Files are hashed whole, because any weight may have changed. The hash of a large file is cached in
FLY_HOME/fingerprints.json and computed again when the file's size, time or inode has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, try_to_load_from_cache

from fly.errors import FlyError
from fly.models.pairs.download import sha256_of
from fly.models.sources import ModelSource
from fly.paths import fly_home, write_whole

_SUFFIXES = {".json", ".safetensors", ".bin", ".gguf", ".model", ".txt", ".jinja", ".py"}
WHOLE = "whole-"  # one hash of all files, each of them hashed whole
_DIGITS = 16  # hex digits that are kept of a SHA-256
_CACHE = "fingerprints.json"
_WORTH_CACHING = 2**20  # bytes; smaller files are read again


def hash_model(
    source: ModelSource,
    revision: str | None = None,
    cache_dir: str | None = None,
    fetch: bool = False,
) -> dict[str, Any]:
    """The model's `path`, with the fingerprints of its `files` or, for a hub id, its `commit`.

    The commit is None for a model that is not in the hub's cache, unless `fetch` downloads its
    config.json there.
    """
    folder = Path(source.path)
    if source.file is not None:
        return {"path": str(source.file), "files": {source.file.name: _hash_file(source.file)}}
    if folder.is_dir():
        return {"path": str(folder), "files": hash_folder(folder)}
    where: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir}
    cached = None
    # the path may be a folder that is gone, or the hub unreachable: loading will report the reason
    with contextlib.suppress(Exception):
        cached = try_to_load_from_cache(source.path, "config.json", **where)
        if fetch and not isinstance(cached, str):
            cached = hf_hub_download(source.path, "config.json", **where)
    commit = Path(cached).parent.name if isinstance(cached, str) else None
    return {"path": source.path, "commit": commit}


def hash_json(value: Any) -> str:
    """The first 16 hex digits of the SHA-256 of its JSON (`str` of what JSON cannot express)."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def as_one(files: Mapping[str, str]) -> str:
    """One fingerprint of a model's `files`."""
    return WHOLE + hash_json(files)


def hash_folder(folder: Path) -> dict[str, str]:
    """Size and hash of each of a model folder's files, by name."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    return {path.name: _hash_file(path) for path in files if path.is_file()}


def hash_files(path: Path, without: Callable[[Path], bool] | None = None) -> dict[str, str]:
    """Size and hash of a file, or of all files in a folder and below, by name.

    Hidden files and those of which `without` is true are left out. Empty if `path` does not exist.
    """
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {
        str(file.relative_to(path)): _hash_file(file)
        for file in files
        if file.is_file()
        and not any(part.startswith((".", "__pycache__")) for part in file.relative_to(path).parts)
        and not (without and without(file))
    }


def _hash_file(path: Path) -> str:
    found = path.stat()
    if found.st_size < _WORTH_CACHING:
        return f"{found.st_size} bytes, sha256 {sha256_of(path)[:_DIGITS]}"
    state = [found.st_size, found.st_mtime_ns, found.st_ino]
    cache = _read_cache()
    name = str(path.resolve())
    entry = cache.get(name)
    if not isinstance(entry, list) or entry[:3] != state:
        entry = [*state, sha256_of(path)[:_DIGITS]]
        _write_cache({**cache, name: entry})
    return f"{found.st_size} bytes, sha256 {entry[3]}"


def _read_cache() -> dict[str, Any]:
    try:
        cache = json.loads((fly_home() / _CACHE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cache if isinstance(cache, dict) else {}


def _write_cache(cache: dict[str, Any]) -> None:
    """Without a folder to write to, or a home folder, files are read again."""
    with contextlib.suppress(OSError, FlyError):
        fly_home().mkdir(parents=True, exist_ok=True)
        write_whole(fly_home() / _CACHE, json.dumps(cache) + "\n")
