"""Drafts from texts alone: no pass and no second model computes them."""

from __future__ import annotations

from torch import Tensor

from fly.speculation.drafters.base import Drafter, DrafterContext
from fly.speculation.drafters.draft import Draft, HostDraft
from fly.speculation.drafters.lookup import Lookup
from fly.speculation.sequence import Sequence, Verdict


class TextDrafter(Drafter):
    """Where no text has anything to propose, the target takes a plain step."""

    @classmethod
    def create(cls, context: DrafterContext) -> Drafter:
        lookup = Lookup.create(context, has_model=False)
        assert lookup is not None
        return cls(lookup)

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self.longest = lookup.longest

    def propose(self, running: list[Sequence], limits: list[int]) -> Draft:
        found = self._lookup.propose(running, limits)
        return HostDraft(
            [proposal.tokens if proposal else [] for proposal in found],
            by=[proposal.by if proposal else "" for proposal in found],
            free=[True] * len(found),
        )

    def commit(
        self, running: list[Sequence], verdicts: list[Verdict], features: Tensor | None = None
    ) -> None:
        self._lookup.commit(verdicts)
