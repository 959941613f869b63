"""The quantised weights of a GGUF file, as they lie there."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GgufWeight:
    """A quantised weight [out_features, in_features]."""

    in_features: int
    out_features: int
    # gguf's name of its type, such as Q4_K
    format: str
    # uint8 [out_features, bytes of a row], mapped from the file
    blocks: Tensor
    # of the linear that has the weight
    bias: Tensor | None


def attach_weights(model: PreTrainedModel, path: Path) -> None:
    """Give the plain linears of a model that was loaded from a GGUF file the file's own weights, as
    `gguf_weight`. Nothing is read yet.

    transformers' loading may have permuted or changed what it dequantised: whether both are the
    same has to be checked before the file's own are used.
    """
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

    try:
        names = get_gguf_hf_weights_map(model, TensorProcessor(config=model.config.to_dict()))
    except (NotImplementedError, TypeError, AttributeError) as error:  # transformers' internals
        logger.info("%s: its weights stay dequantised: %s", path.name, error)
        return
    modules = dict(model.named_modules())
    for tensor in GGUFReader(path, "c").tensors:  # copy on write: torch takes no read-only arrays
        linear = modules.get(names.get(tensor.name, "").removesuffix(".weight"))
        if type(linear) is nn.Linear and tensor.data.dtype == "uint8":
            linear.gguf_weight = GgufWeight(  # type: ignore[assignment]
                linear.in_features, linear.out_features, tensor.tensor_type.name,
                torch.from_numpy(tensor.data), linear.bias,
            )  # fmt: skip
