"""Where models come from, and whether their files are whole. Loads neither torch nor a model."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

from fly.config import FlyConfig
from fly.errors import FlyError
from fly.models import pairs

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


def resolve_source(text: str, field: str) -> ModelSource:
    """A model named in the configuration. `field` is the key that errors speak of.

    Accepts a hub id, a local folder, a .gguf file, or pair:NAME/draft and pair:NAME/target.
    Raises FlyError for local paths that are not there or hold no model.
    """
    text = pairs.resolve_model_path(text)
    path = Path(text).expanduser()
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


def weight_bytes(source: ModelSource) -> int:
    """Bytes of a local model's weights, as they are loaded; 0 if it is on a hub."""
    folder = Path(source.path)
    if source.gguf_file is not None:
        return int((folder / source.gguf_file).stat().st_size * _DEQUANTISED)
    for pattern in ("*.safetensors", "*.bin"):
        files = [f for f in folder.glob(pattern) if not f.name.startswith("consolidated")]
        if files:
            return sum(file.stat().st_size for file in files)
    return 0


def sources(config: FlyConfig) -> tuple[ModelSource, ModelSource | None]:
    """(target, draft or None) of a configuration, their files checked.

    Raises FlyError for what is not there, is damaged, or is not named though it takes part.
    """
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
    """Refuse a local model whose files are cut short or were never fetched, naming the file.

    Only sizes and heads are read. Models on a hub are checked by its own client.
    """
    folder = Path(source.path)
    patterns = [source.gguf_file] if source.gguf_file else _READ_BY_TRANSFORMERS
    for file in (file for pattern in patterns for file in sorted(folder.glob(pattern))):
        try:
            damage = _damage(file)
        except OSError as error:
            damage = f"cannot be read ({error.strerror})"
        if damage:
            raise FlyError(f"{field}={folder}: {file.name} {damage}: {pairs.how_to_fetch(file)}")


def _damage(file: Path) -> str | None:
    """What is wrong with a model's file, in words; None if nothing is to be seen."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        head = opened.read(len(_POINTER))
        if not size:
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
            length = int.from_bytes(head[:8], "little")
            opened.seek(8)
            tensors = json.loads(opened.read(min(length, size)))
            ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name[0] != "_"]
            whole = 8 + length + max(ends, default=0)
        except (ValueError, RecursionError, LookupError, AttributeError, TypeError):
            return "is cut short, or no file of its kind"
        return f"is cut short ({size} of {whole} bytes)" if size < whole else None
