"""`batch_invariant` on accelerators: every pass has one shape.

A library chooses its kernels by the shapes of a pass, and each kernel adds up in an order of its
own, so a token's bits depend on how many others share its pass. Here every pass computes the same
number of tokens, padded with copies of the last one, each token a row of its own; norms,
activations and products are then the same kernels for all. Attention, whose shapes grow with the
context, is `token_attention`'s. What a token's place in a pass may still change, `self_check` looks
for at load.

The price: a pass over one token computes WIDTH, and a long prompt takes a pass per WIDTH tokens.

Shapes: N tokens that are fed, T = WIDTH tokens of a pass, V vocabulary, F features. fed_N3, on the
host: of each token its id, the slot of its sequence, and its position there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fly.execution import token_attention
from fly.execution.cuda_graphs import CapturedPasses, PassOutput, Runner
from fly.execution.kv_cache import SlotCache

WIDTH = 64  # tokens of every pass: reading the weights takes a GPU longer than computing so many


def why_not(model: PreTrainedModel) -> str | None:
    """Why a model cannot have such passes; None if it can."""
    config = model.config.get_text_config()
    for name, module in model.named_modules():
        if "expert" in f"{name} {type(module).__name__}".lower():
            return f"it has experts ({name}), which compute as many tokens as choose them"
    if config._attn_implementation != "sdpa":
        return f"its attention is {config._attn_implementation}, not sdpa"
    return None


class UniformPasses(CapturedPasses):
    """Passes over WIDTH tokens of one runner.

    capture: True as CUDA graphs, False as static passes without a graph (for tests), None eagerly.
    """

    def __init__(self, runner: Runner, *, capture: bool | None, **how: Any) -> None:
        super().__init__(runner, capture=bool(capture), **how)
        self._is_static = capture is not None

    def run(self, fed_N3: Tensor, *, with_logits: bool) -> PassOutput:
        """Feed tokens, those of a sequence in their order: logits [N, V], hidden [N, F].

        Without logits those of the output are empty. Tensors may be a graph's own: they are valid
        until the next pass.
        """
        self._runner.reserve(int(fed_N3[:, 2].max()) + 1)
        pieces = fed_N3.split(WIDTH)
        if len(pieces) == 1:
            return self._pass(fed_N3, with_logits)
        # copied before the next pass writes over a graph's output
        outputs = [self._pass(piece, with_logits).map(torch.clone) for piece in pieces]
        hidden = [output.hidden for output in outputs if output.hidden is not None]
        logits = torch.cat([output.logits for output in outputs])
        return PassOutput(logits, torch.cat(hidden) if hidden else None)

    def _pass(self, fed_N3: Tensor, with_logits: bool) -> PassOutput:
        """One pass over at most WIDTH tokens."""
        device, cache = self._runner.device, self._runner.cache
        # a copy of a token computes and writes what the token does
        padding = fed_N3[-1:].expand(WIDTH - len(fed_N3), -1)
        values_3T = torch.cat([fed_N3, padding]).T.contiguous()
        is_static = self._is_static and cache.is_allocated
        read = SlotCache.rounded(int(fed_N3[:, 2].max()) + 1)
        if token_attention.reads_in_place(device, self._runner.model.dtype):
            read = cache.capacity
        elif is_static:
            read = min(1 << (read - 1).bit_length(), cache.capacity)

        def compute(ids_T: Tensor, slots_T: Tensor, positions_T: Tensor) -> PassOutput:
            where = (ids_T, slots_T, positions_T, read)
            return self._runner.token_pass(*where, with_logits=with_logits)

        def inputs() -> tuple[Tensor, ...]:
            return tuple(values_3T.to(device))

        captured = self.get((read, with_logits), inputs, compute) if is_static else None
        if captured is None:
            output = compute(*inputs())
        else:
            for static, given in zip(captured.inputs, values_3T):
                static.copy_(given, non_blocking=True)
            captured.replay()
            output = captured.output
        return output.map(lambda padded: padded[: len(fed_N3)])
