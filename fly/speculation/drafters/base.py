"""What the engine asks of a drafter. A strategy is an object, never a branch in the loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fly.execution.pass_costs import PairCosts
from fly.execution.slot_runner import SlotRunner
from fly.settings import DrafterSettings, TextSourceName
from fly.speculation.sequence import Sequence, Verdict


class Draft:
    """Proposed continuations, one chain per sequence, which may be empty.

    Chains follow the committed tokens of their sequences. They are given as lists or, where they
    were drafted on an accelerator, as tensors that the host need not wait for. q: per sequence,
    what its tokens were drawn from, [K, V]; None where they were not drawn. by: per sequence, who
    proposed each token, a letter of fly.runs.records.SOURCES each (in a cascade, n-grams that the
    draft model confirmed are the n-gram's). free: per sequence, whether its chain was taken from a
    text, at no cost, so that it says nothing of what drafting earns.
    """

    def __init__(
        self,
        tokens: list[list[int]],
        by: list[str] | None = None,
        q: list[Tensor | None] | None = None,
        free: list[bool] | None = None,
    ) -> None:
        self.tokens: list[list[int]] | None = tokens
        self._padded: tuple[Tensor, Tensor] | None = None
        self._by = by
        self._q = q
        self._free = free

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes are told what was drafted, not what it was drawn from."""
        count = len(self._padded[1]) if self._padded is not None else len(self.tokens or [])
        return Draft, ([self.chain(slot) for slot in range(count)], self._by, None, self._free)

    def is_free(self, slot: int) -> bool:
        return self._free is not None and self._free[slot]

    def drafted_by(self, slot: int, length: int) -> str:
        """`length` letters; a draft that was left on its device is the draft model's own."""
        return "d" * length if self._by is None else self._by[slot]

    def probabilities(self, slot: int) -> Tensor | None:
        return None if self._q is None else self._q[slot]

    def chain(self, slot: int) -> list[int]:
        """One chain on the host; waits for it if it is on a device."""
        if self.tokens is not None:
            return self.tokens[slot]
        assert self._padded is not None
        draft_BK, length_B = self._padded
        result: list[int] = draft_BK[slot, : int(length_B[slot])].tolist()
        return result

    @classmethod
    def on_device(cls, draft_BK: Tensor, length_B: Tensor) -> Draft:
        """draft_BK: ids, whose first length_B[b] are sequence b's chain."""
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
        width = max(len(chain) for chain in self.tokens)
        padded = [chain + [-1] * (width - len(chain)) for chain in self.tokens]
        lengths = [len(chain) for chain in self.tokens]
        return (
            torch.tensor(padded, dtype=torch.long, device=device).reshape(len(padded), width),
            torch.tensor(lengths, device=device),
        )


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter is made from.

    slots: how many sequences run at most. sequences: the same for the whole run, of which a part
    may be there already. draft_runner: of the draft, with so many slots: a ModelRunner, or what the
    registry's `head` makes by `runner`; None for drafters that need no draft (fly/registry.py).
    costs: of both models' passes.
    changes_texts: what is drafted, and how much, may change a text (lossy rules; tokens drawn from
    a draft model), so that it must not depend on what other requests were like. text_sources: see
    fly/speculation/drafters/texts.py.
    """

    slots: int
    sequences: int
    settings: DrafterSettings
    eos_ids: frozenset[int]
    draft_runner: Any
    costs: PairCosts
    changes_texts: bool
    text_sources: tuple[TextSourceName, ...]


class Drafter:
    """Proposes tokens for running sequences; sequence b sits in slot b of every cache.

    This one has no state: a drafter overrides what it needs.

    devices: where it leaves work that the host has not waited for. wants_features: numbers of the
    target's hidden states that it reads (fly.execution.model_runner); `admit` and `commit` get them
    side by side, [.., F]. Prefixes are then computed, not copied. runner: the draft's, which
    follows the slots; None without one. longest: drafts that cost no pass may have so many tokens,
    whatever the limits. prefilling: what a prefill that `admit` put off has to run within, so that
    its seconds are that sequence's prefill, not drafting.
    """

    prefilling: Callable[[Sequence], AbstractContextManager[None]] = staticmethod(
        lambda sequence: nullcontext()
    )
    devices: tuple[torch.device, ...] = ()
    wants_features: tuple[int, ...] = ()
    runner: SlotRunner | None = None
    longest: int = 0

    @classmethod
    def create(cls, context: DrafterContext) -> Drafter:
        return cls()

    def reserve(self, longest: int, spd_k: int) -> None:
        """Sequences will have up to `longest` tokens, and drafts up to spd_k more."""
        if self.runner is not None:
            self.runner.expect(longest + spd_k)

    def admit(
        self, slot: int, sequence: Sequence, features: Tensor | None = None, *, soon: bool = True
    ) -> None:
        """A sequence starts in `slot`: prefill, build an index. Unless something is drafted for it
        `soon`, work may be put off until something is. features: of its tokens but the last,
        [1, N, F].
        """

    def propose(self, running: list[Sequence], limits: list[int]) -> Draft:
        """At most `limits[b]` tokens for sequence b, ending at EOS. All tokens of the sequences are
        committed. Tokens that cost no pass may be more: up to `longest`, within the budget."""
        raise NotImplementedError

    def commit(
        self, running: list[Sequence], verdicts: list[Verdict], features: Tensor | None = None
    ) -> None:
        """The round is decided. All tokens of a sequence but the last (the target's own) are as the
        drafter saw them; what it cached past them is void. A sequence may be shorter than before,
        if a deferral of an earlier round was rolled back. features: after the token before the
        draft and after each drafted one, [B, K + 1, F].
        """

    def move(self, source: int, destination: int) -> None:
        """The sequence of slot `source` continues in slot `destination`."""
        if self.runner is not None:
            self.runner.move(source, destination)

    def resize(self, slots: int) -> None:
        """Forget every sequence and go on with so many slots; they are admitted again."""
        if self.runner is not None:
            self.runner.resize(slots)


class NoDrafter(Drafter):
    """Target only: every round is one plain decoding step."""

    def propose(self, running: list[Sequence], limits: list[int]) -> Draft:
        return Draft([[] for _ in running])
