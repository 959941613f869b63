"""The engine against a plain oracle (tests/oracle.py), over scripted targets and drafters.

The scripted target's token is a hash of all tokens that the engine fed to a slot, so that one
stale, missing or foreign token in a cache changes what it says.
"""

import copy
import random
import re
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.speculation.drafters.base import Drafter
from fly.speculation.drafters.draft import DeviceDraft, HostDraft
from fly.speculation.engine import Engine
from fly.speculation.rules.fly import FlyRule
from fly.speculation.rules.gates import EntropyGate
from fly.speculation.rules.places import Places
from fly.speculation.running_text import RunningText
from fly.speculation.sequence import Request, Sequence
from tests import tiny
from tests.oracle import Oracle, Rule, Script, plain

CASES = 1500  # engine runs of the long comparison, of one to five requests each
FIXED = 300  # engine runs on which every mutant must fail


class ScriptedTarget:
    """A ModelRunner whose K/V are the tokens themselves: it answers from what it was fed.

    A token that stays though it was never fed is -1; positions past a sequence's own feed answer
    EOS.
    """

    static = None
    max_length = 10_000
    device = torch.device("cpu")
    devices = (device,)

    def __init__(self, script, slots):
        self.script = script
        self.resize(slots)

    @property
    def slots(self):
        return len(self.lengths)

    def resize(self, slots):
        self.lengths = [0] * slots
        self.fed = [[] for _ in range(slots)]

    def reserve_rows(self, longest, *, width, spd_k):
        pass

    def prefill(self, slot, tokens, *, reuse=True):
        self.fed[slot], self.lengths[slot] = list(tokens), len(tokens)
        return 0

    def take_hidden(self):
        return None

    def truncate(self, slot, length):
        self.lengths[slot] = length

    def commit(self, slot, tokens, length):
        """`tokens` are not looked at: what was fed counts, not what should have been."""
        self.truncate(slot, length)

    def move(self, source, destination):
        self.fed[destination] = self.fed[source][: self.lengths[source]]
        self.lengths[destination] = self.lengths[source]

    def extend(self, tokens):
        width = max(map(len, tokens))
        logits_BQV = torch.full((len(tokens), width, self.script.vocab), -30.0)
        logits_BQV[:, :, self.script.eos_id] = 30.0
        for slot, new in enumerate(tokens):
            missing = self.lengths[slot] - len(self.fed[slot])
            known = self.fed[slot][: self.lengths[slot]] + [-1] * missing
            self.fed[slot] = known + new
            for index in range(len(new)):
                logits_BQV[slot, index] = self.logits(known + new[: index + 1])
        return logits_BQV

    def extend_ids(self, ids_BQ):
        return self.extend(ids_BQ.tolist())

    def logits(self, prefix):
        """As many likely tokens as the script has rivals, its own a little ahead."""
        values = [-30.0] * self.script.vocab
        best = self.script.target_token(prefix)
        for step in range(self.script.rivals(prefix)):
            values[(best + step) % self.script.vocab] = 0.0
        values[best] = 0.01
        return torch.tensor(values)


class ScriptedDrafter(Drafter):
    """Proposes what the script says, and checks that sequences stay in the slots given to them."""

    def __init__(self, script, slots, *, on_device=False):
        self.script, self.on_device = script, on_device
        self.resize(slots)

    def admit(self, slot, sequence, features=None, *, soon=True):
        self.admitted[slot] = sequence

    def move(self, source, destination):
        self.admitted[destination] = self.admitted[source]

    def resize(self, slots):
        self.admitted = [None] * slots

    def propose(self, running, limits):
        assert running == self.admitted[: len(running)], "sequences changed slots unannounced"
        chains = [self._chain(s.tokens, limit) for s, limit in zip(running, limits)]
        draft = HostDraft(chains)
        if not self.on_device:
            return draft
        return DeviceDraft(*draft.padded(torch.device("cpu")), None, [False] * len(chains))

    def _chain(self, tokens, limit):
        chain = []
        while len(chain) < limit and (token := self.script.proposal(tokens + chain)) is not None:
            chain.append(token)
            if token == self.script.eos_id:
                break
        return chain


@dataclass(frozen=True)
class Case:
    """One engine run."""

    script: Script
    rule: Rule
    requests: tuple[Request, ...]
    slots: int
    on_device: bool


def draw_case(pick) -> Case:
    """A random case; `pick(values)` chooses one of them, at random or as hypothesis likes."""
    window, across = pick([None, 0, 1, 1, 2, 3, 4, 6]), pick([False, True, True])
    lookahead = None if across or window is None else window + pick([0, 0, 1])
    rule = Rule(
        pick(range(1, 9)), window, pick([None, 0.3, 0.9]), lookahead,
        pick([0, 0, 0, 2, 9]), pick([None, None, "[ab]+", "c[^d]*", "a.?b"]),
    )  # fmt: skip
    script = Script(
        pick(range(10**6)), pick(range(8, 13)), pick([0.3, 0.6, 0.8, 0.9]), pick([0, 0.02, 0.08])
    )
    requests = []
    for tag in range(pick(range(1, 6))):
        prompt = tuple(pick(range(script.vocab)) for _ in range(pick(range(1, 5))))
        stops = tuple(
            script.decode(pick(range(script.vocab)) for _ in range(pick([1, 2, 2, 2, 3])))
            for _ in range(pick([0, 1, 3]))
        )
        requests.append(Request(prompt, pick(range(1, 25)), stops, tag=tag))
    return Case(script, rule, tuple(requests), pick([1, 2, 3]), pick([False, False, True]))


def seeded(count) -> list[Case]:
    generator = random.Random(0)
    return [draw_case(generator.choice) for _ in range(count)]


@st.composite
def cases(draw):
    return draw_case(lambda values: draw(st.sampled_from(values)))


def rule_of(rule):
    """The engine's rule for the oracle's."""
    if rule.window is None:
        return tiny.EXACT
    gates = () if rule.theta is None else (EntropyGate(rule.theta),)
    made = tiny.fly_rule(gates, rule.window, rule.lookahead)
    patterns = () if rule.pattern is None else (re.compile(rule.pattern),)
    made.places = Places(rule.exact_first, patterns)
    return made


def run(case: Case, requests=None):
    """{tag: (tokens, finish reason, counts)} from the engine; `requests` keep their order."""
    engine = Engine(
        ScriptedTarget(case.script, case.slots),
        ScriptedDrafter(case.script, case.slots, on_device=case.on_device),
        rule_of(case.rule),
        spd_k=case.rule.spd_k,
        eos_ids=frozenset({case.script.eos_id}),
        decode=case.script.decode,
        reuse_prefixes=requests is None,  # sorts them
    )
    records = {record.request.tag: record for record in engine.run(requests or case.requests)}
    return {
        tag: (
            record.tokens,
            record.finish_reason,
            {**record.counts.as_dict(), "positions": record.positions.as_dict()},
        )
        for tag, record in records.items()
    }


def expected(case: Case, events: Counter | None = None):
    """The same from the oracle."""
    result = {}
    for request in case.requests:
        oracle = Oracle(case.script, case.rule, request.prompt, request.budget, request.stops)
        oracle.decode()
        result[request.tag] = (oracle.tokens, oracle.finish_reason, oracle.counts)
        if events is not None:
            events.update(oracle.events)
    return result


EVENTS = [
    "stood at once",
    "stood within a round",
    "stood across rounds",
    "stood by the end: eos, within a round",
    "stood by the end: eos, across rounds",
    "stood by the end: stop, within a round",
    "stood by the end: stop, across rounds",
    "rolled back within a round",
    "rolled back across rounds",
    "rolled back by the budget",
    "stop by a deferral, cut in a later round",
    "stop by a deferral, rolled back",
    "refused: EOS",
    "refused: first tokens",
    "refused: pattern",
    "refused: too few drafted after it",
    *(
        f"{kind} token ends: {reason}"
        for kind in ("match", "deferred", "recovered", "rollback", "bonus")
        for reason in ("eos", "stop")
    ),
    "bonus token ends: length",
]


def noting_final(seen, honest=Sequence.round_record):
    def round_record(sequence, *args):
        seen.append((sequence, sequence.tokens[: sequence.final_length]))
        return honest(sequence, *args)

    return round_record


def positions_agree(counts):
    found = counts["positions"]
    accepted = counts["native_accepted"] + counts["deferred_accepted"]
    return (sum(found["drafted"]), sum(found["accepted"])) == (counts["drafted"], accepted)


def test_the_engine_decodes_as_the_oracle_does(monkeypatch):
    """Any slip in windows, rollbacks, ends, counts or cache calls; every event must have occurred.

    Also a final token that is taken back: callers may have shown it already.
    """
    events, requests, final = Counter(), 0, []
    monkeypatch.setattr(Sequence, "round_record", noting_final(final))
    for case in seeded(CASES):
        final.clear()
        got = run(case)
        assert got == expected(case, events), case
        assert len(final) == sum(counts["rounds"] for _, _, counts in got.values())
        assert all(s.tokens[: len(tokens)] == tokens for s, tokens in final), case
        assert all(counts["emitted"] == len(tokens) for tokens, _, counts in got.values())
        assert all(positions_agree(counts) for _, _, counts in got.values())
        requests += len(got)
    assert requests >= 4000
    assert [name for name in EVENTS if events[name] < 3] == []


@settings(max_examples=300, deadline=None)
@given(cases())
def test_the_engine_decodes_as_the_oracle_does_for_cases_that_hypothesis_seeks(case):
    """As above; a failure comes out as a small case."""
    assert run(case) == expected(case)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_slots_and_order_change_no_record(slots):
    """A sequence that reads another's cache, deferral or counts."""
    for number, case in enumerate(seeded(100)):
        shuffled = random.Random(number).sample(case.requests, len(case.requests))
        assert run(replace(case, slots=slots), requests=shuffled) == expected(case), case


class TightTarget(ScriptedTarget):
    """Out of memory at every third pass over more than one slot."""

    passes = 0

    def extend(self, tokens):
        self.passes += 1
        if self.slots > 1 and self.passes % 3 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().extend(tokens)


def test_sequences_interrupted_by_lack_of_memory_go_on_with_their_open_deferral(monkeypatch):
    """A window, or a provisional token, that is forgotten when a sequence is admitted again."""
    monkeypatch.setattr(f"{__name__}.ScriptedTarget", TightTarget)
    for case in seeded(100):
        assert run(replace(case, slots=4)) == expected(case), case


def test_exact_mode_is_the_target_alone():
    """Speculation that changes the text; drafts are taken and refused, so it could."""
    total = Counter()
    for case in seeded(100):
        exact = replace(case, rule=Rule(case.rule.spd_k))
        for tag, (tokens, reason, counts) in run(exact).items():
            request = case.requests[tag]
            alone = plain(case.script, request.prompt, request.budget, request.stops)
            assert (tokens, reason) == alone, case
            assert positions_agree(counts)
            total.update({name: n for name, n in counts.items() if name != "positions"})
    assert 0 < total["native_accepted"] < total["drafted"]
    assert total["deferred_accepted"] == total["deferred_rolled_back"] == total["discarded"] == 0


@dataclass(frozen=True)
class Spelled(Script):
    """Target and draft say fixed letters by position, after a prompt of one token."""

    said: str = ""
    drafted: str = ""
    vocab: int = 27

    def target_token(self, prefix):
        return self._spell(self.said, prefix)

    def proposal(self, prefix):
        return self._spell(self.drafted, prefix) if len(prefix) <= len(self.drafted) else None

    def _spell(self, text, prefix):
        letter = text[len(prefix) - 1]
        return self.eos_id if letter == "." else ord(letter) - ord("a")


# target, draft, rule (K, W, lookahead), budget, stop -> text, why it ends,
# (deferred_accepted, deferred_rolled_back, discarded)
BY_HAND = {
    "stands within a round": (
        ("abcdef", "xbcdef", (4, 2, 2), 6, None),
        ("xbcdef", "length", (1, 0, 0)),
    ),
    "too few drafted after it": (
        ("abcdef", "xbcdef", (2, 2, 2), 6, None),
        ("abcdef", "length", (0, 0, 0)),
    ),
    "rolled back within a round": (
        ("abcdef", "xbz", (3, 2, 2), 6, None),
        ("abcdef", "length", (0, 1, 0)),
    ),
    "stands across rounds": (
        ("abcdefgh", "abxdefgh", (3, 3, None), 8, None),
        ("abxdefgh", "length", (1, 0, 0)),
    ),
    "the bonus token closes the window": (
        ("abcd", "abx", (3, 1, None), 4, None),
        ("abxd", "length", (1, 0, 0)),
    ),
    "rolled back across rounds": (
        ("abcdefgh", "abxdz", (3, 3, None), 8, None),
        ("abcdzfgh", "length", (1, 1, 2)),
    ),
    "rolled back by the budget, rounds later": (
        ("abcdef", "xbcdef", (2, 9, None), 6, None),
        ("abcdef", "length", (0, 1, 3)),
    ),
    "rolled back by the budget, in its own round": (
        ("abc", "xb", (2, 3, None), 3, None),
        ("abc", "length", (0, 1, 0)),
    ),
    "EOS closes the window": (
        ("abc.", "xbc.", (2, 9, None), 9, None),
        ("xbc.", "eos", (1, 0, 0)),
    ),
    "EOS is not deferred": (
        ("abc", "ab.", (4, 2, None), 3, None),
        ("abc", "length", (0, 0, 0)),
    ),
    "a stop string closes the window": (
        ("abcd", "xbc", (1, 9, None), 9, "bc"),
        ("xbc", "stop", (1, 0, 0)),
    ),
    "a stop string closes the window, whatever is drafted past it": (
        ("abcd", "xbz", (3, 9, None), 9, "b"),
        ("xb", "stop", (1, 0, 0)),
    ),
    "a stop string ends with the deferred token, which stands": (
        ("abcdef", "axcdef", (2, 3, None), 6, "ax"),
        ("ax", "stop", (1, 0, 0)),
    ),
    "a stop string ends with the deferred token, which is rolled back": (
        ("abcdefg", "axcz", (2, 3, None), 7, "ax"),
        ("abczefg", "length", (1, 1, 2)),
    ),
    "a stop string ends with the deferred token, and EOS follows": (
        ("abc.", "axc.", (4, 9, None), 9, "ax"),
        ("ax", "stop", (1, 0, 0)),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    """The engine or the oracle reads the semantics wrong: answers worked out on paper."""
    (said, drafted, (k, window, lookahead), budget, stop), (text, reason, counts) = BY_HAND[name]
    script = Spelled(0, said=said + "q" * 9, drafted=drafted)
    requests = (Request((0,), budget, (stop,) if stop else (), tag=0),)
    case = Case(script, Rule(k, window, None, lookahead), requests, slots=1, on_device=False)
    for tokens, why, got in (run(case)[0], expected(case)[0]):
        assert (script.decode(tokens), why) == (text, reason)
        names = ("deferred_accepted", "deferred_rolled_back", "discarded")
        assert tuple(got[name] for name in names) == counts


resolve = FlyRule.resolve


def changed(rule, **values):
    other = copy.copy(rule)
    for name, value in values.items():
        setattr(other, name, value)
    return other


def window_too_short(rule, judged):
    window = max(rule.window - 1, min(rule.window, 1))
    return resolve(changed(rule, window=window), judged)


def first_place_counted_by_round(rule, judged):
    return resolve(rule, replace(judged, start=0))


def pattern_not_looked_at(rule, judged):
    return resolve(changed(rule, places=Places(rule.places.first)), judged)


def pattern_blind_to_the_target(rule, judged):
    blind = [*judged.draft, judged.target_tokens[-1]]
    return resolve(rule, replace(judged, target_tokens=blind))


def provisional_tokens_taken_for_final(text, tokens, final, honest=RunningText.of):
    return honest(text, tokens, len(tokens))


def deferred_eos(rule, judged):
    return resolve(rule, replace(judged, eos_ids=frozenset()))


def draft_past_a_stop_string_counts(rule, judged):
    return resolve(rule, replace(judged, stop_at=lambda: None))


def deferred_token_kept_within_a_round(rule, judged):
    result = resolve(rule, judged)
    if not result.rolled_back:
        return result
    stands = (*result.deferred, result.accepted)
    return replace(result, accepted=result.accepted + 1, deferred=stands, rolled_back=False)


def deferred_token_kept_across_rounds(sequence, *args):
    at, sequence.open = sequence.open.at, None
    sequence._truncate(at + 1)
    return 0


def budget_closes_the_window(sequence, honest=Sequence._end):
    if sequence.remaining <= 0:
        sequence.open = None
    return honest(sequence)


def provisional_tokens_counted(sequence, counts, drafted, honest=Sequence._count):
    sequence.open, held = None, sequence.open
    honest(sequence, counts, drafted)
    sequence.open = held


def provisional_positions_counted(sequence, *args, honest=Sequence._count_positions):
    sequence.open, held = None, sequence.open
    honest(sequence, *args)
    sequence.open = held


class UncommittedTarget(ScriptedTarget):
    """Not told when a sequence grows shorter."""

    def commit(self, slot, tokens, length):
        super().commit(slot, tokens, max(length, self.lengths[slot]))


class UnmovedTarget(ScriptedTarget):
    def move(self, source, destination):
        pass


IN_RULE = "fly.speculation.rules.fly.FlyRule.resolve"
MUTANTS = {
    "window one too short": (IN_RULE, window_too_short),
    "EOS deferred": (IN_RULE, deferred_eos),
    "first places counted by round": (IN_RULE, first_place_counted_by_round),
    "pattern not looked at": (IN_RULE, pattern_not_looked_at),
    "pattern blind to the target": (IN_RULE, pattern_blind_to_the_target),
    "text of tokens that went": (
        "fly.speculation.running_text.RunningText.of",
        provisional_tokens_taken_for_final,
    ),
    "drafted past a stop string": (IN_RULE, draft_past_a_stop_string_counts),
    "deferred token kept within a round": (IN_RULE, deferred_token_kept_within_a_round),
    "deferred token kept across rounds": (
        "fly.speculation.sequence.Sequence._roll_back",
        deferred_token_kept_across_rounds,
    ),
    "target not committed": (f"{__name__}.ScriptedTarget", UncommittedTarget),
    "target sequence not moved": (f"{__name__}.ScriptedTarget", UnmovedTarget),
    "budget closes the window": (
        "fly.speculation.sequence.Sequence._end",
        budget_closes_the_window,
    ),
    "provisional tokens counted": (
        "fly.speculation.sequence.Sequence._count",
        provisional_tokens_counted,
    ),
    "provisional tokens counted by position": (
        "fly.speculation.sequence.Sequence._count_positions",
        provisional_positions_counted,
    ),
    "stop by a deferred token cuts at once": (
        "fly.speculation.sequence.Sequence._eos_after",
        lambda sequence, start: True,
    ),
}


@pytest.fixture(scope="module")
def fixed():
    """(case, what the oracle says) on which the engine as it is does not fail."""
    answers = [(case, expected(case)) for case in seeded(FIXED)]
    assert all(run(case) == answer for case, answer in answers)
    return answers


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name, fixed, monkeypatch):
    """A comparison too weak to notice the bugs it is made for."""
    monkeypatch.setattr(*MUTANTS[name])
    assert any(run(case) != answer for case, answer in fixed)
