"""Makes loaded models fast to decode with, once, before the first request.

What applies depends on device, dtype and CPU; what does not apply is said in one log line, and
decoding goes on with the model's own passes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from fly.config import FlyConfig, Quantization
from fly.errors import FlyError
from fly.execution import fused_layer, kernels, packed_linear

logger = logging.getLogger(__name__)

Passes = Literal["kernels", "onednn", "graphs", "eager"]


@dataclass(frozen=True)
class Preparation:
    """What was done to the models, for the log and the results file.

    target: how its passes are computed: `kernels-amx` (or -avx512, -avx2), `onednn`, `graphs`
    (captured as shapes come up) or `eager`. draft: the same, and its quantisation: `kernels-amx
    int8`. draft_weight: bytes of its weights over the target's. seconds: packing and quantising,
    never decode time.
    """

    target: str
    draft: str | None
    draft_parameters: int | None
    draft_weight: float
    threads: int
    cpu_capability: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def prepare(
    target: PreTrainedModel, draft: PreTrainedModel | None, config: FlyConfig
) -> Preparation:
    """Pack and quantise in place, as `execution`, `compile` and `draft_quantization` say.

    Raises FlyError if the configuration asks for what cannot be had here.
    """
    set_threads(config.threads)
    start = time.perf_counter()
    draft_parameters = None if draft is None else draft.num_parameters()
    target_bytes = target.num_parameters() * target.dtype.itemsize
    draft_bytes = float(
        (draft_parameters or 0) * (draft.dtype.itemsize if draft is not None else 0)
    )
    how_target = _pack(target, "target", config)
    how_draft = None if draft is None else prepare_draft(draft, config)
    if how_draft is not None and draft is not None and " " in how_draft:  # names a quantisation
        draft_bytes = (draft_parameters or 0) * (0.5 if how_draft.endswith("int4") else 1)
    done = Preparation(
        target=how_target,
        draft=how_draft,
        draft_parameters=draft_parameters,
        draft_weight=round(draft_bytes / target_bytes, 3),
        threads=torch.get_num_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        seconds=time.perf_counter() - start,
    )
    logger.info(
        "passes: target %s, draft %s, %d threads (CPU capability %s)",
        done.target, done.draft or "none", done.threads, done.cpu_capability,
    )  # fmt: skip
    return done


def passes_for(model: PreTrainedModel, config: FlyConfig) -> tuple[Passes, str | None]:
    """How this model's passes are computed here, and why no faster way is, if none is.

    Raises FlyError if `execution` names a way that cannot be had.
    """
    if config.compile == "off":
        return "eager", None
    device = model.device.type
    if device != "cpu":
        if config.execution not in ("auto", "eager"):
            raise FlyError(
                f"execution={config.execution}: serves CPUs, the model is on {device}: "
                "leave it out, or set it to eager"
            )
        return ("graphs" if device == "cuda" and config.execution == "auto" else "eager"), None
    if config.execution == "eager":
        return "eager", None
    ways: dict[Passes, Callable[[PreTrainedModel], str | None]] = {
        "kernels": packed_linear.why_no_kernels,
        "onednn": packed_linear.why_not_packed,
    }
    first_reason = None
    for way, why_not in ways.items():
        if config.execution not in ("auto", way):
            continue
        reason = why_not(model)
        if reason is None:
            return way, None
        if config.execution == way:
            raise FlyError(f"execution={way}: {reason}: set it to auto")
        first_reason = first_reason or reason
    return "eager", first_reason


def _pack(model: PreTrainedModel, role: str, config: FlyConfig) -> str:
    passes, reason = passes_for(model, config)
    if passes == "kernels":
        packed_linear.use_kernels(model, kernels.Bfloat16Linear)
        fused_layer.replace(model)
        return f"kernels-{kernels.instructions()}"
    if passes == "onednn":
        packed_linear.replace(model, packed_linear.PackedLinear)
    if reason is not None:
        logger.info("compile=auto: eager passes for the %s: %s", role, reason)
    return passes


def quantizations(draft: PreTrainedModel, config: FlyConfig) -> list[Quantization]:
    """The values of draft_quantization that this machine can give a freshly loaded draft."""
    passes, _ = passes_for(draft, config)
    if passes == "kernels":
        return ["int8", "none"]
    if passes == "onednn":
        return ["int4", "int8", "none"]
    if draft.device.type == "cpu":
        return ["none"]
    return ["none", "int8", "fp8"] if find_spec("torchao") else ["none"]


def prepare_draft(model: PreTrainedModel, config: FlyConfig) -> str:
    """Pack or quantise a freshly loaded draft in place; returns what was done."""
    kind = config.draft_quantization
    passes, reason = passes_for(model, config)
    if kind == "auto":
        kind = {"kernels": "int8", "onednn": "int4"}.get(passes, "none")  # type: ignore[assignment]
    if kind == "none":
        return _pack(model, "draft", config)
    if model.device.type != "cpu":
        if kind == "int4":
            raise FlyError("draft_quantization=int4: built for CPUs only: use int8, fp8 or none")
        _quantize_with_torchao(model, kind)
        return f"{passes} {kind}"
    if kind == "fp8":
        raise FlyError("draft_quantization=fp8: needs an accelerator: use int8 or none")
    if passes == "eager":
        reason = reason or "compile=off and execution=eager leave the model's own passes"
        raise FlyError(f"draft_quantization={kind}: {reason}: set it to none or auto")
    if passes == "kernels":
        if kind == "int4":
            raise FlyError(
                "draft_quantization=int4: fly's kernels have none: use int8, which is as fast "
                "there, or execution=onednn on a CPU with bfloat16 instructions"
            )
        packed_linear.use_kernels(model, kernels.Int8Linear)
        fused_layer.replace(model)
        return f"kernels-{kernels.instructions()} int8"
    packed_linear.replace(
        model, packed_linear.quantized if kind == "int4" else packed_linear.Int8Linear
    )
    return f"onednn {kind}"


def _quantize_with_torchao(model: PreTrainedModel, kind: str) -> None:
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


def set_threads(wanted: int | None) -> None:
    """Use `wanted` threads; by default no more than the cores this process may run on."""
    if wanted is not None:
        torch.set_num_threads(wanted)
        return
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
