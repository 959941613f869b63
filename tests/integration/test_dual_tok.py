"""Draft and target with different tokenizers: no text depends on it, and acceptance is as known.

A draft that is the target in other ids must do what the target itself would do as a draft. With
fewer ids it is known where its drafts end. Mutants that mix up ids lower acceptance, and never
change a text.
"""

import functools
import json
import random
from collections import Counter

import pytest
import torch
from lm_eval.models.huggingface import HFLM

from fly.errors import FlyError
from fly.execution.model_runner import ModelRunner
from fly.harness.hf import FlyLM
from fly.models.draft_vocabulary import NONE
from fly.models.token_intersection import TokenIntersection
from fly.runs import context
from fly.runs.finished_requests import FinishedRequests
from fly.runs.manifest import Manifest
from fly.speculation.drafters import draft_view
from fly.speculation.sampling import Sampling
from fly.speculation.sequence import Request
from tests import tiny
from tests.integration import test_sampling_distribution as distribution
from tests.integration.test_lm import instances
from tests.two_tokenizers import (
    CODE,
    PROSE,
    byte_bpe,
    intersection,
    save_pair,
    speaking,
    unigram,
    words,
)

BUDGET = 24
V = 64
EOS = frozenset({tiny.EOS})


def drafter(name, slots, model, shared, eos=EOS, **kwargs):
    return tiny.drafter(name, slots, model, eos, intersection=shared, **kwargs)


def outcome(records):
    return [(record.tokens, record.counts) for record in records]


# The target's ids in another order


def renumbered(dropped=(), size=V, seed=4):
    """All of the target's ids in a random order; those dropped can be read, but not drafted."""
    order = random.Random(seed).sample(range(size), size)
    to_target = [NONE if token in dropped else token for token in order]
    where = {token: index for index, token in enumerate(order)}
    return TokenIntersection(torch.tensor(to_target), size, spell=lambda token: [where[token]])


RULES = {
    "exact": tiny.EXACT,
    "within": tiny.relaxed(2, 0.3),
    "across": tiny.relaxed(4, 0.1, across=True),
}


@pytest.mark.parametrize(
    ("rule", "name", "slots", "capture"),
    [
        tiny.slow("exact", "model", 1, None),
        ("exact", "cascade", 3, False),
        ("within", "model", 8, None),
        tiny.slow("within", "cascade", 1, None),
        tiny.slow("across", "model", 3, False),
        ("across", "cascade", 8, None),
    ],
)
def test_other_ids_change_nothing(target, draft, rule, name, slots, capture):
    """Not a text and not a count, under FLy either: its windows count the target's tokens."""
    shared = renumbered()
    found = []
    for made in (
        tiny.drafter(name, slots, draft, capture=capture),
        drafter(name, slots, speaking(draft, shared), shared, capture=capture),
    ):
        own = tiny.runner(target, slots, capture)
        engine = tiny.engine(own, made, 5, RULES[rule])
        found.append(tiny.decode_all(engine, tiny.prompts(8), BUDGET))
    assert outcome(found[0]) == outcome(found[1])
    assert 0 < tiny.total(found[1], "native_accepted") < tiny.total(found[1], "drafted")
    assert (tiny.total(found[1], "deferred_accepted") > 0) == (rule != "exact")


def foreseen(tokens, dropped, k):
    """(rounds, accepted draft tokens) of a draft that knows the text, but not the dropped ones."""
    at = rounds = accepted = 0
    while at < len(tokens):
        rounds += 1
        limit = min(k, BUDGET - at - 1)
        stand = 0
        while stand < limit and at + stand < len(tokens) and tokens[at + stand] not in dropped:
            stand += 1
        accepted += stand
        at += stand + 1
    return rounds, accepted


@pytest.mark.parametrize("name", ["model", "cascade"])
def test_acceptance_with_fewer_ids_is_known_beforehand(target, name):
    expected = [tiny.generate(target, prompt, BUDGET) for prompt in tiny.prompts()]
    often = [token for token, _ in Counter(t for text in expected for t in text).most_common()]
    dropped = {token for token in often[2::5] if token != tiny.EOS}
    shared = renumbered(dropped)
    model = speaking(target, renumbered())
    engine = tiny.engine(target, drafter(name, 1, model, shared), 6)
    records = tiny.decode_all(engine, tiny.prompts(), BUDGET)
    assert [record.tokens for record in records] == expected
    for record in records:
        found = record.counts.rounds, record.counts.native_accepted
        assert found == foreseen(record.tokens, dropped, 6)
    assert 0 < tiny.total(records, "native_accepted") < tiny.total(records, "drafted")
    assert shared.share == 1 - len(dropped) / V


# Two tokenizers


@pytest.fixture(scope="module")
def tokenizers():
    return {
        "prose": byte_bpe(PROSE, 330),
        "code": byte_bpe(CODE, 300, eos="</s>", bos="<s>"),
        "pieces": unigram(PROSE, 60),
    }


PAIRS = [("code", "prose"), ("pieces", "prose"), ("code", "pieces")]  # of draft, of target
NAMES = ["-".join(pair) for pair in PAIRS]
# for what hangs on the loop rather than on the tokenizers
ONE_PAIR = pytest.mark.parametrize("pair", PAIRS[:1], ids=NAMES[:1], indirect=True)
ONE_PAIR_DAILY = pytest.mark.parametrize(
    "pair",
    [PAIRS[0], *(pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS[1:])],
    ids=NAMES,
    indirect=True,
)


@pytest.fixture(scope="module", params=PAIRS, ids=NAMES)
def pair(request, tokenizers):
    """(target, draft, what they share, EOS, prompts, the target's own texts)

    As with real pairs, what the draft lacks is rarer in texts than in the vocabulary. What the
    target lacks would be the draft's favourites.
    """
    of_draft, of_target = (tokenizers[name] for name in request.param)
    target = tiny.model(seed=1, vocab=len(of_target))
    shared = intersection(of_draft, of_target)
    with torch.no_grad():
        target.lm_head.weight[shared.to_draft_V == NONE] *= 0.8
    draft = speaking(tiny.noisy_copy(target, 0.003), shared)
    with torch.no_grad():
        draft.lm_head.weight[shared.to_target_D == NONE] *= 3
    eos = of_target.eos_token_id
    texts = ["def total(", "The answer is", "é ü 中 🎉", "\n\n  values", "x", "a b c", "12", "is "]
    prompts = [of_target.encode(text) for text in texts]
    expected = [tiny.generate(target, prompt, BUDGET, eos=eos) for prompt in prompts]
    return target, draft, shared, frozenset({eos}), prompts, expected


def decode(pair, name="model", slots=1, rule=tiny.EXACT, k=5, **kwargs):
    target, model, shared, eos, prompts, _ = pair
    made = drafter(name, slots, model, shared, eos, **kwargs)
    return tiny.decode_all(
        tiny.engine(target, made, k, rule, slots, eos=eos), prompts, BUDGET, stops=()
    )


@pytest.fixture(scope="module")
def acceptance(pair):
    """How many draft tokens stand if nothing is wrong, by drafter; decoded once each."""
    return functools.cache(lambda name: tiny.total(decode(pair, name, 4), "native_accepted"))


@ONE_PAIR_DAILY
@pytest.mark.parametrize(("name", "slots"), [("model", 1), ("cascade", 3)])
def test_exact_equals_generate(pair, name, slots):
    shared, expected = pair[2], pair[-1]
    records = decode(pair, name, slots)
    assert [record.tokens for record in records] == expected
    assert 0 < tiny.total(records, "native_accepted") < tiny.total(records, "drafted")
    assert 1 / 3 < shared.share < 1
    said = {token for record in records for token in record.tokens}
    assert any(shared.to_draft_V[token] == NONE for token in said)  # some were read by spelling


@ONE_PAIR_DAILY
def test_the_cascade_drafts_exactly_what_the_model_drafts(pair):
    found = [outcome(decode(pair, name, slots=4, k=8)) for name in ("model", "cascade")]
    assert found[0] == found[1]


@ONE_PAIR_DAILY
def test_static_passes_draft_what_eager_ones_do(pair):
    """The whole loop on the device, too."""
    assert outcome(decode(pair, slots=3)) == outcome(decode(pair, slots=3, capture=False))


@ONE_PAIR_DAILY
def test_the_drafts_context_counts_the_drafts_tokens(pair, monkeypatch):
    """Prompts that are too long for it once they are spelled are not drafted for."""
    fed = []
    honest = ModelRunner.extend

    def extend(self, tokens):
        if self.intersection is not None:
            fed.extend(length + len(ids) for length, ids in zip(self.lengths, tokens))
        return honest(self, tokens)

    monkeypatch.setattr(ModelRunner, "extend", extend)
    records = decode(pair, slots=3, max_length=24)
    assert [record.tokens for record in records] == pair[-1]
    assert 20 < max(fed) <= 24


# Mutants: texts stay, acceptance falls


def logits_unmapped(self, logits_ND):
    """The draft's ids are taken for the target's."""
    wanted = len(self.to_draft_V)
    more = max(0, wanted - logits_ND.shape[-1])
    return torch.nn.functional.pad(logits_ND, (0, more), value=float("-inf"))[..., :wanted]


def read_unmapped(self, token, *, first=False):
    """The target's ids are taken for the draft's."""
    return [min(token, len(self.to_target_D) - 1)]


def cache_not_cut(self, slot, tokens, length):
    """Rejected draft tokens stay in the draft's cache."""
    kept = length if self.intersection is None else self.lengths[slot]
    honest_commit(self, slot, tokens, kept)


honest_commit = ModelRunner.commit
MUTANTS = [
    (TokenIntersection, "spread_logits", logits_unmapped),
    (TokenIntersection, "read", read_unmapped),
    (ModelRunner, "commit", cache_not_cut),
]


@ONE_PAIR_DAILY
@pytest.mark.parametrize("name", ["model", "cascade"])
@pytest.mark.parametrize(
    ("where", "method", "mutant"), MUTANTS, ids=[m.__name__ for _, _, m in MUTANTS]
)
def test_mutants_cost_acceptance_and_no_text(
    pair, acceptance, monkeypatch, where, method, mutant, name
):
    honest = acceptance(name)
    monkeypatch.setattr(where, method, mutant)
    try:
        records = decode(pair, name, 4)
    except (IndexError, RuntimeError):
        return  # it was fed an id that does not exist
    assert [record.tokens for record in records] == pair[-1]
    assert tiny.total(records, "native_accepted") < honest


@ONE_PAIR_DAILY
@pytest.mark.parametrize("name", ["model", "cascade"])
def test_tokens_that_are_not_suppressed_cost_acceptance_and_no_text(pair, acceptance, name):
    """The mutant: what the target does not have is drafted, as some token that the draft lacks."""
    target, model, shared, eos, prompts, expected = pair
    ids, lacking = shared.to_target_D.clone(), (shared.to_draft_V == NONE).nonzero().flatten()
    free = (ids == NONE).nonzero().flatten()[: len(lacking)]
    ids[free] = lacking[: len(free)]
    mutant = TokenIntersection(ids, len(shared.to_draft_V), shared.read)
    records = decode((target, model, mutant, eos, prompts, expected), name, 4)
    assert [record.tokens for record in records] == expected
    assert tiny.total(records, "native_accepted") < acceptance(name)


# The view, where FLy rolls texts back


def watched(pair, slots, name="model"):
    """(drafted tokens, how many of them a fresh pass over the text would not draft)"""
    target, model, shared, eos, prompts, _ = pair
    made = drafter(name, slots, model, shared, eos)
    rule = tiny.relaxed(4, 0.1, across=True)
    engine = tiny.engine(target, made, 3, rule, slots, eos=eos)
    drafted, wrong, verify = 0, 0, engine._verify

    def checked(running, draft):
        nonlocal drafted, wrong
        for slot, sequence in enumerate(running):
            chain = draft.on_host().tokens[slot]
            parts = [shared.read(t, first=not i) for i, t in enumerate(sequence.tokens)]
            ids = [index for part in parts for index in part]
            with torch.inference_mode():
                logits = model(torch.tensor([[*ids, *shared.speakable(chain)]])).logits
            own = shared.spread_logits(logits)[0].argmax(-1).tolist()[len(ids) - 1 :]
            drafted += len(chain)
            wrong += sum(a != b for a, b in zip(chain, own))
        return verify(running, draft)

    engine._verify = checked
    records = tiny.decode_all(engine, prompts, BUDGET)
    assert tiny.total(records, "deferred_rolled_back") > 0
    return drafted, wrong


@ONE_PAIR_DAILY
@pytest.mark.parametrize(("name", "slots"), [("cascade", 1), ("model", 3)])
def test_the_draft_sees_the_text_as_it_is(pair, slots, name):
    drafted, wrong = watched(pair, slots, name)
    assert drafted > 100
    assert wrong == 0


@ONE_PAIR_DAILY
def test_a_view_that_is_not_rolled_back_is_noticed(pair, monkeypatch):
    monkeypatch.setattr(draft_view, "common_prefix", lambda old, new: min(len(old), len(new)))
    _, wrong = watched(pair, 3)
    assert wrong > 0


@ONE_PAIR
def test_views_go_with_their_sequences(pair):
    made = drafter("model", 3, pair[1], pair[2], pair[3])
    engine = tiny.engine(pair[0], made, 3, slots=3, eos=pair[3])
    tiny.decode_all(engine, pair[4] * 2, 10)
    engine._drafter._chains.clear()
    assert len(made._views._views) == 0


# Sampling


SETTINGS = Sampling(1.5, top_k=6, repetition_penalty=1.3)


@pytest.fixture(scope="module")
def sampled():
    """(target, draft, what they share: 5 of the 8 ids, the target's distribution)"""
    target = tiny.model(1, vocab=distribution.V, layers=1)
    shared = renumbered({3, 5, 6}, size=distribution.V)
    close = tiny.noisy_copy(target, 0.08)
    expected = distribution.continuations(target, distribution.PROMPT, 3, SETTINGS, EOS)
    return target, speaking(close, renumbered(size=distribution.V)), shared, expected


def joint(sampled, name, count=1200):
    target, model, shared, expected = sampled
    made = drafter(name, 64, model, shared)
    requests = distribution.table_requests(count, 3, (SETTINGS,), seed=3)
    records = list(tiny.engine(target, made, 3, slots=64).run(requests))
    assert distribution.settled(records)
    return distribution.joint(records, expected)


@pytest.mark.parametrize("name", ["model", pytest.param("cascade", marks=pytest.mark.slow)])
def test_samples_are_the_targets(sampled, name):
    test = joint(sampled, name)
    assert test.freedom > 30
    assert test.p_value > distribution.HONEST


def test_probabilities_in_the_drafts_order_are_refuted(sampled, monkeypatch):
    """The mutant: q is not spread over the target's ids."""
    order = sampled[2].to_target_D
    monkeypatch.setattr(
        "fly.speculation.drafters.draft_model._stacked",
        lambda parts: torch.stack(parts)[:, order.clamp(min=0)] if parts else None,
    )
    assert joint(sampled, "model").p_value < distribution.REFUTED


def test_samples_with_other_ids_are_the_same(target, draft):
    """Draws, penalties and filters are over the target's ids, in their order."""
    shared = renumbered()
    requests = [
        Request(tuple(p), 20, tag=n, sampling=SETTINGS, seed=n)
        for n, p in enumerate(tiny.prompts())
    ]
    found = []
    for made in (
        tiny.drafter("model", 3, draft),
        drafter("model", 3, speaking(draft, shared), shared),
    ):
        engine = tiny.engine(target, made, 4, slots=3)
        found.append({r.request.tag: (r.tokens, r.counts) for r in engine.run(requests)})
    assert found[0] == found[1]


# Through lm-eval's backend


@pytest.fixture(scope="module")
def saved(tokenizers, tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("dual"), tokenizers["prose"], tokenizers["code"])


def fly_lm(saved, **kwargs):
    return FlyLM(
        pretrained=str(saved / "draft"),
        target_model_path=str(saved / "target"),
        device="cpu",
        **{
            "dual_tok": True, "spd_k": 4, "draft_policy": "fixed", "enable_fly": False,
            "dtype": "float32", **kwargs,
        },
    )  # fmt: skip


WANTED = {"max_gen_toks": 30, "until": ["zz"]}
TEXTS = ["def add(a, b):", "x", "The answer is", "é ü 中"]


@pytest.mark.parametrize("drafting", [{}, {"drafter": "cascade", "batch_size": 3}])
def test_texts_equal_hf_and_the_share_is_said_and_recorded(saved, caplog, drafting):
    caplog.set_level("INFO", logger="fly")
    lm = fly_lm(saved, **drafting)
    hf = HFLM(pretrained=str(saved / "target"), device="cpu", dtype="float32")
    asked = instances(WANTED, TEXTS)
    assert lm.generate_until(asked) == hf.generate_until(asked)
    assert 0 < lm.stats.counts.native_accepted < lm.stats.counts.drafted
    share = json.loads(json.dumps(lm.get_model_info()["fly"]))["draft_vocabulary_share"]
    assert share == round(lm.pair.intersection.share, 4)
    total = len(lm.tokenizer)
    assert f"the draft can draft {100 * share:.1f} % of the target's {total} tokens" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_run_that_was_cut_short_is_gone_on_with(saved, tmp_path, monkeypatch):
    manifest = Manifest.create(tmp_path, {"output_path": str(tmp_path)})
    asked = instances(WANTED, TEXTS)
    whole = fly_lm(saved)
    expected = whole.generate_until(asked)
    context.start(tmp_path).join(manifest, None)
    cut = fly_lm(saved)
    keep = cut.keep

    def interrupt(*args):
        keep(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(cut, "keep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cut.generate_until(asked)
    context.start(tmp_path).join(manifest, FinishedRequests(tmp_path, manifest.started))
    resumed = fly_lm(saved)
    assert resumed.generate_until(asked) == expected
    assert resumed.get_model_info()["fly"]["resumed"]["requests"] == 1
    assert resumed.stats.counts == whole.stats.counts
    manifest.release()
    context.start()


def test_one_vocabulary_needs_no_map(saved_pair):
    lm = fly_lm(saved_pair)
    assert lm.pair.intersection is None
    assert lm.get_model_info()["fly"]["draft_vocabulary_share"] is None


def test_little_in_common_is_warned_of(tokenizers, tmp_path, caplog):
    few = words("<unk>", *"aeiou", eos_token="</s>")
    lm = fly_lm(save_pair(tmp_path, tokenizers["prose"], few))
    assert 0 < lm.pair.intersection.share < 1 / 3
    (warning,) = [record for record in caplog.records if "dual_tok" in record.message]
    assert warning.levelname == "WARNING"
    assert "few of its drafts" in warning.message


def test_without_dual_tok_the_refusal_names_it(saved):
    with pytest.raises(FlyError, match=r"different vocabularies .* set dual_tok=true"):
        fly_lm(saved, dual_tok=False)
