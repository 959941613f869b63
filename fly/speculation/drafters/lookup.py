"""Which text to draft from, and how many tokens: what promises the most tokens per cost.

A proposal's tokens are expected to be accepted with a chance that depends on its source and on how
many tokens spoke for it, which counts of the run correct; a draft of L tokens then yields
1 + c + c^2 + ... + c^L tokens, and costs a target pass over L + 1. So a text that has been right
for long is drafted from in ever longer pieces, up to the width where a pass stops being cheap, and
a rejection, after which few tokens speak for any place, shortens the next piece.

Where drafts may change texts (fly.speculation.drafters.base.DrafterContext), counts decide nothing:
a choice then follows from the sequence's own past alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from fly.execution.pass_costs import PairCosts
from fly.settings import DrafterSettings, TextSourceName
from fly.speculation.acceptance import DRAFT_MODEL, AcceptanceEstimate
from fly.speculation.draft_length import GAIN_OF_TEXT, expected_tokens, value
from fly.speculation.drafters.base import DrafterContext
from fly.speculation.drafters.ngram import until_eos
from fly.speculation.drafters.texts import SOURCES, Proposal
from fly.speculation.sequence import Sequence, Verdict

_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # lengths that are tried
_MOST_IN_PASS = 512  # tokens: their logits take memory
_LEAST = 0.1  # chance to stand below which a token is not drafted, however cheap


class Choice:
    """Between texts, the draft model and a plain step, for all sequences of a round.

    learns: counts decide, and all sequences of a round together; else only the sequence's own past.
    sequences: how many run at most, in the whole run, whatever of it is left.
    """

    def __init__(self, costs: PairCosts, sequences: int, *, learns: bool, has_model: bool) -> None:
        self._costs = costs
        self._sequences = sequences
        self._learns = learns
        self._has_model = has_model
        self._acceptance = AcceptanceEstimate()

    def choose(self, candidates: Seq[Seq[Proposal]], limits: Seq[int]) -> list[Proposal | None]:
        """One proposal per sequence, cut to the length that is worth it; None for what happens
        without. limits: tokens that the draft model would draft."""
        sequences = len(candidates) if self._learns else self._sequences
        chosen = [
            self._best(proposals, limit, sequences) for proposals, limit in zip(candidates, limits)
        ]
        return self._cut(chosen, limits) if self._learns else chosen

    def observe(self, drafted: Iterable[tuple[Proposal | None, Verdict]]) -> None:
        """What became of a round's drafts; a draft without a proposal is the draft model's."""
        if not self._learns:
            return
        self._acceptance.forget()
        for proposal, verdict in drafted:
            speaker = proposal.speaker if proposal else DRAFT_MODEL
            self._acceptance.observe(speaker, len(verdict.draft), verdict.leading_matches)

    def _best(self, proposals: Seq[Proposal], limit: int, sequences: int) -> Proposal | None:
        best, most = None, GAIN_OF_TEXT * self._without(limit, sequences)
        for proposal in proposals:
            if not (self._learns or proposal.source.is_weighed):
                if best is None and limit:
                    return proposal.cut(limit)
                continue
            expected = self._expected(proposal)
            most_drafted = len(expected) - 1
            for length in (*(width for width in _WIDTHS if width < most_drafted), most_drafted):
                if sequences * (length + 1) > _MOST_IN_PASS and length > 1:
                    break
                worth = expected[length] / self._costs.of_round(length, 0, sequences)
                if worth > most:
                    best, most = proposal.cut(length), worth
        return best

    def _without(self, limit: int, sequences: int) -> float:
        """Tokens per cost of what would be done without a proposal."""
        chance = self._acceptance.chance(DRAFT_MODEL)
        lengths = (0, limit if self._has_model else 0)
        return max(value(length, sequences, chance, self._costs) for length in lengths)

    def _cut(self, chosen: list[Proposal | None], limits: Seq[int]) -> list[Proposal | None]:
        """All rows of a pass are as wide as its widest: cut to the length that is worth most."""
        drafted = [limit for limit, proposal in zip(limits, chosen) if proposal is None]
        steps = max(drafted, default=0) if self._has_model else 0
        chance = self._acceptance.chance(DRAFT_MODEL)
        fixed = sum(expected_tokens(min(limit, steps), chance) for limit in drafted)
        expected = [self._expected(proposal) for proposal in chosen if proposal is not None]
        rows = len(chosen)

        def value_of(width: int) -> float:
            tokens = fixed + sum(each[min(width, len(each) - 1)] for each in expected)
            return tokens / self._costs.of_round(max(width, steps), steps, rows)

        lengths = {len(proposal.tokens) for proposal in chosen if proposal is not None}
        widest = max({0, *lengths}, key=value_of)
        return [proposal.cut(widest) if proposal and widest else None for proposal in chosen]

    def _expected(self, proposal: Proposal) -> list[float]:
        """Tokens of a round, with the target's own, by how many of the proposal's are drafted; for
        as many as may well stand."""
        chance = self._acceptance.chance(proposal.speaker)
        stands, tokens = 1.0, [1.0]
        for _ in proposal.tokens:
            stands *= chance
            if stands < _LEAST:
                break
            tokens.append(tokens[-1] + stands)
        return tokens


class Lookup:
    """Drafts for all sequences from the texts at hand.

    names: the sources; they are asked in the order of `SOURCES`. longest: of a draft, in tokens.
    """

    def __init__(
        self,
        settings: DrafterSettings,
        names: Iterable[TextSourceName],
        choice: Choice,
        eos_ids: frozenset[int],
    ) -> None:
        self.longest = settings.longest_lookup
        self._sources = [SOURCES[name](settings) for name in SOURCES if name in {*names}]
        self._choice = choice
        self._eos_ids = eos_ids
        self._used: list[Proposal | None] = []

    @classmethod
    def create(cls, context: DrafterContext, *, has_model: bool) -> Lookup | None:
        """None if nothing would ever be drafted from a text."""
        learns = not context.changes_texts and context.settings.draft_policy == "auto"
        names = context.text_sources
        if has_model and not learns:  # the draft model verifies what its own text proposes
            names = tuple(name for name in names if name != "own")
        if has_model and not names:
            return None
        choice = Choice(context.costs, context.sequences, learns=learns, has_model=has_model)
        return cls(context.settings, names, choice, context.eos_ids)

    def propose(self, running: list[Sequence], limits: list[int]) -> list[Proposal | None]:
        """A proposal per sequence; None where a plain step or the draft model, which would draft
        `limits` tokens, is as good."""
        self._used = self._choice.choose(
            [self._candidates(sequence) for sequence in running], limits
        )
        return self._used

    def _candidates(self, sequence: Sequence) -> list[Proposal]:
        room = min(self.longest, sequence.remaining - 1)
        found = [source.match(sequence, room) for source in self._sources] if room else []
        return [p.cut(len(until_eos(p.tokens, self._eos_ids))) for p in found if p is not None]

    def commit(self, verdicts: list[Verdict]) -> None:
        self._choice.observe(zip(self._used, verdicts))
