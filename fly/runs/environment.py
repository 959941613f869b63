"""What a run depends on beside its configuration: versions of libraries, files of models."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fly.config import FlyConfig
from fly.models import fingerprint, sources
from fly.version import VERSION

_PACKAGES = ("torch", "transformers", "lm-eval", "accelerate", "tokenizers", "numpy", "vllm")
_DECIDE_TEXTS = ("fly", "torch", "transformers", "lm-eval", "tokenizers", "vllm")
_FOLDERS = ("tokenizer", "peft", "delta")  # model_args that may name folders of files


def versions() -> dict[str, str]:
    """Of what is installed."""
    found = {"fly": VERSION, "python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def deciding_versions() -> dict[str, str]:
    """Versions of what may change a text."""
    installed = versions()
    return {name: installed[name] for name in _DECIDE_TEXTS if name in installed}


def models_of(config: FlyConfig, hf_args: dict[str, Any], fetch: bool = False) -> dict[str, Any]:
    """Fingerprints of a run's models, and of the folders that `hf_args` name beside them.

    fetch: download what is needed to tell the commit of a hub model that is not in the cache.
    """
    cache = hf_args.get("cache_dir")
    found: dict[str, Any] = {
        name: {"path": path, "files": fingerprint.hash_folder(Path(path))}
        for name in _FOLDERS
        if (path := str(hf_args.get(name) or "")) and Path(path).is_dir()
    }
    if "base_url" in hf_args:  # what the server says of itself is checked instead
        return {**found, "target": {"path": config.target_model_path, "commit": None}}
    target = sources.resolve_source(config.target_model_path, "target_model_path")
    found["target"] = fingerprint.hash_model(target, hf_args.get("revision"), cache, fetch)
    if config.needs_draft_model and config.draft_model_path:
        draft = sources.resolve_source(config.draft_model_path, "pretrained")
        found["draft"] = fingerprint.hash_model(draft, config.draft_revision, cache, fetch)
    return found
