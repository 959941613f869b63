"""One model with its cache: ragged forward passes over rows.

Shapes: B rows, Q new tokens per row (padded), V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fly.decoding.attention import grouped
from fly.decoding.cache import SlotCache
from fly.decoding.costs import PassCosts
from fly.decoding.linears import INT8_ROWS, Int8Linear


class ModelRunner:
    """A causal language model and the K/V of the rows in flight.

    `lengths[slot]` is how many tokens of that row the cache holds; setting it lower rolls back.
    A slot keeps what was written to it until something else is, so that a later prompt may share
    it (`reuse_prefixes`).
    """

    def __init__(
        self, model: PreTrainedModel, slots: int, max_length: int, *, reuse_prefixes: bool = True
    ) -> None:
        self.model = model
        self.max_length = max_length
        self.cache = SlotCache(slots)
        self.lengths = [0] * slots
        self.costs = PassCosts()
        self._written: list[list[int]] = [[] for _ in range(slots)]  # tokens whose K/V lie there
        self._reuse_prefixes = reuse_prefixes
        self._int8 = any(isinstance(module, Int8Linear) for module in model.modules())
        self.device: torch.device = next(model.get_input_embeddings().parameters()).device

    @property
    def slots(self) -> int:
        return len(self.lengths)

    def relative_cost(self, tokens: int) -> float:
        """What a pass over so many tokens costs, in passes over one, by a fixed rule.

        Weights are read once, then arithmetic takes over: after some 24 tokens on CPUs (measured,
        docs/performance.md), some hundreds on accelerators. Unlike `costs` it does not follow the
        clock, so that decisions made by it can be repeated.
        """
        if self._int8 and tokens <= INT8_ROWS:
            return 0.7
        return 1 + tokens / (24 if self.device.type == "cpu" else 256)

    def resize(self, slots: int) -> None:
        """Forget all K/V, free its memory, and go on with so many slots."""
        self.cache = SlotCache(slots)
        self.lengths = [0] * slots
        self._written = [[] for _ in range(slots)]

    @torch.inference_mode()
    def prefill(self, slot: int, tokens: list[int], chunk: int = 2048) -> int:
        """Fill a slot; returns how many of its tokens were copied rather than computed.

        No logits of the prompt are built except one row per chunk.
        """
        reused = self._copy_prefix(slot, tokens) if self._reuse_prefixes else 0
        self.lengths[slot] = reused
        for start in range(reused, len(tokens), chunk):
            piece = tokens[start : start + chunk]
            self._forward(slot, [piece], logits_to_keep=1)
            self.lengths[slot] += len(piece)
        return reused

    def _copy_prefix(self, slot: int, tokens: list[int]) -> int:
        """Bring the longest prefix of `tokens` that any slot holds into `slot`; its length."""
        shared = [common_prefix(written, tokens) for written in self._written]
        source = max(range(self.slots), key=lambda other: (shared[other], other == slot))
        if source != slot and shared[source]:
            self.cache.copy_slot(source, slot, shared[source])
            self._written[slot] = tokens[: shared[source]]
        return shared[source]

    @torch.inference_mode()
    def extend(self, tokens: list[list[int]]) -> Tensor:
        """Feed row b (slot b) its `tokens[b]`; returns logits [B, Q, V], Q the longest feed.

        Position i of a row answers what follows its i-th new token; past the row's own feed the
        values mean nothing. Lengths do not move: the caller says how many tokens stay, by `keep`.
        """
        return self._forward(0, tokens, logits_to_keep=0)

    def keep(self, slot: int, length: int) -> None:
        """Set how many tokens of the row are valid, at once and in both directions."""
        self.lengths[slot] = length

    @torch.inference_mode()
    def move(self, source: int, destination: int) -> None:
        """Move a row to another slot."""
        length = self.lengths[source]
        self.cache.copy_slot(source, destination, length)
        self.lengths[destination] = length
        self._written[destination] = self._written[source][:length]

    def _forward(self, first_slot: int, tokens: list[list[int]], logits_to_keep: int) -> Tensor:
        width = max(len(row) for row in tokens)
        ids_BQ = torch.tensor([row + [0] * (width - len(row)) for row in tokens])
        lengths_B = torch.tensor(self.lengths[first_slot : first_slot + len(tokens)])
        positions_BQ = lengths_B[:, None] + torch.arange(width)
        self.cache.reserve(int(positions_BQ.max()) + 1)
        self.cache.begin(first_slot, positions_BQ)
        for slot, row in enumerate(tokens, start=first_slot):
            self._written[slot][self.lengths[slot] :] = row
        with grouped(self.model):
            output = self.model(
                input_ids=ids_BQ.to(self.device),
                # padding may lie past the context, where position tables have no entry
                position_ids=positions_BQ.clamp(max=self.max_length - 1).to(self.device),
                attention_mask=self._mask(positions_BQ).to(self.device),
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=logits_to_keep,
            )
        logits: Tensor = output.logits
        return logits

    def _mask(self, positions_BQ: Tensor) -> Tensor:
        """[B, 1, Q, read length], additive: a query sees every position up to its own."""
        dtype = self.model.dtype
        keys = torch.arange(int(positions_BQ.max()) + 1)
        hidden_BQK = keys > positions_BQ[:, :, None]
        mask_BQK = torch.zeros(hidden_BQK.shape, dtype=dtype)
        return mask_BQK.masked_fill_(hidden_BQK, torch.finfo(dtype).min)[:, None]


def common_prefix(left: list[int], right: list[int]) -> int:
    """How many leading tokens two lists share."""
    count = min(len(left), len(right))
    if left[:count] == right[:count]:
        return count
    return next(index for index in range(count) if left[index] != right[index])
