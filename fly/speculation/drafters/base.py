"""What the engine asks of a drafter. A strategy is an object, never a branch in the loop."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fly.speculation.sequence import RowVerdict, Sequence


class Draft:
    """Proposed continuations, one chain per row; a row may have none.

    Chains follow the committed tokens of their rows. They are given as lists or, where they were
    drafted on an accelerator, as tensors that the host need not wait for. q: per row, what its
    tokens were drawn from, [K, V]; None where a rule chose them. by: per row, who proposed each
    token, a letter each: d draft model, n n-gram (confirmed by the draft model in a cascade).
    """

    def __init__(
        self,
        tokens: list[list[int]],
        by: list[str] | None = None,
        q: list[Tensor | None] | None = None,
    ) -> None:
        self.tokens: list[list[int]] | None = tokens
        self._padded: tuple[Tensor, Tensor] | None = None
        self._by = by
        self._q = q

    def drafted_by(self, slot: int, length: int) -> str:
        """`length` letters; a draft that was left on its device is the draft model's own."""
        return "d" * length if self._by is None else self._by[slot]

    def probabilities(self, slot: int) -> Tensor | None:
        return None if self._q is None else self._q[slot]

    def row(self, slot: int) -> list[int]:
        """One chain on the host; waits for it if it is on a device."""
        if self.tokens is not None:
            return self.tokens[slot]
        assert self._padded is not None
        draft_BK, length_B = self._padded
        result: list[int] = draft_BK[slot, : int(length_B[slot])].tolist()
        return result

    @classmethod
    def on_device(cls, draft_BK: Tensor, length_B: Tensor) -> Draft:
        """draft_BK: ids, whose first length_B[b] are row b's chain."""
        draft = cls([])
        draft.tokens = None
        draft._padded = (draft_BK, length_B)
        return draft

    def padded(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(draft_BK, padded with -1, and length_B) on `device`; K is the longest chain or more."""
        if self.tokens is None:
            assert self._padded is not None
            draft_BK, length_B = (part.to(device) for part in self._padded)
            past_BK = torch.arange(draft_BK.shape[1], device=device) >= length_B[:, None]
            return draft_BK.masked_fill(past_BK, -1), length_B
        width = max(len(row) for row in self.tokens)
        padded = [row + [-1] * (width - len(row)) for row in self.tokens]
        lengths = [len(row) for row in self.tokens]
        return (
            torch.tensor(padded, dtype=torch.long, device=device).reshape(len(padded), width),
            torch.tensor(lengths, device=device),
        )


class Drafter(Protocol):
    """Rows are in slot order: row b sits in slot b of every cache.

    devices: where it leaves work that the host has not waited for.
    """

    devices: tuple[torch.device, ...]

    def reserve(self, longest: int, spd_k: int) -> None:
        """Rows will have up to `longest` tokens, and drafts up to spd_k more."""

    def admit(self, slot: int, row: Sequence, *, soon: bool = True) -> None:
        """A new row takes `slot`: prefill, build an index. Unless something is drafted for it
        `soon`, work may wait until something is."""

    def propose(self, rows: list[Sequence], limits: list[int]) -> Draft:
        """At most `limits[b]` tokens for row b, ending at EOS. Rows' tokens are all committed."""

    def commit(self, rows: list[Sequence], verdicts: list[RowVerdict]) -> None:
        """The round is decided: all tokens of a row but the last (the target's own) are as the
        drafter saw them; what it cached past them is void. A row may be shorter than before, if
        a deferral of an earlier round was rolled back."""

    def move(self, source: int, destination: int) -> None:
        """The row of slot `source` continues in slot `destination`."""

    def resize(self, slots: int) -> None:
        """Forget every row and go on with so many slots; rows are admitted again."""


class NoDrafter:
    """Target only: every round is one plain decoding step."""

    devices: tuple[torch.device, ...] = ()

    def reserve(self, longest: int, spd_k: int) -> None:
        pass

    def admit(self, slot: int, row: Sequence, *, soon: bool = True) -> None:
        pass

    def propose(self, rows: list[Sequence], limits: list[int]) -> Draft:
        return Draft([[] for _ in rows])

    def commit(self, rows: list[Sequence], verdicts: list[RowVerdict]) -> None:
        pass

    def move(self, source: int, destination: int) -> None:
        pass

    def resize(self, slots: int) -> None:
        pass
