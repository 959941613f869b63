"""Published rules through the engine: drafts' probabilities, drafters, and slots."""

import functools

import pytest
import torch

from fly import config
from fly.speculation.rules import rule_of
from fly.speculation.rules.places import Places
from fly.speculation.sampling import Sampling
from fly.speculation.sequence import Request
from tests import heads, tiny

BUDGET, K = 40, 4
ENSEMBLE = {"verification": "ensemble", "assistant_ensemble_weight": 0.5}
RULES = {
    "ensemble": ENSEMBLE,
    "fsd": {"verification": "fsd", "fsd_div_type": "tv_div", "fsd_div_threshold": 0.4},
    "cascade": {"verification": "cascade", "cascade_alpha": 0.4},
    "mars": {"verification": "mars", "mars_theta": 0.6},
    "asd": {"verification": "asd", "asd_budget": 3.0, "asd_gap": None, "asd_max_mismatches": 2},
    "cactus": {"verification": "cactus", "cactus_delta": 0.5},
    "entropy_ratio": {"verification": "entropy_ratio", "posterior_alpha": 1.0},
    "sglang": {"verification": "sglang", "speculative_accept_threshold_acc": 0.3},
    "block": {"verification": "block"},
}
STRICT = {  # the same rules where they are exact
    "ensemble": {"assistant_ensemble_weight": 1.0},
    "fsd": {"fsd_div_threshold": 0.0},
    "cascade": {"cascade_alpha": 0.0},
    "mars": {"mars_theta": 1.0},
    "asd": {"asd_budget": 0.0},
}


def made(**keys):
    base = {"target_model_path": "x", "draft_model_path": "y"}
    return rule_of(config.build(base | keys, "here"))


@pytest.fixture(scope="module")
def draft(target):
    return tiny.noisy_copy(target, 0.06)


def decoded(target, drafter, rule, slots=1, sampling=None):
    """(tokens by prompt, records)"""
    engine = tiny.engine(target, drafter, K, rule, slots)
    requests = [
        Request(tuple(p), BUDGET, tag=i, sampling=sampling or Sampling(), seed=100 + i)
        for i, p in enumerate(tiny.prompts())
    ]
    records = sorted(engine.run(requests), key=lambda record: record.request.tag)
    return [record.tokens for record in records], records


@pytest.fixture(scope="module")
def exact(target, draft):
    """The texts of exact verification, by drafter; decoded once each."""
    return functools.cache(
        lambda name: decoded(target, tiny.drafter(name, 1, draft), tiny.EXACT)[0]
    )


@pytest.fixture(scope="module")
def alone(target, draft):
    """(texts, records) of a rule as it is, one sequence at a time; decoded once each."""
    sampled = ("cactus", "entropy_ratio", "sglang", "block")

    def decode(name, slots=1):
        drafter, rule = tiny.drafter("model", slots, draft), made(**RULES[name])
        return decoded(target, drafter, rule, slots, Sampling(0.8) if name in sampled else None)

    return functools.cache(decode)


@pytest.mark.parametrize("name", [x if x == "asd" else tiny.slow(x) for x in RULES])
def test_slots_do_not_change_what_a_rule_decides(alone, name):
    """Float32: the running sequences share tensors, state and random numbers if they are mixed."""
    texts, records = alone(name)
    assert texts == alone(name, slots=3)[0]
    assert 0 < tiny.total(records, "native_accepted") < tiny.total(records, "drafted")
    assert tiny.total(records, "deferred_accepted") > 0 or name == "block"


@pytest.mark.parametrize("name", STRICT)
@pytest.mark.parametrize("drafter", ["model", tiny.slow("cascade")])
def test_strict_settings_are_exact_verification(target, draft, exact, name, drafter):
    rule = made(**RULES[name] | STRICT[name])
    assert decoded(target, tiny.drafter(drafter, 1, draft), rule)[0] == exact(drafter)


@pytest.mark.parametrize("name", ["ensemble", tiny.slow("fsd"), tiny.slow("cascade"), "asd"])
def test_exact_places_are_exact_verifications(target, draft, exact, alone, name):
    """And the mutant, the rule without them, is not."""
    assert alone(name)[0] != exact("model")
    rule = made(**RULES[name])
    rule.places = Places(first=BUDGET)
    assert decoded(target, tiny.drafter("model", 1, draft), rule)[0] == exact("model")


def test_exact_places_when_sampling(target, draft):
    sampling = Sampling(0.8)
    own, _ = decoded(target, tiny.drafter("model", 1, draft), tiny.EXACT, sampling=sampling)
    rule = made(**ENSEMBLE)
    relaxed, _ = decoded(target, tiny.drafter("model", 1, draft), rule, sampling=sampling)
    assert relaxed != own
    rule.places = Places(first=BUDGET)
    assert decoded(target, tiny.drafter("model", 1, draft), rule, sampling=sampling)[0] == own


@torch.inference_mode()
def by_hand(target, draft, prompt, weight):
    """Greedy decoding with the ensemble, one token at a time: K from v, then one from p."""
    tokens, place = list(prompt), 0
    while len(tokens) < len(prompt) + BUDGET and tokens[-1] != tiny.EOS:
        p, q = (
            m(torch.tensor([tokens])).logits[0, -1].float().softmax(-1) for m in (target, draft)
        )
        left = len(prompt) + BUDGET - len(tokens) - 1
        place = 0 if place < 0 else place
        is_drafted = place < K and (left > 0 or place > 0)
        own = (weight * p + (1 - weight) * q if is_drafted else p).argmax().item()
        place = place + 1 if is_drafted and own == q.argmax().item() and own != tiny.EOS else -1
        tokens.append(own)
    return tokens[len(prompt) :]


def test_the_greedy_ensemble_is_what_its_formula_says(target, draft, alone):
    cascade = decoded(target, tiny.drafter("cascade", 1, draft), made(**ENSEMBLE))[0]
    for prompt, *found in zip(tiny.prompts(), alone("ensemble")[0], cascade):
        expected = by_hand(target, draft, prompt, 0.5)[: BUDGET - K]
        assert [tokens[: BUDGET - K] for tokens in found] == [expected] * 2


def test_a_greedy_head_has_probabilities(target):
    """Its drafts are judged by q: with w near 0 whatever it drafts stands."""
    target = tiny.model(1, layers=3)
    keys = {"eagle_aux_hidden_state_layer_ids": [2, 3, 3]}
    eagle3 = heads.load(target, heads.tensors(0), **keys)
    rule = made(verification="ensemble", assistant_ensemble_weight=1e-6)
    _, records = decoded(target, heads.drafter(target, eagle3, 1, frozenset({tiny.EOS})), rule)
    accepted = tiny.total(records, "native_accepted") + tiny.total(records, "deferred_accepted")
    assert accepted == tiny.total(records, "drafted") > 0


def test_drafts_from_texts_are_verified_exactly_by_rules_that_need_q(target):
    """A cascade's texts have none."""
    own, _ = decoded(target, tiny.text_drafter(1), tiny.EXACT)
    assert decoded(target, tiny.text_drafter(1), made(**ENSEMBLE))[0] == own
