"""What every trained head of a target is, whatever its architecture."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fly.execution.kv_cache import SlotCache
from fly.execution.slot_runner import SlotRunner
from fly.models.heads.checkpoint import Checkpoint, TargetShape


class Head(PreTrainedModel):
    """A class that fly/registry.py names as a drafter's `head`.

    layers_read: numbers of the target's hidden states that it reads, as
    fly.execution.model_runner counts them. numbers_kept: how many its drafter keeps of a token
    beside K/V.
    """

    layers_read: tuple[int, ...]
    numbers_kept = 0

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, target: TargetShape, layers: tuple[int, ...] | None = None
    ) -> Head:
        """layers: the configuration's `head_layer_ids`. Raises FlyError if it does not fit, and for
        tensors that are not what the checkpoint's own config.json says."""
        raise NotImplementedError

    def bytes_for(self, tokens: int) -> dict[torch.device, int]:
        """What a sequence of so many tokens takes, for `batch_size=auto`."""
        config = self.config
        cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        per_token = (cached + self.numbers_kept) * self.dtype.itemsize
        return {self.device: per_token * SlotCache.rounded(tokens)}

    def runner(self, target: PreTrainedModel, slots: int, max_length: int) -> SlotRunner:
        """What its drafter runs it by, for sequences of up to `max_length` tokens."""
        raise NotImplementedError

    def next_tokens(
        self, target: PreTrainedModel, tokens: list[int], features_1NF: Tensor
    ) -> dict[int, int]:
        """By place in a text: the target id that the head drafts right after that place's token.
        features: of all tokens. A head may leave places out."""
        raise NotImplementedError
