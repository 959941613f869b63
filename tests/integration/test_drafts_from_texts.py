"""Drafts from texts change no text: every source, greedy and sampled, with mutants."""

import functools
import time
from dataclasses import replace

import pytest
import torch

from fly.speculation.drafters.cascade import CascadeDrafter
from fly.speculation.drafters.follower import Follower
from fly.speculation.rules.base import Rule
from fly.speculation.sampling import Sampling
from fly.speculation.sequence import Request
from tests import tiny

BUDGET = 40
ALL = ("runs", "own")
LETTER = {"runs": "e", "own": "n"}
SLOW = pytest.mark.slow
WARM = Sampling(temperature=0.4)


@pytest.fixture(scope="module")
def earlier(target):
    """What a slightly different model wrote for the same prompts."""
    before = tiny.noisy_copy(target, 0.004, seed=11)
    return [tuple(tiny.generate(before, prompt, BUDGET)) for prompt in tiny.prompts()]


@pytest.fixture(scope="module")
def expected(target):
    return [tiny.generate(target, prompt, BUDGET) for prompt in tiny.prompts()]


def requests(earlier=None, repeats=1, sampling=None):
    prompts = enumerate(tiny.prompts())
    return [
        Request(
            tuple(prompt),
            BUDGET,
            tag=(number, repeat),
            seed=100 * number + repeat,
            sampling=sampling or Sampling(),
            earlier=(earlier[number],) if earlier else (),
        )
        for number, prompt in prompts
        for repeat in range(repeats)
    ]


@pytest.fixture(scope="module")
def alone(target):
    """Sampled texts of the target by itself, by how many of each prompt; decoded once each."""
    return functools.cache(
        lambda repeats: texts(decode(target, None, requests(None, repeats, WARM), "none"))
    )


def drafter_of(name, names, slots, draft, learns=True):
    if name == "none":
        return tiny.drafter("none", slots, None)
    if name == "ngram":
        return tiny.text_drafter(slots, names, learns=learns)
    lookup = tiny.lookup(slots, names, learns=learns, has_model=True)
    return CascadeDrafter(tiny.runner(draft, slots), frozenset({tiny.EOS}), (1, 4, 6), lookup)


def decode(target, draft, wanted, name="ngram", names=ALL, slots=1, rule=tiny.EXACT, learns=True):
    """Records by (prompt, repeat)."""
    drafter = drafter_of(name, names, slots, draft, learns)
    engine = tiny.engine(target, drafter, 8, rule, slots)
    return {record.request.tag: record for record in engine.run(wanted)}


def texts(records):
    return {tag: record.tokens for tag, record in records.items()}


def in_order(records):
    return [records[tag].tokens for tag in sorted(records)]


def accepted(records, letter):
    found = [record.sources.get(letter) for record in records.values()]
    return sum(counts.accepted for counts in found if counts)


@pytest.mark.parametrize(
    ("slots", "learns"),
    [(3, True), pytest.param(1, True, marks=SLOW), pytest.param(3, False, marks=SLOW)],
)
@pytest.mark.parametrize("name", ["ngram", "cascade"])
@pytest.mark.parametrize("source", ALL)
def test_greedy_texts_are_generates(target, draft, earlier, expected, source, name, slots, learns):
    wanted = requests(earlier)
    records = decode(target, draft, wanted, name, (source,), slots, learns=learns)
    for (number, _), tokens in texts(records).items():
        assert tokens == expected[number]
    directly = name == "ngram" or learns or source != "own"
    if directly:
        assert accepted(records, LETTER[source]) > 0
    for record in records.values():
        assert sum(c.accepted for c in record.sources.values()) == record.counts.native_accepted
        assert sum(c.drafted for c in record.sources.values()) == record.counts.drafted


def test_an_earlier_output_saves_most_passes(target, draft, expected):
    same = [tuple(tokens) for tokens in expected]
    records = decode(target, draft, requests(same), names=("runs",))
    assert in_order(records) == expected
    assert tiny.total(records.values(), "rounds") < tiny.total(records.values(), "emitted") / 4
    assert accepted(records, "e") > 0.7 * tiny.total(records.values(), "emitted")


@pytest.mark.parametrize("slots", [pytest.param(1, marks=SLOW), 4])
@pytest.mark.parametrize("source", ALL)
def test_sampled_texts_are_the_targets_own(target, draft, earlier, alone, source, slots):
    """Each place in an output has its own random number, so drafts change not even the draws."""
    wanted = requests(earlier, repeats=3, sampling=WARM)
    records = decode(target, draft, wanted, names=(source,), slots=slots)
    assert texts(records) == alone(3)
    assert len({tuple(tokens) for tokens in alone(3).values()}) > 10
    assert accepted(records, LETTER[source]) > 0


# ------------------------------------------------------------------------------------------ mutants


def unverified(rule, judged, honest=Rule.resolve):
    """Takes a proposal as it is."""
    resolution = honest(rule, judged)
    return replace(resolution, accepted=len(judged.draft))


@pytest.mark.parametrize("source", ALL)
def test_a_proposal_taken_without_verification_is_caught(
    target, draft, earlier, alone, monkeypatch, source
):
    wanted = requests(earlier, repeats=2, sampling=WARM)
    honest = alone(2)
    monkeypatch.setattr(Rule, "resolve", unverified)
    assert texts(decode(target, draft, wanted, names=(source,))) != honest


def test_random_numbers_drawn_by_round_would_be_caught(target, draft, earlier, alone, monkeypatch):
    from fly.speculation.sequence import Sequence

    def by_round(self, count):
        self.spent = getattr(self, "spent", 0) + 3
        return self._stream.at(self.spent, count)

    wanted, honest = requests(earlier, sampling=WARM), alone(1)
    monkeypatch.setattr(Sequence, "noise", by_round)
    assert texts(decode(target, draft, wanted, names=("runs",))) != honest


def test_a_place_kept_after_a_rollback_costs_acceptance(target, draft, earlier, monkeypatch):
    """Under deferral across rounds sequences get shorter: the place has to go back with them."""
    rule = tiny.relaxed(4, 0.1, across=True)
    one = decode(target, draft, requests(earlier), "cascade", ("runs",), rule=rule, learns=False)
    assert tiny.total(one.values(), "deferred_rolled_back") > 0

    def only_forward(self, generated):
        self._place = max(self._place, len(generated))
        return type(honest(self, []))(self._place, 8)

    honest = Follower.find
    monkeypatch.setattr(Follower, "find", only_forward)
    kept = decode(target, draft, requests(earlier), "cascade", ("runs",), rule=rule, learns=False)

    def share(records):
        counts = [record.sources["e"] for record in records.values() if "e" in record.sources]
        return sum(c.accepted for c in counts) / sum(c.drafted for c in counts)

    assert share(kept) < share(one)


def test_ids_of_another_tokenizer_cost_acceptance_not_texts(target, draft, expected):
    """Were they drafted from all the same: nothing is accepted, and every text is the target's."""
    shifted = [tuple((token + 7) % 60 + 3 for token in tokens) for tokens in expected]
    records = decode(target, draft, requests(shifted), names=("runs",))
    assert in_order(records) == expected
    right = decode(target, draft, requests([tuple(tokens) for tokens in expected]), names=("runs",))
    assert accepted(records, "e") < 0.2 * accepted(right, "e")


# ----------------------------------------------------------------------------------------- batches


def test_texts_under_fly_do_not_depend_on_neighbours(target, draft, earlier):
    """Without learning, a sequence's drafts follow from its own past alone."""
    rule = tiny.relaxed(1, 0.1)
    wanted = requests(earlier)
    drafts = [
        decode(target, draft, part, "cascade", ("runs", "own"), 3, rule, learns=False)
        for part in (wanted, wanted[2:], wanted[:2])
    ]
    for part in drafts[1:]:
        for tag, record in part.items():
            assert record.tokens == drafts[0][tag].tokens
    assert tiny.total(drafts[0].values(), "deferred_accepted") > 0


def test_memory_that_runs_out_costs_no_text(target, draft, earlier, expected, monkeypatch):
    """Interrupted sequences are admitted again, in fewer slots, with their texts."""
    wanted = requests(earlier, repeats=2)
    drafter = drafter_of("ngram", ALL, 4, draft)
    engine = tiny.engine(target, drafter, 8, slots=4)
    honest, passes = engine._target.extend, []

    def extend(tokens):
        passes.append(len(tokens))
        if len(passes) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return honest(tokens)

    monkeypatch.setattr(engine._target, "extend", extend)
    records = {record.request.tag: record for record in engine.run(wanted)}
    for (number, _), record in records.items():
        assert record.tokens == expected[number]
    assert max(passes[6:]) <= 2


def test_a_draft_model_past_its_context_leaves_texts_to_be_drafted_from(target, draft, expected):
    """It promises nothing that it cannot draft."""
    lookup = tiny.lookup(1, ("runs",), learns=True, has_model=True)
    short = tiny.runner(draft, 1, max_length=8)
    drafter = CascadeDrafter(short, frozenset({tiny.EOS}), (1, 4, 6), lookup)
    limits = []
    honest = lookup.propose
    lookup.propose = lambda running, given: limits.extend(given) or honest(running, given)
    engine = tiny.engine(target, drafter, 8)
    wanted = requests([tuple(tokens) for tokens in expected])
    records = {record.request.tag: record for record in engine.run(wanted)}
    assert in_order(records) == expected
    assert 0 in limits  # past it, nothing is expected of the draft model
    assert limits[-1] < 8


def test_a_prefill_that_was_put_off_is_prefill(target, monkeypatch):
    """While an earlier output is followed the draft model's prompt waits; its seconds were counted
    as drafting, so decoding seemed slower than it is."""
    drafted = tiny.runner(tiny.noisy_copy(target, 0.02), 1)
    honest = drafted.prefill

    def slow(*args):
        time.sleep(0.2)
        return honest(*args)

    monkeypatch.setattr(drafted, "prefill", slow)
    lookup = tiny.lookup(1, ("runs",), has_model=True)
    drafter = CascadeDrafter(drafted, frozenset({tiny.EOS}), (1, 4, 6), lookup)
    request = Request(tuple(range(3, 40)), 20, earlier=((60, 61, 62),))
    (record,) = tiny.engine(target, drafter, 4).run([request])
    assert record.counts.drafted > 0
    assert record.seconds["prefill"] > 0.2
    assert record.seconds["draft"] < 0.2


@pytest.mark.parametrize("name", ["ngram", "cascade"])
def test_static_passes_take_drafts_wider_than_spd_k(target, draft, expected, name):
    """Memory is kept for them at once: growing later would drop captured graphs."""
    runner = tiny.runner(target, 2, capture=False)
    drafter = drafter_of(name, ("runs",), 2, draft)
    engine = tiny.engine(runner, drafter, 4, slots=2)
    wanted = requests([tuple(tokens) for tokens in expected])
    widest = 0
    honest = runner.extend

    def extend(tokens):
        nonlocal widest
        widest = max(widest, *map(len, tokens))
        return honest(tokens)

    runner.extend = extend
    records = {record.request.tag: record for record in engine.run(wanted)}
    assert in_order(records) == expected
    assert widest > 6
