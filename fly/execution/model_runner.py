"""One model with its cache: ragged forward passes over rows.

Shapes: B rows, Q new tokens per row (padded), V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fly.execution.cost_rule import relative_cost, way_of
from fly.execution.cuda_graphs import StaticPasses
from fly.execution.grouped_attention import grouped
from fly.execution.kv_cache import SlotCache


class ModelRunner:
    """A causal language model and the K/V of the rows in flight.

    `lengths[slot]` is how many tokens of that row the cache holds; setting it lower rolls back.
    A slot keeps what was written to it until something else is, so that a later prompt may share
    it (`reuse_prefixes`).

    vocabulary: logits past it are cut off. Models of one tokenizer pad theirs differently (Qwen2.5
    has 151936 rows up to 3B, 152064 from 7B on), and the target must be able to read a draft.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        max_length: int,
        *,
        reuse_prefixes: bool = True,
        vocabulary: int | None = None,
    ) -> None:
        self.model = model
        self._vocabulary = vocabulary
        self.max_length = max_length
        self.cache = SlotCache(slots)
        self.lengths = [0] * slots
        self._written: list[list[int]] = [[] for _ in range(slots)]  # tokens whose K/V lie there
        self._reuse_prefixes = reuse_prefixes
        self.static: StaticPasses | None = None
        self.device: torch.device = input_device(model)
        self.devices = tuple({parameter.device for parameter in model.parameters()})
        self.way = way_of(model, self.device)

    @property
    def slots(self) -> int:
        return len(self.lengths)

    def relative_cost(self, tokens: int) -> float:
        """What a pass over so many tokens costs, by a fixed rule (growth.py): 1 is a pass over one.

        It does not follow the clock, so that decisions made by it can be repeated.
        """
        return relative_cost(self.way, tokens)

    def resize(self, slots: int) -> None:
        """Forget all K/V, free its memory, and go on with so many slots."""
        self.cache = SlotCache(slots)
        self.lengths = [0] * slots
        self._written = [[] for _ in range(slots)]
        if self.static is not None:
            self.static.clear()

    @torch.inference_mode()
    def prefill(self, slot: int, tokens: list[int], chunk: int | None = None) -> int:
        """Fill a slot; returns how many of its tokens were copied rather than computed.

        No logits are built. Chunks keep the arithmetic of a CPU in its caches, and attention from
        looking at keys that are all hidden.
        """
        reused = self._copy_prefix(slot, tokens) if self._reuse_prefixes else 0
        self.lengths[slot] = reused
        self.catch_up(slot, tokens, chunk)
        return reused

    @torch.inference_mode()
    def catch_up(self, slot: int, tokens: list[int], chunk: int | None = None) -> None:
        """Feed a row what it lacks of `tokens`, whose first `lengths[slot]` it holds."""
        chunk = chunk or (256 if self.device.type == "cpu" else 2048)
        for start in range(self.lengths[slot], len(tokens), chunk):
            piece = tokens[start : start + chunk]
            self._forward(slot, [piece], logits_to_keep=torch.empty(0, dtype=torch.long))
            self.lengths[slot] += len(piece)

    def _copy_prefix(self, slot: int, tokens: list[int]) -> int:
        """Bring the longest prefix of `tokens` that any slot holds into `slot`; its length."""
        shared = [common_prefix(written, tokens) for written in self._written]
        source = max(range(self.slots), key=lambda other: (shared[other], other == slot))
        if source != slot and shared[source]:
            self.cache.copy_slot(source, slot, shared[source])
            self._written[slot] = tokens[: shared[source]]
        return shared[source]

    def reserve_rows(self, longest: int, *, width: int, steps: int = 0) -> None:
        """For static passes, have room at once for rows of up to `longest` tokens, passes over
        `width` and chains of `steps`: room that grows later costs the graphs captured by then."""
        if self.static is not None:
            past = self.static.reach(width, steps)
            self.reserve(min(longest, self.max_length) + past)

    def reserve(self, tokens: int) -> None:
        """Have room for `tokens` tokens per slot; what is stored stays."""
        if self.cache.reserve(tokens) and self.static is not None:
            self.static.clear()

    def use_static_passes(self, *, capture: bool) -> None:
        """From now on run `extend` in fixed shapes, with `capture` as CUDA graphs."""
        self.static = StaticPasses(self, capture=capture)

    @torch.inference_mode()
    def extend(self, tokens: list[list[int]]) -> Tensor:
        """Feed row b (slot b) its `tokens[b]`; returns logits [B, Q, V], Q the longest feed.

        Position i of a row answers what follows its i-th new token; past the row's own feed the
        values mean nothing. Lengths do not move: the caller says how many tokens stay, by `keep`.
        The tensor may be a graph's own: it is good until the next pass.
        """
        if self.static is not None:
            logits_BQV = self.static.extend(_padded(tokens).to(self.device))
            if logits_BQV is not None:
                self._note_written(0, tokens)
                return logits_BQV
        return self._forward(0, tokens, logits_to_keep=0)

    @torch.inference_mode()
    def extend_ids(self, ids_BQ: Tensor) -> Tensor:
        """`extend` for tokens that are on the device only; `settle` names them afterwards."""
        logits_BQV = self.static.extend(ids_BQ) if self.static is not None else None
        if logits_BQV is None:
            return self.extend(ids_BQ.tolist())
        self._note_written(0, [[]] * ids_BQ.shape[0])
        return logits_BQV

    @torch.inference_mode()
    def chain(self, feeds: list[list[int]], steps: int) -> Tensor | None:
        """Feed every row, then draft `steps` greedy tokens, on the device: [B, steps].

        A row fed nothing gets tokens that mean nothing, and stays as it is.
        None where that is not to be had: draft by `extend`. Lengths move past all that was fed;
        `settle` names the tokens afterwards.
        """
        if self.static is None:
            return None
        counts = [len(feed) for feed in feeds]
        counts_B = torch.tensor(counts).to(self.device)
        drafted_BK = self.static.chain(_padded(feeds).to(self.device), counts_B, steps)
        if drafted_BK is not None:
            self._note_written(0, feeds)
            for slot, count in enumerate(counts):
                if count:
                    self.lengths[slot] += count + steps - 1
        return drafted_BK

    def settle(self, slot: int, tokens: list[int], length: int) -> None:
        """`keep(slot, length)`, and say which tokens those are (after passes on the device)."""
        written = self._written[slot]
        written += tokens[len(written) : length]
        self.lengths[slot] = length

    def _note_written(self, first_slot: int, tokens: list[list[int]]) -> None:
        """What lay past each row's length was overwritten, padded rows of a graph included."""
        for slot in range(first_slot, self.slots if self.static else first_slot + len(tokens)):
            del self._written[slot][self.lengths[slot] :]
        for slot, row in enumerate(tokens, start=first_slot):
            self._written[slot] += row

    def static_pass(self, ids_BQ: Tensor, lengths_B: Tensor, read_length: int) -> Tensor:
        """One pass over slots 0..B-1 whose shapes do not depend on any value. [B, Q, V]."""
        positions_BQ = lengths_B[:, None] + torch.arange(ids_BQ.shape[1], device=self.device)
        self.cache.begin(0, positions_BQ, read_length)
        return self._call(ids_BQ, positions_BQ, self._mask(positions_BQ, read_length), 0)

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

    def _forward(
        self, first_slot: int, tokens: list[list[int]], logits_to_keep: int | Tensor
    ) -> Tensor:
        ids_BQ = _padded(tokens)
        lengths_B = torch.tensor(self.lengths[first_slot : first_slot + len(tokens)])
        positions_BQ = lengths_B[:, None] + torch.arange(ids_BQ.shape[1])
        read_length = int(positions_BQ.max()) + 1
        self.reserve(read_length)
        self.cache.begin(first_slot, positions_BQ)
        self._note_written(first_slot, tokens)
        mask = self._mask(positions_BQ, read_length)
        on_device = (ids_BQ.to(self.device), positions_BQ.to(self.device), mask.to(self.device))
        return self._call(*on_device, logits_to_keep)

    def _call(
        self, ids_BQ: Tensor, positions_BQ: Tensor, mask: Tensor, logits_to_keep: int | Tensor
    ) -> Tensor:
        """logits_to_keep: as in transformers: which positions to build logits for, 0 being all."""
        with grouped(self.model):
            output = self.model(
                input_ids=ids_BQ,
                # padding may lie past the context, where position tables have no entry
                position_ids=positions_BQ.clamp(max=self.max_length - 1),
                attention_mask=mask,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=logits_to_keep,
            )
        logits: Tensor = output.logits
        return logits[..., : self._vocabulary]

    def _mask(self, positions_BQ: Tensor, read_length: int) -> Tensor:
        """[B, 1, Q, T], additive: a query sees every position up to its own."""
        dtype = self.model.dtype
        keys_T = torch.arange(read_length, device=positions_BQ.device)
        hidden_BQT = keys_T > positions_BQ[:, :, None]
        mask_BQT = torch.zeros(hidden_BQT.shape, dtype=dtype, device=positions_BQ.device)
        return mask_BQT.masked_fill_(hidden_BQT, torch.finfo(dtype).min)[:, None]


def _padded(tokens: list[list[int]]) -> Tensor:
    """[B, Q] on the host, zeros after each row's own tokens."""
    width = max(len(row) for row in tokens)
    return torch.tensor([row + [0] * (width - len(row)) for row in tokens])


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its token ids."""
    embedding: Any = model.get_input_embeddings()
    device: torch.device = embedding.weight.device
    return device


def common_prefix(left: list[int], right: list[int]) -> int:
    """How many leading tokens two lists share."""
    count = min(len(left), len(right))
    if left[:count] == right[:count]:
        return count
    return next(index for index in range(count) if left[index] != right[index])
