"""Draft length as a cost decision: costs, calibration, and what the policies make of them."""

import pytest

from fly.decoding.costs import PassCosts
from fly.drafters.policy import AdaptivePolicy, Calibration, Chain, GuessPolicy


def costs(**seconds):
    table = PassCosts()
    for tokens, value in seconds.items():
        table.observe(int(tokens[1:]), value)
    return table


def test_costs_interpolate_and_stay_flat_or_on_the_slope_outside():
    table = costs(t2=1.0, t10=3.0)
    assert [table.seconds(n) for n in (1, 2, 6, 10)] == [1.0, 1.0, 2.0, 3.0]
    assert table.seconds(14) == pytest.approx(4.0)
    assert PassCosts().seconds(5) == 0.0
    assert costs(t4=2.0).seconds(100) == 2.0


def test_one_stalled_pass_hardly_moves_the_costs():
    table = costs(t1=0.1)
    for _ in range(20):
        table.observe(1, 0.1)
    table.observe(1, 8.0)
    assert table.seconds(1) < 0.125
    stalled_first = costs(t1=8.0)
    stalled_first.observe(1, 0.1)
    assert stalled_first.seconds(1) == 0.1


def test_calibration_learns_what_the_target_accepts():
    calibration = Calibration()
    for _ in range(200):
        calibration.observe([0.995, 0.3], accepted=1)
    assert calibration.acceptance(0.995) > 0.95
    assert calibration.acceptance(0.3) < 0.05
    assert calibration.acceptance(0.9) == pytest.approx((0.85 + 0.92) / 2)  # never seen: the prior


def test_calibration_ignores_what_lies_past_the_first_rejection():
    seen, cut = Calibration(), Calibration()
    seen.observe([0.9, 0.5, 0.7, 0.7], accepted=1)
    cut.observe([0.9, 0.5], accepted=1)
    assert [seen.acceptance(c) for c in (0.9, 0.5, 0.7)] == [
        cut.acceptance(c) for c in (0.9, 0.5, 0.7)
    ]
    assert seen.mean == cut.mean


def trained(draft_cost, target_cost=1.0, slope=0.0):
    """A policy after rounds in which confident tokens stood and doubtful ones did not."""
    target = costs(t1=target_cost, t17=target_cost + 16 * slope)
    policy = AdaptivePolicy(target, costs(t1=draft_cost))
    for _ in range(100):
        chain = Chain(8, tokens=[5] * 8, confidence=[0.995] * 4 + [0.3] + [0.995] * 3)
        policy.observe([chain], [4], draft_seconds=8 * draft_cost)
    return policy


def drafted(policy, confidence, limit=16):
    """How many tokens the policy drafts when the draft is this confident, token by token."""
    chain = Chain(limit)
    for value in confidence[:limit]:
        if not policy.goes_on([chain], 1):
            break
        chain.tokens.append(5)
        chain.confidence.append(value)
    return len(chain.tokens)


def test_drafting_stops_after_a_doubtful_token_and_not_before():
    policy = trained(draft_cost=0.1)
    assert drafted(policy, [0.995] * 3 + [0.3] + [0.995] * 12) == 4
    assert drafted(policy, [0.995] * 16) > 8


def test_dear_drafts_are_shorter_than_cheap_ones_and_none_at_all_if_they_never_pay():
    confidence = [0.9] * 16
    cheap, dear = (drafted(trained(cost), confidence) for cost in (0.02, 0.2))
    assert 1 <= dear < cheap
    never = trained(draft_cost=0.1)
    hopeless = Chain(8, tokens=[5] * 8, confidence=[0.995] * 8)
    for _ in range(300):
        never.observe([hopeless], [0], draft_seconds=0.8)
    assert drafted(never, [0.995] * 16) == 0


def test_what_stopped_paying_is_tried_again_and_learned_again():
    """Whole rounds of a policy that gave up, on a text that the draft has become good at."""
    policy = trained(draft_cost=0.1, slope=0.01)
    hopeless = Chain(8, tokens=[5] * 8, confidence=[0.995] * 8)
    for _ in range(300):
        policy.observe([hopeless], [0], draft_seconds=0.8)
    lengths = []
    for _ in range(400):
        chain = Chain(8)
        while chain.is_open and policy.goes_on([chain], 1):
            chain.tokens.append(5)
            chain.confidence.append(0.995)
        drafted_now = len(chain.tokens)
        policy.trim([chain])
        policy.observe([chain], [len(chain.tokens)], 0.1 * drafted_now)
        lengths.append(len(chain.tokens))
    assert lengths[:10] == [0] * 10
    assert lengths[-10:] == [8] * 10


def test_a_batch_goes_on_while_any_row_makes_the_shared_pass_worth_it():
    policy = trained(draft_cost=0.1)
    doubtful = Chain(8, tokens=[5], confidence=[0.3])
    sure = Chain(8, tokens=[5], confidence=[0.995])
    assert not policy.goes_on([doubtful], 1)
    assert policy.goes_on([doubtful, sure, sure, sure], 1)


def test_trim_drops_a_hopeless_tail_only_if_the_target_pays_for_it():
    def trimmed(slope):
        chain = Chain(8, tokens=[1, 2, 3], confidence=[0.995, 0.3, 0.3])
        trained(draft_cost=0.1, slope=slope).trim([chain])
        return len(chain.tokens)

    assert trimmed(slope=0.0) == 3
    assert trimmed(slope=0.1) == 1


def test_a_guess_is_as_long_as_it_pays():
    free = GuessPolicy(lambda tokens: 1.0)
    assert free.choose([(4, 6)], 1, 1) == 6
    steep = GuessPolicy(lambda tokens: float(tokens))
    assert steep.choose([(4, 6)], 1, 1) == 0
    blocks = GuessPolicy(lambda tokens: 0.7 if tokens <= 4 else 1.3)
    assert blocks.choose([(4, 6)], 1, 1) == 3
    assert blocks.choose([(0, 0)], 1, 1) == 0


def test_guesses_learn_which_suffixes_can_be_trusted():
    policy = GuessPolicy(lambda tokens: 1 + tokens / 8)
    for _ in range(50):
        policy.observe(1, 6, 0)
        policy.observe(4, 6, 6)
    assert policy.choose([(1, 6)], 1, 1) == 0
    assert policy.choose([(4, 6)], 1, 1) == 6
    assert policy.choose([(4, 6), *[(0, 0)] * 7], 8, 1) == 0  # seven rows would only pay for it
