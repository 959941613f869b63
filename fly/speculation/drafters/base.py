"""What the engine asks of a drafter. A strategy is an object, never a branch in the loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fly.execution.pass_costs import PairCosts
from fly.execution.slot_runner import SlotRunner
from fly.settings import DrafterSettings, TextSourceName
from fly.speculation.drafters.draft import Draft, HostDraft
from fly.speculation.sequence import Sequence, Verdict


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter is made from."""

    sequences: int  # that run at most, in the whole run, of which a part may be there already
    settings: DrafterSettings
    eos_ids: frozenset[int]
    # of the draft, with a slot per running sequence: a ModelRunner, or what the registry's `head`
    # makes by `runner`; None for drafters that need no draft
    draft_runner: Any
    costs: PairCosts  # of both models' passes
    # what is drafted, and how much, may change a text (lossy rules; tokens drawn from a draft
    # model), so that it must not depend on what other requests were like
    changes_texts: bool
    text_sources: tuple[TextSourceName, ...]  # see fly/speculation/drafters/texts.py


class Drafter:
    """Proposes tokens for running sequences; sequence b sits in slot b of every cache.

    This one has no state: a drafter overrides what it needs.

    wants_features: numbers of the target's hidden states that it reads
    (fly.execution.model_runner); `admit` and `commit` get them side by side, [.., F]. Prefixes are
    then computed, not copied. runner: the draft's, which follows the slots; None without one.
    longest: drafts that cost no pass may have so many tokens, whatever the limits. prefilling: what
    a prefill that `admit` put off has to run within, so that its seconds are that sequence's
    prefill, not drafting. keeps_q: greedy drafts, too, come with the draft's probabilities, at
    temperature 1 and without filters.
    """

    prefilling: Callable[[Sequence], AbstractContextManager[None]] = staticmethod(
        lambda sequence: nullcontext()
    )
    wants_features: tuple[int, ...] = ()
    runner: SlotRunner | None = None
    longest: int = 0
    keeps_q: bool = False

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
        return HostDraft([[] for _ in running])
