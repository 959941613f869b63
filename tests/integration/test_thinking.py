"""`relax_in`: where a tiny model with think tokens is relaxed."""

from dataclasses import replace

import pytest

from fly import config
from fly.models.tokenizers import Texts
from fly.speculation.rules import rule_of
from fly.speculation.rules.judged import JudgedDraft
from fly.speculation.rules.places import Places
from fly.speculation.sequence import Request, Sequence
from fly.speculation.stop_strings import StopMatcher
from tests import tiny
from tests.integration.test_lm import fly_lm, instances

OPEN, CLOSE, BUDGET = 7, 8, 60


class Vocabulary:
    def get_vocab(self):
        return {"<think>": OPEN, "</think>": CLOSE}


class NoVocabulary:
    def get_vocab(self):
        return {}


def made(relax_in, tokenizer=None, **keys):
    base = {"target_model_path": "x", "draft_model_path": "y", "win_len": 0, "entropy_thre": None}
    found = config.build({**base, "relax_in": relax_in, **keys}, "here")
    return rule_of(found, tokenizer or Vocabulary())


@pytest.fixture(scope="module")
def thinker(target):
    """A target that writes both think tokens now and then."""
    import copy

    import torch

    found = copy.deepcopy(target)
    with torch.no_grad():
        for token, like in ((OPEN, 40), (CLOSE, 44)):
            found.lm_head.weight[token] = found.lm_head.weight[like] * 1.3
    return found


def decoded(target, rule, slots=2, prefix=()):
    """(tokens by prompt, {tag: places of deferred tokens that stand})"""
    deferred = {}

    def observe(record):
        kept = deferred.setdefault(record.request.tag, set())
        kept.update(place for place in record.deferred if place < record.length)

    draft = tiny.noisy_copy(target, 0.06)
    engine = tiny.engine(
        target, tiny.drafter("model", slots, draft), 4, rule, slots, observer=observe
    )
    requests = [Request((*p, *prefix), BUDGET, tag=i) for i, p in enumerate(tiny.prompts(8))]
    return {r.request.tag: [*r.tokens] for r in engine.run(requests)}, deferred


def thinks(prompt, output):
    """Per place of the output: whether a thought is open before it."""
    found, is_open = [], False
    for token in [*prompt, *output]:
        found.append(is_open)
        is_open = token == OPEN or (is_open and token != CLOSE)
    return found[len(prompt) :]


def inside_and_outside(outputs, deferred, prefix):
    counts = [0, 0]
    for tag, places in deferred.items():
        is_thought = thinks((*tiny.prompts(8)[tag], *prefix), outputs[tag])
        for place in places:
            if place < len(is_thought):
                counts[is_thought[place]] += 1
    return counts[1], counts[0]


@pytest.mark.parametrize(
    ("keys", "slots"), [tiny.slow({}, 1), ({"win_len": 2, "defer_across_rounds": True}, 3)]
)
def test_only_thoughts_are_relaxed(thinker, keys, slots):
    """`everywhere` is the mutant: it relaxes both."""
    for prefix in ((), (OPEN,)):
        found = {
            where: inside_and_outside(*decoded(thinker, made(where, **keys), slots, prefix), prefix)
            for where in ("everywhere", "thinking", "answer")
        }
        assert min(found["everywhere"]) > 0
        assert found["thinking"][0] > 0 == found["thinking"][1]
        assert found["answer"][0] == 0 < found["answer"][1]


def test_slots_do_not_matter(thinker):
    found = [decoded(thinker, made("thinking"), slots)[0] for slots in (1, 3)]
    assert found[0] == found[1]


@pytest.mark.parametrize("rule", ["cascade", tiny.slow("ensemble"), "asd", tiny.slow("typical")])
def test_published_rules_know_it_too(thinker, rule):
    keys = {"cascade": {"cascade_alpha": 0.6}, "ensemble": {"assistant_ensemble_weight": 0.3},
            "asd": {"asd_budget": 50.0, "asd_gap": None, "asd_max_mismatches": 9},
            "typical": {"typical_epsilon": 0.01}}[rule]  # fmt: skip
    relaxed = decoded(thinker, made("thinking", verification=rule, **keys), prefix=(OPEN,))
    inside, outside = inside_and_outside(*relaxed, (OPEN,))
    assert inside > 0 == outside


@pytest.mark.parametrize("relax_in", ["thinking", "answer"])
@pytest.mark.parametrize("before", [OPEN, CLOSE])
@pytest.mark.parametrize(("drafted", "own"), [(CLOSE, 20), (20, CLOSE), (OPEN, 20), (20, OPEN)])
def test_tokens_that_open_or_close_are_exact(relax_in, before, drafted, own):
    judged = JudgedDraft([drafted], [False], [True], [own, 3], last_of=lambda ids: before)
    opens_or_closes = (before == OPEN) == (CLOSE in (drafted, own))
    is_relaxed_region = (before == OPEN) == (relax_in == "thinking")
    is_exact = made(relax_in).places.are_exact(judged, 0)
    assert is_exact == (opens_or_closes or not is_relaxed_region)


def allows(places, text, drafted, own):
    """Whether the rule may let this draft stand behind a text, where the target has its own."""
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel|>", "<|end|>"]})
    texts = Texts(tokenizer)
    rule = made("thinking", tokenizer)
    rule.places = places
    sequence = Sequence(
        Request((1,), 500), frozenset(), StopMatcher((), texts.decode), texts.decode_lines
    )
    sequence.tokens += tokenizer.encode(text, add_special_tokens=False)
    draft = tokenizer.encode(drafted, add_special_tokens=False)
    target = tokenizer.encode(own, add_special_tokens=False) if isinstance(own, str) else own
    matches = [False] + [True] * (len(draft) - 1)
    judged = JudgedDraft(draft, matches, [not m for m in matches], [*target[:1], *draft[1:], 1])
    return bool(sequence.judge(rule, judged).resolution.accepted)


TEXTS = Places(relax_in="thinking", think_tokens=("[T]", "[/T]"))


def test_texts_where_the_tokenizer_has_no_such_tokens():
    rule = made("thinking", NoVocabulary(), think_tokens=["[T]", "[/T]"])
    assert rule.places == TEXTS
    assert not allows(TEXTS, " x", "a", "b")
    assert allows(TEXTS, " x [T] y", "a", "b")
    assert not allows(TEXTS, " x [T] y [/T] z", "a", "b")
    assert TEXTS.thought_in([1], lambda ids: "[T] on and on") == "open"
    assert TEXTS.thought_in([1], lambda ids: "[T] on [/T] 7") == "closed"
    assert TEXTS.thought_in([1], lambda ids: "on [/T] 7") == "none"


def test_a_part_of_a_character_may_be_of_a_text_that_closes():
    odd = Places(relax_in="thinking", think_tokens=("[T]", "\u25c1T"))
    of_three = tiny.byte_tokenizer().encode("\u25c1", add_special_tokens=False)
    assert len(of_three) == 3
    assert allows(odd, "[T] y", "a", "b")
    assert not allows(odd, "[T] y", "a", of_three[:1])


@pytest.mark.parametrize(
    ("text", "drafted", "own"),
    [("[T] y", "a", "["), ("[T] y", "[", "a"), ("[T] y[", "a", "/"), ("[T] y[/T", "]", "a")],
)
def test_every_token_of_a_text_that_closes_is_exact(text, drafted, own):
    assert not allows(TEXTS, text, drafted, own)
    is_open_again = Places(relax_in="answer", think_tokens=("[/T]", "[T]"))
    assert not allows(is_open_again, text, drafted, own)


def test_texts_may_hold_special_tokens():
    """As the channels of gpt-oss; rules' other texts have line breaks in their place."""
    thinking = Places(relax_in="thinking", think_tokens=("<|channel|>analysis", "<|end|>"))
    answer = replace(thinking, relax_in="answer")
    for text, is_thought in (
        ("<|channel|>analysis hm", True),
        ("<|channel|>analysis hm<|end|>so", False),
    ):
        assert allows(thinking, text, "a", "b") == is_thought
        assert allows(answer, text, "a", "b") != is_thought


def test_unclosed_thoughts_by_ids():
    places = made("thinking").places
    assert places.thought_in([1, OPEN, 5, CLOSE, OPEN, 6], str) == "open"
    assert places.thought_in([1, OPEN, 5, CLOSE, 6], str) == "closed"
    assert places.thought_in([1, CLOSE], str) == "none"


@pytest.mark.parametrize("is_warned", [True, False])
def test_a_run_that_never_thinks_says_so(saved_pair, caplog, is_warned):
    """It is exact verification throughout, which nobody asked for."""
    asked = instances({"max_gen_toks": 4})[:1]
    opening = "[T]" if is_warned else asked[0].args[0][:1]
    lm = fly_lm(saved_pair, enable_fly=True, relax_in="thinking", think_tokens=[opening, "[/T]"])
    lm.generate_until(asked)
    assert ("no answer opens a thought with '[T]'" in caplog.text) == is_warned


@pytest.mark.parametrize("keys", [{"enable_fly": False}, {"use_sd": False}], ids=str)
def test_runs_that_relax_nothing_count_thoughts_too(saved_pair, caplog, keys):
    """To be compared; and they are what the user asked for, so that nothing is to be said."""
    asked = instances({"max_gen_toks": 4})[:1]
    opening = asked[0].args[0][:1]
    for tokens, count in (([opening, "[/T]"], 1), (["[T]", "[/T]"], 0)):
        lm = fly_lm(saved_pair, relax_in="thinking", think_tokens=tokens, **keys)
        lm.generate_until(asked)
        assert lm.stats.unclosed_thinking == count
    assert "no answer opens a thought" not in caplog.text


def test_runs_of_before_the_key_have_their_hash():
    base = config.build({"target_model_path": "x", "use_sd": False}, "here")
    assert base.hash() == "263c700415d2"
    assert base.model_copy(update={"relax_in": "answer"}).hash() != base.hash()
