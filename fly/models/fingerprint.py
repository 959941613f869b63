"""The identity of a model's and other files, to notice that they are others than before.

Files are read whole, as a weight in the middle is a weight, but once per state (size, time of
change, inode): what was read is kept in FLY_HOME/fingerprints.json.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from fly.models.sources import ModelSource
from fly.paths import fly_home, write_whole

_SUFFIXES = {".json", ".safetensors", ".bin", ".gguf", ".model", ".txt", ".jinja", ".py"}
_BLOCK = 2**22  # bytes read at once
_WORTH_KEEPING = 2**20  # bytes: smaller files are read again
_MOST_KEPT = 1000  # files


def of_model(
    source: ModelSource,
    revision: str | None = None,
    cache_dir: str | None = None,
    fetch: bool = False,
) -> dict[str, Any]:
    """Where a model lies, and its files there; of a hub id the commit, if it is in the cache.

    fetch: ask the hub for it, if it is not there yet.
    """
    folder = Path(source.path)
    if source.gguf_file is not None:
        name = source.gguf_file
        return {"path": str(folder / name), "files": {name: _of_file(folder / name)}}
    if folder.is_dir():
        return {"path": str(folder), "files": of_folder(folder)}
    where: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir}
    try:
        cached = try_to_load_from_cache(source.path, "config.json", **where)
        if fetch and not isinstance(cached, str):
            cached = hf_hub_download(source.path, "config.json", **where)
    except HFValidationError:  # no hub id either: a folder that is no longer there
        cached = None
    except Exception:  # the hub's many: whatever is wrong, loading will say so
        if not fetch:
            raise
        cached = None
    commit = Path(cached).parent.name if isinstance(cached, str) else None
    return {"path": source.path, "commit": commit}


def of_value(value: Any) -> str:
    """16 hex digits of the SHA-256 of its JSON; what JSON lacks goes by its text."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def of_folder(folder: Path) -> dict[str, str]:
    """By name: size and hash of a model folder's files."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    return {path.name: _of_file(path) for path in files if path.is_file()}


def of_files(path: Path, without: Sequence[Path] = ()) -> dict[str, str]:
    """Size and hash of a file, or of every file at any depth of a folder, by name; empty if
    nothing is there. Hidden files and what lies in the folders `without` are left out."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {
        str(file.relative_to(path)): _of_file(file)
        for file in files
        if file.is_file()
        and not any(part.startswith((".", "__pycache__")) for part in file.relative_to(path).parts)
        and not any(file.is_relative_to(folder) for folder in without)
    }


def _of_file(path: Path) -> str:
    found = path.stat()
    if found.st_size < _WORTH_KEEPING:
        return f"{found.st_size} bytes, sha256 {_sha256(path)}"
    state = [found.st_size, found.st_mtime_ns, found.st_ino]
    kept = _kept()
    name = str(path.resolve())
    entry = kept.get(name)
    if not isinstance(entry, list) or entry[:3] != state:
        kept = {**kept, name: [*state, _sha256(path)]}
        _keep(kept)
    return f"{found.st_size} bytes, sha256 {kept[name][3]}"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()[:16]


def _kept_file() -> Path:
    return fly_home() / "fingerprints.json"


def _kept() -> dict[str, Any]:
    try:
        kept = json.loads(_kept_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _keep(kept: dict[str, Any]) -> None:
    """Best effort: without a folder to write to, files are read again."""
    newest = dict(list(kept.items())[-_MOST_KEPT:])
    with contextlib.suppress(OSError):
        os.makedirs(fly_home(), exist_ok=True)
        write_whole(_kept_file(), json.dumps(newest) + "\n")
