"""A preallocated, ragged K/V cache: one slot per row, rollback by moving a length.

Shapes: S slots, H key/value heads, C capacity (tokens), D head size, B rows of one pass, Q new
tokens per row of that pass; T tokens of a pass in which each is a row of its own. A pass writes Q
positions per row at that row's own offset and reads under a mask made from the lengths; what lies
past a row's length is never read, so rollback forgets tokens without touching data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

_BLOCK = 256  # capacity grows in whole blocks of tokens


class SlotCache(Cache):
    """K/V of every layer, [S, H, C, D] each, behind transformers' cache interface.

    Works for models whose every layer attends to the whole past; `compatibility.refuse_unsupported`
    keeps the others out. Layers are allocated at their first write, on the layer's own device.
    read_length: how many positions of a row the pass that has begun may read. is_of_tokens: whether
    each row of that pass is a token (`begin_tokens`).
    """

    def __init__(self, slots: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.capacity = 0
        self.most: int | None = None  # tokens past which nothing is kept to spare
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._rows: slice | Tensor = slice(0, 0)  # the slots that this pass writes to
        self._positions_BQ = torch.empty(0, 0, dtype=torch.long)
        self._places: dict[torch.device, tuple[Tensor, Tensor]] = {}  # of this pass, where needed
        self.read_length = 0
        self.is_of_tokens = False
        self._is_static = False

    def reserve(self, tokens: int, *, spare: bool = True) -> bool:
        """Grow the capacity to at least `tokens` per slot; what is stored stays.

        spare: by half at least, as more may follow. Returns whether it had to grow: then all
        tensors were replaced.
        """
        if tokens <= self.capacity:
            return False
        grown = self.capacity + self.capacity // 2 if spare else 0
        if self.most is not None:
            grown = min(grown, self.most)
        self.capacity = self.rounded(max(tokens, grown))
        for stored in (self._keys, self._values):
            for layer, old in enumerate(stored):  # one at a time: the old one is freed at once
                stored[layer] = old.new_zeros(*old.shape[:2], self.capacity, old.shape[3])
                stored[layer][:, :, : old.shape[2]] = old
        return True

    @staticmethod
    def rounded(tokens: int) -> int:
        """The capacity that is allocated for so many tokens."""
        return -(-tokens // _BLOCK) * _BLOCK

    @property
    def is_allocated(self) -> bool:
        """Whether a pass has written to it, so that there are tensors that a graph can read."""
        return bool(self._keys)

    @property
    def bytes_per_token(self) -> dict[torch.device, int]:
        """Bytes that one token of one row takes in the layers of each device; none before the first
        pass."""
        found: dict[torch.device, int] = {}
        for layer in (*self._keys, *self._values):
            size = layer.shape[1] * layer.shape[3] * layer.element_size()
            found[layer.device] = found.get(layer.device, 0) + size
        return found

    def begin(
        self,
        first_slot: int | Tensor,
        positions_BQ: Tensor,
        read_length: int | None = None,
        *,
        is_static: bool = False,
    ) -> None:
        """Say where the next forward pass writes: rows are consecutive slots from `first_slot`, or
        the slots that a tensor names, so that a graph serves any slot.

        read_length: how far it reads; by default up to the largest position, which the host has to
        know. is_static: nothing that the pass does depends on the positions' values (graphs).
        """
        if isinstance(first_slot, Tensor):
            self._rows = first_slot
        else:
            self._rows = slice(first_slot, first_slot + len(positions_BQ))
        self._positions_BQ = positions_BQ
        self._is_static = is_static
        self.is_of_tokens = False
        self.read_length = int(positions_BQ.max()) + 1 if read_length is None else read_length
        self._places.clear()

    def begin_tokens(self, slots_T: Tensor, positions_T: Tensor, read_length: int) -> None:
        """Have the next pass write one token per row, to any slots; it reads all of the cache.

        A token that is given twice is written twice.
        """
        self.begin(slots_T, positions_T[:, None], read_length, is_static=True)
        self.is_of_tokens = True

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` tokens of one slot over another."""
        for stored in (*self._keys, *self._values):
            stored[destination, :, :length] = stored[source, :, :length]

    def holds_same(self, other: SlotCache, length: int) -> bool:
        """Whether both hold the same bits for the first `length` tokens of their first slots."""
        pairs = zip((*self._keys, *self._values), (*other._keys, *other._values))
        return all(torch.equal(a[0, :, :length], b[0, :, :length]) for a, b in pairs)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write K/V of [B, H, Q, D]; return what the B rows may read, [B, H, read length, D], or
        after `begin_tokens` the whole layer, [S, H, C, D]."""
        for stored, new in ((self._keys, key_states), (self._values, value_states)):
            while len(stored) <= layer_idx:
                shape = (self.slots, new.shape[1], self.capacity, new.shape[3])
                stored.append(new.new_zeros(shape))
            self._write(stored[layer_idx], new)
        if self.is_of_tokens:
            return self._keys[layer_idx], self._values[layer_idx]
        return self.readable(layer_idx)

    def layer(self, layer_idx: int, heads: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's whole K and V, for who writes them itself, to `destination`; of the dtype and
        device of `like`."""
        while len(self._keys) <= layer_idx:
            for stored in (self._keys, self._values):
                stored.append(like.new_zeros(self.slots, heads, self.capacity, size))
        return self._keys[layer_idx], self._values[layer_idx]

    @property
    def destination(self) -> tuple[Tensor, int | Tensor]:
        """Where this pass writes: positions [B, Q], and the slot of the first row, as `begin` was
        told."""
        rows = self._rows
        return self._positions_BQ, rows.start if isinstance(rows, slice) else rows

    def readable(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """What this pass's rows may read of a layer, [B, H, read length, D] each."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        return keys[self._rows, :, : self.read_length], values[self._rows, :, : self.read_length]

    def _write(self, stored: Tensor, new_BHQD: Tensor) -> None:
        positions_BQ = self._positions_BQ
        if positions_BQ.shape[0] == 1 and not self._is_static:  # one row: a plain slice copy
            start = self.read_length - positions_BQ.shape[1]
            stored[self._rows, :, start : self.read_length] = new_BHQD
            return
        device = stored.device
        if device not in self._places:  # once per pass, not per layer
            slots = self._rows
            if isinstance(slots, slice):
                slots = torch.arange(slots.start, slots.stop, device=device)
            self._places[device] = (slots.to(device)[:, None], positions_BQ.to(device))
        rows_B1, positions_BQ = self._places[device]
        stored[rows_B1, :, positions_BQ] = new_BHQD.transpose(1, 2)

    # What transformers' models ask a cache for while they build masks and positions; fly passes
    # both explicitly, so these only have to be well-formed.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.read_length - self._positions_BQ.shape[1]

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.read_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length  # its name in transformers 4
