"""What the engine asks of a drafter. A strategy is an object, never a branch in the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fly.decoding.sequence import RowVerdict, Sequence


@dataclass(frozen=True)
class Draft:
    """Proposed continuations, one chain per row; a row may have none.

    `tokens[b]` follow the committed tokens of row b. Greedy drafts carry no probabilities.
    """

    tokens: list[list[int]]

    def padded(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(draft_BK, padded with -1, and length_B) on `device`; K is the longest chain."""
        width = max(len(row) for row in self.tokens)
        padded = [row + [-1] * (width - len(row)) for row in self.tokens]
        lengths = [len(row) for row in self.tokens]
        return (
            torch.tensor(padded, dtype=torch.long, device=device).reshape(len(padded), width),
            torch.tensor(lengths, device=device),
        )


class Drafter(Protocol):
    """Rows are in slot order: row b sits in slot b of every cache."""

    def admit(self, slot: int, row: Sequence) -> None:
        """A new row takes `slot`: prefill, build an index."""

    def propose(self, rows: list[Sequence], limits: list[int]) -> Draft:
        """At most `limits[b]` tokens for row b, ending at EOS. Rows' tokens are all committed."""

    def commit(self, rows: list[Sequence], verdicts: list[RowVerdict]) -> None:
        """The round is decided: all tokens of a row but the last (the target's own) are as the
        drafter saw them; what it cached past them is void."""

    def move(self, source: int, destination: int) -> None:
        """The row of slot `source` continues in slot `destination`."""

    def resize(self, slots: int) -> None:
        """Forget every row and go on with so many slots; rows are admitted again."""


class NoDrafter:
    """Target only: every round is one plain decoding step."""

    def admit(self, slot: int, row: Sequence) -> None:
        pass

    def propose(self, rows: list[Sequence], limits: list[int]) -> Draft:
        return Draft([[] for _ in rows])

    def commit(self, rows: list[Sequence], verdicts: list[RowVerdict]) -> None:
        pass

    def move(self, source: int, destination: int) -> None:
        pass

    def resize(self, slots: int) -> None:
        pass
