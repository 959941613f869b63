"""Makes loaded models fast to decode with, once, before the first request.

What applies depends on device and dtype; what does not apply is said in one log line, and decoding
goes on with the model's own passes.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from fly.config import FlyConfig, Quantization
from fly.decoding import linears
from fly.errors import FlyError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preparation:
    """What was done to the models: packed, graphs (captured as shapes come up), eager, or the
    draft's quantisation. seconds: packing and quantising, never decode time."""

    target: str
    draft: str | None
    draft_parameters: int | None
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def prepare(
    target: PreTrainedModel, draft: PreTrainedModel | None, config: FlyConfig
) -> Preparation:
    """Pack and quantise in place, as `compile` and `draft_quantization` say.

    Raises FlyError if the configuration asks for a quantisation that cannot be had here.
    """
    limit_threads()
    start = time.perf_counter()
    draft_parameters = None if draft is None else draft.num_parameters()
    how_target = _pack(target, "target", config)
    how_draft = None if draft is None else prepare_draft(draft, config)
    return Preparation(how_target, how_draft, draft_parameters, time.perf_counter() - start)


def _pack(model: PreTrainedModel, role: str, config: FlyConfig) -> str:
    if config.compile == "off":
        return "eager"
    if (reason := linears.why_not_packed(model)) is None:
        linears.replace(model, linears.PackedLinear)
        return "packed"
    if model.device.type == "cpu":
        logger.info("compile=auto: eager passes for the %s: %s", role, reason)
    return "graphs" if model.device.type == "cuda" else "eager"


def quantizations(draft: PreTrainedModel) -> list[Quantization]:
    """The values of draft_quantization that this machine can give a freshly loaded draft."""
    if draft.device.type == "cpu":
        return ["none"] if linears.why_not_packed(draft) else ["int4", "int8", "none"]
    return ["none", "int8", "fp8"] if find_spec("torchao") else ["none"]


def prepare_draft(model: PreTrainedModel, config: FlyConfig) -> str:
    """Pack or quantise a freshly loaded draft in place; returns what was done."""
    kind = config.draft_quantization
    reason = linears.why_not_packed(model)
    on_cpu = model.device.type == "cpu"
    if kind == "auto":
        kind = "int4" if on_cpu and reason is None and config.compile == "auto" else "none"
    if kind == "none":
        return _pack(model, "draft", config)
    if on_cpu:
        if kind == "fp8":
            raise FlyError("draft_quantization=fp8: needs an accelerator: use int8 or none")
        if reason is not None:
            raise FlyError(f"draft_quantization={kind}: {reason}: set it to none or auto")
        linears.replace(model, linears.quantized if kind == "int4" else linears.Int8Linear)
        return kind
    if kind == "int4":
        raise FlyError("draft_quantization=int4: built for CPUs only: use int8, fp8 or none")
    _quantize_with_torchao(model, kind)
    return kind


def _quantize_with_torchao(model: PreTrainedModel, kind: Literal["int8", "fp8"]) -> None:
    """Weight-only quantisation by torchao, whose kernels serve accelerators."""
    try:
        from torchao.quantization import (
            Float8WeightOnlyConfig,
            Int8WeightOnlyConfig,
            quantize_,
        )
    except ImportError:
        raise FlyError(
            f"draft_quantization={kind}: needs torchao: pip install 'fly-eval[quant]', "
            "or set it to none"
        ) from None
    try:
        quantize_(model, Int8WeightOnlyConfig() if kind == "int8" else Float8WeightOnlyConfig())
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FlyError(f"draft_quantization={kind}: torchao: {reason}: set it to none") from error


def limit_threads() -> None:
    """Use no more threads than the cores this process may run on (containers, taskset)."""
    allowed = available_cores()
    if allowed < torch.get_num_threads():
        torch.set_num_threads(allowed)


def available_cores() -> int:
    """Cores by affinity and control-group quota, at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        if quota != "max":
            cores = min(cores, round(int(quota) / int(period)))
    except (OSError, ValueError):
        pass
    return max(1, cores)
