"""FLy decoding by the book: slow, one token at a time, greedy; the tests' reference.

Written from the semantics (docs/compare.md), not from fly/speculation: it knows no tensor, no
cache and no batch, and imports nothing of fly. Words: see fly/speculation/rules/fly.py.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from dataclasses import dataclass

KINDS = {  # why a token is in the output -> the count that it belongs to
    "match": "native_accepted",
    "deferred": "deferred_accepted",
    "recovered": "corrections",
    "rollback": "corrections",
    "bonus": "bonus",
}


@dataclass(frozen=True)
class Script:
    """A target and a drafter whose behaviour is a pseudo-random function of the whole prefix.

    Tokens 0..vocab-2 are the letters a, b, c, ...; the last one is EOS, "." in text. agree: how
    often the draft is the target's own token. eos: how often either says EOS.
    """

    seed: int
    vocab: int = 8
    agree: float = 0.7
    eos: float = 0.03

    @property
    def eos_id(self) -> int:
        return self.vocab - 1

    def target_token(self, prefix: list[int]) -> int:
        """The target's argmax after `prefix`."""
        return self._token("choice", prefix)

    def rivals(self, prefix: list[int]) -> int:
        """How many tokens share the target's probability about equally: entropy ln(rivals)."""
        return 1 + self._hash("rivals", prefix) % 3

    def proposal(self, prefix: list[int]) -> int | None:
        """The draft's token after `prefix`; None where it stops drafting."""
        if self._chance("stop", prefix) < 0.04:
            return None
        if self._chance("agree", prefix) < self.agree:
            return self.target_token(prefix)
        return self._token("other", prefix)

    def decode(self, tokens) -> str:
        return "".join("." if token == self.eos_id else chr(ord("a") + token) for token in tokens)

    def _token(self, what: str, prefix: list[int]) -> int:
        if self._chance(what + " eos", prefix) < self.eos:
            return self.eos_id
        return self._hash(what, prefix) % (self.vocab - 1)

    def _chance(self, what: str, prefix: list[int]) -> float:
        return self._hash(what, prefix) / 2**32

    def _hash(self, what: str, prefix: list[int]) -> int:
        # + 1: a runner may hold -1 for what it was never fed
        key = f"{self.seed} {what} ".encode() + bytes(token + 1 for token in prefix)
        return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big")


@dataclass(frozen=True)
class Rule:
    """window None: exact verification. lookahead: draft tokens that must follow a deferral in its
    round; None: windows stay open across rounds. theta None: every mismatch may be deferred.
    exact_first: not at so many first places; pattern: nor where it matches."""

    spd_k: int
    window: int | None = None
    theta: float | None = None
    lookahead: int | None = None
    exact_first: int = 0
    pattern: str | None = None

    @property
    def is_across(self) -> bool:
        return self.window is not None and self.lookahead is None


@dataclass(frozen=True)
class Placed:
    """A token of the output, why it is there (see KINDS), and the round that put it there."""

    token: int
    kind: str
    round: int


class Oracle:
    """Decodes one request: after `decode`, its tokens, finish_reason, counts and events.

    out: what was generated so far. open_at: where in it the deferral lies whose window is open;
    all that follow it in `out` are matches, so they need not be counted separately.
    """

    def __init__(self, script: Script, rule: Rule, prompt, budget: int, stops=()) -> None:
        self.script, self.rule = script, rule
        self.prompt, self.budget, self.stops = list(prompt), budget, stops
        self.out: list[Placed] = []
        self.open_at: int | None = None
        self.finish_reason: str | None = None
        self.rounds = self.discarded = 0
        self.drafts: list[int] = []  # every round's draft length
        self.events: Counter[str] = Counter()

    @property
    def tokens(self) -> list[int]:
        return [placed.token for placed in self.out]

    @property
    def counts(self) -> dict[str, object]:
        """Under the names of fly.runs.records.Counts; `positions` as Positions.as_dict has it."""
        kinds = [placed.kind for placed in self.out]
        result = dict.fromkeys(KINDS.values(), 0)
        for kind in kinds:
            result[KINDS[kind]] += 1
        return {
            **result,
            "rounds": self.rounds,
            "drafted": sum(self.drafts),
            "deferred_rolled_back": kinds.count("rollback"),
            "emitted": len(self.out),
            "discarded": self.discarded,
            "positions": self.positions,
        }

    @property
    def positions(self) -> dict[str, list[int]]:
        """How many drafts reach, are accepted before, and are accepted at every position."""
        of_draft = (placed for placed in self.out if placed.kind in ("match", "deferred"))
        stand = Counter(placed.round for placed in of_draft)
        rounds = [(drafted, stand[number]) for number, drafted in enumerate(self.drafts, start=1)]
        most = range(max(self.drafts, default=0))
        found = {
            "drafted": [sum(drafted > at for drafted, _ in rounds) for at in most],
            "reached": [
                sum(drafted > at <= accepted for drafted, accepted in rounds) for at in most
            ],
            "accepted": [sum(accepted > at for _, accepted in rounds) for at in most],
        }
        return {name: [count for count in counts if count] for name, counts in found.items()}

    def decode(self) -> Oracle:
        """Round by round to the end; returns itself."""
        while self.finish_reason is None:
            self.rounds += 1
            draft = self.draft()
            self.drafts.append(len(draft))
            self.verify(draft)
            self.end_if_over()
        return self

    def draft(self) -> list[int]:
        """At most spd_k tokens, one fewer than the budget has left, and none after EOS."""
        result: list[int] = []
        while len(result) < min(self.rule.spd_k, self.budget - len(self.out) - 1):
            token = self.script.proposal(self.prefix() + result)
            if token is None:
                break
            result.append(token)
            if token == self.script.eos_id:
                break
        return result

    def verify(self, draft: list[int]) -> None:
        """Go through the draft until the first rejection or the end of the text."""
        for place, token in enumerate(draft, start=1):
            own = self.script.target_token(self.prefix())
            if token == own:
                self.put(token, "match")
            elif self.open_at is not None:
                self.events["rolled back " + self.where()] += 1
                return self.roll_back()
            elif self.is_deferrable(token, following=len(draft) - place):
                self.put(token, "deferred")
            else:
                return self.put(own, "recovered")
            # Within a round a window asks for W matches in the draft, wherever the text ends.
            if self.rule.is_across and self.end_if_over():
                return None
        return self.put(self.script.target_token(self.prefix()), "bonus")

    def is_deferrable(self, token: int, following: int) -> bool:
        """Asked for a mismatch while no window is open."""
        window, lookahead, theta = self.rule.window, self.rule.lookahead, self.rule.theta
        if window is None:
            return False
        if theta is not None and math.log(self.script.rivals(self.prefix())) < theta:
            return False
        if lookahead is not None and following < lookahead:
            self.events["refused: too few drafted after it"] += 1
            return False
        if token == self.script.eos_id and window > 0:
            self.events["refused: EOS"] += 1
            return False
        if len(self.out) < self.rule.exact_first:
            self.events["refused: first tokens"] += 1
            return False
        own = self.script.target_token(self.prefix())
        if self.rule.pattern is not None and (self.is_in_match(token) or self.is_in_match(own)):
            self.events["refused: pattern"] += 1
            return False
        return True

    def is_in_match(self, token: int) -> bool:
        """Whether the letter of this token, if it came next, would be in a match."""
        text = self.script.decode([*self.prefix(), token])
        assert self.rule.pattern is not None
        return any(found.end() == len(text) for found in re.finditer(self.rule.pattern, text))

    def put(self, token: int, kind: str) -> None:
        """Append a token; it may open the window, or be the match that closes it."""
        self.out.append(Placed(token, kind, self.rounds))
        if kind == "deferred" and self.rule.window == 0:
            self.events["stood at once"] += 1
        elif kind == "deferred":
            self.open_at = len(self.out) - 1
        elif self.open_at is not None and self.matches() == self.rule.window:
            self.stand(self.where())

    def matches(self) -> int:
        assert self.open_at is not None
        return len(self.out) - 1 - self.open_at

    def stand(self, why: str) -> None:
        self.events["stood " + why] += 1
        self.open_at = None

    def roll_back(self) -> None:
        """The target's own token for the deferred one, and nothing after it."""
        at = self.open_at
        assert at is not None
        if self.first_end() == (at + 1, "stop"):
            self.events["stop by a deferral, rolled back"] += 1
        self.discarded += sum(placed.round < self.rounds for placed in self.out[at:])
        del self.out[at:]
        self.open_at = None
        self.put(self.script.target_token(self.prefix()), "rollback")

    def end_if_over(self) -> bool:
        """Cut the text at its first EOS, stop string or budget; tell whether it ends there."""
        count, reason = self.first_end()
        if reason is None:
            return False
        if self.open_at is not None and self.is_undecided(count, reason):
            if len(self.out) < self.budget:
                return False
            self.events["rolled back by the budget"] += 1
            self.roll_back()
            return self.end_if_over()
        if self.open_at is not None:
            self.stand(f"by the end: {'eos' if self.last_is_eos() else reason}, {self.where()}")
        last = self.out[count - 1]
        self.events[f"{last.kind} token ends: {reason}"] += 1
        if last.kind == "deferred" and last.round < self.rounds:
            self.events["stop by a deferral, cut in a later round"] += 1
        del self.out[count:]
        self.finish_reason = reason
        return True

    def is_undecided(self, count: int, reason: str) -> bool:
        """The open window may yet be broken: the end is not the target's own doing."""
        assert self.open_at is not None
        if reason == "length":
            return True
        return count == self.open_at + 1 and not self.last_is_eos()

    def first_end(self) -> tuple[int, str | None]:
        """(how many tokens the text has where it first ends, why)."""
        for count, token in enumerate(self.tokens, start=1):
            text = self.script.decode(self.tokens[:count])
            if token == self.script.eos_id:
                return count, "eos"
            if any(stop in text for stop in self.stops):
                return count, "stop"
            if count == self.budget:
                return count, "length"
        return len(self.out), None

    def last_is_eos(self) -> bool:
        return self.out[-1].token == self.script.eos_id

    def where(self) -> str:
        assert self.open_at is not None
        return "within a round" if self.out[self.open_at].round == self.rounds else "across rounds"

    def prefix(self) -> list[int]:
        return self.prompt + self.tokens


def plain(script: Script, prompt, budget: int, stops=()) -> tuple[list[int], str]:
    """The target alone: (tokens, finish_reason)."""
    tokens: list[int] = []
    while len(tokens) < budget:
        tokens.append(script.target_token(list(prompt) + tokens))
        if tokens[-1] == script.eos_id:
            return tokens, "eos"
        if any(stop in script.decode(tokens) for stop in stops):
            return tokens, "stop"
    return tokens, "length"
