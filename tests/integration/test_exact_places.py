"""What exact_first_tokens and exact_pattern promise of texts, on real caches in float32."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.speculation.rules.fly import FlyRule
from fly.speculation.rules.places import Places
from fly.speculation.sequence import Request
from tests import tiny
from tests.integration.test_lm import PROMPTS, fly_lm, instances

BUDGET = 24
IN_PRINT = re.compile(r"[ -\x60]+")  # of a byte-level vocabulary, whose random texts have no words
VOCAB = tiny.TOKENIZER_VOCAB


def rule(across, window, exact_first=0, patterns=()):
    """Every gate open."""
    made = tiny.fly_rule((), window, None if across else window)
    made.places = Places(exact_first, patterns)
    return made


def texts(target, draft, rule_, slots, drafter="model", k=5):
    engine = tiny.engine(target, tiny.drafter(drafter, slots, draft), k, rule_, slots)
    records = tiny.decode_all(engine, tiny.prompts(), BUDGET)
    return [record.tokens for record in records], tiny.total(records, "deferred_accepted")


@pytest.fixture(scope="module")
def exact(target, draft):
    return texts(target, draft, tiny.EXACT, 1)[0]


@pytest.mark.parametrize("across", [False, True], ids=["within a round", "across rounds"])
@pytest.mark.parametrize("slots", [tiny.slow(1), 3])
@pytest.mark.parametrize("window", [0, 2])
def test_as_many_as_the_budget_is_exact_verification(target, draft, exact, across, slots, window):
    """And the same rule with fewer is not, or this would show nothing."""
    assert texts(target, draft, rule(across, window, BUDGET), slots) == (exact, 0)
    changed, deferred = texts(target, draft, rule(across, window), slots)
    assert changed != exact
    assert deferred > 0


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, BUDGET - 1), st.booleans(), st.integers(0, 2), st.integers(1, 3),
    st.sampled_from(["model", "cascade"]),
)  # fmt: skip
def test_the_first_tokens_are_exact_verifications(
    target, draft, exact, first, across, window, slots, drafter
):
    found, _ = texts(target, draft, rule(across, window, first), slots, drafter)
    assert [tokens[:first] for tokens in found] == [tokens[:first] for tokens in exact]


def test_mutant_places_counted_from_the_round(target, draft, exact, monkeypatch):
    """Only the first round's places are kept then."""
    honest = FlyRule._may_be_deferred

    def by_round(self, judged, position):
        object.__setattr__(judged, "start", 0 if judged.start == 0 else BUDGET)
        return honest(self, judged, position)

    monkeypatch.setattr(FlyRule, "_may_be_deferred", by_round)
    found, _ = texts(target, draft, rule(False, 0, BUDGET), 1)
    assert found != exact


@pytest.fixture(scope="module")
def byte_pair():
    target = tiny.model(seed=1, vocab=VOCAB)
    return target, tiny.noisy_copy(target, 0.02)


def deferred_in_matches(pair, rule_, slots, seed):
    """(deferred tokens that stand, those of them whose text is in a match in the whole text)."""
    tokenizer = tiny.byte_tokenizer()

    def decode(ids):
        return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

    deferred = {}

    def observe(record):
        places = deferred.setdefault(record.request.tag, set())
        kept = {p for p in places if p < record.start}
        if record.rolled_back is not None:
            kept = {p for p in kept if p < record.rolled_back}
        deferred[record.request.tag] = {p for p in {*kept, *record.deferred} if p < record.length}

    target, draft = pair
    runner = tiny.drafter("model", slots, draft, eos=frozenset())
    engine = tiny.engine(
        target, runner, 5, rule_, slots, eos=frozenset(), decode=decode, observer=observe
    )
    prompts = tiny.prompts(vocab=200, seed=seed)
    requests = [Request(tuple(p), BUDGET, tag=number) for number, p in enumerate(prompts)]
    stood = inside = 0
    for record in engine.run(requests):
        tokens = [*record.request.prompt, *record.tokens]
        text, start = decode(tokens), len(record.request.prompt)
        spans = [found.span() for found in IN_PRINT.finditer(text)]
        assert len(deferred[record.request.tag]) == record.counts.deferred_accepted
        for place in deferred[record.request.tag]:
            at = len(decode(tokens[: start + place]).rstrip("\ufffd"))
            end = len(decode(tokens[: start + place + 1]))
            stood += 1
            inside += any(a < end and at < b for a, b in spans)
    return stood, inside


@pytest.mark.parametrize(
    ("across", "slots"),
    [tiny.slow(False, 1), (True, 3)],
    ids=["within a round", "across rounds, of three"],
)
def test_no_deferred_token_is_in_a_pattern(byte_pair, across, slots):
    kept = [
        deferred_in_matches(byte_pair, rule(across, 1, patterns=(IN_PRINT,)), slots, seed)
        for seed in range(4)
    ]
    stood, inside = map(sum, zip(*kept))
    assert (stood > 0, inside) == (True, 0)
    without = [deferred_in_matches(byte_pair, rule(across, 1), slots, seed) for seed in range(4)]
    assert sum(inside for _, inside in without) > 0


@pytest.mark.parametrize("across", [False, True], ids=["within a round", "across rounds"])
def test_the_keys_of_a_pair_reach_its_texts(saved_pair, across):
    """From the JSON's keys to the text: first places, and a pattern that matches everything."""

    def decoded(**keys):
        lm = fly_lm(saved_pair, **keys)
        asked = instances({"max_gen_toks": 20, "until": []}, PROMPTS)
        return lm.generate_until(asked), lm.stats.counts.deferred_accepted

    loose = {"enable_fly": True, "entropy_thre": None, "defer_across_rounds": across}
    own, _ = decoded()
    changed, deferred = decoded(**loose)
    assert changed != own
    assert deferred > 0
    assert decoded(**loose, exact_first_tokens=20) == (own, 0)
    assert decoded(**loose, exact_pattern="(?s).+") == (own, 0)
    assert decoded(**loose, exact_pattern=["numbers", r"\w[\w\W]*", r"\W[\w\W]*"]) == (own, 0)
