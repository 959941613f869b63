"""`batch_invariant` on accelerators: every pass has one shape.

A library chooses its kernels by the shapes of a pass, and each kernel adds up in an order of its
own, so a token's bits depend on how many others share its pass. Here every pass computes the same
number of tokens, padded with copies of the last one, each token a row of its own; norms,
activations and products are then the same kernels for all. Attention, whose shapes grow with the
context, goes over blocks of keys at fixed places, and a block that a token does not see changes
none of its bits. What a token's place in a pass may still change, `self_check` looks for at load.

The price: a pass over one token costs what one over `WIDTH` does, which is bound by reading the
weights on a GPU, and long prompts take more passes.

Shapes: N tokens that are fed, T = WIDTH tokens of a pass, H query heads, G query heads per K/V
head, S slots, C capacity, R readable keys, D head size, V vocabulary, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from fly.execution.cuda_graphs import CapturedPasses, PassOutput
from fly.execution.grouped_attention import EXTRAS, attention
from fly.execution.kv_cache import BLOCK, SlotCache

WIDTH = 64  # tokens of every pass: reading the weights takes a GPU longer than computing so many
_NAME = "fly_in_blocks"
_SLOTS: ContextVar[Tensor] = ContextVar("slots of a pass's tokens, [T]")


class Fed(NamedTuple):
    """A token, the sequence that it continues, and its place in it."""

    id: int
    slot: int
    position: int


def attention_in_blocks(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [T, H, 1, D], all of a layer's key and value [S, H/G, C, D], additive mask
    [T, 1, 1, R], R a multiple of BLOCK. Sums are float32, in the order of the blocks.

    Returns [T, 1, H, D], as transformers' attention functions do.
    """
    for name in EXTRAS:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name} has no blocks")
    dtype, (tokens, heads, _, size) = query.dtype, query.shape
    kv_heads = key.shape[1]
    slots_T = _SLOTS.get().to(key.device)
    query = query.reshape(tokens, kv_heads, heads // kv_heads, size).float()
    query = query * (size**-0.5 if scaling is None else scaling)
    highest = query.new_full((*query.shape[:3], 1), -torch.inf)
    whole: Tensor | float = 0.0
    mixed: Tensor | float = 0.0
    for start in range(0, attention_mask.shape[-1], BLOCK):
        block = slice(start, start + BLOCK)
        keys, values = (part[:, :, block][slots_T].float() for part in (key, value))
        scores = query @ keys.mT + attention_mask[..., block]
        new_highest = torch.maximum(highest, scores.amax(dim=-1, keepdim=True))
        # of a block that is hidden from a token: weights are 0 and what came before is kept whole
        weights, kept = (scores - new_highest).exp(), (highest - new_highest).exp()
        whole = whole * kept + weights.sum(dim=-1, keepdim=True)
        mixed = mixed * kept + weights @ values
        highest = new_highest
    assert isinstance(mixed, Tensor)
    return (mixed / whole).to(dtype).reshape(tokens, 1, heads, -1), None


AttentionInterface.register(_NAME, attention_in_blocks)


@contextmanager
def in_blocks(model: PreTrainedModel, slots_T: Tensor) -> Iterator[None]:
    """Within the block, `model` attends by `attention_in_blocks` for tokens of these slots."""
    token = _SLOTS.set(slots_T)
    try:
        with attention(model, _NAME):
            yield
    finally:
        _SLOTS.reset(token)


def why_not(model: PreTrainedModel) -> str | None:
    """Why a model cannot have such passes; None if it can."""
    config = model.config.get_text_config()
    if experts := [key for key, value in config.to_dict().items() if "experts" in key and value]:
        return f"it has experts ({experts[0]}), which compute as many tokens as choose them"
    if config._attn_implementation != "sdpa":
        return f"its attention is {config._attn_implementation}, not sdpa"
    return None


class Runner(Protocol):
    """Whose passes these are: fly.execution.model_runner.ModelRunner."""

    cache: SlotCache
    device: torch.device

    def reserve(self, tokens: int) -> None: ...

    def token_pass(
        self,
        ids_T: Tensor,
        slots_T: Tensor,
        positions_T: Tensor,
        read_length: int,
        *,
        with_logits: bool,
    ) -> PassOutput: ...


class UniformPasses(CapturedPasses[Runner]):
    """Passes over WIDTH tokens of one runner.

    capture: True as CUDA graphs, False as static passes without a graph (for tests), None eagerly.
    """

    def __init__(self, runner: Runner, *, capture: bool | None) -> None:
        super().__init__(runner, capture=bool(capture))
        self._is_static = capture is not None

    def run(self, fed: Sequence[Fed], *, with_logits: bool) -> PassOutput:
        """Feed tokens, those of a sequence in their order: logits [N, V], hidden [N, F].

        Without logits those of the output are empty.
        """
        self._runner.reserve(max(token.position for token in fed) + 1)
        outputs = [
            self._pass(fed[start : start + WIDTH], with_logits)
            for start in range(0, len(fed), WIDTH)
        ]
        hidden = [output.hidden for output in outputs if output.hidden is not None]
        logits = torch.cat([output.logits for output in outputs])
        return PassOutput(logits, torch.cat(hidden) if hidden else None)

    def _pass(self, fed: Sequence[Fed], with_logits: bool) -> PassOutput:
        """One pass over at most WIDTH tokens."""
        device, cache = self._runner.device, self._runner.cache
        # a copy of a token computes and writes what the token does
        padded = [*fed, *[fed[-1]] * (WIDTH - len(fed))]
        values = torch.tensor(padded).T.contiguous()  # ids, slots, positions
        read = SlotCache.rounded(max(token.position for token in fed) + 1)
        is_static = self._is_static and cache.bytes_per_token > 0  # there is a cache to capture
        if is_static:
            read = min(1 << (read - 1).bit_length(), cache.capacity)

        def compute(ids_T: Tensor, slots_T: Tensor, positions_T: Tensor) -> PassOutput:
            where = (ids_T, slots_T, positions_T, read)
            return self._runner.token_pass(*where, with_logits=with_logits)

        def inputs() -> tuple[Tensor, ...]:
            return tuple(values.to(device))

        captured = self.get((read, with_logits), inputs, compute) if is_static else None
        if captured is None:
            return _first(compute(*inputs()), len(fed))
        for static, given in zip(captured.inputs, values):
            static.copy_(given, non_blocking=True)
        captured.replay()
        # the next pass writes over a graph's output
        logits, hidden = _first(captured.output, len(fed))
        return PassOutput(logits.clone(), None if hidden is None else hidden.clone())


def _first(output: PassOutput, count: int) -> PassOutput:
    logits, hidden = output
    return PassOutput(logits[:count], None if hidden is None else hidden[:count])
