"""The rules that others have published, on hand-made p and q, from their formulas."""

import math
import re

import pytest
import torch

from fly import config, registry
from fly.errors import FlyError
from fly.speculation.rules import rule_of
from fly.speculation.rules.base import verify
from fly.speculation.rules.fsd import divergence
from fly.speculation.rules.judged import JudgedDraft
from fly.speculation.rules.mars import LogitRatioGate
from fly.speculation.rules.places import Places
from fly.speculation.rules.revised import RevisedRule
from fly.speculation.sampling import Noise, Sampling, certain, draw
from fly.speculation.sequence import Request, Sequence
from fly.speculation.stop_strings import StopMatcher

P = torch.tensor([0.5, 0.3, 0.15, 0.05])
Q = torch.tensor([0.1, 0.3, 0.2, 0.4])
ROWS = 40_000


def made(name, **keys):
    values = {"target_model_path": "x", "draft_model_path": "y", "verification": name, **keys}
    return rule_of(config.build(values, "here"))


def revised(rule, token, p=P, q=Q):
    """v of one position whose draft is `token`."""
    token_111 = torch.tensor([[[token]]])
    return rule.revise(p[None, None], q[None, None], token_111)[0, 0]


def close(found, expected):
    return torch.allclose(found, torch.tensor(expected).float(), atol=1e-6)


def test_cascade():
    """T = {0, 1} at alpha = 0.5: q there, and p with what q has outside, 0.6."""
    assert close(revised(made("cascade", cascade_alpha=0.5), 3), [0.4, 0.48, 0.09, 0.03])
    assert close(revised(made("cascade", cascade_alpha=0.0), 3), [0.55, 0.27, 0.135, 0.045])
    assert close(revised(made("cascade", cascade_alpha=1.0), 3), Q.tolist())


def test_ensemble():
    rule = made("ensemble", assistant_ensemble_weight=0.7)
    assert close(revised(rule, 0), [0.38, 0.3, 0.165, 0.155])


def test_cactus():
    """h(3) = 0.05 + sqrt(2 * 0.2 * 0.05 * 0.95), the rest scaled from 0.95 to what is left."""
    h = 0.05 + math.sqrt(0.4 * 0.05 * 0.95)
    expected = [p * (1 - h) / 0.95 for p in (0.5, 0.3, 0.15)] + [h]
    assert close(revised(made("cactus", cactus_delta=0.2), 3), expected)
    assert close(revised(made("cactus", cactus_delta=0.0), 3), P.tolist())
    assert close(revised(made("cactus", cactus_delta=9.0), 0), [1, 0, 0, 0])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("kl_div", sum(b * math.log(b / a) for a, b in zip(P.tolist(), Q.tolist()))),
        ("kl_div_reversed", sum(a * math.log(a / b) for a, b in zip(P.tolist(), Q.tolist()))),
        ("tv_div", 0.4),
        ("js_div", 0.1520387),
    ],
)
def test_fsd(kind, expected):
    assert divergence(P, Q, kind).item() == pytest.approx(expected, abs=1e-6)
    near = made("fsd", fsd_div_type=kind, fsd_div_threshold=expected + 1e-5)
    assert revised(near, 3)[3] == 1  # stands whatever is drawn
    far = made("fsd", fsd_div_type=kind, fsd_div_threshold=expected - 1e-5)
    assert close(revised(far, 3), P.tolist())


def test_divergences_of_what_filters_exclude():
    """Top-p leaves zeros: never nan, and infinite only where the formula is."""
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([1.0, 0.0, 0.0])
    assert divergence(p, q, "kl_div").item() == pytest.approx(math.log(2))
    assert divergence(p, q, "kl_div_reversed").item() == math.inf
    assert divergence(p, q, "js_div").isfinite()


@pytest.mark.parametrize("kind", ["kl_div", "kl_div_reversed", "tv_div", "js_div"])
def test_divergences_of_what_rounds_to_zero(kind):
    """At a low temperature one of two nearly equal distributions underflows first."""
    logits = torch.linspace(10, -30, 2000)
    p, q = (torch.softmax(each / 0.2, -1) for each in (logits, logits * 1.001))
    assert ((p > 0) & (q == 0)).any()
    exact = [torch.softmax(each.double() / 0.2, -1) for each in (logits, logits * 1.001)]
    found, expected = divergence(p, q, kind), divergence(*exact, kind)
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)


def test_entropy_ratio():
    entropy = -sum(p * math.log(p) for p in P.tolist())
    found = revised(made("entropy_ratio"), 3)
    assert close(found, [0.5, 0.3, 0.15, 0.05 / math.exp(-0.4 * entropy)])
    certain_p = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert revised(made("entropy_ratio"), 0, certain_p)[0].item() == pytest.approx(1 / 0.95)


def test_sglang():
    keys = {
        "speculative_accept_threshold_single": 0.4, "speculative_accept_threshold_acc": 0.5,
    }  # fmt: skip
    rule = made("sglang", **keys)
    assert close(revised(rule, 0), [1, 0, 0, 0])  # p = 0.5 >= 0.4
    assert close(revised(rule, 1), [0.5 * 4 / 7, 0.6, 0.15 * 4 / 7, 0.05 * 4 / 7])  # 0.3 / 0.5


def outputs(judge, q=Q, p=P, seed=0):
    """Shares of what a round of one draft token drawn from q gives first."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(4, ROWS, generator=generator, dtype=torch.float64)
    draft = torch.multinomial(q, ROWS, replacement=True, generator=generator)[:, None]
    noise = Noise(uniform[0][:, None], uniform[1][:, None], uniform[2:].T)
    p_BNV = p.expand(ROWS, 2, 4)
    stands, own = judge(p_BNV, q.expand(ROWS, 1, 4), draft, noise)
    tokens = torch.where(stands[:, 0], draft[:, 0], own[:, 0])
    return torch.bincount(tokens, minlength=4) / ROWS, stands.float().mean().item()


def chi_square(found, expected):
    return (ROWS * (found - expected) ** 2 / expected).sum().item()


BAR = 21.1  # of chi-square with 3 degrees of freedom, p = 1e-4


def of_cactus(rule):
    """What a draft token and the residual of its own h give, summed over the tokens."""
    result = torch.zeros(4)
    for token in range(4):
        h = revised(rule, token)
        stands = min(1.0, (h[token] / Q[token]).item())
        rest = (h - Q).clamp(min=0)
        result += Q[token] * (1 - stands) * rest / rest.sum().clamp(min=1e-9)
        result[token] += Q[token] * stands
    return result


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("cascade", {"cascade_alpha": 0.5}, lambda rule: revised(rule, 0)),
        ("ensemble", {"assistant_ensemble_weight": 0.6}, lambda rule: 0.6 * P + 0.4 * Q),
        ("fsd", {"fsd_div_threshold": 0.2}, lambda rule: Q),
        ("fsd", {"fsd_div_threshold": 0.05}, lambda rule: P),
        ("cactus", {"cactus_delta": 0.2}, of_cactus),
        ("cactus", {"cactus_delta": 0.0}, lambda rule: P),
        ("sglang", {}, lambda rule: P),
    ],
)
def test_what_is_decoded_follows_the_distribution_that_is_claimed(name, keys, expected):
    rule = made(name, **keys)
    found, accepted = outputs(rule.judge)
    assert chi_square(found, expected(rule)) < BAR
    assert 0 < accepted < 1 or name == "fsd"


def test_the_entropy_rule_accepts_with_the_probability_that_is_claimed():
    entropy = -sum(p * math.log(p) for p in P.tolist())
    bar = min(0.95, math.exp(-0.4 * entropy))
    expected = sum(min(q, p / bar) for p, q in zip(P.tolist(), Q.tolist()))
    rule = made("entropy_ratio")
    assert outputs(rule.judge)[1] == pytest.approx(expected, abs=0.01)
    bits = {"posterior_alpha": 0.4 / math.log(2)}  # the mutant takes the entropy in bits
    rule.settings = rule.settings.model_copy(update=bits)
    assert outputs(rule.judge)[1] != pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    ("name", "keys"),
    [("entropy_ratio", {"posterior_alpha": 1e5}), ("cactus", {"cactus_delta": 1e6})],
)
def test_extreme_settings_leave_no_probability_undefined(name, keys):
    """0 / 0 for a token that p leaves out gave NaN, and an index that is no token."""
    p = torch.tensor([[[0.5, 0.5, 0.0, 0.0]]])
    for token in range(4):
        v = made(name, **keys).revise(p, p, torch.tensor([[[token]]]))
        assert torch.isfinite(v).all()
        assert v[0, 0, token] == (p[0, 0, token] if token > 1 else v.max())


def test_sglang_does_not_ask_the_draft():
    """d stands with probability p(d), whatever q says of it."""
    rule = made("sglang")
    assert outputs(rule.judge)[1] == pytest.approx((P * Q).sum().item(), abs=0.01)

    def mutant(p, q, draft, noise):
        return RevisedRule.judge(rule, p, q, draft, noise)

    found, accepted = outputs(mutant)
    assert chi_square(found, P) < BAR  # lossless as well: only the share of accepted tokens tells
    assert accepted != pytest.approx((P * Q).sum().item(), abs=0.01)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("cascade", {"cascade_alpha": 0.5}),
        ("ensemble", {"assistant_ensemble_weight": 0.6}),
        ("cactus", {"cactus_delta": 0.2}),
    ],
)
def test_mutant_without_residual(name, keys):
    """What takes the place of a rejected token is drawn from p."""
    rule = made(name, **keys)

    def mutant(p, q, draft, noise):
        return rule.judge(p, q, draft, noise)[0], draw(p, noise.target)

    expected = of_cactus(rule) if name == "cactus" else revised(rule, 0)
    assert chi_square(outputs(rule.judge)[0], expected) < BAR
    assert chi_square(outputs(mutant)[0], expected) > 10 * BAR


@pytest.mark.parametrize(
    ("weight", "stands", "own"), [(1.0, False, 0), (0.6, False, 0), (0.5, True, 3)]
)
def test_greedy_ensemble_takes_the_likeliest_of_v(weight, stands, own):
    """At w = 0.5 v(3) = 0.375 beats v(0) = 0.3125; at 0.6 it does not."""
    p, q = torch.tensor([0.525, 0.2, 0.175, 0.1]), torch.tensor([0.1, 0.1, 0.15, 0.65])
    found, tokens = made("ensemble", assistant_ensemble_weight=weight).judge_greedy(
        torch.stack([p, p])[None].log(), q[None, None], torch.tensor([[3]]), torch.tensor([[0, 0]])
    )
    assert (found.item(), tokens[0, 0].item()) == (stands, own)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("ensemble", {"assistant_ensemble_weight": 0.5}),
        ("fsd", {"fsd_div_type": "js_div", "fsd_div_threshold": 0.2}),
    ],
)
def test_greedy_drafts_are_judged_where_p_would_have_another_token(name, keys):
    """As all positions would be: where the likeliest tokens agree, v's is the same."""
    torch.manual_seed(0)
    rule = made(name, **keys)
    scores_BNV = 3 * torch.randn(40, 7, 12)
    q_BKV = torch.softmax(scores_BNV[:, :6] + 2 * torch.randn(40, 6, 12), dim=-1)
    draft_BK = q_BKV.argmax(dim=-1)
    draft_BK[5, 3:] = -1
    stands_BK, own_BN = rule.judge_greedy(scores_BNV, q_BKV, draft_BK, scores_BNV.argmax(-1))
    p_BNV = torch.softmax(scores_BNV, dim=-1)
    v_BKV = rule.revise(p_BNV[:, :6], q_BKV, draft_BK.clamp(min=0)[..., None])
    expected_BK = torch.where(draft_BK < 0, p_BNV[:, :6].argmax(-1), v_BKV.argmax(-1))
    assert torch.equal(own_BN, torch.cat([expected_BK, p_BNV[:, 6:].argmax(-1)], dim=1))
    assert torch.equal(stands_BK, draft_BK == expected_BK)
    deferred = stands_BK & (draft_BK != p_BNV[:, :6].argmax(-1))
    assert 10 < int(deferred.sum()) < int((draft_BK != p_BNV[:, :6].argmax(-1)).sum())


def test_greedy_cascade_is_a_ratio():
    rule = made("cascade", cascade_alpha=0.45)
    found = verify(torch.tensor([[1, 2]]), torch.tensor([2]), P.log().expand(1, 3, 4), rule)
    assert found.deferrable_BK.tolist() == [[True, False]]  # 0.3 >= 0.55 * 0.5 > 0.15


@pytest.mark.parametrize(
    ("logits", "token", "passes"),
    [
        ([10.0, 9.1, 1.0], 1, True),
        ([10.0, 9.0, 1.0], 1, False),  # above, not at
        ([10.0, 9.9, 9.8], 2, False),  # the third
        ([-1.0, -1.1, -9.0], 1, False),  # negative: 1.1
        ([0.0, -0.1, -9.0], 1, False),
        ([2.0, -1.0, -9.0], 1, False),
    ],
)
def test_mars(logits, token, passes):
    found = verify(
        torch.tensor([[token]]), torch.tensor([1]), torch.tensor([[logits, logits]]),
        made("mars"),
    )  # fmt: skip
    assert found.deferrable_BK.item() is passes


def test_mutant_mars_of_negative_logits(monkeypatch):
    def mutant(self, logits_MV, token_M):
        first_M, second_M = logits_MV.float().topk(2).values.unbind(-1)
        return second_M / first_M > self.theta

    monkeypatch.setattr(LogitRatioGate, "passes", mutant)
    with pytest.raises(AssertionError):
        test_mars([-1.0, -1.1, -9.0], 1, False)


def asd_draft(costs, state=None):
    """A cost of 0 is a match."""
    k = len(costs)
    matches = [cost == 0 for cost in costs]
    return JudgedDraft(
        [7] * k, matches, [not m for m in matches], [5] * (k + 1), cost=costs, state=state
    )


ASD = {"asd_budget": 2.0, "asd_gap": None, "asd_max_mismatches": 1}


@pytest.mark.parametrize(
    ("costs", "keys", "accepted", "spent"),
    [
        ([0, 1.0, 0, 0], {}, 4, 1.0),
        ([0, 1.0, 0, 0.5], {}, 3, 1.0),  # the second mismatch of the draft
        ([0, 1.0, 0, 0.5], {"asd_max_mismatches": 2}, 4, 1.5),
        ([0, 1.5, 0, 1.0], {"asd_max_mismatches": 2}, 3, 1.5),  # 2.5 is above B
        ([0, 0.5, 0, 0], {"asd_max_mismatches": 0}, 1, 0.0),
        ([0, 0.5, 0, 0], {"asd_budget": 0.0}, 1, 0.0),
        ([1.0, 0, 0, 0], {"asd_gap": 0.25}, 4, 1.0),  # 1 / 4
        ([0, 1.0, 0, 0], {"asd_gap": 0.25}, 1, 0.0),  # 1 / 3
        ([0, 0, 0, 0.25], {"asd_gap": 0.25}, 4, 0.25),
    ],
)
def test_asd(costs, keys, accepted, spent):
    found = made("asd", **ASD | keys).resolve(asd_draft(costs))
    assert (found.accepted, found.state) == (accepted, spent)


def test_asd_counts_over_a_request():
    rule = made("asd", **ASD)
    first = rule.resolve(asd_draft([1.5, 0]))
    assert rule.resolve(asd_draft([0.5, 0], first.state)).accepted == 2
    assert rule.resolve(asd_draft([0.6, 0], first.state)).accepted == 0


def test_asd_counts_a_round_once_that_is_done_again():
    """Memory may run out between the verdict and the commit."""
    sequence = Sequence(Request((1,), 9), frozenset(), StopMatcher((), str))
    rule = made("asd", **ASD)
    for _ in range(2):
        verdict = sequence.judge(rule, asd_draft([1.5]))
        assert verdict.resolution.accepted == 1
    sequence.commit(verdict)
    assert sequence.judge(rule, asd_draft([0.6])).resolution.accepted == 0


def test_the_cost_is_carried_to_the_host():
    rule, logits = made("asd"), torch.tensor([[[3.0, 1.5], [2.0, 0.0], [0.0, 1.0]]])
    draft, length = torch.tensor([[1, -1]]), torch.tensor([1])
    (found,) = verify(draft, length, logits, rule).split()
    assert found == JudgedDraft([1], [False], [True], [0, 0], cost=[1.5])


def test_exact_places_take_exact_verification_and_its_tokens():
    """Where the rule relaxes its own verdict and tokens count, elsewhere those of exact."""
    draft = JudgedDraft(
        [1, 2, 3], [True, False, False], [False] * 3, [10, 11, 12, 13],
        stands=[False, True, False], own_tokens=[20, 21, 22, 23],
    )  # fmt: skip
    rule = made("ensemble")
    found = rule.resolve(draft)
    assert (found.accepted, found.recovered) == (0, 20)  # rejected though exact accepts it
    rule.places = Places(first=1)
    found = rule.resolve(draft)
    assert (found.accepted, found.deferred, found.recovered) == (2, (1,), 22)
    rule.places = Places(first=2)
    found = rule.resolve(draft)
    assert (found.accepted, found.deferred, found.recovered) == (1, (), None)


@pytest.mark.parametrize(
    "places",
    [Places(patterns=(re.compile("7"),)), Places(relax_in="thinking", think_ids=(8, 7))],
)
def test_what_a_rule_would_write_itself_is_looked_at_too(places):
    """Neither the draft's token nor the target's is a number, or closes a thought; its own is."""
    draft = JudgedDraft(
        [1], [False], [False], [2, 3], stands=[False], own_tokens=[7, 3],
        texts=lambda tokens: ("", "".join(map(str, tokens))), last_of=lambda ids: 8,
    )  # fmt: skip
    rule = made("ensemble")
    assert rule.resolve(draft).recovered == 7
    rule.places = places
    assert rule.resolve(draft).recovered is None


@pytest.mark.parametrize("name", ["cactus", "entropy_ratio", "sglang"])
def test_rules_of_samples_refuse_greedy_requests(name):
    made(name).check(Sampling(0.7))
    with pytest.raises(FlyError, match=f"verification={name} with temperature=0: it is defined"):
        made(name).check(Sampling())


def test_rules_of_greedy_requests_refuse_samples():
    made("asd").check(Sampling())
    with pytest.raises(FlyError, match=r"verification=asd with temperature=0\.7"):
        made("asd").check(Sampling(0.7))
    with pytest.raises(FlyError, match="no exact places when sampling"):
        made("typical", exact_first_tokens=3).check(Sampling(0.7))


def test_the_registry_says_which_rules_need_q():
    needy = {name for name in registry.RULES if made(name).judges == "all"}
    assert needy == {name for name, entry in registry.RULES.items() if entry.needs_q}
    with pytest.raises(FlyError, match="'ensemble' needs the draft's probabilities, which"):
        made("ensemble", drafter="ngram")


# Block verification


def enumerated(p_NV, q_KV):
    """{accepted: mean} of exact and of block verification over all drafts of three tokens, by the
    formulas; and the distribution of the first token that block verification gives."""
    k, v = q_KV.shape
    first, block, exact = torch.zeros(v), 0.0, 0.0
    for draft in torch.cartesian_prod(*[torch.arange(v)] * k).tolist():
        chance = math.prod(q_KV[i, token].item() for i, token in enumerate(draft))
        r, standing, h, stands = 1.0, 1.0, [], []
        for i, token in enumerate(draft):
            ratio = (p_NV[i, token] / q_KV[i, token]).item()
            standing *= min(1.0, ratio)
            stands.append(standing)
            r = min(1.0, r * ratio)
            rest = (r * p_NV[i + 1] - q_KV[i + 1]).clamp(min=0).sum().item() if i + 1 < k else 0
            h.append(r if i + 1 == k else rest / (rest + 1 - r) if rest + 1 - r else 1.0)
        exact += chance * sum(stands)
        left = chance
        for i in reversed(range(k)):
            block += left * h[i] * (i + 1)
            first[draft[0]] += left * h[i]
            left *= 1 - h[i]
        rest = (p_NV[0] - q_KV[0]).clamp(min=0)
        first += left * rest / rest.sum()
    return block, exact, first


def test_block_verification_accepts_what_its_formula_says_and_more_than_exact():
    generator = torch.Generator().manual_seed(3)
    p_NV = torch.softmax(torch.randn(4, 4, generator=generator), -1)
    q_KV = torch.softmax(torch.randn(3, 4, generator=generator), -1)
    block, exact, first = enumerated(p_NV, q_KV)
    assert block > exact + 0.01
    assert torch.allclose(first, p_NV[0], atol=1e-5)
    draft = torch.stack(
        [torch.multinomial(q, ROWS, replacement=True, generator=generator) for q in q_KV], 1
    )
    uniform = torch.rand(ROWS, 7, generator=generator, dtype=torch.float64)
    noise = Noise(uniform[:, :3], uniform[:, :3], uniform[:, 3:])
    matches, target = made("block").sample(
        p_NV.expand(ROWS, 4, 4), q_KV.expand(ROWS, 3, 4), draft, noise
    )
    assert matches.sum().item() / ROWS == pytest.approx(block, abs=0.02)
    assert chi_square(torch.bincount(target[:, 0], minlength=4) / ROWS, p_NV[0]) < BAR
    assert (matches.int().diff(dim=1) <= 0).all()  # a prefix


def test_a_padded_draft_is_verified_like_a_short_one():
    generator = torch.Generator().manual_seed(4)
    p = torch.softmax(torch.randn(1, 4, 4, generator=generator), -1)
    q = torch.softmax(torch.randn(1, 3, 4, generator=generator), -1)
    rule = made("block")
    for seed in range(50):
        uniform = torch.rand(7, generator=torch.Generator().manual_seed(seed))[None].double()
        short = Noise(uniform[:, :1], uniform[:, :1], uniform[:, 3:5])
        long = Noise(uniform[:, :3], uniform[:, :3], uniform[:, 3:])
        for draft in ([2], [-1]):
            one = rule.sample(p[:, :2], q[:, :1], torch.tensor([draft]), short)
            padded = torch.tensor([[*draft, -1, -1]])
            three = rule.sample(p, q, padded, long)
            assert one[0].tolist()[0] == three[0].tolist()[0][:1]
            count = 1 + one[0].sum().item()
            assert one[1].tolist()[0][:count] == three[1].tolist()[0][:count]


def test_a_draft_of_no_distribution_is_all_on_its_token():
    assert certain(torch.tensor([[2, -1]]), P.expand(1, 3, 4)).tolist()[0][0] == [0, 0, 1, 0]
