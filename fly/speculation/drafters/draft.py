"""What a drafter proposes: one continuation per sequence, which may be empty.

Shapes: B sequences, K draft tokens (padded), Q = K + 1 tokens fed, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:  # vLLM's processes load no runner
    from fly.execution.model_runner import ModelRunner


class Draft(ABC):
    """Proposed continuations of the committed tokens, one chain per sequence.

    `HostDraft` has its tokens as lists, `DeviceDraft` as tensors that the host has not waited for.
    """

    @abstractmethod
    def on_host(self) -> HostDraft:
        """The same, its tokens on the host, which waits for them."""

    @abstractmethod
    def padded(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(draft_BK, padded with -1, and length_B) on `device`; K is the longest chain or more."""

    @abstractmethod
    def score(self, target: ModelRunner, last_tokens: list[int]) -> Tensor:
        """One target pass: logits [B, Q, V] after each sequence's last token and each drafted
        one."""

    def drafted_by(self, slot: int, length: int) -> str:
        """Who proposed each of the first `length` tokens: letters of fly.runs.records.SOURCES."""
        return "d" * length

    @abstractmethod
    def width(self, slots: list[int]) -> int:
        """The longest of these chains, or more."""

    def is_drawn(self, slot: int) -> bool:
        """Whether it has `probabilities`."""
        return False

    def probabilities(self, slots: list[int]) -> Tensor:
        """What the tokens of these chains were drawn from, or are the likeliest of, if greedy:
        [len(slots), K, V]."""
        raise NotImplementedError

    def is_free(self, slot: int) -> bool:
        """Whether the chain was taken from a text, at no cost, so that it says nothing of what
        drafting earns."""
        return False


class HostDraft(Draft):
    """by, q, free: who drafted each token, what they were drawn from ([K, V], None if they were
    not), and whether the chain is free; per sequence. In a cascade n-grams that the draft model
    confirmed are the n-gram's."""

    def __init__(
        self,
        tokens: list[list[int]],
        by: list[str] | None = None,
        q: list[Tensor | None] | None = None,
        free: list[bool] | None = None,
    ) -> None:
        self.tokens = tokens
        self.by = by or ["d" * len(chain) for chain in tokens]
        self.q = q or [None] * len(tokens)
        self.free = free or [False] * len(tokens)

    def on_host(self) -> HostDraft:
        return self

    def padded(self, device: torch.device) -> tuple[Tensor, Tensor]:
        width = max(len(chain) for chain in self.tokens)
        padded = [chain + [-1] * (width - len(chain)) for chain in self.tokens]
        lengths = [len(chain) for chain in self.tokens]
        draft_BK = torch.tensor(padded, dtype=torch.long).reshape(len(padded), width)
        return (
            draft_BK.to(device, non_blocking=True),
            torch.tensor(lengths).to(device, non_blocking=True),
        )

    def score(self, target: ModelRunner, last_tokens: list[int]) -> Tensor:
        # a token of -1, from logits that are not finite, is named once all are judged
        chains = [[max(0, token) for token in chain] for chain in self.tokens]
        return target.extend([[last, *chain] for last, chain in zip(last_tokens, chains)])

    def drafted_by(self, slot: int, length: int) -> str:
        return self.by[slot]

    def width(self, slots: list[int]) -> int:
        return max(len(self.tokens[slot]) for slot in slots)

    def is_drawn(self, slot: int) -> bool:
        return self.q[slot] is not None

    def probabilities(self, slots: list[int]) -> Tensor:
        found = [q for slot in slots if (q := self.q[slot]) is not None]
        return found[0][None] if len(found) == 1 else pad_sequence(found, batch_first=True)

    def is_free(self, slot: int) -> bool:
        return self.free[slot]


class DeviceDraft(Draft):
    """Tokens on the device. draft_BK: the first length_B[b] are sequence b's. q_BKV: of the
    sequences whose tokens were `drawn`."""

    def __init__(
        self, draft_BK: Tensor, length_B: Tensor, q_BKV: Tensor | None, drawn: list[bool]
    ) -> None:
        self._draft_BK, self._length_B = draft_BK, length_B
        self._q_BKV, self._drawn = q_BKV, drawn

    def on_host(self) -> HostDraft:
        rows = torch.cat([self._length_B[:, None], self._draft_BK], dim=1).tolist()
        host = HostDraft([tokens[:length] for length, *tokens in rows])
        if self._q_BKV is not None:
            parts = zip(self._q_BKV, host.tokens, self._drawn)
            host.q = [q_KV[: len(chain)] if drawn else None for q_KV, chain, drawn in parts]
        return host

    def width(self, slots: list[int]) -> int:
        return self._draft_BK.shape[1]

    def is_drawn(self, slot: int) -> bool:
        return self._drawn[slot]

    def probabilities(self, slots: list[int]) -> Tensor:
        assert self._q_BKV is not None
        if len(slots) == len(self._q_BKV):
            return self._q_BKV
        device = self._q_BKV.device
        return self._q_BKV[torch.tensor(slots).to(device, non_blocking=True)]

    def padded(self, device: torch.device) -> tuple[Tensor, Tensor]:
        draft_BK, length_B = self._draft_BK.to(device), self._length_B.to(device)
        past_BK = torch.arange(draft_BK.shape[1], device=device) >= length_B[:, None]
        return draft_BK.masked_fill(past_BK, -1), length_B

    def score(self, target: ModelRunner, last_tokens: list[int]) -> Tensor:
        draft_BK, _ = self.padded(target.device)
        last_B = torch.tensor(last_tokens).to(draft_BK.device, non_blocking=True)
        return target.extend_ids(torch.cat([last_B[:, None], draft_BK.clamp(min=0)], dim=1))
