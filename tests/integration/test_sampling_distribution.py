"""Sampled outputs follow the distribution they must: chi-square tests through the real engine.

Two worlds. A tiny model, whose short continuations are enumerated and counted whole: everything
is real. A table of logits by the last two tokens behind a real ModelRunner's bookkeeping: cheap
enough for hundreds of thousands of tokens, whose transitions are counted; engine, drafters and
rejection sampler are the real ones. Every claim has mutants that the same counts refute.

FLY_TEST_TOKENS multiplies the number of table tokens (1 by default, 10,500 per case). Cases whose
parts other cases test are slow ones (`-m slow`).
"""

import os
import random
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch

from fly.execution.model_runner import ModelRunner
from fly.settings import Settings
from fly.speculation.drafters.base import NoDrafter
from fly.speculation.drafters.cascade import CascadeDrafter
from fly.speculation.drafters.draft_model import ModelDrafter
from fly.speculation.rules.base import Rule
from fly.speculation.rules.block import BlockRule
from fly.speculation.rules.fly import FlyRule
from fly.speculation.rules.gates import RankGate
from fly.speculation.sampling import (
    Noise,
    NoiseStream,
    Sampling,
    draw,
    rejection_sample,
    seen_tokens,
)
from fly.speculation.sequence import Request, Sequence
from tests import heads, tiny
from tests.tiny import slow

V = 8
SCALE = float(os.environ.get("FLY_TEST_TOKENS", "1"))
PROMPT = (3, 4, 5, 6, 3, 4)  # its last tokens came before, so that n-gram drafts happen
HONEST, REFUTED = 1e-3, 1e-6  # p-values: above the one, below the other
NO_EOS = frozenset()
ACCEPT_ALL = tiny.gated_rule()


# Chi-square


class ChiSquare:
    """Sums of (observed - expected)^2 / expected over independent multinomials."""

    def __init__(self):
        self.statistic, self.freedom, self.impossible = 0.0, 0, 0

    def add(self, observed, probabilities):
        """One multinomial; cells that expect fewer than 5 are counted as one."""
        total = sum(observed)
        cells, few, few_expected = 0, 0, 0.0
        for count, probability in zip(observed, probabilities):
            expected = total * probability
            if expected >= 5:
                self.statistic += (count - expected) ** 2 / expected
                cells += 1
                continue
            self.impossible += count if probability == 0 else 0
            few, few_expected = few + count, few_expected + expected
        if few_expected >= 5:
            self.statistic += (few - few_expected) ** 2 / few_expected
            cells += 1
        self.freedom += max(0, cells - 1)

    @property
    def p_value(self):
        if self.impossible:  # a token that the settings exclude
            return 0.0
        half = torch.tensor([self.freedom, self.statistic], dtype=torch.float64) / 2
        return torch.special.gammaincc(half[0], half[1]).item()


def test_the_chi_square_itself_tells_fair_from_loaded():
    """A statistic that never rejects would make every test below pass."""
    generator = random.Random(0)
    fair = Counter(generator.choices(range(6), k=20_000))
    loaded = Counter(generator.choices(range(6), [1, 1, 1, 1, 1, 1.15], k=20_000))
    for counts, expected in ((fair, True), (loaded, False)):
        test = ChiSquare()
        test.add([counts[face] for face in range(6)], [1 / 6] * 6)
        assert test.freedom == 5
        assert (test.p_value > HONEST) == expected
        assert (test.p_value < REFUTED) != expected
    quantile = ChiSquare()
    quantile.statistic, quantile.freedom = 11.0705, 5  # 5 %, from a printed table
    assert quantile.p_value == pytest.approx(0.05, abs=1e-5)


# The table world


class TableRunner(ModelRunner):
    """A runner whose logits are looked up by the last two tokens; all bookkeeping is real."""

    def __init__(self, table_VVV, slots):
        stub = torch.nn.Embedding(1, 1)
        stub.get_input_embeddings = lambda: stub
        super().__init__(stub, slots, 4096)
        self.table_VVV = table_VVV

    def _forward(self, first_slot, tokens, *, with_logits):
        self._note_written(first_slot, tokens)
        width = max(map(len, tokens))
        pairs = []
        for slot, row in enumerate(tokens, start=first_slot):
            length = self.lengths[slot]
            known = [0, *self._written[slot][: length + len(row)]]
            padding = [(0, 0)] * (width - len(row))
            pairs.append([*zip(known[length:], known[length + 1 :]), *padding])
        earlier_BQ, last_BQ = torch.tensor(pairs).unbind(-1)
        return self.table_VVV[earlier_BQ, last_BQ]


def table(seed, spread=1.6, like=None, noise=0.0):
    """[V, V, V] logits; with `like`, a noisy copy of another's."""
    own = torch.randn(V, V, V, generator=torch.Generator().manual_seed(seed))
    return spread * own if like is None else like + noise * own


TARGET = table(1)
CLOSE = table(2, like=TARGET, noise=0.5)
FAR = table(3)  # knows nothing of the target
ANOTHER = table(4, like=TARGET, noise=1.2)  # for mutants: drafts neither too good nor too bad

MIXED = (Sampling(1.0), Sampling(0.7), Sampling(1.2, top_k=5), Sampling(0.9, top_p=0.85))


def table_drafter(name, slots, draft=FAR):
    if name == "none":
        return NoDrafter()
    if name == "ngram":
        return tiny.text_drafter(slots, eos=NO_EOS)
    if name == "runs":
        return tiny.text_drafter(slots, ("runs",), eos=NO_EOS, learns=True)
    if name == "cascade":
        return CascadeDrafter(TableRunner(draft, slots), NO_EOS, (1, 4, 6))
    if name == "cascade-runs":
        lookup = tiny.lookup(slots, ("runs",), eos=NO_EOS, has_model=True)
        return CascadeDrafter(TableRunner(draft, slots), NO_EOS, (1, 4, 6), lookup)
    return ModelDrafter(TableRunner(draft, slots), NO_EOS)


def table_engine(name, draft=FAR, *, k=3, slots=48, rule=tiny.EXACT, **kwargs):
    drafter = table_drafter(name, slots, draft)
    return tiny.engine(TableRunner(TARGET, slots), drafter, k, rule, eos=NO_EOS, **kwargs)


def table_requests(count, budget, settings=MIXED, prompt=PROMPT, seed=0, earlier=()):
    """Requests of a batch differ in their settings, so that mixing them up shows."""
    return [
        Request(
            prompt,
            budget,
            tag=i,
            sampling=settings[i % len(settings)],
            seed=seed * 10**6 + i,
            earlier=earlier,
        )
        for i in range(count)
    ]


def earlier_for(name, budget):
    """An earlier output for drafters that follow one: the target's own likeliest tokens."""
    if "runs" not in name:
        return ()
    text = [*PROMPT]
    for _ in range(budget):
        text.append(int(TARGET[text[-2], text[-1]].argmax()))
    return (tuple(text[len(PROMPT) :]),)


def processed(logits, settings):
    """Probabilities, float64, [..., V]: without a penalty they do not look at the tokens."""
    scores = settings.process(logits.reshape(-1, V))
    return torch.softmax(scores.double(), -1).view(logits.shape)


def transitions(records):
    """p-value of "every token was drawn from the target's distribution at its context"."""
    counts = Counter()
    for record in records:
        request = record.request
        text = [*request.prompt, *record.tokens]
        for at in range(len(request.prompt), len(text)):
            counts[request.sampling, text[at - 2], text[at - 1], text[at]] += 1
    test = ChiSquare()
    for settings in {record.request.sampling for record in records}:
        p_VVV = processed(TARGET, settings).tolist()
        for a, b in product(range(V), range(V)):
            test.add([counts[settings, a, b, c] for c in range(V)], p_VVV[a][b])
    return test


def settled(records):
    """Some drafts stood and some did not: neither is tested otherwise."""
    return 0 < tiny.total(records, "native_accepted") < tiny.total(records, "drafted")


EXACT_CASES = [
    ("none", None, 0),
    ("model", CLOSE, 5),
    slow("model", FAR, 2),
    ("ngram", None, 3),
    ("cascade", CLOSE, 5),
    slow("runs", None, 3),  # texts are compared elsewhere
    slow("cascade-runs", CLOSE, 5),
]


@pytest.mark.parametrize(
    ("name", "draft", "k"),
    EXACT_CASES,
    ids=["none", "model", "model-far", "ngram", "cascade", "runs", "cascade-runs"],
)
def test_every_drafter_leaves_the_distribution_as_it_is(name, draft, k):
    """The mutants below say what this catches."""
    seed = len(name)  # a cascade with the seeds of its draft model would only repeat its tokens
    earlier = earlier_for(name, 125)
    requests = table_requests(int(SCALE * 84), 125, seed=seed, earlier=earlier)
    records = list(table_engine(name, draft, k=k).run(requests))
    test = transitions(records)
    assert tiny.total(records, "emitted") == int(SCALE * 84) * 125
    assert test.freedom > 400
    assert test.p_value > HONEST
    assert settled(records) or name == "none"
    sources = {letter for record in records for letter in record.sources}
    assert ("e" in sources) == ("runs" in name)


BLOCK_CASES = [("model", 42), slow("cascade", 40), slow("ngram", 42)]


@pytest.mark.parametrize(("name", "count"), BLOCK_CASES)
def test_block_verification_leaves_the_distribution_as_it_is(name, count):
    """And accepts more than token by token, as its paper proves. Where the draft model is the same,
    so are the tokens: other seeds. The mutant below is refuted by as many requests."""
    requests = table_requests(int(SCALE * count), 125, seed=len(name))
    records = list(table_engine(name, ANOTHER, k=4, rule=BlockRule(Settings())).run(requests))
    assert transitions(records).p_value > HONEST
    assert settled(records)
    if name != "ngram":
        exact = list(table_engine(name, ANOTHER, k=4).run(requests[:40]))
        few = [record for record in records if record.request.tag < 40]
        assert tiny.total(few, "rounds") < tiny.total(exact, "rounds")


@pytest.mark.parametrize(("name", "count"), BLOCK_CASES)
def test_block_verification_of_what_is_drawn_otherwise_is_noticed(name, count, monkeypatch):
    """A draft, or without q the token after the accepted ones, drawn at half its temperature."""
    where = "fly.speculation.rules.block.draw" if name == "ngram" else IN_DRAFTER
    monkeypatch.setattr(where, drawn_colder)
    requests = table_requests(int(SCALE * count), 125, seed=len(name))
    records = list(table_engine(name, ANOTHER, k=4, rule=BlockRule(Settings())).run(requests))
    assert transitions(records).p_value < REFUTED


@pytest.mark.parametrize("is_mutant", [False, True], ids=["honest", "mutant"])
def test_numbers_of_rejected_tokens_that_decided_are_spent(is_mutant, monkeypatch):
    """No round draws with numbers that an earlier one's acceptance looked at. (The bias is too
    small for the counts above.)"""
    taken, honest = [], NoiseStream.at

    def at(self, start, count):
        taken.append((start, count))
        return honest(self, start, count)

    monkeypatch.setattr(NoiseStream, "at", at)
    if is_mutant:
        monkeypatch.setattr(BlockRule, "resolve", Rule.resolve)
    (record,) = table_engine("model", ANOTHER, k=4, slots=1, rule=BlockRule(Settings())).run(
        table_requests(1, 60)
    )
    assert settled([record])
    rounds = [*dict.fromkeys(taken)]  # drafter and rule ask for the same
    starts = sorted({start for start, _ in rounds})
    ends = [max(start + count for start, count in rounds if start == at) for at in starts]
    assert all(end < start for end, start in zip(ends, starts[1:])) != is_mutant


@pytest.mark.slow
@pytest.mark.parametrize("is_mutant", [False, True], ids=["honest", "mutant"])
def test_numbers_of_drafts_that_were_too_short_are_spent(is_mutant, monkeypatch):
    """FLy within a round refuses a deferral where too few tokens follow. Where the draft drew an
    EOS, its numbers made that so: the next round drew the same EOS with them."""
    honest = FlyRule.resolve
    if is_mutant:
        monkeypatch.setattr(
            FlyRule, "resolve", lambda *args: replace(honest(*args), spends_draft=False)
        )
    eos, settings, rounds = frozenset({2}), Sampling(1.0), []
    drafts_eos = ANOTHER.clone()
    drafts_eos[..., 2] += 1.5
    drafter = ModelDrafter(TableRunner(drafts_eos, 64), eos)
    engine = tiny.engine(
        TableRunner(TARGET, 64), drafter, 3, tiny.relaxed(2, None), eos=eos, slots=64,
        observer=rounds.append,
    )  # fmt: skip
    requests = table_requests(4000, 4, (settings,), seed=12)
    outputs = {record.request.tag: record.tokens for record in engine.run(requests)}
    counts = Counter()
    for record in rounds:
        refused = record.number == record.length == 1 and record.draft and not record.matches[0]
        if refused and record.rolled_back is None and len(outputs[record.request.tag]) > 1:
            counts[tuple(outputs[record.request.tag][:2])] += 1
    p_VV, test = processed(TARGET, settings)[PROMPT[-1]].tolist(), ChiSquare()
    for first in range(V):
        test.add([counts[first, second] for second in range(V)], p_VV[first])
    assert test.freedom > 10
    assert (test.p_value < REFUTED) == is_mutant
    assert (test.p_value > HONEST) != is_mutant


# Mutants of exact verification


def either_of_two(p, q, draft, noise):
    """The draft stands if it matches either of two independent draws."""
    k = draft.shape[-1]
    target = draw(p, noise.target)
    second = draw(p[..., :k, :], noise.accept)
    return (target[..., :k] == draft) | (second == draft), target


def without_residual(p, q, draft, noise):
    """After a rejection the token is drawn from p, not from what q left of it."""
    matches, _ = rejection_sample(p, q, draft, noise)
    own = draw(p, noise.target)
    own[..., :-1] = torch.where(matches, draft, own[..., :-1])
    return matches, own


def one_uniform(p, q, draft, noise):
    """The number that rejected the draft also draws in its place."""
    again = torch.cat([noise.accept, noise.target[..., -1:]], dim=-1)
    return rejection_sample(p, q, draft, Noise(noise.draft, noise.accept, again))


def drafted_and_accepted_by_one_uniform(p, q, draft, noise):
    return rejection_sample(p, q, draft, Noise(noise.draft, noise.draft, noise.target))


def one_position_late(p, q, draft, noise):
    """Draft probabilities of the position before."""
    late = None if q is None else torch.cat([q[..., :1, :], q[..., :-1, :]], dim=-2)
    return rejection_sample(p, late, draft, noise)


def drawn_colder(q_NV, uniform_N):
    """The draft draws at half the temperature that q is computed at."""
    return draw(q_NV**2, uniform_N)


IN_ENGINE, IN_DRAFTER = (
    "fly.speculation.rules.base.rejection_sample",
    "fly.speculation.drafters.draft_model.draw",
)
# (where, mutant, drafter, requests of 60 tokens with which its p-value is below 1e-10)
MUTANTS = [
    (IN_ENGINE, either_of_two, "model", 80),
    (IN_ENGINE, either_of_two, "ngram", 120),
    (IN_ENGINE, either_of_two, "runs", 40),
    (IN_ENGINE, either_of_two, "cascade-runs", 40),
    (IN_ENGINE, without_residual, "model", 80),
    (IN_ENGINE, without_residual, "cascade", 60),
    (IN_ENGINE, one_uniform, "model", 120),
    (IN_ENGINE, drafted_and_accepted_by_one_uniform, "model", 80),
    (IN_ENGINE, one_position_late, "model", 40),
    (IN_DRAFTER, drawn_colder, "model", 80),
    (IN_DRAFTER, drawn_colder, "cascade", 60),
]


def mutant_p_value(name, count):
    requests = table_requests(count, 60, MIXED[:2], seed=2, earlier=earlier_for(name, 60))
    return transitions(list(table_engine(name, ANOTHER, k=3).run(requests))).p_value


@pytest.mark.parametrize(
    ("name", "count"),
    [
        (name, count) if name in ("model", "ngram") else slow(name, count)
        for name, count in {m[-2]: m[-1] for m in sorted(MUTANTS, key=lambda m: m[-1])}.items()
    ],
)
def test_the_honest_pass_the_test_that_mutants_fail(name, count):
    """With the most requests that any of them gets."""
    assert mutant_p_value(name, count) > HONEST


@pytest.mark.parametrize(
    ("where", "mutant", "name", "count"),
    [m if m[2] in ("model", "ngram") else slow(*m) for m in MUTANTS],
    ids=[f"{m[1].__name__}-{m[2]}" for m in MUTANTS],
)
def test_mutants_are_refuted(where, mutant, name, count, monkeypatch):
    monkeypatch.setattr(where, mutant)
    assert mutant_p_value(name, count) < REFUTED


# The real world: short continuations of a tiny model, enumerated


@pytest.fixture(scope="module")
def models():
    """(target, {name: draft}): one draft is a noisy copy, one knows nothing of the target."""
    target = tiny.model(1, vocab=V, layers=1)
    return target, {
        "close": tiny.noisy_copy(target, 0.08),
        "far": tiny.model(5, vocab=V, layers=1),
    }


@torch.inference_mode()
def continuations(model, prompt, budget, settings, eos):
    """{tokens: probability} of all continuations up to EOS or the budget, by plain passes."""
    ended, going = {}, {(): 1.0}
    for _ in range(budget):
        prefixes = [[*prompt, *tokens] for tokens in going]
        logits_NV = model(torch.tensor(prefixes)).logits[:, -1]
        longer = {}
        for (tokens, probability), before, logits_V in zip(going.items(), prefixes, logits_NV):
            seen_NV = seen_tokens([before], torch.empty(1, 0, dtype=torch.long), V)[0]
            scores_NV = settings.process(logits_V[None], seen_NV)
            for token, p in enumerate(torch.softmax(scores_NV.double(), -1)[0].tolist()):
                where = ended if token in eos else longer
                where[(*tokens, token)] = probability * p
        going = longer
    assert sum((ended | going).values()) == pytest.approx(1)
    return ended | going


def joint(records, expected):
    """Whole outputs against {tokens: probability}."""
    counts = Counter(tuple(record.tokens) for record in records)
    test = ChiSquare()
    test.add([counts[tokens] for tokens in expected], expected.values())
    test.impossible += sum(counts[tokens] for tokens in counts.keys() - expected.keys())
    return test


TOP_P, PENALTY = Sampling(0.8, top_p=0.9), Sampling(1.5, top_k=6, repetition_penalty=1.3)
REAL_CASES = {
    "none-penalty": ("none", "far", PENALTY),
    "model-close-top-p": ("model", "close", TOP_P),
    "model-close-penalty": ("model", "close", PENALTY),
    "model-far-top-p": ("model", "far", TOP_P),
    "ngram-penalty": ("ngram", "far", PENALTY),
    "cascade-top-p": ("cascade", "close", TOP_P),
    "cascade-penalty": ("cascade", "close", PENALTY),
}


SLOW_CASES = (
    "none-penalty",
    "model-close-penalty",
    "model-far-top-p",
    "ngram-penalty",
    "cascade-top-p",
)


@pytest.mark.parametrize(
    ("name", "draft", "settings"),
    [slow(*c, id=i) if i in SLOW_CASES else pytest.param(*c, id=i) for i, c in REAL_CASES.items()],
)
def test_whole_continuations_of_a_real_model(models, name, draft, settings):
    """Caches, positions, penalties along a draft, EOS inside one: all in one joint count."""
    target, drafts = models
    eos = frozenset({tiny.EOS})
    expected = continuations(target, PROMPT, 3, settings, eos)
    assert any(len(tokens) < 3 for tokens in expected)
    drafter = tiny.drafter(name, 64, drafts[draft], eos)
    requests = table_requests(1200, 3, (settings,), seed=3)
    records = list(tiny.engine(target, drafter, 3, slots=64, eos=eos).run(requests))
    test = joint(records, expected)
    assert test.freedom > 30
    assert test.p_value > HONEST
    assert settled(records) or name == "none"


DRAFTED = torch.tensor([0, 2, 3, 5, 6])  # of 8 tokens; the others are the target's alone


@pytest.fixture(scope="module")
def head():
    """(a target, a head of it that drafts 5 of its 8 tokens)."""
    target = tiny.model(1, vocab=V, layers=3)
    keys = {"vocab_size": V, "eagle_aux_hidden_state_layer_ids": [2, 3, 3]}
    return target, heads.load(target, heads.tensors(0, DRAFTED, vocab=V), **keys)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [TOP_P, PENALTY], ids=["top-p", "penalty"])
def test_a_head_with_a_reduced_vocabulary_samples_from_the_target(head, settings):
    """q is 0 for what it cannot draft, which only the target's own draws give."""
    target, eagle3 = head
    eos = frozenset({tiny.EOS})
    expected = continuations(target, PROMPT, 3, settings, eos)
    drafter = heads.drafter(target, eagle3, 64, eos)
    requests = table_requests(1200, 3, (settings,), seed=3)
    records = list(tiny.engine(target, drafter, 3, slots=64, eos=eos).run(requests))
    test = joint(records, expected)
    assert test.freedom > 30
    assert test.p_value > HONEST
    assert settled(records)


@pytest.mark.slow
def test_q_of_another_draft_is_noticed(head, monkeypatch):
    """The mutant: tokens are drawn from sharper logits than q is made of."""
    target, eagle3 = head
    settings = Sampling(1.0)
    expected = continuations(target, PROMPT, 3, settings, NO_EOS)
    monkeypatch.setattr(IN_DRAFTER, drawn_colder)
    drafter = heads.drafter(target, eagle3, 64, NO_EOS)
    engine = tiny.engine(target, drafter, 3, slots=64, eos=NO_EOS)
    assert joint(list(engine.run(table_requests(2000, 3, (settings,)))), expected).p_value < REFUTED


def test_a_draft_penalised_as_a_whole_is_noticed(models, monkeypatch):
    """The mutant of the penalty: every position of the target sees all drafted tokens."""
    honest = Sampling.process

    def all_at_once(self, logits, seen=None):
        return honest(self, logits, None if seen is None else seen[..., -1:, :].expand_as(seen))

    target, drafts = models
    expected = continuations(target, PROMPT, 3, PENALTY, NO_EOS)
    monkeypatch.setattr(Sampling, "process", all_at_once)
    drafter = tiny.drafter("model", 64, drafts["close"], NO_EOS)
    engine = tiny.engine(target, drafter, 3, slots=64, eos=NO_EOS)
    assert joint(list(engine.run(table_requests(1200, 3, (PENALTY,)))), expected).p_value < REFUTED


# Independence of neighbours


def varied_requests():
    """Requests that differ in prompt, budget, seed and settings; some are greedy."""
    generator = random.Random(8)
    settings = (*MIXED, Sampling(), Sampling(1.1, min_p=0.05, repetition_penalty=1.2))
    return [
        Request(
            tuple(generator.choices(range(3, 64), k=generator.randrange(1, 12)) * (1 + i % 2)),
            generator.randrange(2, 20),
            tag=i,
            sampling=settings[i % len(settings)],
            seed=generator.randrange(2**40),
        )
        for i in range(14)
    ]


RULES = {
    "exact": tiny.EXACT,
    "within": tiny.relaxed(2, 0.3),
    "across": tiny.relaxed(2, 0.3, across=True),
    "block": BlockRule(Settings()),
}
INDEPENDENT = [
    ("none", "exact"),
    *(("cascade", rule) for rule in RULES),
    *(slow(name, rule) for name in ("model", "ngram") for rule in RULES),
]


@pytest.mark.parametrize(("name", "rule"), INDEPENDENT)
def test_tokens_do_not_depend_on_other_sequences(target, draft, name, rule):
    """One generator for the batch, or numbers taken by what was accepted, would show here."""
    wanted, seen = varied_requests(), []
    for slots in (1, 5):
        drafter = tiny.drafter(name, slots, draft)
        engine = tiny.engine(target, drafter, 4, RULES[rule], slots, reuse_prefixes=slots > 1)
        shuffled = random.Random(slots).sample(wanted, len(wanted))
        seen.append({record.request.tag: record.tokens for record in engine.run(shuffled)})
    assert seen[0] == seen[1]
    assert len(seen[0]) == len(wanted)


def test_seeds_alone_tell_equal_requests_apart(target, draft):
    requests = [
        Request((5, 6, 7), 12, tag=i, sampling=Sampling(1.0), seed=i // 2) for i in range(8)
    ]
    engine = tiny.engine(target, tiny.drafter("model", 4, draft), 4, slots=4)
    tokens = {record.request.tag: tuple(record.tokens) for record in engine.run(requests)}
    assert [tokens[i] for i in (0, 2, 4, 6)] == [tokens[i] for i in (1, 3, 5, 7)]
    assert len(set(tokens.values())) == 4


# FLy under sampling


@pytest.mark.parametrize("name", [slow("model"), slow("ngram"), "cascade"])
def test_fly_whose_gates_never_pass_is_exact_verification(name):
    """The same tokens, not just the same distribution: FLy takes no random number of its own."""
    found = []
    for rule in (tiny.EXACT, tiny.relaxed(2, 99.0), tiny.relaxed(2, 99.0, across=True)):
        records = list(table_engine(name, ANOTHER, k=4, rule=rule).run(table_requests(50, 24)))
        found.append({record.request.tag: record.tokens for record in records})
        assert settled(records)
    assert found[0] == found[1] == found[2]


def chained(tables, settings):
    """{(a, b, ...): probability} after PROMPT, the i-th token drawn from the i-th table."""
    result = {(): 1.0}
    for logits_VVV in tables:
        p_VVV = processed(logits_VVV, settings).tolist()
        result = {
            (*tokens, token): probability * p
            for tokens, probability in result.items()
            for token, p in enumerate(p_VVV[[*PROMPT, *tokens][-2]][[*PROMPT, *tokens][-1]])
        }
    return result


@pytest.mark.parametrize(
    "settings",
    [pytest.param(Sampling(1.0), id="plain"), slow(Sampling(0.8, top_p=0.9), id="top-p")],
)
def test_accepting_everything_samples_from_the_draft(settings):
    """Two drafted tokens follow q, the bonus after them p; by exact verification it would be p."""
    requests = table_requests(4000, 3, (settings,), seed=5)
    engine = table_engine("model", ANOTHER, k=2, rule=ACCEPT_ALL)
    records = list(engine.run(requests))
    test = joint(records, chained([ANOTHER, ANOTHER, TARGET], settings))
    assert test.p_value > HONEST
    assert tiny.total(records, "rounds") == len(records)
    assert joint(records, chained([TARGET] * 3, settings)).p_value < REFUTED


def test_rules_that_decide_by_gates_draw_anew_from_the_target():
    """Catches a rejected token that comes back as the recovered token: only the argmax stands here,
    so a token is the argmax if that was drafted, and else drawn from p."""
    settings = Sampling(1.0)
    rule = tiny.gated_rule(RankGate(1))
    records = list(
        table_engine("model", ANOTHER, k=1, rule=rule).run(
            table_requests(4000, 2, (settings,), seed=5)
        )
    )
    p_V, q_V = (
        processed(logits_VVV, settings)[PROMPT[-2]][PROMPT[-1]] for logits_VVV in (TARGET, ANOTHER)
    )
    best = int(p_V.argmax())
    expected_V = (1 - q_V[best]) * p_V
    expected_V[best] += q_V[best]
    first = Counter(record.tokens[0] for record in records)
    for distribution_V, agrees in ((expected_V, True), (p_V, False)):
        test = ChiSquare()
        test.add([first[token] for token in range(V)], distribution_V.tolist())
        assert (test.p_value > HONEST) == agrees


@pytest.fixture
def rolled_back(monkeypatch):
    """First tokens of sequences whose first token was deferred, and rolled back by a mismatch."""
    tokens, honest = [], Sequence.round_record

    def note(sequence, verdict, counts, start):
        resolution = verdict.resolution
        at_once = resolution.rolled_back and start == 0 and resolution.accepted == 0
        if at_once or (resolution.rolls_back_earlier and len(sequence.generated) == 1):
            tokens.append(sequence.generated[0])
        return honest(sequence, verdict, counts, start)

    monkeypatch.setattr(Sequence, "round_record", note)
    return tokens


WITHIN, ACROSS = tiny.relaxed(1, None), tiny.relaxed(2, None, across=True)


def residual(settings, rule_token=None):
    """(what is left of p after PROMPT, its sum): p without q, or without the rule's token."""
    p_V = processed(TARGET, settings)[PROMPT[-2], PROMPT[-1]]
    if rule_token is None:
        rest_V = (p_V - processed(ANOTHER, settings)[PROMPT[-2], PROMPT[-1]]).clamp(min=0)
    else:
        rest_V = p_V.clone()
        rest_V[rule_token] = 0
    return (rest_V / rest_V.sum()).tolist(), rest_V.sum().item()


def both_mismatch(settings):
    """Chance that the first two tokens drafted from q are both mismatches."""
    p_VVV, q_VVV = processed(TARGET, settings), processed(ANOTHER, settings)
    surplus_VVV = (q_VVV - p_VVV).clamp(min=0)  # q(d) * (1 - min(1, p/q))
    first_V = surplus_VVV[PROMPT[-2], PROMPT[-1]]
    return (first_V * surplus_VVV[PROMPT[-1]].sum(-1)).sum().item()


@pytest.mark.parametrize(
    ("name", "rule", "k"),
    [
        slow("model", WITHIN, 3),
        slow("model", tiny.relaxed(1, 0.0), 2),
        slow("cascade", WITHIN, 3),
        slow("ngram", WITHIN, 3),
        ("model", ACROSS, 1),
        slow("ngram", ACROSS, 1),
    ],
    ids=["model", "model-gate", "cascade", "ngram", "model-across", "ngram-across"],
)
def test_a_rolled_back_deferral_becomes_a_draw_from_the_residual(name, rule, k, rolled_back):
    """Whether it is rolled back depends on later tokens only, so the residual is what remains.

    Drawing afresh from p would give the rejected token a second chance. Across rounds the token
    kept with the deferral must be that of its own position and round.
    """
    settings, count = Sampling(1.1), 3000
    engine = table_engine(name, ANOTHER, k=k, rule=rule)
    list(engine.run(table_requests(count, 5, (settings,), seed=6)))
    rule_token = PROMPT[2] if name == "ngram" else None
    expected, mass = residual(settings, rule_token)
    observed = Counter(rolled_back)
    test = ChiSquare()
    test.add([observed[token] for token in range(V)], expected)
    assert len(rolled_back) > 200
    assert test.p_value > HONEST
    if k > 1:  # rolled back within the round: how often is known, too
        chance = both_mismatch(settings)
        if name == "ngram":
            p_VVV = processed(TARGET, settings)
            chance = mass * (1 - p_VVV[PROMPT[-1], PROMPT[2], PROMPT[3]].item())
        often = ChiSquare()
        often.add([len(rolled_back), count - len(rolled_back)], [chance, 1 - chance])
        assert often.p_value > HONEST


@pytest.mark.parametrize(
    ("k", "rule"), [pytest.param(3, WITHIN, id="within"), slow(1, ACROSS, id="across")]
)
def test_rolled_back_to_a_draw_from_p_is_noticed(k, rule, rolled_back, monkeypatch):
    """The mutant of the test above."""
    monkeypatch.setattr(IN_ENGINE, without_residual)
    settings = Sampling(1.1)
    engine = table_engine("model", ANOTHER, k=k, rule=rule)
    list(engine.run(table_requests(1800, 5, (settings,), seed=6)))
    observed = Counter(rolled_back)
    test = ChiSquare()
    test.add([observed[token] for token in range(V)], residual(settings)[0])
    assert test.p_value < REFUTED
