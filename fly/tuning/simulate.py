"""Rounds of any rule and drafter, walked over a replay: the engine without its models.

Which tokens stand is decided by the product's own `resolve`; guesses come from its own n-gram index
and guess policy. Without a standing deferral the walk is the engine's own, round by round and pass
by pass (tested); behind one it goes on as the replay says (fly/tuning/recorder.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fly.execution.model_runner import common_prefix
from fly.runs.records import Counts
from fly.speculation.drafters.guess_policy import GuessPolicy
from fly.speculation.drafters.ngram import NgramIndex
from fly.speculation.rules.verification import Relaxation, Resolution, resolve
from fly.tuning.recorder import Replay


@dataclass
class Passes:
    """How many passes of a model, by width (tokens fed), and the sum of their contexts."""

    count: Counter[int] = field(default_factory=Counter)
    context: Counter[int] = field(default_factory=Counter)

    def add(self, width: int, context: int) -> None:
        """A pass over `width` tokens of a row that the cache holds `context` tokens of."""
        self.count[width] += 1
        self.context[width] += context


class DraftCounter(Protocol):
    """Counts the passes that a drafter would take for the chains of a walk."""

    passes: Passes

    def admit(self, prompt_length: int) -> None: ...

    def draft(self, tokens: list[int], final: int, limit: int, chain: list[int]) -> None:
        """A round's chain, `limit` long at most, after `tokens`; the first `final` are final."""

    def commit(self, length: int) -> None:
        """The row has so many tokens after the round."""


class StepCounter:
    """fly.speculation.drafters.draft_model.ModelDrafter: one pass per draft token."""

    def __init__(self) -> None:
        self.passes = Passes()
        self._known = 0  # tokens whose K/V the draft holds

    def admit(self, prompt_length: int) -> None:
        self._known = prompt_length - 1

    def draft(self, tokens: list[int], final: int, limit: int, chain: list[int]) -> None:
        for done in range(len(chain)):
            width = len(tokens) + done - self._known
            self.passes.add(width, self._known)
            self._known += width

    def commit(self, length: int) -> None:
        self._known = min(self._known, length - 1)


class CascadeCounter:
    """fly.speculation.drafters.draft_model.CascadeDrafter: n-gram guesses that the draft verifies.

    sizes: smallest and largest suffix; count: most tokens of a guess. `pass_cost`: the draft
    runner's `relative_cost`, by which guesses are cut. One counter serves one run: the policy
    learns from document to document.
    """

    def __init__(
        self, min_size: int, max_size: int, count: int, pass_cost: Callable[[int], float]
    ) -> None:
        self.passes = Passes()
        self._sizes, self._count = (min_size, max_size), count
        self._policy = GuessPolicy(pass_cost)
        self._index = NgramIndex(*self._sizes)
        self._known = 0

    def admit(self, prompt_length: int) -> None:
        self._known = prompt_length - 1
        self._index = NgramIndex(*self._sizes)

    def draft(self, tokens: list[int], final: int, limit: int, chain: list[int]) -> None:
        self._index.sync(tokens[:final])
        done = 0
        while done < len(chain):
            unseen = len(tokens) + done - self._known
            size, guess = self._guess(tokens[final:] + chain[:done], limit - done - 1)
            length = self._policy.choose([(size, len(guess))], 1, unseen)
            agreed = common_prefix(guess[:length], chain[done:])
            self._policy.observe(size, length, agreed)
            self.passes.add(unseen + length, self._known)
            self._known += unseen + agreed
            done += min(agreed + 1, len(chain) - done)

    def _guess(self, pending: list[int], room: int) -> tuple[int, list[int]]:
        return self._index.match(pending, min(room, self._count)) if room > 0 else (0, [])

    def commit(self, length: int) -> None:
        self._known = min(self._known, length - 1)


@dataclass
class Walk:
    """What a rule does with a set of documents. verify: the target's passes."""

    counts: Counts = field(default_factory=Counts)
    verify: Passes = field(default_factory=Passes)


@dataclass(frozen=True)
class _Open:
    """A deferral whose window is open: its index in the generated tokens, its state."""

    at: int
    state: int
    matches: int


class Row:
    """One document decoded over its replay.

    may_wait: by state of the tree, does its drafted token pass the rule's gates?
    """

    def __init__(
        self,
        replay: Replay,
        spd_k: int,
        relaxation: Relaxation | None,
        may_wait: Sequence[bool],
        eos_ids: frozenset[int],
    ) -> None:
        self._document, self._tree = replay.document, replay.tree
        self._spd_k, self._relaxation = spd_k, relaxation
        self._may_wait, self._eos_ids = may_wait, eos_ids
        self.tokens = list(self._document.prompt)
        self._prompt = len(self.tokens)
        self._state = 0
        self._final = 0  # generated tokens that no rollback can take back
        self._open: _Open | None = None
        self._deferred: list[int] = []  # indexes of deferred tokens in the generated ones
        self.counts = Counts()

    @property
    def _generated(self) -> int:
        return len(self.tokens) - self._prompt

    def run(self, verify: Passes, drafters: Sequence[DraftCounter]) -> Counts:
        """All rounds to the end of the document; passes are added up where they belong."""
        for drafter in drafters:
            drafter.admit(self._prompt)
        while True:
            self._final = self._generated if self._open is None else self._open.at
            limit = max(0, min(self._spd_k, self._document.budget - self._generated - 1))
            chain, states = self._draft(limit)
            for drafter in drafters:
                drafter.draft(self.tokens, self._prompt + self._final, limit, chain)
            verify.add(len(chain) + 1, len(self.tokens) - 1)
            self.counts.rounds += 1
            self.counts.drafted += len(chain)
            ended = self._commit(chain, states)
            if ended:
                self._count()
                return self.counts
            for drafter in drafters:
                drafter.commit(len(self.tokens))

    def _draft(self, limit: int) -> tuple[list[int], list[int]]:
        """(tokens, the states before each and after the last)."""
        tree, state = self._tree, self._state
        chain: list[int] = []
        states = [state]
        while len(chain) < limit and tree.drafted[state] >= 0:
            token = tree.drafted[state]
            state = tree.after_draft[state]
            chain.append(token)
            states.append(state)
            if token in self._eos_ids:
                break
        return chain, states

    def _commit(self, chain: list[int], states: list[int]) -> bool:
        """Apply the round's verdict; returns whether the row has ended."""
        before = self._generated
        resolution = self._resolve(chain, states)
        if resolution.reopened:
            self.counts.discarded += self._roll_back(before)
        else:
            self._extend(chain, states, resolution)
        if self._end():
            return True
        if self._open is not None and self._generated >= self._document.budget:
            self.counts.discarded += self._roll_back(before)  # the window cannot be filled
            return self._end()
        return False

    def _resolve(self, chain: list[int], states: list[int]) -> Resolution:
        tree, rule = self._tree, self._relaxation
        native = [tree.own[state] == token for state, token in zip(states, chain)]
        windowed = rule is not None and rule.window > 0
        may_wait = [
            self._may_wait[state] and not (windowed and token in self._eos_ids)
            for state, token in zip(states, chain)
        ]
        judged = len(chain)
        if rule is not None and rule.room is None and self._document.finish == "stop":
            left = len(self._document.tokens) - self._generated
            if 0 < left <= judged and native[left - 1]:
                judged = left  # as Engine._resolve: nothing past a matched end takes a window back
        matches = None if self._open is None else self._open.matches
        return resolve(native[:judged], may_wait[:judged], rule, matches)

    def _extend(self, chain: list[int], states: list[int], resolution: Resolution) -> None:
        start, accepted = self._generated, resolution.accepted
        last = states[accepted]
        self.tokens += [*chain[:accepted], self._tree.own[last]]
        self._deferred += [start + position for position in resolution.deferred]
        self._state = self._tree.after_own[last]
        if resolution.open_at is None or resolution.open_matches is None:
            self._open = None
        elif resolution.open_at >= 0:
            at = resolution.open_at
            self._open = _Open(start + at, states[at], resolution.open_matches)
        elif self._open is not None:
            self._open = _Open(self._open.at, self._open.state, resolution.open_matches)

    def _roll_back(self, before: int) -> int:
        """The target's own token for the open deferral; how many earlier tokens that drops."""
        assert self._open is not None
        at, state = self._open.at, self._open.state
        del self.tokens[self._prompt + at :]
        self.tokens.append(self._tree.own[state])
        self._deferred = [index for index in self._deferred if index < at]
        self._state = self._tree.after_own[state]
        self._open = None
        self.counts.deferred_rolled_back += 1
        return max(0, before - at)

    def _end(self) -> bool:
        """As fly.speculation.sequence.Sequence._end; the text is as long as the target's own."""
        length = len(self._document.tokens)
        end = length if self._generated >= length else None
        for index in range(self._final, self._generated if end is None else end):
            if self.tokens[self._prompt + index] in self._eos_ids:
                del self.tokens[self._prompt + index + 1 :]
                return True
        if end is None:
            return False
        undecided = self._open is not None and self._open.at < end
        if self._document.finish == "length" and undecided:
            return False
        del self.tokens[self._prompt + end :]
        return True

    def _count(self) -> None:
        self.counts.emitted = self._generated
        self.counts.deferred_accepted = sum(index < self._generated for index in self._deferred)


def walk(
    replays: Sequence[Replay],
    spd_k: int,
    relaxation: Relaxation | None,
    eos_ids: frozenset[int],
    drafters: Sequence[DraftCounter] = (),
) -> Walk:
    """Decode all replays by one rule; `drafters` count what drafting the same chains would take."""
    result = Walk()
    for replay in replays:
        gates = None if relaxation is None else relaxation.gates
        may_wait = [False] * len(replay.tree.own) if gates is None else replay.tree.passes(gates)
        row = Row(replay, spd_k, relaxation, may_wait, eos_ids)
        result.counts.add(row.run(result.verify, drafters))
    return result
