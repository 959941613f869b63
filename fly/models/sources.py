"""Resolve the models that a configuration names and check their files, without loading them."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from fly.config import FlyConfig
from fly.errors import FlyError
from fly.models.pairs import store
from fly.paths import expanded

_DEQUANTISED = 3.5  # a 4-bit GGUF file's weights as bfloat16
_POINTER = b"version https://git-lfs"
_READ_BY_TRANSFORMERS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "*.index.json", "model*.safetensors", "pytorch_model*.bin",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSource:
    """What `from_pretrained` is given: a hub id or folder, and the GGUF file in it, if any."""

    path: str
    gguf_file: str | None = None

    @property
    def file(self) -> Path | None:
        return None if self.gguf_file is None else Path(self.path) / self.gguf_file


def resolve_source(text: str, field: str) -> ModelSource:
    """A model named in the configuration; `field` is the key that errors name.

    Accepts a hub id, a local folder, a .gguf file, or pair:NAME/draft and pair:NAME/target.
    Raises FlyError for local paths that do not exist or hold no model.
    """
    text = store.resolve_model_path(text)
    path = expanded(text)
    if text.endswith(".gguf"):
        if not path.is_file():
            raise FlyError(f"{field}={text}: no such file: give the path of a GGUF file")
        return ModelSource(str(path.parent), path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FlyError(f"{field}={text}: the folder has no config.json: give a model's folder")
        return ModelSource(str(path))
    looks_local = text.startswith(("/", ".", "~")) or text.count("/") > 1
    if looks_local:
        raise FlyError(f"{field}={text}: no such folder: give a hub id or a model's folder")
    return ModelSource(text)


def is_local(source: ModelSource) -> bool:
    """Whether the model is a folder or file of this machine, not a hub id."""
    return Path(source.path).is_dir()


def weight_bytes(source: ModelSource, *, stays_quantised: bool = False) -> int:
    """Bytes of a local model's weights once loaded; 0 for a model on a hub."""
    folder = Path(source.path)
    if source.file is not None:
        return int(source.file.stat().st_size * (1 if stays_quantised else _DEQUANTISED))
    for pattern in ("*.safetensors", "*.bin"):
        files = [f for f in folder.glob(pattern) if not f.name.startswith("consolidated")]
        if files:
            return sum(file.stat().st_size for file in files)
    return 0


def check_names(config: FlyConfig, where: str) -> None:
    """Raise FlyError for a `pair:` name that names no embedded pair; `where` gave it."""
    for field in ("target_model_path", "draft_model_path"):
        try:
            store.role_of(getattr(config, field) or "")
        except FlyError as error:
            raise FlyError(f"{field} ({where}): {error}") from None


def sources(config: FlyConfig, where: str | None = None) -> tuple[ModelSource, ModelSource | None]:
    """(target, draft or None) of a configuration, with their files checked.

    where: the file that the configuration came from, if any, for errors about `pair:` names.
    Raises FlyError for a model that does not exist or is damaged, and for a missing draft.
    """
    check_names(config, where or "model_args")
    target = resolve_source(config.target_model_path, "target_model_path")
    check_files(target, "target_model_path")
    if not config.needs_draft_model:
        return target, None
    if config.draft_model_path is None:
        raise FlyError(
            "pretrained is missing: name the draft model (pretrained=<hub id or folder>), "
            "or choose drafter=ngram or use_sd=false, which need none"
        )
    draft = resolve_source(config.draft_model_path, "pretrained")
    check_files(draft, "pretrained")
    return target, draft


def check_files(source: ModelSource, field: str) -> None:
    """Raise FlyError if a file of a local model is cut short or was never fetched.

    Only sizes and headers are read. Models on a hub are checked by its own client.
    """
    folder = Path(source.path)
    read = [file for pattern in _READ_BY_TRANSFORMERS for file in sorted(folder.glob(pattern))]
    for file in read if source.file is None else [source.file]:
        try:
            damage = _damage(file)
        except OSError as error:
            damage = f"cannot be read ({error.strerror})"
        if damage:
            remedy = store.how_to_fetch(file)
            raise FlyError(f"{field}={folder}: {file.name} {damage}: {remedy}")


def _damage(file: Path) -> str | None:
    """What is wrong with a model's file, in words; None if it looks whole."""
    with open(file, "rb") as opened:
        head = opened.read(len(_POINTER))
    if not head:
        return "is empty"
    if head == _POINTER:
        return "is a git-lfs pointer, not the file itself (`git lfs pull` gets it)"
    if file.suffix == ".gguf":
        return None if head.startswith(b"GGUF") else "is no GGUF file"
    if file.suffix == ".bin":
        cut = head.startswith(b"PK") and not zipfile.is_zipfile(file)
        return "is cut short" if cut else None
    try:
        if file.suffix == ".json":
            is_object = isinstance(json.loads(file.read_bytes()), dict)
            return None if is_object else "holds no JSON object"
        with safe_open(file, "numpy"):  # compares the file's size with its header's
            return None
    except (ValueError, RecursionError, SafetensorError):
        return "is cut short, or no file of its kind"
