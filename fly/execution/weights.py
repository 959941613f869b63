"""Makes loaded models fast to decode with, once, before the first request.

What applies depends on device, dtype and CPU. What does not apply is logged in one line, and the
model's own passes are used.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from fly import launch
from fly.errors import FlyError
from fly.execution import fused_layer, kernels, packed_linear, uniform_passes
from fly.execution.heads.base import Head
from fly.settings import ExecutionSettings

logger = logging.getLogger(__name__)

Passes = Literal["kernels", "graphs", "inductor", "eager"]
# of the time of a pass over one token with bfloat16 weights (docs/performance.md)
_SHARES = {"kernels-amx gguf": 0.65}


@dataclass(frozen=True)
class PackedWeights:
    """What was done to the models, for the log and the results file.

    target: how its passes are computed: `kernels-amx` (or -avx512_bf16, -avx512, -avx2), followed
    by ` gguf` where they read a GGUF file's own weights, `graphs` (captured as shapes come up),
    followed by ` triton` where layers are fly's, `inductor` (compiled, then captured) or `eager`.
    draft: the same, and its quantisation: `kernels-amx int8`. eager: by model, why its passes are,
    where a faster way exists.
    draft_weight: bytes of its weights over those in bfloat16 that take as long as the target's.
    seconds: packing and quantising, never decode time. batch_invariant: a token's bits in the
    target are the same in every pass; uniform: because all its passes are of one shape
    (fly.execution.uniform_passes).
    """

    target: str
    draft: str | None
    draft_parameters: int | None
    draft_weight: float
    threads: int
    cpu_capability: str
    seconds: float
    batch_invariant: bool
    uniform: bool = False
    eager: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """What the passes were: capturing may have failed since."""
        facts = asdict(self)
        return facts | dict.fromkeys(self.eager, "eager")


def pack(
    target: PreTrainedModel, draft: PreTrainedModel | None, settings: ExecutionSettings
) -> PackedWeights:
    """Pack and quantise in place, as the settings say.

    Raises FlyError if they ask for what this machine does not have.
    """
    set_threads(settings.threads)
    start = time.perf_counter()
    target_bytes = target.num_parameters() * target.dtype.itemsize
    loaded = {"target": target} if draft is None else {"target": target, "draft": draft}
    ways = {role: passes_for(model, settings) for role, model in loaded.items()}
    how_target, is_invariant = _pack(
        target, "target", *ways["target"], invariant=settings.batch_invariant
    )
    how_draft, parameters, weight = None, None, 0.0
    if draft is not None:
        parameters, stored = draft.num_parameters(), draft.dtype.itemsize
        how_draft = pack_draft(draft, settings)
        per_weight = 1 if how_draft.endswith(" int8") else stored
        weight = round(parameters * per_weight / (target_bytes * _SHARES.get(how_target, 1.0)), 3)
    done = PackedWeights(
        target=how_target,
        draft=how_draft,
        draft_parameters=parameters,
        draft_weight=weight,
        threads=torch.get_num_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        seconds=time.perf_counter() - start,
        batch_invariant=is_invariant,
        uniform=is_invariant and not how_target.startswith("kernels"),
        eager={role: reason for role, (_, reason) in ways.items() if reason is not None},
    )
    logger.info(
        "passes: target %s, draft %s, %d threads (CPU capability %s)",
        done.target, done.draft or "none", done.threads, done.cpu_capability,
    )  # fmt: skip
    return done


def passes_for(model: PreTrainedModel, settings: ExecutionSettings) -> tuple[Passes, str | None]:
    """How this model's passes are computed here, and why no faster way is, if none is.

    Raises FlyError if `execution` names a way that does not exist here.
    """
    wanted = "eager" if settings.compile == "off" else settings.execution
    device = model.device.type
    if settings.compile == "inductor" and device != "cuda":
        raise FlyError(f"compile=inductor: serves GPUs, the model is on {device}: set it to auto")
    if device != "cpu":
        if wanted not in ("auto", "eager"):
            raise FlyError(
                f"execution={wanted}: serves CPUs, the model is on {device}: "
                "leave it out, or set it to eager"
            )
        if device != "cuda" or wanted == "eager":
            return "eager", None
        if isinstance(model, Head):
            return "eager", "passes of a head are not captured"
        if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            return "eager", "its layers are spread over devices"
        return ("inductor" if settings.compile == "inductor" else "graphs"), None
    if wanted == "eager":
        return "eager", None
    if (reason := packed_linear.why_no_kernels(model)) is None:
        return "kernels", None
    if wanted == "kernels":
        raise FlyError(f"execution=kernels: {reason}: set it to auto")
    return "eager", reason


def _pack(
    model: PreTrainedModel,
    role: str,
    passes: Passes,
    reason: str | None,
    kind: str = "none",
    *,
    invariant: bool | Literal["auto"] = False,
) -> tuple[str, bool]:
    """Pack a model on a CPU, quantised to `kind`; returns what was done, and whether a token's bits
    are the same in every pass. Raises FlyError if they must be, and cannot be here."""
    done: str = passes
    is_invariant = False
    if invariant is True and passes != "kernels":
        if (why := _why_not_uniform(model, passes, reason)) is not None:
            raise _not_invariant(why)
        if torch.version.hip:  # else its products may add up by atomics, in any order
            torch.use_deterministic_algorithms(True, warn_only=True)
        is_invariant = True
    if passes == "kernels":
        is_gguf = packed_linear.use_kernels(model, kernels.LINEARS[kind])
        is_fused = fused_layer.replace(model, is_invariant=bool(invariant))
        is_invariant = is_fused and bool(invariant)
        if invariant is True and not is_fused:
            disagree = f"{model.config.model_type}: fly's layers do not agree with transformers'"
            raise _not_invariant(fused_layer.why_not(model) or disagree)
        done = f"kernels-{kernels.instructions()}{' gguf' if is_gguf else ''}"
    else:
        packed_linear.restore_weights(model)
        if passes == "graphs" and not is_invariant and fused_layer.replace_on_gpu(model):
            done = "graphs triton"
    if reason is not None:
        logger.info("compile=auto: eager passes for the %s: %s", role, reason)
    return done if kind == "none" else f"{done} {kind}", is_invariant


def _why_not_uniform(model: PreTrainedModel, passes: Passes, reason: str | None) -> str | None:
    """Why the passes of a model outside of fly's kernels cannot be of one shape; None if they can.
    reason: why a CPU does not compute them faster."""
    if model.device.type == "cpu":
        return f"its passes are {passes} here{f' ({reason})' if reason else ''}"
    if os.environ.get("PYTORCH_TUNABLEOP_ENABLED") == "1":
        return "PYTORCH_TUNABLEOP_ENABLED=1 chooses products by their time"
    return uniform_passes.why_not(model)


def _not_invariant(why: str) -> FlyError:
    return FlyError(
        f"batch_invariant=true: the target: {why}: it takes fly's kernels (a bfloat16 model of the "
        "Llama, Mistral, Qwen2 or Qwen3 family on an x86-64 CPU) or a GPU: set it to false"
    )


def pack_draft(model: PreTrainedModel, settings: ExecutionSettings) -> str:
    """Pack or quantise a freshly loaded draft in place; returns what was done."""
    passes, reason = passes_for(model, settings)
    kind = settings.draft_quantization
    if kind == "auto":
        kind = "int8" if passes == "kernels" else "none"
    if kind != "none" and passes != "kernels":
        if model.device.type != "cpu":
            reason = "fly's kernels serve CPUs: name a quantised checkpoint as the draft"
        reason = reason or "compile=off and execution=eager leave the model's own passes"
        raise FlyError(f"draft_quantization={kind}: {reason}: set it to none or auto")
    return _pack(model, "draft", passes, reason, kind)[0]


def set_threads(wanted: int | None) -> None:
    """Use `wanted` threads; None lowers PyTorch's number to this process's share of the cores."""
    torch.set_num_threads(wanted or min(launch.cores_of_this_process(), torch.get_num_threads()))
