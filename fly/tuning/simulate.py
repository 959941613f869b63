"""Rounds of any rule and drafter, walked over a recording: the engine without its models.

What stands, what ends a text and what is rolled back is decided by the engine's own Sequence and
Rule; n-gram guesses come from its own index and policy. Until a deferral stands, the walk is the
engine's decoding, round by round and pass by pass (tested); behind one it goes on as the recording
says (fly/tuning/recorder.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from fly.execution.model_runner import common_prefix
from fly.runs.records import Counts
from fly.speculation.drafters.cascade import GuessPolicy
from fly.speculation.drafters.ngram import NgramIndex
from fly.speculation.rules.base import JudgedDraft, Rule
from fly.speculation.sequence import Request, Sequence
from fly.speculation.stop_strings import Decode, StopMatcher
from fly.tuning.recorder import Answer, Recording


@dataclass
class Passes:
    """How many passes of a model, by width (tokens fed), and the sum of their contexts."""

    count: Counter[int] = field(default_factory=Counter)
    context: Counter[int] = field(default_factory=Counter)

    def add(self, width: int, context: int) -> None:
        """A pass over `width` tokens of a sequence of which the cache holds `context`."""
        self.count[width] += 1
        self.context[width] += context


class DraftCounter:
    """Counts the passes in which a ModelDrafter would draft what a walk drafts."""

    def __init__(self) -> None:
        self.passes = Passes()
        self._cached = 0  # tokens whose K/V the draft model holds

    def admit(self, sequence: Sequence) -> None:
        self._cached = len(sequence.tokens) - 1

    def draft(self, sequence: Sequence, chain: list[int], limit: int) -> None:
        """A round's chain, at most `limit` long, was drafted."""
        done = 0
        while done < len(chain):
            unseen = len(sequence.tokens) + done - self._cached
            guessed, agreed = self._guess(sequence, chain, done, limit, unseen)
            self.passes.add(unseen + guessed, self._cached)
            self._cached += unseen + agreed
            done += agreed + 1

    def _guess(
        self, sequence: Sequence, chain: list[int], done: int, limit: int, unseen: int
    ) -> tuple[int, int]:
        """(tokens guessed after `chain[:done]`, how many of them the draft model agrees with)."""
        return 0, 0

    def commit(self, sequence: Sequence) -> None:
        """The round is decided."""
        self._cached = min(self._cached, len(sequence.tokens) - 1)


class CascadeCounter(DraftCounter):
    """The same for a CascadeDrafter, whose n-gram guesses save passes.

    pass_cost: the draft runner's `relative_cost`, by which guesses are cut. One counter serves one
    run: the policy learns from document to document.
    """

    def __init__(
        self, min_size: int, max_size: int, count: int, pass_cost: Callable[[int], float]
    ) -> None:
        super().__init__()
        self._sizes, self._count = (min_size, max_size), count
        self._policy = GuessPolicy(pass_cost)
        self._index = NgramIndex(*self._sizes)

    def admit(self, sequence: Sequence) -> None:
        super().admit(sequence)
        self._index = NgramIndex(*self._sizes)

    def _guess(
        self, sequence: Sequence, chain: list[int], done: int, limit: int, unseen: int
    ) -> tuple[int, int]:
        size, guess, lookahead = 0, list[int](), limit - done - 1
        if lookahead > 0:
            most = min(lookahead, self._count)
            size, guess = self._index.match_in(sequence, chain[:done], most)
        length = self._policy.choose([(size, len(guess))], 1, unseen)
        agreed = common_prefix(guess[:length], chain[done:])
        self._policy.observe(size, length, agreed)
        return length, agreed


@dataclass
class Walk:
    """What a rule does with a set of documents. verify: the target's passes."""

    counts: Counts = field(default_factory=Counts)
    verify: Passes = field(default_factory=Passes)


def walk(
    recordings: Seq[Recording],
    spd_k: int,
    rule: Rule,
    decode: Decode,
    counters: Seq[DraftCounter] = (),
) -> Walk:
    """Decode all recordings by one rule; `counters` count what drafting the same would take.

    decode: token ids to text, line breaks in place of special tokens, for rules that look at texts.
    """
    result = Walk()
    for recording in recordings:
        counts = _decode(recording, spd_k, rule, decode, result.verify, counters)
        result.counts.add(counts)
    return result


def _decode(
    recording: Recording,
    spd_k: int,
    rule: Rule,
    decode: Decode,
    verify: Passes,
    counters: Seq[DraftCounter],
) -> Counts:
    """All rounds of one document; the passes are added to `verify` and `counters`."""
    answer, tree = recording.answer, recording.tree
    deferrable = tree.deferrable(rule.gates)
    request = Request(answer.prompt, answer.budget)
    sequence = Sequence(request, tree.eos_ids, _EndOfText(answer, decode))
    state, chosen_in = 0, list[int]()  # the state in which each generated token was chosen
    for counter in counters:
        counter.admit(sequence)
    while sequence.is_open:
        limit = min(spd_k, sequence.remaining - 1)
        draft, states = tree.draft(state, limit)
        for counter in counters:
            counter.draft(sequence, draft, limit)
        verify.add(len(draft) + 1, len(sequence.tokens) - 1)
        target_tokens = [tree.target[each] for each in states]
        judged = JudgedDraft(
            draft,
            matches=[token == own for token, own in zip(draft, target_tokens)],
            deferrable=[deferrable[each] for each in states[:-1]],
            target_tokens=target_tokens,
        )
        verdict = sequence.judge(rule, judged)
        sequence.commit(verdict)
        chosen_in += states[: verdict.accepted + 1]
        del chosen_in[len(sequence.generated) :]
        state = tree.after_target[chosen_in[-1]]
        for counter in counters:
            counter.commit(sequence)
    return sequence.counts


class _EndOfText(StopMatcher):
    """A text that EOS or a stop string ended ends there, whatever a deferral has changed in it."""

    def __init__(self, answer: Answer, decode: Decode) -> None:
        super().__init__((), decode)
        self._end = None if answer.finish == "length" else len(answer.tokens)

    def tokens_until_match(self, generated: Seq[int], new: Seq[int]) -> int | None:
        if self._end is None or not 0 < self._end - len(generated) <= len(new):
            return None
        return self._end - len(generated)
