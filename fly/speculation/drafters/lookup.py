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
from fly.speculation.draft_length import expected_tokens, round_cost, value
from fly.speculation.drafters.base import DrafterContext
from fly.speculation.drafters.ngram import until_eos
from fly.speculation.drafters.texts import SOURCES, START, Proposal
from fly.speculation.sequence import Sequence, Verdict

_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # lengths that are tried
_MOST_IN_PASS = 512  # tokens: their logits take memory
_PRIOR = 4.0  # tokens that a chance without counts is worth
_AT_START = 8  # what a text's beginning is taken for: as if so many tokens spoke for it
_OF_MODEL = 0.8  # chance of a draft model's tokens before there are counts
_FORGET = 0.99  # per round: what was earned lately counts, and what earned nothing is tried again
_LEAST = 0.1  # chance to stand below which a token is not drafted, however cheap
_GAIN = 1.05  # a text has to promise this much over what would be done without it


class Chances:
    """Of a draft token to be accepted if all before it were, by its source and by how many tokens
    spoke for the proposal."""

    def __init__(self) -> None:
        self._accepted: dict[tuple[str, int], float] = {}
        self._promised: dict[tuple[str, int], float] = {}

    def of(self, letter: str, size: int) -> float:
        """Of a token that all occurrences agree in."""
        key = _bucket(letter, size)
        accepted = self._accepted.get(key, 0.0) + _PRIOR * _prior(letter, size)
        return min(1.0, accepted / (self._promised.get(key, 0.0) + _PRIOR))

    def observe(self, letter: str, size: int, shares: Seq[float], accepted: int) -> None:
        """Of a draft whose tokens had these shares, the first `accepted` were accepted."""
        key = _bucket(letter, size)
        promised = sum(shares[: accepted + 1])  # what follows a rejection was not judged
        self._accepted[key] = self._accepted.get(key, 0.0) + accepted
        self._promised[key] = self._promised.get(key, 0.0) + promised

    def forget(self) -> None:
        """A round has ended."""
        for counts in (self._accepted, self._promised):
            for key in counts:
                counts[key] *= _FORGET


def _bucket(letter: str, size: int) -> tuple[str, int]:
    return letter, size if size <= 4 else 3 + (size - 1).bit_length()


def _prior(letter: str, size: int) -> float:
    """A place that was right `size` times in a row is right once more (rule of succession); in
    another document's text, which happens to have the same tokens, less surely."""
    if letter == "d":
        return _OF_MODEL
    if letter == "o":
        return size / (size + 4)
    size = _AT_START if size == START else size
    return (size + 1) / (size + 2)


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
        self._chances = Chances()

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
        self._chances.forget()
        for proposal, verdict in drafted:
            letter, size, shares = "d", 0, [1.0] * len(verdict.draft)
            if proposal is not None:
                letter, size, shares = proposal.letter, proposal.size, proposal.shares
            if verdict.draft:
                self._chances.observe(letter, size, shares, verdict.leading_matches)

    def _best(self, proposals: Seq[Proposal], limit: int, sequences: int) -> Proposal | None:
        best, most = None, _GAIN * self._without(limit, sequences)
        for proposal in proposals:
            if proposal.letter == "n" and not self._learns:  # as long as it was always
                if best is None and limit:
                    return proposal.cut(limit)
                continue
            expected = self._expected(proposal)
            # Rows share the pass's width. All may follow earlier outputs; other texts serve a row
            # now and then, and what the others are fed beside it only costs.
            is_shared = proposal.letter == "e" or self._learns
            rows = 1 if is_shared else sequences
            for length in _lengths(len(expected) - 1):
                if sequences * (length + 1) > _MOST_IN_PASS and length > 1:
                    break
                tokens = (expected[length] + rows - 1) / rows
                worth = tokens / round_cost(length, 0, sequences, self._costs)
                if worth > most:
                    best, most = proposal.cut(length), worth
        return best

    def _without(self, limit: int, sequences: int) -> float:
        """Tokens per cost of what would be done without a proposal."""
        chance = self._chances.of("d", 0)
        lengths = (0, limit if self._has_model else 0)
        return max(value(length, sequences, chance, self._costs) for length in lengths)

    def _cut(self, chosen: list[Proposal | None], limits: Seq[int]) -> list[Proposal | None]:
        """All rows of a pass are as wide as its widest: cut to the length that is worth most."""
        drafted = [limit for limit, proposal in zip(limits, chosen) if proposal is None]
        steps = max(drafted, default=0) if self._has_model else 0
        chance = self._chances.of("d", 0)
        fixed = sum(expected_tokens(min(limit, steps), chance) for limit in drafted)
        expected = [self._expected(proposal) for proposal in chosen if proposal is not None]
        rows = len(chosen)

        def value_of(width: int) -> float:
            tokens = fixed + sum(each[min(width, len(each) - 1)] for each in expected)
            return tokens / round_cost(max(width, steps), steps, rows, self._costs)

        lengths = {len(proposal.tokens) for proposal in chosen if proposal is not None}
        widest = max({0, *lengths}, key=value_of)
        cut = [proposal and proposal.cut(widest) for proposal in chosen]
        return [proposal if proposal and proposal.tokens else None for proposal in cut]

    def _expected(self, proposal: Proposal) -> list[float]:
        """Tokens of a round, with the target's own, by how many of the proposal's are drafted; for
        as many as may well stand."""
        chance = self._chances.of(proposal.letter, proposal.size)
        stands, tokens = 1.0, [1.0]
        for share in proposal.shares:
            stands *= chance * share
            if stands < _LEAST:
                break
            tokens.append(tokens[-1] + stands)
        return tokens


def _lengths(most: int) -> Iterable[int]:
    return [*(width for width in _WIDTHS if width < most), most]


class Lookup:
    """Drafts for all slots from the texts at hand.

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

    def admit(self, slot: int, sequence: Sequence) -> None:
        for source in self._sources:
            source.admit(slot, sequence)

    def propose(self, running: list[Sequence], limits: list[int]) -> list[Proposal | None]:
        """A proposal per sequence; None where a plain step or the draft model, which would draft
        `limits` tokens, is as good."""
        self._used = self._choice.choose(
            [self._candidates(slot, sequence) for slot, sequence in enumerate(running)], limits
        )
        return self._used

    def _candidates(self, slot: int, sequence: Sequence) -> list[Proposal]:
        room = min(self.longest, sequence.remaining - 1)
        found = [source.match(slot, sequence, room) for source in self._sources] if room else []
        return [p.cut(len(until_eos(p.tokens, self._eos_ids))) for p in found if p is not None]

    def commit(self, running: list[Sequence], verdicts: list[Verdict]) -> None:
        self._choice.observe(zip(self._used, verdicts))
        for slot, sequence in enumerate(running):
            for source in self._sources:
                source.commit(slot, sequence)

    def move(self, source: int, destination: int) -> None:
        for each in self._sources:
            each.move(source, destination)
