"""Processed distributions, draws and rejection sampling, against transformers and slow oracles."""

import math
import random
from dataclasses import asdict

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from fly.speculation.sampling import (
    GREEDY,
    Noise,
    NoiseStream,
    Sampling,
    draw,
    keep_top_p,
    rejection_sample,
    seen_tokens,
)
from tests import tiny

ALMOST_ONE = 1 - 2**-53  # the largest number that torch.rand gives in float64

SETTINGS = [
    Sampling(1.0),
    Sampling(0.7),
    Sampling(0.8, top_k=9),
    Sampling(1.4, top_p=0.8),
    Sampling(1.2, min_p=0.2),
    Sampling(0.9, top_k=30, top_p=0.9, min_p=0.05),
    Sampling(1.0, repetition_penalty=1.5),
    Sampling(1.6, top_k=20, top_p=0.85, min_p=0.1, repetition_penalty=1.8),
    Sampling(repetition_penalty=1.7),  # greedy
]


@pytest.fixture(scope="module")
def model():
    return tiny.model(11)


def processed(settings, logits_NV, before, drafted):
    """Row i follows the tokens `before` and the first i of `drafted`."""
    seen_BNV = seen_tokens([before], torch.tensor([drafted]).long(), logits_NV.shape[-1])
    return settings.process(logits_NV, seen_BNV[0, : len(logits_NV)])


def generated(model, settings, prompt, count):
    """transformers' own run: (its tokens, raw logits, processed scores), [N] and [N, V]."""
    torch.manual_seed(5)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=not settings.is_greedy,
        temperature=settings.temperature or None,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p or None,
        repetition_penalty=settings.repetition_penalty,
        eos_token_id=None,
        pad_token_id=0,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[0, len(prompt) :].tolist()
    return tokens, torch.cat(output.logits), torch.cat(output.scores)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_processing_is_that_of_transformers_generate(model, settings):
    """Another order of the processors, or one left out, moves the cut of top-p and min-p."""
    prompt = [5, 9, 5, 30, 12]
    tokens, logits_NV, scores_NV = generated(model, settings, prompt, 12)
    mine_NV = processed(settings, logits_NV, prompt, tokens[:-1])
    assert torch.equal(mine_NV.isinf(), scores_NV.isinf())
    torch.testing.assert_close(mine_NV, scores_NV, rtol=1e-6, atol=1e-6)
    if settings != Sampling(1.0):
        assert not torch.allclose(mine_NV, logits_NV)


@pytest.mark.parametrize("top_p", [1.0, 0.6])
@pytest.mark.parametrize(("size", "step"), [(300, 0.5), (300, 1.0), (5000, 0.125)])
def test_tokens_that_tie_with_the_kth_are_kept(size, step, top_p):
    """Of bfloat16 logits some tie at the k-th place more often than not; transformers keeps all."""
    generator = torch.Generator().manual_seed(size)
    logits_NV = (torch.randn(20, size, generator=generator) / step).round() * step
    expected_NV = TopKLogitsWarper(50)(None, logits_NV.clone())
    assert int((expected_NV > -math.inf).sum(-1).max()) > 50
    mine_NV = processed(Sampling(1.0, top_k=50), logits_NV, [1], ())
    assert torch.equal(mine_NV, expected_NV)
    cut_NV = processed(Sampling(1.0, top_k=50, top_p=top_p), logits_NV, [1], ())
    kept = (cut_NV > -math.inf).sum(-1)
    reference_NV = TopPLogitsWarper(top_p)(None, expected_NV) if top_p < 1 else expected_NV
    assert torch.equal(kept, (reference_NV > -math.inf).sum(-1))


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 12.0])  # from equally likely to almost certain
@pytest.mark.parametrize("size", [1, 7, 3000])
def test_top_p_keeps_the_fewest_tokens_that_hold_it(size, spread, top_p):
    """transformers' processor sums in float32; otherwise it says the same (tests above and below).
    -inf stays, and of ties so many as are needed are kept."""
    generator = torch.Generator().manual_seed(size)
    scores_NV = (spread * torch.randn(12, size, generator=generator)).round(decimals=1)
    scores_NV[:, 1::5] = -math.inf
    kept_NV = keep_top_p(scores_NV, top_p)
    assert torch.equal(kept_NV, torch.where(kept_NV.isinf(), kept_NV, scores_NV))
    p_NV = torch.softmax(scores_NV.double(), -1)
    is_in_NV = kept_NV > -math.inf
    held_N = p_NV.masked_fill(~is_in_NV, 0).sum(-1)
    least_N = p_NV.masked_fill(~is_in_NV, 1).amin(-1)
    assert (held_N > top_p - 1e-6).all()
    assert (held_N - least_N < top_p + 1e-6).all()
    assert (p_NV.masked_fill(is_in_NV, 0).amax(-1) <= least_N).all()


def test_of_ties_at_the_edge_of_top_p_the_first_stay():
    """As of argmax: the likeliest token is no other one because of top-p."""
    kept_NV = keep_top_p(torch.tensor([[0.0, 10, 10, 1], [10, 1, 10, 10]]), 0.6)
    assert kept_NV.tolist() == [[-math.inf, 10, 10, -math.inf], [10, -math.inf, 10, -math.inf]]
    assert keep_top_p(kept_NV, 0.4).argmax(-1).tolist() == [1, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_none_of_top_ps(value):
    """It became one that is excluded whole, whose argmax, token 0, has finite logits."""
    scores_NV = torch.randn(2, 9)
    scores_NV[1, 4] = value
    if value < 0:
        scores_NV[1] = value
    kept_NV = keep_top_p(scores_NV, 0.5)
    assert torch.equal(kept_NV[1].nan_to_num(7.0), scores_NV[1].nan_to_num(7.0))
    assert kept_NV[0].isinf().any()


def test_processors_come_in_the_order_of_transformers(model):
    """All five at once on wide logits, where the order moves what top-p and min-p cut."""
    settings = SETTINGS[7]
    config = GenerationConfig(do_sample=True, **asdict(settings))
    pipeline = model._get_logits_processor(
        generation_config=config, input_ids_seq_length=5, device="cpu"
    )
    row_L = torch.tensor([[4, 4, 8, 17, 63]])
    logits_NV = 6 * torch.randn(1, 64, generator=torch.Generator().manual_seed(3))
    expected_NV = pipeline(row_L, logits_NV.clone())
    torch.testing.assert_close(processed(settings, logits_NV, row_L[0].tolist(), ()), expected_NV)
    assert 0 < int(expected_NV.isinf().sum()) < 63


def test_a_row_of_a_chain_is_penalised_for_the_tokens_before_it_only():
    """A penalty for the whole chain would punish a draft for proposing the token at all."""
    settings = Sampling(1.0, repetition_penalty=2.0)
    logits_NV = torch.ones(4, 10)
    scores_NV = processed(settings, logits_NV, [1, 2], [3, 4, 1])
    penalised = [set(torch.nonzero(row == 0.5)[:, 0].tolist()) for row in scores_NV]
    assert penalised == [{1, 2}, {1, 2, 3}, {1, 2, 3, 4}, {1, 2, 3, 4}]
    assert int((scores_NV == 1).sum()) == 40 - sum(map(len, penalised))


def test_a_penalty_where_the_first_tokens_are_past_the_vocabulary():
    """Of a draft with fewer rows than the target: transformers 4.57's processor cannot look an id
    up that has no row, and the first token stood for such ids."""
    settings = Sampling(repetition_penalty=2.0)
    logits = torch.ones(2, 6)
    found = processed(settings, logits, [9, 3, 8], [7])
    assert found.tolist() == [[1, 1, 1, 0.5, 1, 1]] * 2
    assert processed(settings, logits, [9, 8], [7]).tolist() == logits.tolist()


def test_negative_logits_are_penalised_downwards_and_the_input_stays():
    logits_NV = torch.tensor([[-1.0, 2.0, -3.0]])
    scores_NV = processed(Sampling(repetition_penalty=2.0), logits_NV, [0, 1], ())
    assert scores_NV.tolist() == [[-2.0, 1.0, -3.0]]
    assert logits_NV.tolist() == [[-1.0, 2.0, -3.0]]


def test_the_token_after_the_chain_is_not_taken_for_part_of_it():
    """`drafted` may be longer than the logits (a draft scored in parts): the rest is not seen."""
    settings = Sampling(1.0, repetition_penalty=2.0)
    logits_NV = torch.ones(2, 6)
    short = processed(settings, logits_NV, [1], [2])
    assert torch.equal(processed(settings, logits_NV, [1], [2, 3, 4]), short)


def test_bfloat16_logits_are_processed_in_float32():
    logits_NV = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    scores_NV = processed(Sampling(0.7, top_p=0.9), logits_NV, [1], [2, 3])
    assert scores_NV.dtype == torch.float32
    assert torch.equal(
        scores_NV, processed(Sampling(0.7, top_p=0.9), logits_NV.float(), [1], [2, 3])
    )


# Draws


def drawn_by_definition(weights, uniform):
    """The first token whose cumulative weight exceeds uniform * total."""
    total = math.fsum(weights)
    for token in range(len(weights)):
        if math.fsum(weights[: token + 1]) > uniform * total:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


def sparse_weights(generator, size):
    """Unnormalised, many of them zero, the last ones too at times."""
    weights = [generator.choice([0.0, 0.0, generator.random(), 1e-6, 40.0]) for _ in range(size)]
    weights[generator.randrange(size)] = 0.5
    return weights


def draw_both(weights_NV, uniform_N):
    """The tokens, which are the same where the weights lie apart, in blocks with zeros between."""
    rows, size = weights_NV.shape
    apart_NV = weights_NV.new_zeros(rows, 3 * size, 128)
    apart_NV[:, ::3, 77] = weights_NV
    apart_N = draw(apart_NV.flatten(1), uniform_N)
    tokens_N = draw(weights_NV, uniform_N)
    is_token_N = tokens_N < size
    assert torch.equal(apart_N, torch.where(is_token_N, 3 * 128 * tokens_N + 77, 3 * 128 * size))
    return tokens_N


def test_draw_is_the_quantile_and_never_a_token_of_weight_zero():
    """Zeros at the start (u = 0), in the middle, and at the end (u near 1) are the traps."""
    generator = random.Random(0)
    for _ in range(300):
        weights = sparse_weights(generator, generator.randrange(1, 12))
        uniforms = [0.0, 1e-300, 2**-53, 0.5, ALMOST_ONE, *(generator.random() for _ in range(5))]
        weights_NV = torch.tensor(weights).repeat(len(uniforms), 1)
        tokens = draw_both(weights_NV, torch.tensor(uniforms, dtype=torch.float64)).tolist()
        exact = weights_NV[0].double().tolist()
        assert tokens == [drawn_by_definition(exact, uniform) for uniform in uniforms]
        assert all(weights[token] > 0 for token in tokens)


@pytest.mark.parametrize(
    ("weights", "uniform", "token"),
    [
        ([0, 0, 1, 0, 0], 0.0, 2),
        ([0, 0, 1, 0, 0], ALMOST_ONE, 2),
        ([1, 1, 1, 0], ALMOST_ONE, 2),
        ([0, 1, 1], 0.0, 1),
        ([1, 1, 2], 0.25, 1),  # an edge belongs to the token above it
        ([1, 1, 2], 0.5, 2),
        ([3e-39, 1e-39, 0], ALMOST_ONE, 1),  # subnormal in float32
        ([0.1] * 7 + [0], ALMOST_ONE, 6),
    ],
)
def test_draw_at_the_edges(weights, uniform, token):
    uniform_N = torch.tensor([uniform], dtype=torch.float64)
    assert draw_both(torch.tensor([weights], dtype=torch.float32), uniform_N).tolist() == [token]


def test_weights_that_are_not_finite_draw_no_token():
    weights_NV = torch.tensor([[1, math.nan], [math.inf, 1], [0, 0], [0, 1]])
    assert draw_both(weights_NV, torch.full((4,), 0.5).double()).tolist() == [2, 2, 2, 1]


def test_the_end_of_a_block_is_not_left_by_rounding():
    """A block's sum and the last of its running sums may differ; what follows weighs nothing."""
    weights_NV = torch.zeros(200, 256)
    generator = torch.Generator().manual_seed(0)
    weights_NV[:, :128] = torch.randn(200, 128, generator=generator).mul(5).softmax(-1)
    weights_NV[:, 200] = 0.5
    total_N1 = weights_NV.sum(-1, keepdim=True, dtype=torch.float64)
    edge_N1 = (total_N1 - 0.5) / total_N1
    for steps in range(-8, 9):
        tokens_N1 = draw(weights_NV, (edge_N1 * (1 + steps * 2**-53))[:, 0])[:, None]
        assert (weights_NV.gather(-1, tokens_N1) > 0).all()


@pytest.mark.parametrize("size", [150_000, 128 * 1172])
def test_draw_reaches_the_tail_of_a_large_vocabulary(size):
    """float32 sums would stop moving near 1: the last 100,000 tokens would never be drawn."""
    weights_V = torch.full((size,), 1e-9)
    weights_V[0] = 1.0
    cut = 1 / (1 + (size - 1) * 1e-9)
    uniform_N = torch.linspace(cut, ALMOST_ONE, 41, dtype=torch.float64)
    tokens = draw(weights_V.expand(41, -1), uniform_N)
    expected = torch.linspace(0, size - 1, 41)
    assert int((tokens - expected).abs().max()) <= 2


def test_rows_of_draw_have_their_own_weights_and_totals():
    weights_NV = torch.tensor([[1.0, 0, 0], [0, 5, 5], [0, 0, 1e-4]])
    uniform_N = torch.tensor([0.9, 0.6, 0.1], dtype=torch.float64)
    assert draw_both(weights_NV, uniform_N).tolist() == [0, 2, 2]


# Rejection sampling


def rejection_oracle(p, q, draft, noise):
    """One position at a time, in Python's numbers."""
    matches, targets = [], []
    for j, token in enumerate(draft):
        if q is None:
            own = drawn_by_definition(p[j], noise.target[j].item())
            stands = own == token
        else:
            stands = noise.accept[j].item() < p[j][token] / q[j][token]
            rest = [max(0.0, a - b) for a, b in zip(p[j], q[j])]
            own = drawn_by_definition(rest if sum(rest) else p[j], noise.target[j].item())
        matches.append(stands)
        targets.append(token if stands else own)
    return matches, [*targets, drawn_by_definition(p[len(draft)], noise.target[len(draft)].item())]


def distributions(generator, count, vocab, cut):
    """[count, vocab], some tokens excluded as top-p excludes them."""
    logits = 2 * torch.randn(count, vocab, generator=generator, dtype=torch.float64)
    if cut:
        logits = logits.masked_fill(logits < logits.median(-1, keepdim=True).values, -math.inf)
    return torch.softmax(logits, -1)


@pytest.mark.parametrize("with_q", [True, False])
def test_rejection_sampling_equals_the_scalar_oracle(with_q):
    generator = torch.Generator().manual_seed(2)
    matched = 0
    for trial in range(400):
        k = trial % 5
        p_NV = distributions(generator, k + 1, 6, trial % 3 == 0)
        q_KV = distributions(generator, k, 6, trial % 4 == 0)
        noise = NoiseStream(trial).at(trial % 7, k)
        draft_K = draw(q_KV, noise.draft[:k])
        matches_K, target_N = rejection_sample(p_NV, q_KV if with_q else None, draft_K, noise)
        q = q_KV.tolist() if with_q else None
        expected = rejection_oracle(p_NV.tolist(), q, draft_K.tolist(), noise)
        assert (matches_K.tolist(), target_N.tolist()) == expected
        matched += sum(expected[0])
    assert 100 < matched < 700  # of 800


P = torch.tensor([0.40, 0.30, 0.15, 0.15, 0.0])
Q = torch.tensor([0.10, 0.50, 0.00, 0.30, 0.10])


def midpoints(count):
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def integrated(sample, with_q=True):
    """The emitted token's distribution for a draft from Q, over a grid of both uniforms.

    Positions do not look at each other, so each grid point is a position of one long chain.
    """
    accepts, draws = (1500, 300) if with_q else (1, 20_000)  # a rule's draft needs no acceptance
    accept_G = midpoints(accepts).repeat_interleave(draws)
    target_G = midpoints(draws).repeat(accepts)
    size = len(accept_G)
    noise = Noise(target_G, accept_G, torch.cat([target_G, target_G[:1]]))
    result_V = torch.zeros(len(P), dtype=torch.float64)
    for token, weight in enumerate(Q.tolist()):
        if weight:
            draft_K = torch.full((size,), token)
            q_KV = Q.expand(size, -1) if with_q else None
            matches_K, target_N = sample(P.expand(size + 1, -1), q_KV, draft_K, noise)
            emitted_K = torch.where(matches_K, draft_K, target_N[:-1])
            result_V += weight * torch.bincount(emitted_K, minlength=len(P)) / size
    return result_V


def distance(result_V):
    return float((result_V - P).abs().max())


@pytest.mark.parametrize("with_q", [True, False], ids=["drawn", "by rule"])
def test_the_emitted_token_follows_p_exactly(with_q):
    """The definition of lossless, integrated rather than sampled: 450,000 points per token."""
    assert distance(integrated(rejection_sample, with_q)) < 1e-3


def either_of_two(p_NV, q_KV, draft_K, noise):
    k = len(draft_K)
    second_K = draw(p_NV[:k], noise.accept[:k])
    target_N = draw(p_NV, noise.target[: k + 1])
    return (target_N[:k] == draft_K) | (second_K == draft_K), target_N


def without_residual(p_NV, q_KV, draft_K, noise):
    matches_K, target_N = rejection_sample(p_NV, q_KV, draft_K, noise)
    own_N = draw(p_NV, noise.target[: len(target_N)])
    own_N[:-1] = torch.where(matches_K, draft_K, own_N[:-1])
    return matches_K, own_N


def at_another_temperature(p_NV, q_KV, draft_K, noise):
    return rejection_sample(p_NV, torch.softmax(q_KV.log() / 1.5, -1), draft_K, noise)


def one_uniform(p_NV, q_KV, draft_K, noise):
    k = len(draft_K)
    return rejection_sample(p_NV, q_KV, draft_K, Noise(noise.draft, noise.target[:k], noise.target))


@pytest.mark.parametrize(
    "mutant", [either_of_two, without_residual, at_another_temperature, one_uniform]
)
def test_mutants_of_rejection_sampling_are_far_from_p(mutant):
    """What the test above would catch: each is a plausible slip, and off by percents."""
    assert distance(integrated(mutant)) > 0.01


def test_equal_distributions_reject_nothing():
    p_NV = distributions(torch.Generator().manual_seed(4), 6, 5, False).float()
    ones = torch.full((5,), ALMOST_ONE, dtype=torch.float64)
    noise = Noise(ones, ones, torch.full((6,), 0.5, dtype=torch.float64))
    for token in range(5):
        matches_K, target_N = rejection_sample(p_NV, p_NV[:5], torch.full((5,), token), noise)
        assert matches_K.all()
        assert target_N[:5].tolist() == [token] * 5


def test_a_token_the_target_excludes_never_stands():
    """accept = 0 is drawn sometimes; `<=` would let in what top-p has cut."""
    p_NV, q_KV = torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
    zeros = torch.zeros(2, dtype=torch.float64)
    for q in (q_KV, None):
        matches_K, target_N = rejection_sample(
            p_NV, q, torch.tensor([0]), Noise(zeros[:1], zeros[:1], zeros)
        )
        assert matches_K.tolist() == [False]
        assert target_N.tolist() == [1, 0]


def test_without_a_draft_the_target_token_is_a_plain_draw():
    noise = NoiseStream(0).at(0, 0)
    p_NV = P[None]
    for q_KV in (None, torch.empty(0, 5)):
        matches_K, target_N = rejection_sample(p_NV, q_KV, torch.empty(0, dtype=torch.long), noise)
        assert matches_K.shape == (0,)
        assert torch.equal(target_N, draw(p_NV, noise.target))


# Noise and settings


def test_a_place_has_the_same_numbers_whatever_is_asked_for():
    """Else what is drafted, and how much, would change a sequence's tokens."""
    whole, pieces = NoiseStream(9).at(0, 200), NoiseStream(9)
    for start, count in ((150, 3), (0, 0), (63, 5), (3, 1), (60, 70)):
        noise = pieces.at(start, count)
        for part in ("draft", "accept", "target"):
            own = getattr(whole, part)[start : start + len(getattr(noise, part))]
            assert torch.equal(getattr(noise, part), own), (start, part)
        lengths = [len(part) for part in (noise.draft, noise.accept, noise.target)]
        assert lengths == [count, count, count + 1]
    together = torch.cat([whole.draft, whole.accept, whole.target])
    assert len(set(together.tolist())) == 601  # no number serves twice
    assert together.dtype == torch.float64
    assert not torch.equal(NoiseStream(8).at(0, 5).target, NoiseStream(9).at(0, 5).target)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", -0.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
    ],
)
def test_bad_settings_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Sampling(**{name: value})


def test_what_is_greedy_and_what_is_plain():
    assert GREEDY.is_greedy
    assert GREEDY.is_plain
    assert not Sampling(repetition_penalty=1.1).is_plain
    assert Sampling(top_k=5, top_p=0.5, min_p=0.3).is_plain  # filters do not move an argmax
    assert not Sampling(1e-3).is_greedy


def test_greedy_requests_keep_the_penalty_only():
    logits_NV = torch.randn(2, 8, generator=torch.Generator().manual_seed(6))
    filtered = processed(Sampling(top_k=2, top_p=0.3, min_p=0.5), logits_NV, [1], [2])
    assert torch.equal(filtered, logits_NV)


@pytest.mark.parametrize("settings", [{"temperature": 2}, {"repetition_penalty": 2}])
def test_whole_numbers_are_good_settings(settings):
    """lm-eval hands on `temperature=2` as an int, which transformers refuses in mid-run."""
    logits_NV = torch.randn(1, 8, generator=torch.Generator().manual_seed(6))
    assert torch.isfinite(processed(Sampling(**settings), logits_NV, [1], [])).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", 2.5), ("top_k", True), ("temperature", 1e-40), ("temperature", float("inf"))],
)
def test_settings_that_would_fail_in_mid_run_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        Sampling(**{name: value})


def test_all_that_tie_with_the_last_of_top_k_stay():
    logits = torch.zeros(1, 300)
    logits[0, 0] = 1.0
    assert processed(Sampling(1.0, top_k=2), logits, (0,), ()).isfinite().all()
