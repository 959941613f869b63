"""A model's configuration and its parameters, without its weights.

architectures.json holds the configurations of the shipped pairs' hub models, so that they are known
without a network: the keys that decide shapes, from the publisher's config.json,
`https://huggingface.co/<id>/blob/main/config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fly.errors import FlyError, reason_of
from fly.models.sources import ModelSource, is_local

KNOWN = Path(__file__).with_name("architectures.json")
_BITS_BY_METHOD = {"fp8": 8, "fbgemm_fp8": 8, "fp_quant": 4, "mxfp4": 4.25}  # mxfp4: scales by 32


@dataclass(frozen=True)
class Parameter:
    """One tensor: its name, its shape and its bytes as it is stored."""

    name: str
    shape: tuple[int, ...]
    bytes: int


def is_here(source: ModelSource) -> bool:
    """Whether `model_config` needs no network for it."""
    return is_local(source) or source.path in _known()


def _known() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(KNOWN.read_text(encoding="utf-8"))
    return found


def model_config(source: ModelSource, field: str) -> PretrainedConfig:
    """The configuration of a local model, of a known hub model or, with a network, of any.

    Raises FlyError, naming `field`, for one that cannot be read.
    """
    known = _known().get(source.path)
    if known is not None:
        try:
            return AutoConfig.for_model(**known)
        except ValueError:
            raise _not_loaded(known["model_type"], f"{field}={source.path}") from None
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(
            source.path, **({"gguf_file": source.gguf_file} if source.gguf_file else {})
        )
    except (OSError, ValueError, KeyError) as error:
        raise FlyError(
            f"{field}={source.path}: its config.json can neither be read nor is it known here "
            f"({reason_of(error)}): name a local folder that holds it"
        ) from None
    return found.get_text_config()


def without_weights(config: PretrainedConfig, name: str) -> PreTrainedModel:
    """The model on the meta device: shapes, no memory.

    Raises FlyError, naming `name`, for what transformers loads as no causal language model.
    """
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise _not_loaded(config.model_type, name)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=stored_dtype(config)
        )
    return model


def _not_loaded(model_type: str, name: str) -> FlyError:
    return FlyError(
        f"{name}: transformers {transformers.__version__} loads {model_type} as no causal language "
        "model: use --model vllm, or choose another model"
    )


def stored_dtype(config: PretrainedConfig) -> torch.dtype:
    """The dtype that the checkpoint is loaded in: its own, as lm-eval's hf and vLLM do."""
    dtype = getattr(config, "dtype", None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def parameters(model: PreTrainedModel, bits: float | None) -> Iterator[Parameter]:
    """All parameters, tied ones once. bits: of a weight in quantised layers; None: there are none.

    Quantised are linear layers and fused experts but the output embedding and what the checkpoint's
    quantization_config leaves out; scales, mostly under 1 %, are left out.
    """
    linear = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()
    }
    settings = _quantization(model.config)
    kept = [f"*.{name}.*" for name in settings.get("modules_to_not_convert") or ()]
    for name, tensor in model.named_parameters():
        is_weight = id(tensor) in linear or (tensor.dim() == 3 and ".experts." in name)
        is_kept = any(fnmatch(f".{name}.", pattern) for pattern in kept)
        own = 8 * tensor.dtype.itemsize
        per_weight = bits if bits is not None and is_weight and not is_kept else own
        yield Parameter(name, tuple(tensor.shape), int(tensor.numel() * per_weight // 8))


def _quantization(config: PretrainedConfig) -> dict[str, Any]:
    """The checkpoint's quantization_config; empty without one."""
    found = getattr(config, "quantization_config", None) or {}
    settings: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    return settings


def quantised_bits(config: PretrainedConfig) -> float | None:
    """Bits of a weight in the checkpoint's quantised layers; None if there are none.

    Raises FlyError for a quantization_config that does not say.
    """
    settings = _quantization(config)
    if not settings:
        return None
    method = str(settings.get("quant_method"))
    groups = settings.get("config_groups") or {}  # compressed-tensors
    group_bits = {group["weights"]["num_bits"] for group in groups.values() if group.get("weights")}
    weight = (settings.get("global_quant_config") or {}).get(
        "weight"
    ) or {}  # Quark: fp8_e4m3, int4
    weight = weight[0] if isinstance(weight, list) else weight
    quark = next((n for n in (4, 8) if str(n) in str(weight.get("dtype", ""))[:4]), None)
    by_flag = 4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else None
    bits = settings.get("bits") or max(group_bits, default=None) or quark or by_flag
    bits = bits or _BITS_BY_METHOD.get(method)
    if bits is None:
        raise FlyError(
            f"quantization_config: quant_method={method} does not say its bits per weight"
        )
    return float(bits)
