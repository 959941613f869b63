"""What a drafter proposes: one continuation per sequence, which may be empty.

Shapes: B sequences, K draft tokens (padded), Q = K + 1 tokens fed, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fly.execution.model_runner import ModelRunner


class Draft(ABC):
    """Proposed continuations of the committed tokens, one chain per sequence.

    `HostDraft` has its tokens as lists, `DeviceDraft` as tensors that the host has not waited for.
    """

    @abstractmethod
    def chain(self, slot: int) -> list[int]:
        """One sequence's draft tokens, on the host."""

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

    def probabilities(self, slot: int) -> Tensor | None:
        """What the tokens were drawn from, [K, V]; None if they were not drawn."""
        return None

    def is_free(self, slot: int) -> bool:
        """Whether the chain was taken from a text, at no cost, so that it says nothing of what
        drafting earns."""
        return False


class HostDraft(Draft):
    """by, q, free: what `drafted_by`, `probabilities` and `is_free` say, per sequence. In a cascade
    n-grams that the draft model confirmed are the n-gram's."""

    def __init__(
        self,
        tokens: list[list[int]],
        by: list[str] | None = None,
        q: list[Tensor | None] | None = None,
        free: list[bool] | None = None,
    ) -> None:
        self._tokens, self._by, self._q, self._free = tokens, by, q, free

    def chain(self, slot: int) -> list[int]:
        return self._tokens[slot]

    def padded(self, device: torch.device) -> tuple[Tensor, Tensor]:
        width = max(len(chain) for chain in self._tokens)
        padded = [chain + [-1] * (width - len(chain)) for chain in self._tokens]
        lengths = [len(chain) for chain in self._tokens]
        return (
            torch.tensor(padded, dtype=torch.long, device=device).reshape(len(padded), width),
            torch.tensor(lengths, device=device),
        )

    def score(self, target: ModelRunner, last_tokens: list[int]) -> Tensor:
        return target.extend([[last, *chain] for last, chain in zip(last_tokens, self._tokens)])

    def drafted_by(self, slot: int, length: int) -> str:
        return super().drafted_by(slot, length) if self._by is None else self._by[slot]

    def probabilities(self, slot: int) -> Tensor | None:
        return None if self._q is None else self._q[slot]

    def is_free(self, slot: int) -> bool:
        return self._free is not None and self._free[slot]


class DeviceDraft(Draft):
    """The draft model's own greedy tokens. draft_BK: the first length_B[b] are sequence b's."""

    def __init__(self, draft_BK: Tensor, length_B: Tensor) -> None:
        self._draft_BK, self._length_B = draft_BK, length_B

    def chain(self, slot: int) -> list[int]:
        """Waits for the device."""
        tokens: list[int] = self._draft_BK[slot, : int(self._length_B[slot])].tolist()
        return tokens

    def padded(self, device: torch.device) -> tuple[Tensor, Tensor]:
        draft_BK, length_B = self._draft_BK.to(device), self._length_B.to(device)
        past_BK = torch.arange(draft_BK.shape[1], device=device) >= length_B[:, None]
        return draft_BK.masked_fill(past_BK, -1), length_B

    def score(self, target: ModelRunner, last_tokens: list[int]) -> Tensor:
        draft_BK, _ = self.padded(target.device)
        last_B = torch.tensor(last_tokens).to(draft_BK.device)
        return target.extend_ids(torch.cat([last_B[:, None], draft_BK.clamp(min=0)], dim=1))
