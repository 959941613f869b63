"""Models in GGUF files: their configuration and tokenizer, and their weights as they lie there."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fly.errors import FlyError, summarize_names
from fly.models.fingerprint import hash_json
from fly.paths import fly_home, whole_folder

logger = logging.getLogger(__name__)

# control tokens that end a turn or a text, whichever of them the file names as its EOS
_ENDS = {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"}
_CONTROL = 3  # GGUF's type of such tokens
_TENSORS = "gguf_tensors.json"  # what the file holds, and where
_PLAIN = ("F32", "F16", "BF16", "F64")  # types that are not quantised


@dataclass(frozen=True)
class GgufWeight:
    """A quantised weight [out_features, in_features]."""

    in_features: int
    out_features: int
    # gguf's name of its type, such as Q4_K
    format: str
    # uint8 [out_features, bytes of a row], mapped from the file
    blocks: Tensor
    # of the linear that has the weight; set when it is packed
    bias: Tensor | None = None


def metadata_folder(file: Path) -> Path:
    """A folder with the configuration and tokenizer of a GGUF file, as transformers reads them.

    Written once per file, as it takes seconds. Raises FlyError without a place to write, and what
    transformers raises for a file that it cannot read.
    """
    import gguf
    import transformers

    state = file.stat()
    key = [str(file.resolve()), state.st_size, state.st_mtime_ns, transformers.__version__]
    folder = fly_home() / "gguf" / hash_json(key)
    if folder.is_dir():
        return folder
    logger.info("%s: reading its configuration and tokenizer (once)", file)
    reader = _read(file)
    named: dict[str, Any] = {"gguf_file": file.name}
    # transformers would read the file once for each, which takes longer than all else
    with mock.patch.object(gguf, "GGUFReader", return_value=reader):
        config = transformers.AutoConfig.from_pretrained(str(file.parent), **named)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), **named)
    config.dtype = torch.bfloat16
    config.gguf_architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    generation = transformers.GenerationConfig.from_model_config(config)
    generation.eos_token_id = _end_ids(reader, config.eos_token_id)
    tensors = [
        [t.name, t.tensor_type.name, [*map(int, reversed(t.shape))], int(t.data_offset), t.n_bytes]
        for t in reader.tensors
    ]
    try:
        with whole_folder(folder) as beside:
            for part in (config, tokenizer, generation):
                part.save_pretrained(beside)
            (beside / _TENSORS).write_text(json.dumps(tensors), encoding="utf-8")
    except OSError as error:
        if not folder.is_dir():  # else another process was faster
            raise FlyError(
                f"FLY_HOME={fly_home()}: cannot be written ({error.strerror}): "
                "set FLY_HOME to a folder of yours"
            ) from error
    return folder


def _read(file: Path) -> Any:
    """gguf's reader of a file."""
    import gguf

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """Reads from a plain array: every slice of a mapped one costs three times as much."""

        def __setattr__(self, name: str, value: Any) -> None:
            is_mapped = isinstance(value, np.memmap)
            super().__setattr__(name, value.view(np.ndarray) if is_mapped else value)

    return Reader(file)


def _end_ids(reader: Any, eos: Any) -> list[int]:
    """The tokens that end a text: the configuration's, and those that are known by name."""
    kinds, tokens = (
        reader.get_field(f"tokenizer.ggml.{name}") for name in ("token_type", "tokens")
    )
    found = set(eos if isinstance(eos, list) else [eos]) - {None}
    if kinds is not None and tokens is not None:
        for index, at in enumerate(kinds.data):
            is_control = kinds.parts[at][0] == _CONTROL
            if is_control and bytes(tokens.parts[tokens.data[index]]).decode() in _ENDS:
                found.add(index)
    return sorted(found)


@dataclass(frozen=True)
class _FileTensor:
    name: str
    # gguf's name of its type, such as Q4_K or F32
    format: str
    shape: list[int]
    # uint8, mapped from the file
    data: Tensor

    def read_rows(self) -> Tensor:
        """[rows, bytes of a row]"""
        return self.data.view(math.prod(self.shape[:-1]), -1)


def dequantize(rows: Tensor, form: str) -> Tensor:
    """[rows, bytes of a row] as float32, by the gguf package."""
    import gguf

    return torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[form]))


def _map_tensors(file: Path, metadata: Path) -> Iterator[_FileTensor]:
    # private: what would be written stays in memory
    data = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
    for name, form, shape, start, count in json.loads((metadata / _TENSORS).read_bytes()):
        yield _FileTensor(name, form, shape, data[start : start + count])


def load(
    file: Path, auto_class: Any, keep: Callable[[GgufWeight], bool], **options: Any
) -> PreTrainedModel:
    """The bfloat16 model of a GGUF file. Weights of plain linears and embeddings that `keep` takes
    stay in the file, as the module's `gguf_weight`; its `weight` is NaN and takes no memory.

    Names of tensors, and what is done to their values, are transformers'. options: of its
    configuration. Raises FlyError if tensors are missing or of other shapes.
    """
    import gguf
    import transformers
    from accelerate import init_empty_weights
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    metadata = metadata_folder(file)
    config: Any = transformers.AutoConfig.from_pretrained(metadata, **options)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = auto_class.from_config(config, dtype=torch.bfloat16)
    kind = TENSOR_PROCESSORS.get(config.gguf_architecture, TensorProcessor)
    processor = kind(config=config.to_dict())
    # transformers asks for the same map again for every module, which took half of the load
    with mock.patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)):
        names = get_gguf_hf_weights_map(model, processor)
    merged: dict[str, Any] = {}  # of several tensors of the file, such as experts

    def process(values: Any, name: str) -> Any:
        done = processor.process(
            values, name, tensor_key_mapping=names, parsed_parameters={"tensors": merged}
        )
        return None if done.name is None else done.weights

    unknown: list[str] = []
    found: dict[str, Tensor | GgufWeight] = {}
    for tensor in _map_tensors(file, metadata):
        name = names.get(tensor.name)
        module = model.get_submodule(name.rpartition(".")[0]) if name else None
        if type(module) in (nn.Linear, nn.Embedding) and tensor.format not in _PLAIN:
            weight = _keep_quantised(tensor, process)
            if weight is not None and keep(weight):
                found[name] = weight
                continue
        dense = dequantize(tensor.read_rows(), tensor.format).view(tensor.shape)
        values = process(dense.numpy(), tensor.name)
        if values is not None and name is None:
            unknown.append(tensor.name)
        elif values is not None:
            found[name] = torch.tensor(values).bfloat16()
    found |= {name: values.bfloat16() for name, values in merged.items()}
    if unknown:
        logger.warning("%s: not used: %s", file.name, summarize_names(unknown))
    _fill(model, found, file)
    return model.eval()


def _keep_quantised(tensor: _FileTensor, process: Callable[[Any, str], Any]) -> GgufWeight | None:
    """A matrix as it lies in the file, its rows in the order of transformers' model. None if
    transformers does anything else to its values than move rows."""
    rows, width = tensor.shape
    in_file = torch.arange(rows, dtype=torch.float64)[:, None]
    order = process(in_file.numpy(), tensor.name)
    if order is None or order.shape != in_file.shape:
        return None
    order = torch.tensor(order)
    if not torch.equal(order.sort(0).values, in_file):
        return None
    blocks = tensor.read_rows()
    if not torch.equal(order, in_file):
        blocks = blocks[order[:, 0].long()]
    return GgufWeight(width, rows, tensor.format, blocks)


def _fill(model: PreTrainedModel, found: dict[str, Tensor | GgufWeight], file: Path) -> None:
    nothing = torch.tensor(torch.nan, dtype=torch.bfloat16)
    for name, value in found.items():
        owner, _, attribute = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        if isinstance(value, GgufWeight):
            module.gguf_weight = value
            values = nothing.expand(value.out_features, value.in_features)
        else:
            values = value
        expected = getattr(module, attribute).shape
        if values.shape != expected:
            raise FlyError(
                f"{file}: {name} has shape {[*values.shape]}, its configuration says "
                f"{[*expected]}: fetch the file again"
            )
        setattr(module, attribute, nn.Parameter(values, requires_grad=False))
    model.tie_weights()
    absent = sorted(name for name, value in model.named_parameters() if value.is_meta)
    if absent:
        raise FlyError(f"{file}: lacks {summarize_names(absent)}: fetch it again, or another file")
    kept = {id(m.weight): m.gguf_weight for m in model.modules() if hasattr(m, "gguf_weight")}
    for module in model.modules():  # tied ones too
        if type(module) in (nn.Linear, nn.Embedding) and id(module.weight) in kept:
            module.gguf_weight = kept[id(module.weight)]


def export(file: Path, folder: Path) -> None:
    """Write a GGUF file's model as a new folder of transformers', in bfloat16."""
    import transformers

    model = load(file, transformers.AutoModelForCausalLM, keep=lambda weight: False)
    with whole_folder(folder) as beside:
        model.save_pretrained(beside)
        shutil.copytree(metadata_folder(file), beside, dirs_exist_ok=True)  # the save changes some
        (beside / _TENSORS).unlink()
