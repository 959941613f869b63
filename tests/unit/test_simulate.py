"""A walk over a recording against the product's own engine, pass by pass."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.runs.records import Counts
from fly.speculation.drafters.base import NoDrafter
from fly.speculation.drafters.cascade import CascadeDrafter
from fly.speculation.drafters.draft_model import ModelDrafter
from fly.speculation.engine import Engine
from fly.speculation.rules.gates import EntropyGate, MarginGate, RankGate, RatioGate, all_pass
from fly.speculation.sequence import Request
from fly.tuning.recorder import Answer, Recorder, Recording, Tree
from fly.tuning.simulate import CascadeCounter, DraftCounter, walk
from tests import tiny
from tests.positional import Positional, ScriptedModel

NGRAMS = (1, 3, 4)
KS = (1, 2, 3, 5, 8)
LENGTH = 12


def letters(ids):
    return "".join(chr(97 + i) for i in ids)


class Widths:
    """Stands between a runner and its user, and notes the width of every pass of one sequence."""

    def __init__(self, runner):
        self.runner, self.widths = runner, []

    def __getattr__(self, name):
        return getattr(self.runner, name)

    def extend(self, tokens):
        self.widths.append(len(tokens[0]))
        return self.runner.extend(tokens)


def answers_of(target, requests, eos, decode=str):
    """What the target alone answers, in the order of the requests."""
    engine = Engine(
        target, NoDrafter(), tiny.EXACT, spd_k=0, eos_ids=eos, decode=decode, reuse_prefixes=False
    )
    return [
        Answer("t", i, r.request.prompt, r.request.budget, tuple(r.tokens), r.finish_reason)
        for i, r in enumerate(engine.run(requests))
    ]


def by_engine(target, draft, requests, eos, k, rule, ngrams=None, decode=str):
    """(counts of every request, widths of the draft's passes, of the target's)."""
    target, draft = Widths(target), Widths(draft)
    drafter = CascadeDrafter(draft, eos, ngrams) if ngrams else ModelDrafter(draft, eos)
    engine = Engine(
        target, drafter, rule, spd_k=k, eos_ids=eos, decode=decode, reuse_prefixes=False
    )
    records = list(engine.run(requests))
    return [record.counts for record in records], draft.widths, target.widths


def compare(target, draft, requests, recordings, eos, k, rule, decode=str):
    """Every round, pass and count of the walk is the engine's, for both drafters."""
    step, cascade = DraftCounter(), CascadeCounter(*NGRAMS, draft.relative_cost)
    found = walk(recordings, k, rule, decode, [step, cascade])
    for counter, ngrams in ((step, None), (cascade, NGRAMS)):
        counts, drafts, verifies = by_engine(target, draft, requests, eos, k, rule, ngrams, decode)
        sums = Counts()
        for each in counts:
            sums.add(each)
        assert found.counts == sums
        assert sorted(counter.passes.count.elements()) == sorted(drafts)
        assert sorted(found.verify.count.elements()) == sorted(verifies)
    return found.counts


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    agree=st.sampled_from([0.5, 0.8, 0.95]),
    k=st.sampled_from(KS),
    window=st.sampled_from([0, 1, 2, 4]),
    theta=st.sampled_from([None, 0.2, 0.9]),
    across=st.booleans(),
    exact_first=st.sampled_from([0, 0, 3, 12]),
    pattern=st.sampled_from(["", "", "[a-c]+", "b[^a]*"]),
)
def test_every_rule_walks_as_the_engine_decodes(
    seed, agree, k, window, theta, across, exact_first, pattern
):
    """Where behind a deferral the text goes on by position, the walk is exact for all rules."""
    script = Positional(seed, agree=agree, eos=0.0)
    eos = frozenset({script.eos_id})
    target = ScriptedModel(script, 3)
    draft = ScriptedModel(Positional(seed, agree=agree, eos=0.0, is_draft=True), 3)
    requests = [Request((1, 2, 3), 40), Request((4,), 1), Request((1, 5), 23)]
    fly = tiny.relaxed(window, theta, across)
    fly.exact_first = exact_first
    fly.patterns = (re.compile(pattern),) if pattern else ()
    recorder = Recorder(target, draft, eos, fly.gates, length=LENGTH, width=4)
    answers = answers_of(ScriptedModel(script, 1), requests, eos)
    recordings = [recorder.record(answer) for answer in answers]
    for rule in (tiny.EXACT, fly):
        target.resize(1)
        draft.resize(1)
        compare(target, draft, requests, recordings, eos, k, rule, letters)


def tiny_recordings(target, draft, requests, eos, gates=(), decode=str, length=LENGTH):
    answers = answers_of(tiny.runner(target, 1), requests, eos, decode)
    runners = (tiny.runner(target, 4), tiny.runner(draft, 4))
    recorder = Recorder(*runners, eos, gates, length=length)
    return [recorder.record(answer) for answer in answers]


def test_exact_verification_of_real_models_round_by_round(target, draft):
    """K/V and positions of the teacher-forced passes are the ones decoding has; ends too."""
    eos = frozenset({tiny.EOS})

    requests = [Request(tuple(p), 40, ("zu",)) for p in tiny.prompts(6)]
    recordings = tiny_recordings(target, draft, requests, eos, decode=letters)
    assert {"length"} < {recording.answer.finish for recording in recordings}
    for k in (1, 3, 8):
        runners = tiny.runner(target, 1), tiny.runner(draft, 1)
        counts = compare(*runners, requests, recordings, eos, k, tiny.EXACT, letters)
        assert 0 < counts.emitted - counts.rounds < counts.drafted  # some drafts were rejected


class Chains(DraftCounter):
    """What was drafted in every round of a walk, by where the round started."""

    def admit(self, sequence):
        super().admit(sequence)
        self.rounds = []

    def draft(self, sequence, chain, limit):
        self.rounds.append((len(sequence.generated), chain))


@pytest.mark.parametrize("across", [False, True])
def test_until_the_first_standing_deferral_fly_is_the_engines(target, draft, across):
    """Rollouts behind mismatches are the draft's and target's own: what fails there fails in the
    walk, too, and the round after the first deferral that stands starts where the engine's does."""
    eos = frozenset({tiny.EOS})
    requests = [Request(tuple(p), 40) for p in tiny.prompts(8)]
    rule = tiny.relaxed(window=2, threshold=0.3, across=across)
    recordings = tiny_recordings(target, draft, requests, eos, rule.gates, length=20)
    walked = decoded = stood = failed = 0
    for request, recording in zip(requests, recordings):
        chains, rounds, clean = Chains(), [], []

        def observe(record, rounds=rounds, clean=clean):
            rounds.append((record.start, record.draft))
            clean.append(all(clean) and record.counts.deferred_accepted == 0)

        drafter = ModelDrafter(tiny.runner(draft, 1), eos)
        (record,) = tiny.engine(target, drafter, 6, rule, observer=observe).run([request])
        found = walk([recording], 6, rule, str, [chains])
        first = [*clean, False].index(False)
        assert chains.rounds[: first + 1] == rounds[: first + 1]
        following = rounds[first + 1 : first + 2]
        if following and following[0][0] < len(recording.answer.tokens):
            assert chains.rounds[first + 1][0] == rounds[first + 1][0]
        walked += found.counts.emitted / found.counts.rounds
        decoded += record.counts.emitted / record.counts.rounds
        stood += record.counts.deferred_accepted
        failed += record.counts.deferred_rolled_back
    assert stood > 5
    assert failed > 5
    assert abs(walked / decoded - 1) < 0.2


def test_what_is_deferrable_is_what_the_gates_say_of_decoding(target, draft):
    """At every mismatch along the text, against the gates on the target's own logits."""
    sets = [
        (EntropyGate(0.7),), (EntropyGate(3.2, "full"),), (EntropyGate(0.75, "normalized"),),
        (MarginGate(0.04),), (RatioGate(0.9),), (RankGate(2),), (MarginGate(0.1), RankGate(3)),
    ]  # fmt: skip
    requests = [Request(tuple(p), 40) for p in tiny.prompts(8)]
    recorded = {gate for gates in sets for gate in gates}
    recordings = tiny_recordings(target, draft, requests, frozenset({tiny.EOS}), recorded)
    found, expected = [[] for _ in sets], [[] for _ in sets]
    for recording in recordings:
        answer, tree = recording.answer, recording.tree
        logits = target(torch.tensor([answer.prompt + answer.tokens])).logits[0].detach()
        logits = logits[len(answer.prompt) - 1 : -1]
        differ = [i for i, token in enumerate(answer.tokens) if tree.drafted[i] != token]
        drafted = torch.tensor([tree.drafted[i] for i in differ])
        for number, gates in enumerate(sets):
            found[number] += [tree.deferrable(gates)[i] for i in differ]
            expected[number] += all_pass(gates, logits[differ], drafted).tolist()
        assert not any(tree.deferrable(None))
    assert found == expected
    for verdicts in expected:
        assert 0 < sum(verdicts) < len(verdicts)


@pytest.mark.parametrize(
    ("after", "expected"),
    [(8, Counts(rounds=2, drafted=6, native_accepted=2, deferred_accepted=1, emitted=3)),
     (4, Counts(rounds=2, drafted=6, native_accepted=2, corrections=1, deferred_rolled_back=1,
                emitted=3, discarded=2))],
)  # fmt: skip
def test_a_deferral_on_the_last_token_of_a_text_needs_its_window(after, expected):
    """It stood at once, as the text ended there; the engine goes on until its window is filled."""
    tree = Tree(frozenset({2}))
    for target, drafted in [(5, 5), (6, 6), (7, 9), (8, after)]:
        state = tree.add(target, drafted)
        tree.after_target[state] = tree.after_draft[state] = min(state + 1, 3)
    recording = Recording(Answer("t", 0, (1,), 20, (5, 6, 7), "stop"), tree, 1, 0)
    rule = tiny.relaxed(window=2, threshold=None, across=True)
    assert walk([recording], 3, rule, str).counts == expected
