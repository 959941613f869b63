"""The verification rules against a slow, obvious oracle, and tables that pin the window."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.settings import FlySettings, Settings
from fly.speculation.rules.base import Rule, verify
from fly.speculation.rules.fly import FlyRule
from fly.speculation.rules.gates import (
    DistanceGate,
    EntropyGate,
    MarginGate,
    RankGate,
    RatioGate,
    TypicalGate,
    all_pass,
    entropy,
    full_entropy,
    top_k_entropy,
)
from fly.speculation.rules.judged import JudgedDraft, Resolution
from fly.speculation.rules.places import Places
from tests import tiny

V = 8
HIGH, LOW = 1.0, 0.1  # entropies above and below the tests' threshold of 0.3


def logits_for(token: int, uncertain: bool) -> torch.Tensor:
    """A distribution whose argmax is `token`: nearly flat, or nearly certain."""
    logits = torch.zeros(V)
    logits[token] = 0.5 if uncertain else 9.0
    return logits


def stream(matches: str, uncertain: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A draft of token 1 per position. matches: 'y' where the target agrees. Plus the bonus."""
    logits = [logits_for(1 if m == "y" else 2, u == "h") for m, u in zip(matches, uncertain)]
    logits.append(logits_for(3, False))
    return torch.ones(1, len(matches), dtype=torch.long), torch.stack(logits)[None]


def judged(matches, uncertain, rule, **rest):
    """One sequence's stream, judged by the rule's gates as the engine does."""
    draft, logits = stream(matches, uncertain)
    found = verify(draft, torch.tensor([len(matches)]), logits, rule)
    parts = (draft, found.matches_BK, found.deferrable_BK, found.target_BK1)
    return JudgedDraft(*(part[0].tolist() for part in parts), **rest)


def decide(
    matches, uncertain, window, threshold=0.3, lookahead=None, across=False, open_matches=None
):
    """What FLy's rule says of one sequence's stream."""
    gates = () if threshold is None else (EntropyGate(threshold),)
    lookahead = None if across else (window if lookahead is None else lookahead)
    rule = tiny.fly_rule(gates, window, lookahead)
    return rule.resolve(judged(matches, uncertain, rule, open_matches=open_matches))


def oracle(matches, uncertain, length, window):
    """One position at a time, from the definition: accepted count, stood, rolled back."""
    accepted, stood = 0, []
    for j in range(1, length + 1):
        if matches[j - 1]:
            accepted += 1
            continue
        fits = j + window <= length
        if not (uncertain[j - 1] and fits):
            return accepted, stood, False
        if not all(matches[j : j + window]):
            return accepted, stood, True
        stood.append(j - 1)
        accepted += 1
    return accepted, stood, False


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_within_a_round_it_agrees_with_the_slow_oracle(data):
    """Catches any off-by-one in the window, and padding that leaks between sequences."""
    sequences = data.draw(st.integers(1, 4))
    k = data.draw(st.integers(1, 12))
    window = data.draw(st.integers(0, 7))
    lengths = data.draw(st.lists(st.integers(0, k), min_size=sequences, max_size=sequences))
    flags = st.lists(st.booleans(), min_size=k, max_size=k)
    matches = [data.draw(flags) for _ in range(sequences)]
    uncertain = [data.draw(flags) for _ in range(sequences)]
    draft, logits = [], []
    for b in range(sequences):
        chain, scores = stream(
            "".join("y" if m else "n" for m in matches[b]),
            "".join("h" if u else "l" for u in uncertain[b]),
        )
        chain[0, lengths[b] :] = -1
        draft.append(chain[0])
        logits.append(scores[0])
    rule = tiny.relaxed(window, 0.3)
    found = verify(torch.stack(draft), torch.tensor(lengths), torch.stack(logits), rule)
    for b, length in enumerate(lengths):
        matched, deferrable = found.matches_BK[b].tolist(), found.deferrable_BK[b].tolist()
        assert not any(matched[length:])
        assert not any(deferrable[length:])
        got = rule.resolve(
            JudgedDraft(
                draft[b][:length].tolist(),
                matched[:length],
                deferrable[:length],
                found.target_BK1[b, : length + 1].tolist(),
            )
        )
        accepted, stood, rolled_back = oracle(matches[b], uncertain[b], length, window)
        assert (got.accepted, list(got.deferred), got.rolled_back) == (accepted, stood, rolled_back)
        assert got.open_at is None
        assert not got.rolls_back_earlier


@pytest.mark.parametrize(
    ("deferrable", "count", "first", "spends"),
    [(True, 3, 0, True), (False, 3, 0, False), (True, 4, 0, False), (True, 3, 1, False)],
    ids=["too-short", "gate", "rolled-back", "exact-place"],
)
def test_a_draft_too_short_for_a_window_spends_its_numbers(deferrable, count, first, spends):
    rule = tiny.relaxed(3, 0.3)
    rule.places = Places(first=first)
    matches = [False, True, True, False][:count]
    found = rule.resolve(JudgedDraft([1] * count, matches, [deferrable] * count, [2] * (count + 1)))
    assert (found.accepted, found.spends_draft) == (0, spends)


@pytest.mark.parametrize(
    ("matches", "uncertain", "window", "accepted", "why"),
    [
        ("nyyyyyy", "hhhhhhh", 6, 7, "window of 6 ends exactly at the draft's end"),
        ("ynyyyyy", "hhhhhhh", 6, 1, "only 5 positions follow: rejected"),
        ("nyyyyyn", "hhhhhhh", 6, 0, "mismatch at the last window position rolls back"),
        ("nyyynyyy", "hhhhhhhh", 3, 8, "second mismatch one past the window: both stand"),
        ("nyynyyyy", "hhhhhhhh", 3, 0, "two mismatches W apart: the first is rolled back"),
        ("nyyyyyyy", "lhhhhhhh", 6, 0, "certain target: the gate is shut"),
        ("nnnn", "hhhh", 0, 4, "no window: every uncertain mismatch is accepted"),
        ("nnnn", "hhlh", 0, 2, "no window still asks the gate"),
        ("yyyyyyyy", "llllllll", 6, 8, "all match: nothing to relax"),
        ("y" * 8 + "n" + "y" * 6, "h" * 15, 6, 15, "last relaxable position of K=15"),
        ("y" * 9 + "n" + "y" * 5, "h" * 15, 6, 9, "last W positions cannot be relaxed"),
    ],
)
def test_window_table(matches, uncertain, window, accepted, why):
    assert decide(matches, uncertain, window).accepted == accepted, why


@pytest.mark.parametrize(
    ("matches", "window", "accepted", "why"),
    [
        ("nyyyyyy", 6, 7, "six follow and the five that are checked match"),
        ("ynyyyyy", 6, 1, "only five follow: rejected, though five are checked"),
        ("nyyyyyn", 6, 6, "the sixth follower is not checked; it is then rejected itself"),
        ("nyyyynyyyyyy", 6, 0, "the fifth follower is"),
        ("nyyyyynyyyyyy", 6, 13, "a mismatch right after the checked ones is deferrable itself"),
        ("nn", 1, 1, "W=1 checks nothing, but one must follow"),
        ("n", 1, 0, "and here none does"),
    ],
)
def test_reference_window_table(matches, window, accepted, why):
    """The reference code checks W - 1 followers and wants W to remain in the round."""
    rule = FlyRule(FlySettings(win_len=window, window_rule="reference", entropy_thre=0.3))
    assert (rule.window, rule.lookahead) == (window - 1, window)
    uncertain = "h" * len(matches)
    assert rule.resolve(judged(matches, uncertain, rule)).accepted == accepted, why
    assert decide(matches, uncertain, window - 1, lookahead=window).accepted == accepted, why


def test_across_rounds_table():
    def shape(matches, **kwargs):
        got = decide(matches, "h" * len(matches), 3, across=True, **kwargs)
        return got.accepted, got.deferred, got.rolled_back, got.rolls_back_earlier, got.open_at

    assert shape("yn") == (2, (1,), False, False, 1), "open at the end: provisional"
    assert decide("yn", "hh", 3, across=True).open_matches == 1, "the bonus token is a match"
    assert shape("nyy") == (3, (0,), False, False, None), "the bonus token fills the window"
    assert shape("ynyn") == (1, (), True, False, None), "rolled back in its own round"
    assert shape("yn", open_matches=1) == (0, (), False, True, None), "it takes the draft with it"
    assert shape("yyn", open_matches=1) == (3, (2,), False, False, 2), "closed, then a new one"
    assert shape("y", open_matches=0) == (1, (), False, False, -1), "still the earlier one"
    assert decide("y", "h", 3, across=True, open_matches=0).open_matches == 2
    assert shape("", open_matches=2) == (0, (), False, False, None), "a plain step fills it"


def test_gate_passes_at_equality():
    """Catches > written for >=."""
    _, logits = stream("nyy", "hhh")
    exact = entropy(logits[0, 0], "top3").item()
    assert decide("nyy", "hhh", 2, threshold=exact).accepted == 3
    assert decide("nyy", "hhh", 2, threshold=math.nextafter(exact, 9) + 1e-6).accepted == 0


def test_threshold_none_is_off_and_zero_is_zero():
    assert decide("nyy", "lll", 2, threshold=None).accepted == 3
    assert decide("nyy", "lll", 2, threshold=0.0).accepted == 3


EOS = frozenset({1})  # the drafted token of every stream


@pytest.mark.parametrize(
    ("window", "across", "accepted"), [(2, False, 1), (2, True, 1), (0, False, 5)]
)
def test_eos_is_deferred_only_without_a_window(window, across, accepted):
    """Nothing can follow a deferred EOS, so its window could not be filled."""
    rule = tiny.relaxed(window, 0.3, across)
    assert rule.resolve(judged("ynyyy", "hhhhh", rule)).accepted == 5
    assert rule.resolve(judged("ynyyy", "hhhhh", rule, eos_ids=EOS)).accepted == accepted
    assert rule.resolve(judged("yyyyy", "hhhhh", rule, eos_ids=EOS)).accepted == 5


def test_what_is_drafted_past_a_stop_string_takes_no_window_back():
    """Across rounds, where the stop string is completed by a match."""

    def shape(matches, end, across=True, **rest):
        rule = tiny.relaxed(3, 0.3, across)
        uncertain = "h" * len(matches)
        got = rule.resolve(judged(matches, uncertain, rule, stop_at=lambda: end, **rest))
        return got.accepted, got.rolled_back, got.rolls_back_earlier, got.open_at

    assert shape("nyn", None) == (0, True, False, None)
    assert shape("nyn", 2) == (2, False, False, 0), "open: the sequence ends with the match"
    assert shape("nyn", 3) == (0, True, False, None), "a mismatch completes nothing"
    assert shape("ynyn", 2) == (1, True, False, None), "nor does the deferred token itself"
    assert shape("yn", 1, open_matches=0) == (1, False, False, -1)
    assert shape("yn", None, open_matches=0) == (0, False, True, None)
    assert shape("nyyn", 2, across=False) == (0, True, False, None), "the draft goes on"
    assert shape("nyyyn", 2, across=False) == (4, False, False, None)


def test_a_stop_string_is_only_looked_for_across_rounds():
    """It costs decoding, which nothing within a round depends on."""

    def asked():
        raise AssertionError

    for rule in (tiny.EXACT, tiny.relaxed(3, 0.3), tiny.gated_rule()):
        rule.resolve(judged("nyyyn", "hhhhh", rule, stop_at=asked))
    across = tiny.relaxed(3, 0.3, across=True)
    with pytest.raises(AssertionError):
        across.resolve(judged("nyyyn", "hhhhh", across, stop_at=asked))


def test_exact_rule_never_relaxes():
    draft, logits = stream("nyyyyyyy", "hhhhhhhh")
    found = verify(draft, torch.tensor([8]), logits, tiny.EXACT)
    assert tiny.EXACT.gates is None
    assert not found.deferrable_BK.any()
    assert tiny.EXACT.resolve(judged("nyyyyyyy", "hhhhhhhh", tiny.EXACT)) == Resolution(0)
    assert tiny.EXACT.resolve(judged("yynyyyyy", "hhhhhhhh", tiny.EXACT)) == Resolution(2)


def test_rules_by_gates_alone_have_no_window():
    """They take every mismatch that passes, EOS too, and stop at the first that does not."""
    rule = tiny.gated_rule(EntropyGate(0.3))
    assert rule.decides_alone
    assert not tiny.EXACT.decides_alone
    assert not tiny.relaxed(2, 0.3).decides_alone
    found = rule.resolve(judged("nynnyn", "hlhllh", rule, eos_ids=EOS))
    assert found == Resolution(3, deferred=(0, 2))
    everything = Rule(Settings())
    assert everything.gates == ()
    assert everything.resolve(judged("nnn", "lll", everything)) == Resolution(3, (0, 1, 2))


def test_empty_draft_yields_the_targets_token():
    empty, logits = torch.empty(1, 0, dtype=torch.long), logits_for(5, False)[None, None]
    found = verify(empty, torch.tensor([0]), logits, tiny.gated_rule(EntropyGate(0.3)))
    assert found.target_BK1.tolist() == [[5]]
    for rule in (tiny.fly_rule((), 6, 6), tiny.EXACT, tiny.gated_rule()):
        assert rule.resolve(JudgedDraft([], [], [], [5])) == Resolution(0)


P = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.97, 0.01, 0.01, 0.01]])


@pytest.mark.parametrize(
    ("gate", "token", "passes"),
    [
        (MarginGate(0.21), 1, [True, False]),
        (MarginGate(0.19), 1, [False, False]),
        (RatioGate(0.29), 2, [True, False]),
        (RatioGate(0.31), 2, [False, False]),
        (RankGate(2), 1, [True, True]),  # ties share a place
        (RankGate(2), 2, [False, True]),
        (DistanceGate(0.36), 2, [True, False]),
        (DistanceGate(0.34), 2, [False, False]),
        (TypicalGate(0.09, 0.3), 2, [True, False]),  # H = 1.14 nats: the bar is 0.09
        (TypicalGate(0.5, 0.3), 2, [True, False]),  # 0.3 * exp(-1.14) = 0.0957
        (TypicalGate(0.5, 0.5), 2, [False, False]),  # 0.5 * exp(-1.14) = 0.16
        (EntropyGate(1.0), 3, [False, False]),  # 0.99 nats over the three largest
        (EntropyGate(0.95), 3, [True, False]),
    ],
)
def test_gates_by_hand(gate, token, passes):
    tokens = torch.tensor([token, token])
    for shift in (0.0, 7.0):  # logits are defined up to a constant
        assert gate.passes(P.log() + shift, tokens).tolist() == passes


def test_all_gates_must_pass():
    gates = (MarginGate(0.21), RankGate(2))
    assert all_pass(gates, P.log(), torch.tensor([1, 1])).tolist() == [True, False]
    assert all_pass(gates, P.log(), torch.tensor([2, 2])).tolist() == [False, False]
    assert all_pass((), P.log(), torch.tensor([3, 3])).tolist() == [True, True]


def test_what_the_filters_exclude_passes_no_gate():
    """Every excluded token ranks right after the kept ones, and its distance is bounded."""
    logits = torch.tensor([[0.0, -0.1, -math.inf, -math.inf]])
    no_threshold = FlyRule(FlySettings(entropy_thre=None)).gates  # it let them in
    for gates in ((RankGate(10),), (DistanceGate(0.9),), (EntropyGate(0.0),), no_threshold):
        assert all_pass(gates, logits, torch.tensor([2])).tolist() == [False]
        assert all_pass(gates, logits, torch.tensor([1])).tolist() == [True]


def test_gates_stand_what_top_p_excludes():
    """-inf must not become NaN, which would shut every gate."""
    logits = torch.tensor([[0.0, -0.1, -math.inf, -math.inf]])
    token = torch.tensor([1])
    assert 0.6 < top_k_entropy(logits, 3).item() < 0.7
    for gate in (EntropyGate(0.6), MarginGate(0.1), RatioGate(0.8), TypicalGate(0.09, 0.3)):
        assert gate.passes(logits, token).tolist() == [True]


def test_entropies_against_the_definition():
    logits = torch.randn(3, 4, 50, dtype=torch.float64)
    p = torch.softmax(logits, -1)
    plogp = -(p * p.log())
    top = p.topk(3, -1).indices
    torch.testing.assert_close(
        top_k_entropy(logits, 3).double(), plogp.gather(-1, top).sum(-1), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(full_entropy(logits).double(), plogp.sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        entropy(torch.zeros(2, 50), "normalized"), torch.ones(2), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("gate", [MarginGate(0.0), RatioGate(1.0), DistanceGate(0.0)], ids=repr)
def test_a_gate_passes_at_equality(gate):
    assert gate.passes(torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([1])).item()


def test_typical_asks_for_more_than_its_threshold():
    assert not TypicalGate(0.5, 9.0).passes(torch.tensor([[0.0, 0.0]]), torch.tensor([1])).item()
