"""What all runners share: the K/V of the running sequences by slot, and how far each of them goes.

Shapes: B sequences, Q new tokens of each (padded).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fly.execution.kv_cache import SlotCache
from fly.execution.pass_costs import way_of


class SlotRunner:
    """A model with a slot of its cache per running sequence.

    `lengths[slot]` is how many tokens of that sequence the cache holds; a lower one rolls back.
    device: where it takes its inputs. way: how its passes are computed (fly.execution.pass_costs).
    block: tokens of a sequence in the one pass that drafts all of a round; None where every drafted
    token takes a pass.
    """

    block: int | None = None

    def __init__(self, model: PreTrainedModel, slots: int, device: torch.device) -> None:
        self.device = device
        self.way = way_of(model, device)
        self.resize(slots)

    @property
    def slots(self) -> int:
        return len(self.lengths)

    @property
    def chunk(self) -> int:
        """Tokens of a pass over a long text: chunks keep the arithmetic of a CPU in its caches, and
        attention from looking at keys that are all hidden."""
        return 256 if self.device.type == "cpu" else 2048

    def resize(self, slots: int) -> None:
        """Forget all K/V, free its memory, and go on with so many slots."""
        self.cache = SlotCache(slots)
        self.lengths = [0] * slots

    def reserve(self, tokens: int, *, spare: bool = True) -> None:
        """Reserve memory for `tokens` tokens per slot (see `SlotCache`); what is stored stays."""
        self.cache.reserve(tokens, spare=spare)

    def expect(self, tokens: int) -> None:
        """No slot will hold more than `tokens` tokens: memory that grows is not spared past that,
        which is what `--batch_size auto` counts."""
        self.cache.most = tokens

    def truncate(self, slot: int, length: int) -> None:
        """Set how many of the tokens written to a slot are valid: drops the others, or takes in
        what the last pass wrote."""
        self.lengths[slot] = length

    @torch.inference_mode()
    def move(self, source: int, destination: int) -> None:
        """Move a sequence to another slot."""
        self.cache.copy_slot(source, destination, self.lengths[source])
        self.lengths[destination] = self.lengths[source]

    def _begin(self, first_slot: int, rows: int, width: int) -> Tensor:
        """Have the next pass write `width` tokens behind what each of these rows holds. Returns
        their positions, [B, Q], on the device; the pass may read up to `cache.read_length`."""
        lengths = self.lengths[first_slot : first_slot + rows]
        read_length = max(lengths) + width
        self.reserve(read_length)
        positions_BQ = torch.tensor(lengths)[:, None] + torch.arange(width)
        positions_BQ = positions_BQ.to(self.device, non_blocking=True)
        self.cache.begin(first_slot, positions_BQ, read_length)
        return positions_BQ
