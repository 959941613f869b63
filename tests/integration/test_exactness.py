"""Losslessness: exact verification equals transformers' greedy generation, token for token.

Every claim comes with mutants of the engine that must break it.
"""

from dataclasses import replace

import pytest
import torch

from fly.execution.model_runner import ModelRunner
from fly.speculation import chains
from fly.speculation.drafters.draft_model import ModelDrafter
from fly.speculation.rules.base import Rule, verify
from fly.speculation.sampling import GREEDY, Sampling
from fly.speculation.sequence import Request
from tests import tiny

BUDGET = 40


@pytest.fixture(scope="module")
def expected(target):
    return [tiny.generate(target, prompt, BUDGET) for prompt in tiny.prompts()]


def run(target, draft, name, k, slots=1, rule=tiny.EXACT):
    engine = tiny.engine(target, tiny.drafter(name, slots, draft), k, rule, slots)
    return tiny.decode_all(engine, tiny.prompts(), BUDGET)


def test_target_only(target, draft, expected):
    records = run(target, draft, "none", 0)
    assert [record.tokens for record in records] == expected
    assert tiny.total(records, "rounds") == tiny.total(records, "emitted")


@pytest.mark.parametrize(("k", "slots"), [(1, 3), tiny.slow(4, 1), (4, 3), (15, 1)])
@pytest.mark.parametrize("name", ["model", "ngram", "cascade"])
def test_exact_equals_generate(target, draft, expected, name, k, slots):
    records = run(target, draft, name, k, slots)
    assert [record.tokens for record in records] == expected
    assert 0 < tiny.total(records, "native_accepted") < tiny.total(records, "drafted")
    assert tiny.total(records, "deferred_accepted") == 0
    for record in records:
        counts = record.counts
        parts = counts.native_accepted + counts.deferred_accepted + counts.corrections
        assert counts.emitted == len(record.tokens) == parts + counts.bonus


def test_cascade_drafts_exactly_what_the_model_drafts(target, draft):
    """The n-gram level changes the cost of a draft, never its tokens."""
    plain, cascade = (run(target, draft, name, 8) for name in ("model", "cascade"))
    for name in ("rounds", "drafted", "native_accepted"):
        assert tiny.total(plain, name) == tiny.total(cascade, name)


def test_sequences_do_not_influence_each_other(target, draft):
    """FLy too: slots and arrival order change nothing (float32)."""
    relaxed = tiny.relaxed(1, 0.1)
    alone = run(target, draft, "model", 6, slots=1, rule=relaxed)
    engine = tiny.engine(target, tiny.drafter("model", 3, draft), 6, relaxed, slots=3)
    order = [3, 0, 4, 2, 1]
    shuffled = tiny.decode_all(engine, [tiny.prompts()[i] for i in order], BUDGET)
    assert [r.tokens for r in shuffled] == [alone[i].tokens for i in order]


def test_fly_relaxes_and_its_tokens_are_the_drafts_or_the_targets(target, draft, expected):
    records = run(target, draft, "model", 8, rule=tiny.relaxed(1, 0.1))
    assert tiny.total(records, "deferred_accepted") > 0
    assert [record.tokens for record in records] != expected


def resolve_one_too_many(rule, judged, honest=Rule.resolve):
    resolution = honest(rule, judged)
    return replace(resolution, accepted=min(resolution.accepted + 1, len(judged.draft)))


def verify_by_top_two(draft_BK, length_B, logits_BKV, *rest, **more):
    found = verify(draft_BK, length_B, logits_BKV, *rest, **more)
    second_BK = logits_BKV.topk(2, -1).indices[:, : draft_BK.shape[1], 1]
    return replace(found, matches_BK=found.matches_BK | (draft_BK == second_BK))


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [(Rule, "resolve", resolve_one_too_many), (chains, "verify", verify_by_top_two)],
    ids=["resolve", "verify"],
)
def test_mutant_verification_is_caught(target, draft, expected, monkeypatch, where, name, mutant):
    monkeypatch.setattr(where, name, mutant)
    records = run(target, draft, "model", 4)
    assert [record.tokens for record in records] != expected


def test_mutant_cache_without_rollback_is_caught(target, draft, expected, monkeypatch):
    """The target forgets to take rejected tokens out of its cache."""
    honest = ModelRunner.extend

    def extend_and_note(self, tokens):
        logits = honest(self, tokens)
        if self.model is target:
            self.stale = [length + len(feed) for length, feed in zip(self.lengths, tokens)]
        return logits

    def commit_stale(self, slot, tokens, length):
        self.lengths[slot] = max(length, getattr(self, "stale", self.lengths)[slot])

    monkeypatch.setattr(ModelRunner, "extend", extend_and_note)
    monkeypatch.setattr(ModelRunner, "commit", commit_stale)
    assert [record.tokens for record in run(target, draft, "ngram", 4)] != expected


def test_a_drafter_with_a_wrong_cache_costs_speed_not_correctness(
    target, draft, expected, monkeypatch
):
    """A drafter that never saw the prompt drafts badly; the target still decides."""
    honest = tiny.total(run(target, draft, "model", 4), "native_accepted")

    def admit_blindly(self, slot, sequence, features=None, *, soon=True):
        self.runner.prefill(slot, [3] * (len(sequence.tokens) - 1))

    monkeypatch.setattr(ModelDrafter, "admit", admit_blindly)
    records = run(target, draft, "model", 4)
    assert [record.tokens for record in records] == expected
    assert tiny.total(records, "native_accepted") < honest


def test_drafter_stops_at_eos_and_at_its_own_context(target):
    """With the target as its own draft everything is accepted, up to EOS and not past it."""
    eos = tiny.generate(target, tiny.prompts()[1], 5, eos=None)[2]
    stops = frozenset({eos})
    drafter = tiny.drafter("model", 1, target, eos=stops)
    engine = tiny.engine(target, drafter, 15, eos=stops)
    (record,) = tiny.decode_all(engine, [tiny.prompts()[1]], BUDGET)
    assert record.tokens == tiny.generate(target, tiny.prompts()[1], BUDGET, eos=eos)
    assert record.counts.drafted == record.counts.native_accepted == len(record.tokens)
    assert record.finish_reason == "eos"


def test_short_draft_context_ends_drafting_only(target, draft, expected):
    drafter = tiny.drafter("model", 1, draft, max_length=30)
    records = tiny.decode_all(tiny.engine(target, drafter, 4), tiny.prompts(), BUDGET)
    assert [record.tokens for record in records] == expected


def test_prompt_that_ends_in_eos(target, draft):
    prompt = [5, 6, tiny.EOS]
    engine = tiny.engine(target, tiny.drafter("model", 1, draft), 4)
    (record,) = tiny.decode_all(engine, [prompt], BUDGET)
    assert record.tokens == tiny.generate(target, prompt, BUDGET)


def test_seconds_are_shared_out_completely(target, draft):
    records = run(target, draft, "model", 4, slots=3)
    assert all(record.seconds["verify"] > 0 for record in records)
    assert all(torch.isfinite(torch.tensor(list(r.seconds.values()))).all() for r in records)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, top_k=5)], ids=["greedy", "sampling"])
@pytest.mark.parametrize("vocab", [56, 72])
def test_models_that_pad_one_vocabulary_differently(vocab, sampling):
    """Catches q and p of different widths, and draft ids that the target cannot read."""
    target, small = tiny.model(seed=1), tiny.model(seed=5, vocab=vocab)
    with torch.no_grad():
        target.lm_head.weight[56:] = 0  # padding: never among the likeliest
        small.lm_head.weight[64:] *= 50  # ids that only the draft has would be its favourites
    drafting = tiny.runner(small, 2, vocabulary=64)
    engine = tiny.engine(target, ModelDrafter(drafting, frozenset({tiny.EOS})), 4, slots=2)
    requests = [
        Request(tuple(p), 20, tag=n, sampling=sampling, seed=n)
        for n, p in enumerate(tiny.prompts(vocab=56))
    ]
    records = list(engine.run(requests))
    assert tiny.total(records, "drafted") > 0
    assert all(token < 64 for record in records for token in record.tokens)


@pytest.mark.parametrize("penalty", [1.0, 1.2])
@pytest.mark.parametrize("name", ["model", "cascade"])
def test_a_draft_that_lacks_ids_of_the_target_goes_on_after_them(name, penalty):
    """Padding that the target drew ended the run in an IndexError of the draft's embedding."""
    target, small = tiny.model(seed=1), tiny.model(seed=5, vocab=56)
    with torch.no_grad():
        target.lm_head.weight[56:] *= 3
    sampling = Sampling(repetition_penalty=penalty)
    requests = [
        Request(tuple(p), 20, tag=n, sampling=sampling)
        for n, p in enumerate(tiny.prompts(vocab=56))
    ]
    alone, drafted = (
        list(tiny.engine(target, drafter, 4, slots=2).run(requests))
        for drafter in (
            tiny.drafter("none", 2, None),
            tiny.drafter(name, 2, small, vocabulary=64),
        )
    )
    texts, expected = ({r.request.tag: r.tokens for r in run} for run in (drafted, alone))
    assert texts == expected
    assert any(token >= 56 for own in texts.values() for token in own[:-4])
    assert tiny.total(drafted, "drafted") > 0
