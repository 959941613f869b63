"""Checks around loading: enough memory before, and passes through the cache after."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from fly.errors import FlyError, reason_of
from fly.execution import kernels, oom, uniform_passes
from fly.execution.model_runner import ModelRunner, context_of, input_device
from fly.models.sources import ModelSource, weight_bytes

logger = logging.getLogger(__name__)

_CHECKED = 64  # tokens of context in the self-check
_LONG = 300  # before the tokens whose places are compared
# The difference that rounding explains between passes of different widths, as a share of the
# largest logit, by dtype.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
_COARSEST = 0.05
_LOADED = 1.2  # bytes in memory per byte of weights: an untied copy of the head, quantisation
_WORKSPACE = 10**9  # bytes beside the weights: activations, K/V, libraries
NOT_FINITE = (
    "its weights are damaged, or overflow in this dtype: fetch the model again, or try "
    "dtype=float32 (draft_dtype for the draft)"
)


def warn_if_memory_is_short(target: ModelSource, draft: ModelSource | None, device: str) -> None:
    """Log a warning if a CPU's free memory will hardly hold the models that are on this disk.

    Weights are packed one at a time and the checkpoint's own copy is released as they are, so the
    two never exist side by side.
    """
    if device != "cpu":
        return
    stored = weight_bytes(target, stays_quantised=kernels.why_not() is None)
    stored += 0 if draft is None else weight_bytes(draft)
    needed, free = int(_LOADED * stored) + _WORKSPACE, oom.free_bytes(torch.device("cpu"))
    if stored and needed > free:
        logger.warning(
            "the models will take about %.1f GB of memory and %.1f GB are free: close other "
            "programs, or choose smaller models",
            needed / 1e9,
            free / 1e9,
        )


@torch.inference_mode()
def check_cache_agrees(
    model: PreTrainedModel, field: str, *, uniform: bool = False, capture: bool | None = None
) -> None:
    """Decode two sequences through the cache and compare every logit with a plain pass.

    Catches architectures that ignore the mask or the positions that fly passes (ALiBi, or
    positions counted by the cache), and passes that compute something else than the model's own.
    Logits may differ by what the dtype's rounding explains; the largest logit may be another one
    only where two are that close. uniform: by passes of one shape. capture: also by static passes,
    as `ModelRunner.use_static_passes` takes it: a wrong graph must not score. Raises FlyError,
    naming the configuration key `field`.
    """
    tokens = _tokens_for(model)
    name = f"{field} ({model.config.model_type})"
    unsupported = "this architecture is not supported yet"
    if uniform:
        unsupported = "batch_invariant=true does not support this architecture: set it to false"
    device = input_device(model)
    expected: Any = model(torch.tensor([tokens], device=device)).logits[0].float()
    if not expected.isfinite().all():
        raise FlyError(f"{name}: its logits are not finite (NaN or infinite): {NOT_FINITE}")
    try:
        eager = _through_cache(model, tokens, uniform)
        static = [] if capture is None else _through_cache(model, tokens, uniform, capture)
    except (ValueError, TypeError, RuntimeError, AttributeError, LookupError) as error:
        if oom.is_out_of_memory(error):
            raise FlyError(
                f"{name}: memory ran out in its first passes ({reason_of(error)}): free some, or "
                "take a smaller or quantised draft, or another device"
            ) from error
        raise FlyError(
            f"{name}: cannot be decoded through fly's cache ({reason_of(error)}): {unsupported}"
        ) from error
    dtype = torch.bfloat16 if kernels.rounds_inputs(model) else model.dtype
    tolerance = _ROUNDING.get(dtype, _COARSEST) * expected.abs().max().item() + 1e-4
    for index, (at, logits) in enumerate([*eager, *static]):
        if index >= len(eager):
            unsupported = "its captured passes are wrong: set compile=off"
        difference = (logits - expected[at]).abs().max().item()
        best, ours = (int(values.argmax()) for values in (expected[at], logits))
        gap = (expected[at, best] - expected[at, ours]).item()
        if not difference <= tolerance or gap > tolerance:  # also refuses NaN
            raise FlyError(
                f"{name}: decoding through fly's cache differs from the model's plain pass (at "
                f"token {at} by {difference:.3g}, where rounding explains {tolerance:.3g}): "
                f"{unsupported}"
            )


@torch.inference_mode()
def check_places(model: PreTrainedModel, field: str, *, capture: bool | None) -> None:
    """Check that in passes of one shape a token's bits do not depend on its place in the pass, nor
    on what shares it: a pass's tokens together, and one by one as the run will compute them.

    Libraries promise nothing of the kind. capture: as `ModelRunner.use_uniform_passes` takes it.
    Raises FlyError, naming the configuration key `field`.
    """
    width = uniform_passes.WIDTH
    length = context_of(model, _LONG + width)  # more than one block of keys
    known = _tokens_for(model)
    tokens = [known[index % len(known)] for index in range(length)]
    first = max(0, length - width)
    runners = []
    for how in (None, capture):
        runner = ModelRunner(model, slots=1, max_length=length, reuse_prefixes=False)
        runner.use_uniform_passes(capture=how)
        runner.prefill(0, tokens[:first])
        runners.append(runner)
    together, alone = runners
    together_NV = together.extend([tokens[first:]])[0].clone()
    for index, token in enumerate(tokens[first:]):
        alone.truncate(0, first + index)
        if not torch.equal(alone.extend([[token]])[0, 0], together_NV[index]):
            break
    else:
        if together.cache.holds_same(alone.cache, length):
            return
    raise FlyError(
        f"batch_invariant=true: {field} ({model.config.model_type}): on this {runner.device.type} "
        "device a token's bits depend on its place in a pass, or on what shares it: set it to false"
    )


def _tokens_for(model: PreTrainedModel) -> list[int]:
    length = context_of(model, _CHECKED)
    words = max(1, min(model.config.get_text_config().vocab_size, 1000) - 3)
    return [(index * index * 7 + index * 11) % words + 3 for index in range(length)]


def _through_cache(
    model: PreTrainedModel, tokens: list[int], uniform: bool, capture: bool | None = None
) -> list[tuple[int, torch.Tensor]]:
    """(position, logits [V] there) of two sequences, fed piece by piece with a rollback.

    Together the pieces are prompt chunks, a wide pass and drafts, and cover all of `tokens`.
    """
    first, second = len(tokens) // 3, len(tokens) // 2
    runner = ModelRunner(model, slots=2, max_length=len(tokens), reuse_prefixes=False)
    if uniform:
        runner.use_uniform_passes(capture=capture)
    elif capture is not None:
        runner.use_static_passes(capture=capture)
    runner.prefill(0, tokens[:first], chunk=16)
    runner.prefill(1, tokens[:second], chunk=16)
    # the two fillers are rolled back
    runner.extend([[*tokens[first : first + 2], 1, 1], tokens[second : second + 2]])
    runner.truncate(0, first + 2)
    runner.truncate(1, second + 2)
    checked = []
    at = [first + 2, second + 2]
    while min(at) < len(tokens):
        pieces = [tokens[start : start + width] for start, width in zip(at, (10, 8))]
        # a sequence that has ended repeats its last token
        logits_BQV = runner.extend([piece or tokens[-1:] for piece in pieces]).float()
        for row, (start, piece) in enumerate(zip(at, pieces)):
            checked += [(start + i, logits_BQV[row, i].clone()) for i in range(len(piece))]
            at[row] = start + len(piece)
            runner.truncate(row, at[row])
    return checked
