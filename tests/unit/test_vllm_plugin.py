"""fly's rules inside vLLM, on objects that look like vLLM's. No vLLM here."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fly import config as fly_config
from fly.errors import FlyError
from fly.models.tokenizers import Texts
from fly.speculation.rules import rule_of
from fly.speculation.rules.base import verify
from fly.speculation.sequence import Request, Sequence
from fly.speculation.stop_strings import StopMatcher
from fly.vllm_plugin import options
from fly.vllm_plugin.verifier import Verifier, replay, verdict_of

VOCABULARY, EOS = 16, 15
LOADED = """
import sys
from fly import registry
from fly.vllm_plugin import register, verifier
[registry.load(each) for entry in registry.RULES.values() for each in (entry.where, entry.settings)]
print([name for name in sys.modules if name.startswith(("fly.execution.", "llvmlite"))])
"""
RULES = {
    "exact": {"enable_fly": False},
    "fly": {"win_len": 1, "entropy_thre": 0.8},
    "no window": {"win_len": 0, "entropy_thre": None},
    "first places": {"win_len": 0, "entropy_thre": None, "exact_first_tokens": 3},
    "pattern": {"win_len": 0, "entropy_thre": None, "exact_pattern": ["[a-h]"]},
    "typical": {"verification": "typical"},
    "top_k": {"verification": "top_k", "relaxed_top_k": 4},
    "accept_all": {"verification": "accept_all"},
    "cascade": {"verification": "cascade", "cascade_alpha": 0.9},
    "mars": {"verification": "mars", "mars_theta": 0.5},
    "asd": {"verification": "asd", "asd_budget": 9.0, "asd_gap": None, "asd_max_mismatches": 3},
}


class Letters:
    """A tokenizer of a letter per token."""

    all_special_ids = (EOS,)

    def decode(self, ids, **_):
        return "".join(chr(ord("a") + index) for index in ids)


def rule(name):
    keys = {"target_model_path": "t", "spd_k": 8, **RULES[name]}
    return rule_of(fly_config.build(keys, "test"))


def request(number=0, output=(), budget=20, **sampling):
    usual = {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "seed": number}
    params = SimpleNamespace(max_tokens=budget, all_stop_token_ids={EOS}, **{**usual, **sampling})
    return SimpleNamespace(
        req_id=f"{number}-0a1b2c3d",
        prompt_token_ids=[1, 2, 3],
        output_token_ids=list(output),
        sampling_params=params,
    )


def case(counts, seed=0, peak=2.0):
    """(draft_N, logits_MV): many drafts are the target's own or near it."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(counts) + len(counts), VOCABULARY, generator=generator) * peak
    drafts, row = [], 0
    for count in counts:
        for _ in range(count):
            rank = torch.multinomial(torch.tensor([6.0, 3.0, 1.0]), 1, generator=generator)
            drafts.append(logits[row].topk(3).indices[rank])
            row += 1
        row += 1
    return torch.tensor(drafts, dtype=torch.int32), logits


def slow(rule_, served, draft, logits_NV):
    """The oracle: one request alone, by `verify` and the rule's own walk."""
    left = served.sampling_params.max_tokens - len(served.output_token_ids) - 1
    draft = draft[:left]
    if EOS in draft:
        draft = draft[: draft.index(EOS) + 1]
    k = len(draft)
    judged = verify(
        torch.tensor([draft]).view(1, k), torch.tensor([k]), logits_NV[None, : k + 1], rule_
    )
    texts = Texts(Letters())
    sequence = Sequence(
        Request(tuple(served.prompt_token_ids), 99),
        frozenset({EOS}),
        StopMatcher((), texts.decode),
        texts.decode_lines,
    )
    sequence.tokens += served.output_token_ids
    (own,) = judged.split()
    verdict = sequence.judge(rule_, own)
    accepted = verdict.resolution.accepted
    return [*draft[:accepted], own.target_tokens[accepted]]


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*RULES]),
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.integers(0, 10**6),
    st.integers(0, 6),
)
def test_any_batch_is_verified_as_each_request_alone(name, counts, seed, done):
    draft, logits = case(counts, seed)
    served = [request(i, output=[4] * (done + i), budget=done + 6) for i in range(len(counts))]
    served = [s for s in served if len(s.output_token_ids) < s.sampling_params.max_tokens]
    counts = counts[: len(served)]
    draft = draft[: sum(counts)]
    logits = logits[: sum(counts) + len(counts)]
    found = Verifier(rule(name), Texts(Letters())).verify(served, counts, draft, logits)
    rows = logits.split([count + 1 for count in counts])
    for own, of_request, part, rows_ in zip(found, served, draft.split(counts), rows):
        assert own == slow(rule(name), of_request, part.tolist(), rows_)


@pytest.mark.parametrize("name", RULES)
def test_rules_differ_from_exact_verification(name):
    counts = [5] * 40
    draft, logits = case(counts, seed=1)
    served = [request(i) for i in range(40)]
    exact, own = (
        Verifier(rule(n), Texts(Letters())).verify(served, counts, draft, logits)
        for n in ("exact", name)
    )
    assert (exact == own) == (name == "exact")
    assert sum(map(len, own)) >= sum(map(len, exact))


def test_rounds_give_the_output_and_its_counts():
    """Requests are decoded to their end, a pass without a draft among them."""
    verifier = Verifier(rule("no window"), Texts(Letters()), keeps_rounds=True, traced="top3")
    served = request(7, output=[4], budget=12)
    step = 0
    while len(served.output_token_ids) < 12 and EOS not in served.output_token_ids:
        counts = [0 if step == 1 else 4]
        draft, logits = case(counts, seed=step)
        served.output_token_ids += verifier.verify([served], counts, draft, logits)[0]
        step += 1
    rounds = verifier.take_rounds("7")
    assert verifier.take_rounds("7") == []
    assert json.loads(json.dumps(rounds)) == rounds
    texts = Texts(Letters())
    replayed, seen = [], []
    for output in (served.output_token_ids, served.output_token_ids[:5]):
        sequence = Sequence(
            Request((1, 2, 3), len(output)), frozenset({EOS}), StopMatcher((), texts.decode)
        )
        replay(sequence, output, rounds, "d", seen.append)
        replayed.append(sequence.record(0.0))
        assert replayed[-1].tokens == output
    counts = replayed[0].counts
    assert counts.emitted == len(served.output_token_ids) - 1
    assert counts.rounds == step
    deferred = [verdict_of(line, "d").resolution.deferred for line in rounds]
    assert counts.deferred_accepted == sum(map(len, deferred))
    assert counts.deferred_accepted > 0
    assert seen[0].entropy is not None
    assert len(seen[0].entropy) == len(seen[0].draft) + 1
    with pytest.raises(FlyError, match="do not give the output"):
        sequence = Sequence(Request((1,), 12), frozenset(), StopMatcher((), texts.decode))
        replay(sequence, served.output_token_ids[:-1], rounds, "d", seen.append)


def test_a_prefill_that_ends_the_output_has_no_round():
    texts = Texts(Letters())
    for output, budget in (([EOS], 9), ([3], 1)):
        sequence = Sequence(Request((1,), budget), frozenset({EOS}), StopMatcher((), texts.decode))
        replay(sequence, output, [], "d", lambda record: None)
        assert sequence.record(0.0).counts.rounds == 0
        assert sequence.finish_reason == ("eos" if output == [EOS] else "length")


def test_nothing_past_an_eos_fills_a_window():
    """fly's drafters end at an EOS, vLLM's go on."""
    logits = torch.full((1, 4, VOCABULARY), -9.0)
    for row, token in enumerate((3, EOS, 4, 5)):
        logits[0, row, token] = 9.0
    logits[0, 0, 6] = 9.0 - 0.1
    draft = torch.tensor([6, EOS, 4], dtype=torch.int32)
    window = rule_of(fly_config.build(
        {"target_model_path": "t", "spd_k": 8, "win_len": 2, "entropy_thre": None}, "test"
    ))  # fmt: skip
    found = Verifier(window, Texts(Letters())).verify([request()], [3], draft, logits[0])
    assert found == [[3]]


def test_forgotten_requests_leave_no_state():
    verifier = Verifier(rule("exact"), Texts(Letters()))
    draft, logits = case([2, 2])
    verifier.verify([request(0), request(1)], [2, 2], draft, logits)
    verifier.forget({"1-0a1b2c3d"})
    assert [*verifier._sequences] == ["1-0a1b2c3d"]


@pytest.mark.parametrize("with_q", [False, True])
def test_sampled_exact_verification_follows_the_target(with_q):
    """Over many seeds the first token has the target's distribution; a mutant's has not."""
    generator = torch.Generator().manual_seed(5)
    p = torch.softmax(torch.randn(VOCABULARY, generator=generator), -1)
    q = torch.softmax(torch.randn(VOCABULARY, generator=generator), -1)
    size, batch = 3000, 500
    seen = {"exact": [], "accept_all": []}
    for start in range(0, size, batch):
        served = [request(start + i, temperature=1.0) for i in range(batch)]
        counts = [1] * batch
        if with_q:
            draft = torch.multinomial(q, batch, True, generator=generator).int()
            q_NV = q.expand(batch, -1)
        else:
            draft, q_NV = torch.full((batch,), 3, dtype=torch.int32), None
        logits = p.log().expand(2 * batch, -1)
        for name, tokens in seen.items():
            verifier = Verifier(rule(name), Texts(Letters()))
            tokens += [b[0] for b in verifier.verify(served, counts, draft, logits, q_NV)]

    def statistic(tokens):
        counts = torch.bincount(torch.tensor(tokens), minlength=VOCABULARY)
        return float(((counts - size * p) ** 2 / (size * p)).sum())

    assert statistic(seen["exact"]) < 45  # chi-square of 15 degrees: 1e-4 lies at 44.3
    assert statistic(seen["accept_all"]) > 45


def test_sampling_repeats_with_the_seed_and_by_request():
    draft, logits = case([4])
    verifiers = [Verifier(rule("exact"), Texts(Letters())) for _ in range(3)]
    seeds = (1, 1, 2)
    found = [
        [
            v.verify([request(i, seed=seed, temperature=2.0)], [4], *case([4], seed=i))[0]
            for i in range(20)
        ]
        for v, seed in zip(verifiers, seeds)
    ]
    assert found[0] == found[1] != found[2]
    unseeded = [request(i, seed=None, temperature=5.0) for i in range(20)]
    fresh = Verifier(rule("exact"), Texts(Letters()))
    blocks = [fresh.verify([one], [4], draft, logits)[0] for one in unseeded]
    assert len({tuple(block) for block in blocks}) > 1


def test_vllms_own_meaning_of_sampling_parameters():
    draft, logits = case([3])
    for sampling in ({"temperature": 1e-6}, {"temperature": 0.9, "top_k": 1}):
        own, greedy = (
            Verifier(rule("exact"), Texts(Letters())).verify([one], [3], draft, logits)
            for one in (request(**sampling), request())
        )
        assert own == greedy


# ------------------------------------------------------------------------------ options


def test_options_are_the_keys_of_a_pair(tmp_path):
    assert options.read({}, "t", 4, "9.9") is None
    assert options.read({"other": 1}, "t", None, "9.9") is None
    found = options.read({"fly": {"win_len": 3, "draft_rank_max": 2}}, "t", 8, "0.32.0+cpu")
    assert (found.rule, found.win_len, found.spd_k, found.draft_rank_max) == ("fly", 3, 8, 2)
    path = tmp_path / "pair.json"
    path.write_text(json.dumps({"target_model_path": "x", "win_len": 2, "use_ngram": True}))
    for given_ in (str(path), {"config_path": str(path)}):
        assert options.read({"fly": given_}, "t", 8, "0.33.0").win_len == 2
    both = {"config_path": str(path), "win_len": 3}
    assert options.read({"fly": both}, "t", 8, "0.33.1").win_len == 3


@pytest.mark.parametrize(
    ("additional", "drafts", "version", "said"),
    [
        ({"fly": {}}, 8, "0.31.0", "fly's rules run in vLLM 0.32 and 0.33, not in 0.31.0: install"),
        ({"fly": {}}, None, "0.32.0", "nothing is drafted: add a speculative_config"),
        ({"fly": 3}, 8, "0.32.0", "additional_config fly=3: give"),
        ({"fly": {"win_len": 8}}, 8, "0.32.0", "win_len=8 needs spd_k >= 9, got 8"),
        ({"fly": {"win_lem": 8}}, 8, "0.32.0", "unknown key 'win_lem'"),
        ({"fly": {"defer_across_rounds": True}}, 8, "0.32.0", "vLLM gives tokens away"),
        ({"fly": {"verification": "fsd"}}, 8, "0.32.0", "vLLM drafts without the draft's prob"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(additional, drafts, version, said):
    with pytest.raises(FlyError, match=re.escape(said)) as caught:
        options.read(additional, "t", drafts, version)
    assert "\n" not in str(caught.value)


def test_vllms_processes_load_no_kernels():
    """vLLM looks into every object of every module, and fails at llvmlite's library."""
    loaded = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    assert loaded.stdout.strip() == "['fly.execution.argmax']", loaded.stderr
