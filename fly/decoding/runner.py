"""One model with its cache: ragged forward passes over rows.

Shapes: B rows, Q new tokens per row (padded), V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fly.decoding.cache import SlotCache


class ModelRunner:
    """A causal language model and the K/V of the rows in flight.

    `lengths[slot]` is how many tokens of that row the cache holds; setting it lower rolls back.
    """

    def __init__(self, model: PreTrainedModel, slots: int, max_length: int) -> None:
        self.model = model
        self.max_length = max_length
        self.cache = SlotCache(slots)
        self.lengths = [0] * slots
        self._device: torch.device = next(model.get_input_embeddings().parameters()).device
        self._additive_mask = model.config._attn_implementation == "eager"

    @torch.inference_mode()
    def prefill(self, slot: int, tokens: list[int], chunk: int = 2048) -> None:
        """Fill an empty slot. No logits of the prompt are built except one row per chunk."""
        self.lengths[slot] = 0
        for start in range(0, len(tokens), chunk):
            piece = tokens[start : start + chunk]
            self._forward(slot, [piece], logits_to_keep=1)
            self.lengths[slot] += len(piece)

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
        self.cache.copy_slot(source, destination, self.lengths[source])
        self.lengths[destination] = self.lengths[source]

    def _forward(self, first_slot: int, tokens: list[list[int]], logits_to_keep: int) -> Tensor:
        width = max(len(row) for row in tokens)
        ids_BQ = torch.tensor([row + [0] * (width - len(row)) for row in tokens])
        lengths_B = torch.tensor(self.lengths[first_slot : first_slot + len(tokens)])
        positions_BQ = lengths_B[:, None] + torch.arange(width)
        self.cache.reserve(int(positions_BQ.max()) + 1)
        self.cache.begin(first_slot, positions_BQ)
        output = self.model(
            input_ids=ids_BQ.to(self._device),
            position_ids=positions_BQ.to(self._device),
            attention_mask=self._mask(positions_BQ).to(self._device),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        )
        return output.logits

    def _mask(self, positions_BQ: Tensor) -> Tensor:
        """[B, 1, Q, read length]: a query sees every position up to its own."""
        keys = torch.arange(int(positions_BQ.max()) + 1)
        visible_BQK = keys <= positions_BQ[:, :, None]
        mask: Any = visible_BQK[:, None]
        if self._additive_mask:
            dtype = self.model.dtype
            hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype)
            mask = torch.where(mask, torch.zeros((), dtype=dtype), hidden)
        return mask
