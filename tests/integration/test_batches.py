"""Continuous batching: results do not depend on batch size, order, shared prefixes, memory."""

import contextlib
import random
from dataclasses import replace

import pytest
import torch

from fly.errors import FlyError
from fly.execution import oom
from fly.execution.batch_size import SequenceWork, sequences_that_fit
from fly.execution.cuda_graphs import CapturedPasses
from fly.execution.model_runner import ModelRunner
from fly.execution.pass_costs import PairCosts, PassCosts
from fly.speculation import engine as engine_module
from fly.speculation import phase_timer
from fly.speculation.draft_length import AdaptiveLength
from fly.speculation.drafters.base import NoDrafter
from fly.speculation.drafters.cascade import CascadeDrafter
from fly.speculation.drafters.draft_model import ModelDrafter
from fly.speculation.sampling import Sampling
from fly.speculation.sequence import Request, Sequence
from fly.speculation.stop_strings import StopMatcher
from tests import tiny


@pytest.fixture(scope="module")
def pair():
    target = tiny.model(1)
    return target, tiny.noisy_copy(target, 0.01)


def requests(count=11):
    """Requests that differ in everything: prompt, shared prefix, budget, stop string."""
    generator = random.Random(5)
    common = [generator.randrange(3, 64) for _ in range(30)]
    made = []
    for index in range(count):
        own = [generator.randrange(3, 64) for _ in range(generator.randrange(1, 20))]
        prompt = tuple((common[: generator.choice([0, 9, 30])] + own) * (1 + index % 2))
        stops = (f" {generator.randrange(3, 64)},",) if index % 3 == 0 else ()
        made.append(Request(prompt, generator.randrange(1, 40), stops, tag=index))
    return [*made, Request(made[4].prompt, 25, tag=count)]  # one prompt twice


def decode(ids):
    return "".join(f" {token}," for token in ids)


def run(pair, wanted, slots, *, k=6, length=None, reuse=True, rule=tiny.EXACT, target=None):
    target_model, draft = pair
    runner = ModelRunner(draft, slots, 512, reuse_prefixes=reuse)
    target = target or ModelRunner(target_model, slots, 512, reuse_prefixes=reuse)
    drafter = CascadeDrafter(runner, frozenset({tiny.EOS}), (1, 4, 6))
    own = {"decode": decode, "reuse_prefixes": reuse, "draft_length": length}
    engine = tiny.engine(target, drafter, k, rule, **own)
    records = {record.request.tag: record for record in engine.run(wanted)}
    assert len(records) == len(wanted)
    return records


def tokens(records):
    return [records[tag].tokens for tag in sorted(records)]


@pytest.mark.parametrize("rule", [tiny.EXACT, tiny.relaxed(2, 0.3)], ids=["exact", "fly"])
@pytest.mark.parametrize("slots", [tiny.slow(1), 3, tiny.slow(8)])
def test_batch_size_and_order_change_nothing(pair, slots, rule):
    wanted = requests()
    expected = tokens(run(pair, wanted, 1, rule=rule, reuse=False))
    shuffled = random.Random(slots).sample(wanted, len(wanted))
    assert tokens(run(pair, shuffled, slots, rule=rule)) == expected
    assert any(len(output) > 3 for output in expected)


def test_a_cache_that_mixes_up_sequences_is_noticed(pair, monkeypatch):
    """The mutant of the test above: a moved sequence whose K/V did not move with it."""
    expected = tokens(run(pair, requests(), 1, reuse=False))
    monkeypatch.setattr("fly.execution.kv_cache.SlotCache.copy_slot", lambda *args: None)
    assert tokens(run(pair, requests(), 3)) != expected


@pytest.mark.parametrize("slots", [1, 3])
def test_adaptive_drafts_change_nothing_when_verified_exactly(pair, slots):
    """Also where drafting is left out for some rounds, or is postponed from the start."""
    wanted = requests()
    expected = run(pair, wanted, slots)
    # drafting pays for a single sequence only: it starts late, behind others that did without
    costs = PairCosts(PassCosts((1, 3, 4), (1.0, 1.0, 40.0)), PassCosts((1,), (0.1,)), "test")
    length = Recorded(12, costs)
    adaptive = run(pair, wanted, slots, length=length, k=12)
    assert tokens(adaptive) == tokens(expected)
    assert tiny.total(adaptive.values(), "native_accepted") > 0
    assert slots == 1 or {0, 2} <= length.chosen


class Recorded(AdaptiveLength):
    def __init__(self, *args):
        super().__init__(*args)
        self.chosen = set()

    def choose(self, sequences):
        self.chosen.add(k := super().choose(sequences))
        return k


def test_shared_prefixes_are_copied_and_repeats_prefill_nothing(pair):
    records = run(pair, requests(), 3)
    reused = sum(record.prompt_tokens_reused for record in records.values())
    assert reused > 100
    twice = [Request(tuple(range(3, 40)), 10, tag=tag) for tag in range(5)]
    for slots in (1, 2):
        again = run(pair, twice, slots)
        assert [again[tag].prompt_tokens_reused for tag in range(5)] == [0, 36, 36, 36, 36]
        without = run(pair, twice, slots, reuse=False)
        assert tokens(again) == tokens(without)
        assert sum(record.prompt_tokens_reused for record in without.values()) == 0


def test_a_prefix_left_by_a_longer_sequence_is_not_trusted_past_its_own_tokens(pair):
    """What a rejected draft wrote must not pass for the prompt of the next sequence."""
    target, _ = pair
    runner = ModelRunner(target, 1, 512)
    runner.prefill(0, [5, 6, 7])
    runner.extend([[8, 9, 10]])
    runner.truncate(0, 4)
    runner.extend([[11]])
    assert runner.prefill(0, [5, 6, 7, 8, 9, 10]) == 4
    fresh = ModelRunner(target, 1, 512)
    fresh.prefill(0, [5, 6, 7, 8, 9, 10])
    torch.testing.assert_close(runner.extend([[12]]), fresh.extend([[12]]), atol=1e-4, rtol=1e-4)


class OutOfMemoryAbove(ModelRunner):
    """A runner whose passes fail while more than `most` slots exist, every third pass."""

    passes = 0

    def extend(self, tokens):
        self.passes += 1
        if self.slots > self.most and self.passes % 3 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().extend(tokens)


def out_of_memory_above(model, slots, most):
    runner = OutOfMemoryAbove(model, slots, 512)
    runner.most = most
    return runner


def test_out_of_memory_halves_the_running_sequences_and_loses_nothing(pair, caplog):
    wanted = requests()
    target = out_of_memory_above(pair[0], 8, most=2)
    assert tokens(run(pair, wanted, 8, target=target)) == tokens(run(pair, wanted, 1))
    assert target.slots == 2
    assert "going on with 4 running sequences" in caplog.text
    assert "going on with 2 running sequences" in caplog.text


def test_out_of_memory_changes_no_sample(pair):
    """A round that is done again must not draw again: other numbers, another text."""
    wanted = [replace(r, sampling=Sampling(1.0), seed=n) for n, r in enumerate(requests())]
    target = out_of_memory_above(pair[0], 4, most=1)
    assert tokens(run(pair, wanted, 4, target=target)) == tokens(run(pair, wanted, 1))
    assert target.slots == 1


@pytest.mark.parametrize("where", ["prefill", "propose", "commit"])
def test_out_of_memory_anywhere_loses_no_finished_sequence(pair, where, monkeypatch):
    """Also after a sequence has ended, and while the next one is admitted. Every round is told."""
    wanted, calls, rounds = requests(), [], []
    owner = ModelRunner if where == "prefill" else CascadeDrafter
    honest = getattr(owner, where)

    def fail_at_times(self, *args, **kwargs):
        calls.append(None)
        result = honest(self, *args, **kwargs)
        if len(calls) in (4, 9):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result

    expected = tokens(run(pair, wanted, 1))
    monkeypatch.setattr(owner, where, fail_at_times)
    target_model, draft = pair
    drafter = CascadeDrafter(ModelRunner(draft, 4, 512), frozenset({tiny.EOS}), (1, 4, 6))
    engine = tiny.engine(target_model, drafter, 6, slots=4, decode=decode, observer=rounds.append)
    records = list(engine.run(wanted))
    assert len(rounds) == sum(record.counts.rounds for record in records)
    assert sorted(record.request.tag for record in records) == list(range(len(wanted)))
    assert tokens({record.request.tag: record for record in records}) == expected
    assert engine._target.slots == 1


class Clock:
    """Time that only what the test names takes."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def spend(self, seconds, result=None):
        self.now += seconds
        return result


def test_only_decoding_is_decode_time(pair, monkeypatch):
    """Traces were `other`, their entropies `verify`, failed passes and moved sequences nothing."""
    clock = Clock()
    monkeypatch.setattr(phase_timer, "time", clock)
    slow = {"entropy": 100.0, "move": 10.0, "fail": 1000.0}
    honest = engine_module.entropy
    monkeypatch.setattr(
        engine_module, "entropy", lambda *a: clock.spend(slow["entropy"], honest(*a))
    )

    class Slow(OutOfMemoryAbove):
        moves = fails = 0

        def move(self, source, destination):
            Slow.moves += 1
            clock.spend(slow["move"])
            super().move(source, destination)

        def extend(self, tokens):
            try:
                return super().extend(tokens)
            except torch.OutOfMemoryError:
                Slow.fails += 1
                clock.spend(slow["fail"])
                raise

    target = Slow(pair[0], 8, 512)
    target.most = 4
    rounds = []
    engine = tiny.engine(
        target, NoDrafter(), 0, slots=4, decode=decode, trace_entropy="top3",
        observer=lambda record: clock.spend(1.0, rounds.append(record)),
    )  # fmt: skip
    records = list(engine.run(requests()))
    total = {
        phase: sum(record.seconds[phase] for record in records) for phase in records[0].seconds
    }
    assert Slow.moves
    assert Slow.fails
    passes = (total["recording"] - len(rounds)) / slow["entropy"]
    assert passes == pytest.approx(round(passes))
    assert round(passes) > 0
    assert total["verify"] == pytest.approx(Slow.fails * slow["fail"])
    assert total["other"] == pytest.approx(Slow.moves * slow["move"])
    assert total["draft"] == total["prefill"] == 0


@pytest.mark.parametrize(
    ("has_ended", "milliseconds", "late"),
    [(True, 7000, 4), (True, 2000, 0), (True, 90_000, 10), (False, 7000, 0)],
    ids=["drafts late", "drafts while it is queued", "never more than the wait", "failed"],
)
def test_drafting_that_verification_waited_for_is_draft_time(
    monkeypatch, has_ended, milliseconds, late
):
    """The host queues a draft in 3 s, 1 s of them for capturing, and waits 10 s for the verdict."""
    clock = Clock()
    monkeypatch.setattr(phase_timer, "time", clock)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.now

        def query(self):
            return has_ended

        def elapsed_time(self, end):
            assert end.at > self.at
            return milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    timer = phase_timer.PhaseTimer([torch.device("cuda:0")])
    sequence = Sequence(Request((5,), 4), frozenset(), StopMatcher((), decode))
    with timer.timed("draft", [sequence]):
        clock.spend(3.0)
        monkeypatch.setattr(CapturedPasses, "all_seconds", CapturedPasses.all_seconds + 1.0)
    for _ in range(2):  # the second has no draft of its own
        with timer.timed("verify", [sequence]):
            clock.spend(10.0)
    seconds = {phase: taken for phase, taken in sequence.seconds.items() if taken}
    assert seconds == {"draft": 2 + late, "verify": 20 - late, "compile": 1}
    assert timer.clock == 22


def test_wall_seconds_hold_the_passes_of_others_since_a_requests_own_prefill(pair, monkeypatch):
    """Two slots, three requests; a prefill takes 100 s, a pass 1, an observer 1000 (left out)."""
    clock = Clock()
    monkeypatch.setattr(phase_timer, "time", clock)

    class Slow(ModelRunner):
        def prefill(self, *args, **kwargs):
            return clock.spend(100.0, super().prefill(*args, **kwargs))

        def extend(self, tokens):
            return clock.spend(1.0, super().extend(tokens))

    engine = tiny.engine(
        Slow(pair[0], 2, 512), NoDrafter(), 0, eos=frozenset(),
        observer=lambda record: clock.spend(1000.0),
    )  # fmt: skip
    wanted = [Request((5 + tag, 9), budget, tag=tag) for tag, budget in enumerate((4, 10, 3))]
    wall = {record.request.tag: record.wall_seconds for record in engine.run(wanted)}
    assert wall == {0: 100 + 4, 1: 4 + 100 + 6, 2: 3}


def test_memory_is_reserved_for_both_models_and_again_after_memory_ran_out(pair):
    """A cache that grows later drops every captured graph."""
    wanted = requests()
    longest = max(len(request.prompt) + request.budget for request in wanted)

    class OnDevice(OutOfMemoryAbove):  # drafts of static passes come as tensors
        def extend_ids(self, ids_BQ):
            return self.extend(ids_BQ.tolist())

    target = OnDevice(pair[0], 4, 512)
    target.most = 2
    target.use_static_passes(capture=False)
    draft = ModelRunner(pair[1], 4, 512)
    draft.use_static_passes(capture=False)
    grown = []
    for runner in (target, draft):
        honest = runner.reserve
        runner.reserve = lambda tokens, r=runner, f=honest, **how: (
            grown.append((r is target, r.slots, tokens > r.cache.capacity, r.cache.capacity)),
            f(tokens, **how),
        )
    drafter = ModelDrafter(draft, frozenset({tiny.EOS}))
    engine = tiny.engine(target, drafter, 6, slots=4, decode=decode)
    list(engine.run(wanted))
    for of_target in (True, False):
        growths = [(slots, had) for who, slots, grew, had in grown if who is of_target and grew]
        assert growths == [(4, 0), (2, 0)]  # at once, and once more for the halved cache
    assert min(target.cache.capacity, draft.cache.capacity) >= longest


@pytest.mark.parametrize("static", [True, False])
def test_what_is_reserved_at_once_is_what_a_sequence_was_counted_to_take(pair, static):
    """Longer requests made a cache grow by half, past what --batch_size auto had counted."""
    runner = ModelRunner(pair[0], 1, 4096)
    if static:
        runner.use_static_passes(capture=False)
    else:
        runner.device = torch.device("cuda")  # reserving itself asks for no device
    for longest in (1000, 1100):
        runner.reserve_rows(longest, width=8, spd_k=0)
        assert runner.cache.capacity == runner.cache.rounded(longest + 8)


def test_slots_grow_when_a_long_request_is_admitted(pair):
    """One outlier sized every slot from the first round on; now it comes last."""
    runner, seen = ModelRunner(pair[0], 2, 4096), []
    runner.use_static_passes(capture=False)
    outlier = Request(tuple(range(3, 63)) * 15, 4)
    wanted = [outlier, *(Request((8, 9 + tag), 4, tag=tag) for tag in range(4))]
    engine = tiny.engine(runner, NoDrafter(), 0, eos=frozenset())
    for record in engine.run(wanted):
        seen.append((record.request is outlier, runner.cache.capacity))
    assert seen[:3] == [(False, 768)] * 3
    assert seen[-1] == (True, 1024)


def test_memory_that_runs_out_behind_a_last_token_ends_nothing(pair, monkeypatch):
    """With one slot it ended a whole run, though the sequence had its record."""
    wanted, honest, failures = requests(), CascadeDrafter.commit, []

    def fail(self, running, verdicts, features=None):
        if not any(sequence.is_open for sequence in running):
            failures.append(None)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return honest(self, running, verdicts, features)

    expected = tokens(run(pair, wanted, 1))
    monkeypatch.setattr(CascadeDrafter, "commit", fail)
    assert tokens(run(pair, wanted, 1)) == expected
    assert len(failures) == len(wanted)


def test_one_sequence_that_does_not_fit_ends_with_one_clear_line(pair):
    with pytest.raises(FlyError, match="out of memory with one running sequence"):
        run(pair, requests(), 2, target=out_of_memory_above(pair[0], 2, most=0))


def test_other_errors_are_not_taken_for_memory(pair):
    class Broken(ModelRunner):
        def extend(self, tokens):
            raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        run(pair, requests(), 2, target=Broken(pair[0], 2, 512))


def test_auto_batch_fits_sequences_to_free_memory(pair, monkeypatch):
    work = SequenceWork(ModelRunner(pair[0], 1, 512), width=7)
    (each,) = work.bytes_for(100).values()
    kv = 2 * 2 * 2 * 8 * 4  # layers, K and V, K/V heads, head size, float32
    assert each == kv * 256 + 7 * 64 * (8 + 4)  # capacity comes in blocks of 256 tokens
    monkeypatch.setattr(oom, "free_bytes", lambda device: 10 * each)
    assert sequences_that_fit([work], 100, at_most=64) == 8
    assert sequences_that_fit([work, work], 100, at_most=64) == 4
    assert sequences_that_fit([work], 100, at_most=3) == 3
    monkeypatch.setattr(oom, "free_bytes", lambda device: 0)
    assert sequences_that_fit([work], 100, at_most=64) == 1


def test_auto_batch_counts_the_distributions_of_sampling_sequences(pair):
    """A draft of K tokens is verified against K distributions of the whole vocabulary (64)."""
    runner = ModelRunner(pair[1], 1, 512)
    (greedy,) = SequenceWork(runner, 2).bytes_for(100).values()
    assert SequenceWork(runner, 2, kept=9).bytes_for(100) == {runner.device: greedy + 9 * 64 * 4}


def test_memory_stays_flat_over_many_requests(pair):
    """The cache and the indexes grow with the longest sequence, not with the number of requests."""
    many = [
        Request(tuple(random.Random(n).choices(range(3, 64), k=5 + 97 * n % 400)), 4, tag=n)
        for n in range(120)
    ]
    engine = tiny.engine(pair[0], tiny.drafter("cascade", 4, pair[1]), 4, slots=4)
    capacity = []
    for _ in engine.run(many):
        drafter = engine._drafter
        capacity.append(
            (
                engine._target.cache.capacity,
                sum(len(index._last) for index in drafter._indexes.values()),
            )
        )
    assert len(capacity) == 120
    assert {size for size, _ in capacity[30:]} == {512}
    assert max(size for _, size in capacity) < 4 * 4 * 420
