"""A walk over a replay against the product's own engine, pass by pass."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.speculation.drafters.base import NoDrafter
from fly.speculation.drafters.draft_model import CascadeDrafter, ModelDrafter
from fly.speculation.engine import Engine
from fly.speculation.rules.gates import EntropyGate, MarginGate, RankGate, RatioGate, all_pass
from fly.speculation.rules.verification import Relaxation
from fly.speculation.sequence import Request
from fly.tuning.recorder import Document, Recorder, Tree, _looked_at
from fly.tuning.simulate import CascadeCounter, StepCounter, walk
from tests import tiny
from tests.positional import Positional, ScriptedModel

NGRAMS = (1, 3, 4)
KS = (1, 2, 3, 5, 8)
LENGTH = 12


class Widths:
    """Stands between a runner and its user, and notes the width of every pass of one row."""

    def __init__(self, runner):
        self.runner, self.widths = runner, []

    def __getattr__(self, name):
        return getattr(self.runner, name)

    def extend(self, tokens):
        self.widths.append(len(tokens[0]))
        return self.runner.extend(tokens)


def documents_of(target, requests, eos, decode=str):
    """What the target alone answers, in the order of the requests."""
    engine = Engine(
        target, NoDrafter(), spd_k=0, relaxation=None, eos_ids=eos, decode=decode,
        reuse_prefixes=False,
    )  # fmt: skip
    return [
        Document("t", i, r.request.prompt, r.request.budget, tuple(r.tokens), r.finish_reason)
        for i, r in enumerate(engine.run(requests))
    ]


def by_engine(target, draft, requests, eos, k, relaxation, ngrams=None, decode=str):
    """(counts of every request, widths of the draft's passes, of the target's)."""
    target, draft = Widths(target), Widths(draft)
    drafter = CascadeDrafter(draft, eos, *ngrams) if ngrams else ModelDrafter(draft, eos)
    engine = Engine(
        target, drafter, spd_k=k, relaxation=relaxation, eos_ids=eos, decode=decode,
        reuse_prefixes=False,
    )  # fmt: skip
    records = list(engine.run(requests))
    return [record.counts for record in records], draft.widths, target.widths


def counts_of(values):
    return values.rounds, values.drafted, values.emitted, values.deferred_accepted, values.discarded


def compare(target, draft, requests, replays, eos, k, relaxation, decode=str):
    """Every round, pass and count of the walk is the engine's, for both drafters."""
    step, cascade = StepCounter(), CascadeCounter(*NGRAMS, draft.relative_cost)
    found = walk(replays, k, relaxation, eos, [step, cascade])
    for counter, ngrams in ((step, None), (cascade, NGRAMS)):
        counts, drafts, verifies = by_engine(
            target, draft, requests, eos, k, relaxation, ngrams, decode
        )
        sums = tuple(map(sum, zip(*map(counts_of, counts))))
        assert counts_of(found.counts) == sums
        assert sorted(counter.passes.count.elements()) == sorted(drafts)
        assert sorted(found.verify.count.elements()) == sorted(verifies)
    return found.counts


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    agree=st.sampled_from([0.5, 0.8, 0.95]),
    k=st.sampled_from(KS),
    window=st.sampled_from([0, 1, 2, 4]),
    theta=st.sampled_from([None, 0.2, 0.9]),
    across=st.booleans(),
)
def test_every_rule_walks_as_the_engine_decodes(seed, agree, k, window, theta, across):
    """Where behind a deferral the text goes on by position, the walk is exact for all rules."""
    script = Positional(seed, agree=agree, eos=0.0)
    eos = frozenset({script.eos_id})
    target = ScriptedModel(script, 3)
    draft = ScriptedModel(Positional(seed, agree=agree, eos=0.0, is_draft=True), 3)
    requests = [Request((1, 2, 3), 40), Request((4,), 1), Request((1, 5), 23)]
    documents = documents_of(ScriptedModel(script, 1), requests, eos)
    recorder = Recorder(target, draft, eos, length=LENGTH, width=4)
    replays = [recorder.record(document) for document in documents]
    gates = () if theta is None else (EntropyGate(theta),)
    room = None if across else window
    for relaxation in (None, Relaxation(gates, window, room)):
        target.resize(1)
        draft.resize(1)
        compare(target, draft, requests, replays, eos, k, relaxation)


def tiny_replays(target, draft, requests, eos, decode=str, length=LENGTH):
    documents = documents_of(tiny.runner(target, 1), requests, eos, decode)
    runners = (tiny.runner(target, 4), tiny.runner(draft, 4))
    recorder = Recorder(*runners, eos, length=length)
    return [recorder.record(document) for document in documents]


def test_exact_verification_of_real_models_round_by_round(target, draft):
    """K/V and positions of the teacher-forced passes are the ones decoding has; ends too."""
    eos = frozenset({tiny.EOS})

    def decode(ids):
        return "".join(chr(97 + i) for i in ids)

    requests = [Request(tuple(p), 40, ("zu",)) for p in tiny.prompts(6)]
    replays = tiny_replays(target, draft, requests, eos, decode)
    assert {"length"} < {replay.document.finish for replay in replays} | {"eos", "stop"}
    for k in KS:
        runners = tiny.runner(target, 1), tiny.runner(draft, 1)
        counts = compare(*runners, requests, replays, eos, k, None, decode)
        assert 0 < counts.emitted - counts.rounds < counts.drafted  # some drafts were rejected


class Chains(StepCounter):
    """What was drafted in every round of a walk, by where the round started."""

    def admit(self, prompt_length):
        super().admit(prompt_length)
        self.prompt, self.rounds = prompt_length, []

    def draft(self, tokens, final, limit, chain):
        self.rounds.append((len(tokens) - self.prompt, chain))


@pytest.mark.parametrize("across", [False, True])
def test_until_the_first_standing_deferral_fly_is_the_engines(target, draft, across):
    """Rollouts behind mismatches are the draft's and target's own: what fails there fails in the
    walk, too, and the round after the first deferral that stands starts where the engine's does."""
    eos = frozenset({tiny.EOS})
    requests = [Request(tuple(p), 40) for p in tiny.prompts(8)]
    replays = tiny_replays(target, draft, requests, eos, length=20)
    relaxation = tiny.relaxed(window=2, threshold=0.3, across=across)
    walked = decoded = stood = failed = 0
    for request, replay in zip(requests, replays):
        chains, rounds, clean = Chains(), [], []

        def observe(record, rounds=rounds, clean=clean):
            rounds.append((record.start, record.verdict.draft))
            clean.append(record.row.counts.deferred_accepted == 0)

        engine = Engine(
            tiny.runner(target, 1), ModelDrafter(tiny.runner(draft, 1), eos), spd_k=6,
            relaxation=relaxation, eos_ids=eos, decode=str, observer=observe,
        )  # fmt: skip
        (record,) = engine.run([request])
        found = walk([replay], 6, relaxation, eos, [chains])
        first = [*clean, False].index(False)
        assert chains.rounds[: first + 1] == rounds[: first + 1]
        following = rounds[first + 1 : first + 2]
        if following and following[0][0] < len(replay.document.tokens):
            assert chains.rounds[first + 1][0] == rounds[first + 1][0]
        walked += found.counts.emitted / found.counts.rounds
        decoded += record.counts.emitted / record.counts.rounds
        stood += record.counts.deferred_accepted
        failed += record.counts.deferred_rolled_back
    assert stood > 5
    assert failed > 5
    assert abs(walked / decoded - 1) < 0.2


def test_gates_read_what_they_read_in_the_engine(target, draft):
    """The recorded numbers against the gates themselves, on logits."""
    torch.manual_seed(0)
    logits = torch.randn(200, 64) * 2
    tokens = torch.randint(0, 64, (200,))
    tokens[::3] = logits[::3].topk(2).indices[:, 1]
    tree = Tree()
    for values, token in zip(_looked_at(logits, tokens.tolist()), tokens.tolist()):
        tree.add(0, token, values)
    sets = [
        (EntropyGate(0.6),), (EntropyGate(2.5, "full"),), (EntropyGate(0.6, "normalized"),),
        (MarginGate(0.2),), (RatioGate(0.4),), (RankGate(2),), (MarginGate(0.5), RankGate(3)),
    ]  # fmt: skip
    for gates in sets:
        expected = all_pass(gates, logits, tokens).tolist()
        assert tree.passes(gates) == expected
        assert 0 < sum(expected) < 200
