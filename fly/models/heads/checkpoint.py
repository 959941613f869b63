"""A trained head's files: config.json and its tensors, whoever published them.

A head fits one target. What its files say of themselves differs between producers; `layers_of` and
the modules beside this one bring it into one form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from fly.errors import FlyError, reason_of, summarize_names
from fly.models.draft_vocabulary import DraftVocabulary
from fly.models.loading import naming_model
from fly.models.sources import ModelSource, is_local

T = TypeVar("T", bound=nn.Module)
_FILES = ("config.json", "*.safetensors", "pytorch_model*.bin")
_OF_SNAPSHOTS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
_FIXED_ROPE = ("llama3", "linear", "yarn")  # scaling that does not depend on a text's length
_SCALE = ".weight_scale"
# what producers store beside a head's own tensors: training's leftovers, scales of activations
_LEFTOVERS = (
    "rotary_emb.inv_freq", ".input_scale", ".output_scale", ".weight_zero_point",
    "verifier_norm.weight", "verifier_lm_head.weight",
)  # fmt: skip


@dataclass(frozen=True)
class TargetShape:
    """What a head must fit. vocabulary: how many ids the target's logits have."""

    hidden_size: int
    vocabulary: int
    layers: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> TargetShape:
        config = config.get_text_config()
        return cls(config.hidden_size, config.vocab_size, config.num_hidden_layers)


@dataclass(frozen=True)
class Checkpoint:
    """name: as the run's configuration gives it. tensors: by name, 8-bit weights dequantised."""

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def refuse(self, why: str) -> FlyError:
        return FlyError(f"pretrained={self.name}: {why}")

    @contextmanager
    def reading_config(self) -> Iterator[None]:
        """What its config.json holds goes into shapes and counts: of what makes no sense there,
        any error may come. Raises FlyError instead."""
        try:
            yield
        except FlyError:
            raise
        except KeyError as error:
            raise self.refuse(f"its config.json lacks {error}") from None
        except Exception as error:
            raise self.refuse(
                f"its config.json makes no sense: {type(error).__name__}: {reason_of(error)}"
            ) from error

    def build(self, make: Callable[[], T]) -> T:
        """The head that `make` makes, with these tensors. Raises FlyError unless they are its own,
        by name and shape, before it takes memory: a tensor that nothing reads is a part of the head
        that would be left out."""
        with torch.device("meta"):
            wanted = make().state_dict()
        if missing := sorted(wanted.keys() - self.tensors.keys()):
            raise self.refuse(f"the checkpoint lacks {summarize_names(missing)}")
        if unread := sorted(self.tensors.keys() - wanted.keys()):
            raise self.refuse(f"a head with {summarize_names(unread)} is not supported")
        for name, tensor in wanted.items():
            found, expected = self.tensors[name].shape, tensor.shape
            if found != expected:
                raise self.refuse(
                    f"{name} is {_times(found)}, not {_times(expected)}: by its config.json and "
                    "the target"
                )
        head = make()
        head.load_state_dict(dict(self.tensors))
        return head

    def layers_of(
        self, found: Iterable[int], target: TargetShape, override: tuple[int, ...] | None
    ) -> tuple[int, ...]:
        """Numbers of the hidden states that the head reads, as fly.execution.model_runner counts
        them: `found`, which its files say, or the configuration's `head_layer_ids` instead."""
        layers = tuple(found)
        if override is not None and len(override) != len(layers):
            raise FlyError(
                f"head_layer_ids={list(override)}: the head reads {len(layers)} hidden states, "
                f"{list(layers)} by its files"
            )
        layers = override or layers
        if any(not 0 <= layer <= target.layers for layer in layers):
            raise self.refuse(
                f"reads hidden states {list(layers)}, and the target has 0 to {target.layers}: "
                "choose the head of this target, or set head_layer_ids"
            )
        return layers

    def vocabulary_of(self, d2t_D: Tensor, target: TargetShape) -> DraftVocabulary:
        """What its `d2t` says; FlyError if that names ids that the target does not have."""
        try:
            return DraftVocabulary.from_offsets(d2t_D, target.vocabulary)
        except ValueError as error:
            raise self.refuse(f"its d2t does not fit the target: {error}") from None

    def rope(self, shape: Mapping[str, Any]) -> dict[str, Any]:
        """`rope_theta` and `rope_scaling` for a configuration of transformers; its version 4 keeps
        them apart, 5 in `rope_parameters`."""
        parameters = shape.get("rope_parameters") or {}
        theta = float(shape.get("rope_theta") or parameters.get("rope_theta") or 10000.0)
        scaling = dict(shape.get("rope_scaling") or parameters)
        partial = shape.get("partial_rotary_factor") or scaling.get("partial_rotary_factor")
        if partial not in (None, 1):
            raise self.refuse(f"heads with partial_rotary_factor={partial} are not supported")
        kind = scaling.pop("type", None)
        kind = scaling.get("rope_type") or kind or "default"
        if kind == "default":
            return {"rope_theta": theta, "rope_scaling": None}
        if kind not in _FIXED_ROPE:
            raise self.refuse(f"heads with {kind} RoPE scaling are not supported")
        scaling |= {"rope_type": kind, "rope_theta": theta}
        return {"rope_theta": theta, "rope_scaling": scaling}


def read(source: ModelSource, name: str, hub: Mapping[str, Any]) -> Checkpoint:
    """The head in a folder or, as a hub id, downloaded with `hub`'s arguments of from_pretrained.

    Raises FlyError for files that hold no head.
    """
    folder = _folder(source, _FILES, hub)
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    if not tensors:
        for file in sorted(folder.glob("pytorch_model*.bin")):
            tensors |= torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    found = Checkpoint(name, _config(folder), tensors)
    if not tensors:
        raise found.refuse("the folder has neither *.safetensors nor pytorch_model*.bin")
    return replace(found, tensors=_dequantised(found))


def read_config(source: ModelSource, name: str, hub: Mapping[str, Any]) -> Checkpoint:
    """The head's config.json alone, without tensors, from where `read` takes it.

    Raises FlyError if it cannot be read or downloaded.
    """
    with naming_model("pretrained", name):
        config = _config(_folder(source, ("config.json",), hub))
    return Checkpoint(name, config, {})


def _folder(source: ModelSource, files: Iterable[str], hub: Mapping[str, Any]) -> Path:
    if is_local(source):
        return Path(source.path)
    given = {key: hub[key] for key in _OF_SNAPSHOTS if key in hub}
    return Path(snapshot_download(source.path, allow_patterns=list(files), **given))


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def _dequantised(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Its tensors without what training left over, and 8-bit floats times their scales, which are
    one per output channel or one for all (AMD Quark, compressed-tensors)."""
    found: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        if name.endswith((_SCALE, *_LEFTOVERS)):
            continue
        if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
            scale = checkpoint.tensors.get(name.removesuffix(".weight") + _SCALE)
            if scale is None or scale.numel() not in (1, len(tensor)):
                raise checkpoint.refuse(f"{name} is {tensor.dtype} without a scale per row")
            tensor = tensor.float() * scale.float().reshape(-1, 1)
        elif not tensor.is_floating_point() and name.endswith(".weight"):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise checkpoint.refuse(
                f"{name} is {kind}: heads of 16 bits or 8-bit floats can be read"
            )
        found[name] = tensor
    return found


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a single number"
