"""What the engine tells a rule of one sequence's draft, and what the rule answers. On the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class JudgedDraft:
    """One sequence's draft, every position judged by itself. On the host."""

    draft: list[int]
    # the draft token is what the target's own decoding accepts there: its argmax (greedy), or what
    # the rejection sampler accepts (sampling)
    matches: list[bool]
    deferrable: list[bool]  # a mismatch that the rule's gates let in
    target_tokens: list[int]  # the target's own, one more than the draft
    # where a rule judges drafts by itself (`Rule.judge`): what it lets stand, matches too, and what
    # it puts in the place of what does not stand; `matches` and `target_tokens` are then what exact
    # verification says
    stands: list[bool] | None = None
    own_tokens: list[int] | None = None
    # of letting each token stand, where a rule counts (`Rule.cost`)
    cost: list[float] | None = None
    state: Any = None  # what the rule kept of the sequence's round before; None in the first
    eos_ids: frozenset[int] = frozenset()  # of the target
    # finds how many draft tokens complete the first stop string, if all stand; None without
    stop_at: Callable[[], int | None] = lambda: None
    # matches that the window of a deferral left open by earlier rounds has seen; None without one
    open_matches: int | None = None
    start: int = 0  # tokens of the output before the draft
    # of the prompt and of the output, if these tokens follow; special tokens are line breaks there
    texts: Callable[[list[int]], tuple[str, str]] = lambda tokens: ("", "")
    # of both together, special tokens kept
    whole_text: Callable[[list[int]], str] = lambda tokens: ""
    # the last token before the draft, prompt included, that is one of these; None without one
    last_of: Callable[[tuple[int, ...]], int | None] = lambda ids: None

    def choices(self, position: int) -> set[int]:
        """What may be written at this place of the draft: its token, the target's, the rule's."""
        found = {self.draft[position], self.target_tokens[position]}
        return found if self.own_tokens is None else found | {self.own_tokens[position]}

    def first(self, k: int) -> JudgedDraft:
        """Of the first k draft tokens alone."""
        return replace(
            self,
            draft=self.draft[:k],
            matches=self.matches[:k],
            deferrable=self.deferrable[:k],
            target_tokens=self.target_tokens[: k + 1],
            stands=self.stands and self.stands[:k],
            own_tokens=self.own_tokens and self.own_tokens[: k + 1],
            cost=self.cost and self.cost[:k],
        )


@dataclass(frozen=True)
class Resolution:
    """What becomes of one sequence's draft."""

    accepted: int  # leading draft tokens that stay, provisional ones included
    deferred: tuple[int, ...] = ()  # positions among them that are deferred mismatches
    rolled_back: bool = False  # the position at `accepted` was deferred first
    # the open deferral of an earlier round is rolled back, and with it this whole draft
    rolls_back_earlier: bool = False
    # the deferral still open: its position in this draft; -1: it is the earlier round's
    open_at: int | None = None
    open_matches: int | None = None  # how many matches its window has seen; both None without one
    recovered: int | None = None  # what follows the accepted tokens; None: the target's own token
    # draft tokens past the accepted ones have decided, too: their random numbers are spent
    spends_draft: bool = False
    state: Any = None  # for the sequence's next round
