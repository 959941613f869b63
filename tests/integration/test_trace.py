"""Traces: complete enough to replay a run from, refused where they could not be kept."""

import json
from collections import Counter, defaultdict

import pytest

from fly.errors import FlyError
from fly.harness.engine_factory import EngineFactory
from fly.runs import context, replay
from fly.runs.records import CountsBySource
from tests import tiny
from tests.integration.test_lm import PROMPTS, fly_lm, instances

RELAXED = {"enable_fly": True, "entropy_thre": 0.0, "win_len": 3, "spd_k": 4, "dtype": "float32"}


@pytest.fixture
def folder(tmp_path):
    context.start(tmp_path)
    yield tmp_path
    context.start(None)


def lines(folder):
    (file,) = folder.glob("fly_trace_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def assert_replays(generation, record):
    """Tokens and their sources are the engine's own."""
    tokens, counts = generation.tokens, record.counts
    assert [token.id for token in tokens] == record.tokens
    sources = Counter(token.source for token in generation.shown)
    assert sum(sources[name] for name in replay.MATCHES.values()) == counts.native_accepted
    assert sources["deferred"] == counts.deferred_accepted
    assert sources["recovered"] == counts.corrections
    assert sources["bonus"] == counts.bonus
    assert [token.index for token in tokens] == list(range(len(tokens)))
    for token in generation.shown:
        assert token.matches_target == (token.id == token.target_id)
        assert token.window is None or token.window < token.index <= token.window + 3
    fallen = [token for token in generation.shown if not token.stands and token.was_deferred]
    assert len(fallen) == counts.deferred_rolled_back
    for token in tokens:
        assert token.source != "deferred" or token.target_id != token.id


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("drafter", ["model", "ngram", "cascade"])
def test_a_run_can_be_replayed_from_its_trace(saved_pair, folder, drafter, across):
    """Catches positions that are off by one, and rollbacks or deferrals left out."""
    lm = fly_lm(
        saved_pair, **RELAXED, trace=True, drafter=drafter, defer_across_rounds=across, batch_size=3
    )
    seen = []
    lm.keep = lambda instance, text, record, log: seen.append(record)
    lm.generate_until(instances({"max_gen_toks": 40}))
    rounds = defaultdict(list)
    for line in lines(folder):
        rounds[line["doc_id"]].append(line)
    assert len(seen) == len(PROMPTS)
    for record in seen:
        mine = rounds[record.request.tag.doc_id]
        assert [line["round"] for line in mine] == list(range(1, record.counts.rounds + 1))
        assert_replays(replay.replay(mine, window=3), record)
        assert sum(len(line["draft"]) for line in mine) == record.counts.drafted
        assert mine[-1]["finish"] == record.finish_reason
        assert all(line["finish"] is None for line in mine[:-1])
        assert all(len(line["entropy"]) == len(line["choice"]) for line in mine)
    everything = [line for line in lines(folder) if line["draft"]]
    letters = {"model": "d", "ngram": "n", "cascade": "dn"}[drafter]
    assert {letter for line in everything for letter in line["by"]} <= set(letters)
    assert all(len(line["by"]) == len(line["draft"]) for line in everything)
    if drafter != "ngram":
        assert any(line["deferred"] for line in everything)
    assert across == any(line["open"] is not None for line in everything)


@pytest.mark.parametrize("rule", ["exact", "fly"])
def test_sources_in_a_trace_are_those_of_the_records(saved_pair, folder, rule):
    """Catches letters that are lost or mixed up on the way from the drafter to the trace."""
    own = {**RELAXED, "verification": rule, "draft_sources": ["own"]}
    lm = fly_lm(saved_pair, **own, trace=True, drafter="cascade")
    seen = []
    lm.keep = lambda instance, text, record, log: seen.append(record)
    lm.generate_until(instances({"max_gen_toks": 40}, PROMPTS[:1] * 3))
    drafted, accepted = Counter(), Counter()
    for line in lines(folder):
        drafted.update(line["by"])
    for generation in replay.generations(lines(folder)):
        accepted.update(token.by for token in generation.tokens if token.position is not None)
    records = CountsBySource()
    for record in seen:
        records.merge(record.sources)
    assert drafted == {letter: counts.drafted for letter, counts in records.items()}
    assert accepted == {letter: counts.accepted for letter, counts in records.items()}
    assert 0 < accepted["n"] < sum(accepted.values())


@pytest.mark.parametrize("rule", ["fly", "exact", *map(tiny.slow, ("typical", "top_k"))])
def test_a_match_is_the_targets_own_token_when_sampling_too(saved_pair, folder, rule):
    """A rule that never draws in a match's place must not show a draw there."""
    own = {"verification": rule, "drafter": "model", "defer_across_rounds": rule == "fly"}
    lm = fly_lm(saved_pair, **{**RELAXED, **own}, trace=True, temperature=1.0, top_k=0)
    lm.generate_until(instances({"max_gen_toks": 40, "do_sample": True}))
    seen = [
        (matches, token == target)
        for line in lines(folder)
        for matches, token, target in zip(line["native"], line["draft"], line["choice"])
    ]
    assert {("1", True), ("0", False)} <= set(seen)
    assert ("1", False) not in seen


def test_off_by_default_and_changes_nothing(saved_pair, folder):
    asked = {"max_gen_toks": 30}
    plain = fly_lm(saved_pair, **RELAXED, drafter="model", defer_across_rounds=True)
    texts = plain.generate_until(instances(asked))
    assert not list(folder.glob("fly_trace_*"))
    traced = fly_lm(saved_pair, **RELAXED, drafter="model", defer_across_rounds=True, trace=True)
    assert traced.generate_until(instances(asked)) == texts


def test_refused_without_a_folder(saved_pair):
    context.start(None)
    with pytest.raises(FlyError, match=r"trace=true: .* add --output_path DIR"):
        fly_lm(saved_pair, trace=True)


def test_a_draft_that_stays_on_its_device_is_named_too(saved_pair, folder, monkeypatch):
    honest = EngineFactory._runner

    def static(self, *args, **kwargs):
        runner = honest(self, *args, **kwargs)
        runner.use_static_passes(capture=False)
        return runner

    monkeypatch.setattr(EngineFactory, "_runner", static)
    lm = fly_lm(saved_pair, **RELAXED, trace=True, drafter="model")
    lm.generate_until(instances({"max_gen_toks": 10}, PROMPTS[:2]))
    lm.generate_until(instances({"max_gen_toks": 10}, PROMPTS[:1]))
    assert all(line["by"] == "d" * len(line["draft"]) for line in lines(folder))
    assert {line["request"] for line in lines(folder)} == {0, 1, 2}  # over all calls of the run
