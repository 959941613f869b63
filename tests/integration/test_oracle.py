"""The engine against a plain oracle (tests/oracle.py), over scripted targets and drafters.

The scripted target chooses by a hash of all tokens that the engine fed to a slot, so that one
stale, missing or foreign token in a cache changes what it says.
"""

import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.speculation.drafters.base import Draft
from fly.speculation.engine import Engine
from fly.speculation.rules.gates import EntropyGate
from fly.speculation.rules.verification import Relaxation, resolve
from fly.speculation.sequence import Request, Sequence
from tests.oracle import Oracle, Rule, Script, plain

CASES = 1500  # engine runs of the long comparison, of one to five requests each
FIXED = 300  # engine runs on which every mutant must fail


class ScriptedTarget:
    """A ModelRunner whose K/V are the tokens themselves: it answers from what it was fed.

    A token that is kept though it was never fed is -1; positions past a row's own feed answer EOS.
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

    def reserve_rows(self, longest, *, width, steps=0):
        pass

    def prefill(self, slot, tokens):
        self.fed[slot], self.lengths[slot] = list(tokens), len(tokens)
        return 0

    def keep(self, slot, length):
        self.lengths[slot] = length

    def settle(self, slot, tokens, length):
        """`tokens` are not looked at: what was fed counts, not what should have been."""
        self.keep(slot, length)

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
        """As many likely tokens as the script has rivals, its choice a little ahead."""
        values = [-30.0] * self.script.vocab
        best = self.script.choice(prefix)
        for step in range(self.script.rivals(prefix)):
            values[(best + step) % self.script.vocab] = 0.0
        values[best] = 0.01
        return torch.tensor(values)


class ScriptedDrafter:
    """Proposes what the script says, and checks that rows stay in the slots they were given."""

    devices = ()

    def __init__(self, script, slots, *, on_device=False):
        self.script, self.on_device = script, on_device
        self.resize(slots)

    def admit(self, slot, row, *, soon=True):
        self.rows[slot] = row

    def reserve(self, longest, spd_k):
        pass

    def move(self, source, destination):
        self.rows[destination] = self.rows[source]

    def resize(self, slots):
        self.rows = [None] * slots

    def propose(self, rows, limits):
        assert rows == self.rows[: len(rows)], "rows changed their slots unannounced"
        chains = [self._chain(row.tokens, limit) for row, limit in zip(rows, limits)]
        draft = Draft(chains)
        return Draft.on_device(*draft.padded(torch.device("cpu"))) if self.on_device else draft

    def _chain(self, tokens, limit):
        chain = []
        while len(chain) < limit and (token := self.script.proposal(tokens + chain)) is not None:
            chain.append(token)
            if token == self.script.eos_id:
                break
        return chain

    def commit(self, rows, verdicts):
        pass


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
    room = None if across or window is None else window + pick([0, 0, 1])
    rule = Rule(pick(range(1, 9)), window, pick([None, 0.3, 0.9]), room)
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


def relaxation(rule):
    if rule.window is None:
        return None
    gates = () if rule.theta is None else (EntropyGate(rule.theta),)
    return Relaxation(gates, rule.window, rule.room)


def run(case: Case, requests=None, observer=lambda record: None):
    """{tag: (tokens, finish reason, counts)} from the engine; `requests` keep their order."""
    engine = Engine(
        ScriptedTarget(case.script, case.slots),
        ScriptedDrafter(case.script, case.slots, on_device=case.on_device),
        spd_k=case.rule.spd_k,
        relaxation=relaxation(case.rule),
        eos_ids=frozenset({case.script.eos_id}),
        decode=case.script.decode,
        observer=observer,
        reuse_prefixes=requests is None,  # sorts them
    )
    records = {record.request.tag: record for record in engine.run(requests or case.requests)}
    return {
        tag: (record.tokens, record.finish_reason, record.counts.as_dict())
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
    "refused: no room in the round",
    *(
        f"{kind} token ends: {reason}"
        for kind in ("native", "deferred", "correction", "rollback", "bonus")
        for reason in ("eos", "stop")
    ),
    "bonus token ends: length",
]


def note_final(seen, record):
    seen.append((record.row, record.row.tokens[: record.row.final_length]))


def test_the_engine_decodes_as_the_oracle_does():
    """Any slip in windows, rollbacks, ends, counts or cache calls; every event must have occurred.

    Also a final token that is taken back: callers may have shown it already.
    """
    events, requests = Counter(), 0
    for case in seeded(CASES):
        final = []
        got = run(case, observer=partial(note_final, final))
        assert got == expected(case, events), case
        assert all(row.tokens[: len(tokens)] == tokens for row, tokens in final), case
        assert all(counts["emitted"] == len(tokens) for tokens, _, counts in got.values())
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
    """A row that reads another's cache, deferral or counts."""
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


def test_rows_interrupted_by_lack_of_memory_go_on_with_their_open_deferral(monkeypatch):
    """A window, or a provisional token, that is forgotten when a row is let in again."""
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
            total.update(counts)
    assert 0 < total["native_accepted"] < total["drafted"]
    assert total["deferred_accepted"] == total["deferred_rolled_back"] == total["discarded"] == 0


@dataclass(frozen=True)
class Spelled(Script):
    """Target and draft say fixed letters by position, after a prompt of one token."""

    said: str = ""
    drafted: str = ""
    vocab: int = 27

    def choice(self, prefix):
        return self._spell(self.said, prefix)

    def proposal(self, prefix):
        return self._spell(self.drafted, prefix) if len(prefix) <= len(self.drafted) else None

    def _spell(self, text, prefix):
        letter = text[len(prefix) - 1]
        return self.eos_id if letter == "." else ord(letter) - ord("a")


# target, draft, rule (K, W, room), budget, stop -> text, why it ends,
# (deferred_accepted, deferred_rolled_back, discarded)
BY_HAND = {
    "stands within a round": (
        ("abcdef", "xbcdef", (4, 2, 2), 6, None),
        ("xbcdef", "length", (1, 0, 0)),
    ),
    "no room in the round": (
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
    (said, drafted, (k, window, room), budget, stop), (text, reason, counts) = BY_HAND[name]
    script = Spelled(0, said=said + "q" * 9, drafted=drafted)
    requests = (Request((0,), budget, (stop,) if stop else (), tag=0),)
    case = Case(script, Rule(k, window, None, room), requests, slots=1, on_device=False)
    for tokens, why, got in (run(case)[0], expected(case)[0]):
        assert (script.decode(tokens), why) == (text, reason)
        names = ("deferred_accepted", "deferred_rolled_back", "discarded")
        assert tuple(got[name] for name in names) == counts


def window_too_short(native, may_wait, relaxation, *rest):
    if relaxation is not None and relaxation.window > 1:
        relaxation = replace(relaxation, window=relaxation.window - 1)
    return resolve(native, may_wait, relaxation, *rest)


def deferred_token_kept_within_a_round(*args):
    result = resolve(*args)
    if not result.rolled_back:
        return result
    stands = (*result.deferred, result.accepted)
    return replace(result, accepted=result.accepted + 1, deferred=stands, rolled_back=False)


def deferred_token_kept_across_rounds(row, *args):
    at, row.open = row.open.at, None
    row._truncate(at + 1)
    return 0


def budget_closes_the_window(row, honest=Sequence._end):
    if row.remaining <= 0:
        row.open = None
    return honest(row)


def provisional_tokens_counted(row, counts, honest=Sequence._count):
    row.open, held = None, row.open
    honest(row, counts)
    row.open = held


class UnsettledTarget(ScriptedTarget):
    """Not told when a row grows shorter."""

    def settle(self, slot, tokens, length):
        super().settle(slot, tokens, max(length, self.lengths[slot]))


class UnmovedTarget(ScriptedTarget):
    def move(self, source, destination):
        pass


MUTANTS = {
    "window one too short": ("fly.speculation.engine.resolve", window_too_short),
    "deferred token kept within a round": (
        "fly.speculation.engine.resolve",
        deferred_token_kept_within_a_round,
    ),
    "deferred token kept across rounds": (
        "fly.speculation.sequence.Sequence._roll_back",
        deferred_token_kept_across_rounds,
    ),
    "target not settled": (f"{__name__}.ScriptedTarget", UnsettledTarget),
    "target row not moved": (f"{__name__}.ScriptedTarget", UnmovedTarget),
    "budget closes the window": (
        "fly.speculation.sequence.Sequence._end",
        budget_closes_the_window,
    ),
    "provisional tokens counted": (
        "fly.speculation.sequence.Sequence._count",
        provisional_tokens_counted,
    ),
    "stop by a deferred token cuts at once": (
        "fly.speculation.sequence.Sequence._eos_after",
        lambda row, start: True,
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
    caught = sum(run(case) != answer for case, answer in fixed)
    assert caught > 0
