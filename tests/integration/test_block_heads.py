"""Block heads in the engine: lossless whatever they draft, and drafting what the head says.

Heads that learned a tiny target's texts by heart draft well, so that feeding them wrongly shows in
acceptance, while exact texts stay the target's own.
"""

import functools
import random

import pytest
import torch

from fly.errors import FlyError
from fly.execution import weights
from fly.execution.heads import layer_check
from fly.execution.heads.block import BlockRunner
from fly.settings import DrafterSettings, ExecutionSettings
from fly.speculation.drafters.base import DrafterContext
from fly.speculation.drafters.block import BlockDrafter
from fly.speculation.sampling import Sampling
from fly.speculation.sequence import Request
from tests import block_heads, tiny
from tests.integration.test_sampling_distribution import (
    HONEST,
    IN_DRAFTER,
    PROMPT,
    REFUTED,
    continuations,
    drawn_colder,
    joint,
    settled,
    table_requests,
    varied_requests,
)
from tests.once import once
from tests.unit.test_linears import needs_kernels

BUDGET = 40
PROMPTS = tiny.prompts(8)
# several sequences come and go unevenly: what is wrong for one is wrong for them, too
SLOTS = pytest.mark.parametrize("slots", [tiny.slow(1), 3])


@pytest.fixture(scope="module")
def expected(target):
    return [tiny.generate(target, prompt, BUDGET) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def heads(target, tmp_path_factory):
    """Trained on what the target says after five of the prompts; the others are met anew. Those
    `in part` stopped halfway: some of their drafts stand, and few as a whole."""

    def train():
        texts = [
            (len(prompt), prompt + tiny.generate(target, prompt, BUDGET + 8, eos=None))
            for prompt in PROMPTS[:5]
        ]
        kinds = ("dflash", "dspark")
        pairs = {kind: block_heads.trained(kind, target, texts, (60, 120)) for kind in kinds}
        return {
            name: head
            for kind, (in_part, whole) in pairs.items()
            for name, head in ((f"{kind} in part", in_part), (kind, whole))
        }

    return once(tmp_path_factory, "block heads", train)


def run(target, checkpoint, slots=1, k=5, rule=tiny.EXACT, capture=None, prompts=PROMPTS, **keys):
    drafter = block_heads.drafter(checkpoint, target, slots, **keys)
    engine = tiny.engine(tiny.runner(target, slots, capture), drafter, k, rule)
    return tiny.decode_all(engine, prompts, BUDGET)


def accepted(records):
    return tiny.total(records, "native_accepted")


@pytest.fixture(scope="module")
def acceptance(target, heads):
    """How many draft tokens stand if nothing is wrong, by kind and slots; decoded once each."""
    return functools.cache(lambda kind, slots: accepted(run(target, heads[kind], slots)))


@pytest.mark.parametrize(
    ("slots", "capture"), [(1, None), (3, False), (8, None)], ids=["one", "static", "eight"]
)
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_exact_equals_generate(target, heads, expected, kind, slots, capture):
    records = run(target, heads[kind], slots, capture=capture)
    assert [record.tokens for record in records] == expected
    assert 0 < accepted(records) < tiny.total(records, "drafted")
    assert all(record.prompt_tokens_reused == 0 for record in records)


def test_trained_heads_draft_well(target, heads):
    """Else the mutants below would have nothing to lose."""
    for kind in ("dflash", "dspark"):
        records = run(target, heads[kind], prompts=PROMPTS[:5])
        assert accepted(records) > 0.5 * tiny.total(records, "drafted")


# What feeds the head wrongly costs acceptance, and never a text


class Shifted(BlockDrafter):
    """Features of the token before."""

    def admit(self, slot, sequence, features=None, *, soon=True):
        super().admit(slot, sequence, features.roll(1, dims=1), soon=soon)

    def commit(self, running, verdicts, features=None):
        super().commit(running, verdicts, features.roll(1, dims=1))


class Stale(BlockDrafter):
    """The K/V of a block stay in the place of those of the accepted tokens' features."""

    def commit(self, running, verdicts, features=None):
        for slot, sequence in enumerate(running):
            self.runner.lengths[slot] = len(sequence.tokens) - 1


class Unrolled(BlockDrafter):
    """Features of rejected tokens are kept, so that what follows comes after them."""

    def commit(self, running, verdicts, features=None):
        counts = [len(verdict.draft) + 1 for verdict in verdicts]
        self.runner.extend(0, features, counts)


@SLOTS
@pytest.mark.parametrize("kind", ["dflash", tiny.slow("dspark")])
@pytest.mark.parametrize(
    "mutant",
    [{"kind": Shifted}, {"kind": Stale}, {"kind": Unrolled}, {"layers": (0, 1)}],
    ids=["features shifted by one", "stale cache", "not rolled back", "ids off by one layer"],
)
def test_mutants_lower_acceptance_and_change_no_text(
    target, heads, expected, acceptance, kind, slots, mutant
):
    records = run(target, heads[kind], slots, **mutant)
    assert [record.tokens for record in records] == expected
    assert accepted(records) < 0.8 * acceptance(kind, slots)


# The head sees the text as it is, whatever became of its drafts


class Watched(BlockDrafter):
    """Compares every draft with that of a head which sees the text for the first time."""

    def propose(self, running, limits):
        draft = super().propose(running, limits)
        for slot, sequence in enumerate(running):
            if chain := draft.on_host().tokens[slot]:
                known, last = sequence.tokens[:-1], sequence.tokens[-1:]
                fresh = self.fresh()
                seen = block_heads.features(self.target, self.wants_features, known)
                fresh.extend(0, seen, [len(known)])
                logits = fresh.logits(fresh.draft(last))
                previous, wanted = torch.tensor(last), []
                for at in range(len(chain)):
                    previous = fresh.after(logits[:, at], previous).argmax(-1)
                    wanted.append(int(previous))
                self.checked += 1
                self.wrong += wanted != chain
        return draft


@pytest.mark.parametrize(
    ("rule", "k"),
    [
        tiny.slow(tiny.EXACT, 4),
        (tiny.relaxed(1, 0.1), 4),
        tiny.slow(tiny.relaxed(2, 0.1, across=True), 1),
        (tiny.relaxed(2, 0.1, across=True), 3),
    ],
    ids=["exact", "within", "across-1", "across-3"],
)
@SLOTS
@pytest.mark.parametrize("kind", [tiny.slow("dflash in part"), "dspark in part"])
def test_every_draft_is_a_fresh_heads(target, heads, kind, slots, rule, k):
    drafter = block_heads.drafter(heads[kind], target, slots, Watched)
    drafter.target, drafter.checked, drafter.wrong = target, 0, 0
    head = block_heads.runner(heads[kind], target, 1).head
    drafter.fresh = lambda: BlockRunner(head, target, 1)
    engine = tiny.engine(target, drafter, k, rule, slots)
    records = tiny.decode_all(engine, PROMPTS, BUDGET)
    assert (drafter.checked > 30, drafter.wrong) == (True, 0)
    is_fly, is_across = rule is not tiny.EXACT, k != 4
    assert (tiny.total(records, "deferred_accepted") > 0) == is_fly
    assert (tiny.total(records, "deferred_rolled_back") > 0) == is_fly
    assert (tiny.total(records, "discarded") > 0) == is_across


def test_fewer_slots_after_out_of_memory(target, heads, expected):
    """Interrupted sequences are admitted again, with their output's features."""
    drafter = block_heads.drafter(heads["dspark"], target, 4)
    engine = tiny.engine(target, drafter, 4, slots=4)
    honest, calls = engine._round, []

    def fails_once(running):
        calls.append(len(running))
        if len(calls) == 3:
            raise MemoryError
        honest(running)

    engine._round = fails_once
    records = tiny.decode_all(engine, PROMPTS, BUDGET)
    assert [record.tokens for record in records] == expected
    assert max(calls[3:]) == 2


def test_nothing_is_drafted_past_the_heads_own_context(target, heads):
    checkpoint = heads["dflash"]
    short = dict(checkpoint.config, max_position_embeddings=24)
    checkpoint = block_heads.Checkpoint("short", short, checkpoint.tensors)
    (record,) = run(target, checkpoint, prompts=PROMPTS[1:2])
    assert record.tokens == tiny.generate(target, PROMPTS[1], BUDGET)
    drafted = record.positions.drafted[0]
    assert 0 < drafted < record.counts.rounds


def test_confidence_cuts_drafts_before_the_first_doubtful_token(target, heads, expected):
    whole = run(target, heads["dspark"])
    for threshold in (0.3, 0.6, 1.0):
        cut = run(target, heads["dspark"], confidence=threshold)
        assert [record.tokens for record in cut] == expected
        assert tiny.total(cut, "drafted") < tiny.total(whole, "drafted")
        assert (tiny.total(cut, "drafted") == 0) == (threshold == 1.0)


@needs_kernels
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_packed_head_of_fewer_bits_drafts_as_well(heads, kind):
    target = tiny.model(seed=0).to(torch.bfloat16)
    found = []
    for settings in (None, ExecutionSettings(draft_quantization="int8")):
        drafter = block_heads.drafter(heads[kind], target, 1)
        runner = drafter.runner
        for parameter in runner.head.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        if settings is not None:
            assert weights.pack_draft(runner.head, settings).endswith("int8")
        drafter.runner = BlockRunner(runner.head, target, 1)
        found.append(accepted(tiny.decode_all(tiny.engine(target, drafter, 5), PROMPTS[:5], 20)))
    assert found[1] > 0.8 * found[0] > 20


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_layers_that_are_one_off_are_noticed_at_load(heads, kind, caplog):
    """As are EAGLE-3's; on a text that the head knows."""
    target = tiny.model(seed=0)
    text = PROMPTS[3] + tiny.generate(target, PROMPTS[3], BUDGET + 8, eos=None)
    for layers, is_told in (((1, 2), False), ((0, 1), True)):
        caplog.clear()
        head = block_heads.runner(heads[kind], target, 1, layers).head
        layer_check.warn_if_layers_are_shifted(head, target, text)
        assert ("set head_layer_ids=[1, 2]" in caplog.text) == is_told


def test_what_a_head_cannot_do_is_refused_at_once(target, heads):
    head = block_heads.runner(heads["dflash"], target, 1).head

    def create(**keys):
        settings = DrafterSettings(**{"spd_k": 5, **keys})
        ends = frozenset({tiny.EOS})
        runner = head.runner(target, 1, 512)
        context = DrafterContext(1, settings, ends, runner, tiny.COSTS, False, ())
        return BlockDrafter.create(context)

    assert create().wants_features == (1, 2)
    with pytest.raises(FlyError, match=r"spd_k=6: .* at most 5 tokens .*: set spd_k to 5 or lower"):
        create(spd_k=6)
    with pytest.raises(FlyError, match=r"confidence_thre=0.5: this head has no confidence head"):
        create(confidence_thre=0.5)


# Sampling


@pytest.fixture(scope="module")
def small():
    return tiny.model(1, vocab=8, layers=1)


def sampled(small, kind, settings, count=1200, drafted=None):
    """Joint count of outputs of three tokens against the target's own distribution."""
    checkpoint = block_heads.published(kind, small, drafted=drafted)
    drafter = block_heads.drafter(checkpoint, small, 64)
    requests = table_requests(count, 3, (settings,), seed=3)
    records = list(tiny.engine(small, drafter, 3, slots=64).run(requests))
    assert settled(records)
    return joint(records, continuations(small, PROMPT, 3, settings, frozenset({tiny.EOS})))


TOP_P, PENALTY = Sampling(0.8, top_p=0.9), Sampling(1.5, top_k=6, repetition_penalty=1.3)


@pytest.mark.parametrize(
    ("kind", "drafted", "settings"),
    [
        tiny.slow("dflash", None, TOP_P),
        tiny.slow("dspark", None, PENALTY),
        tiny.slow("dspark", [0, 2, 5, 7], TOP_P),
        ("speculators", [2, 3, 6], PENALTY),
    ],
    ids=["dflash", "dspark", "dspark-reduced", "speculators-reduced"],
)
def test_sampled_outputs_follow_the_target(small, kind, drafted, settings):
    """Ids that a head does not know are sampled all the same."""
    test = sampled(small, kind, settings, drafted=drafted)
    assert test.freedom > 30
    assert test.p_value > HONEST


@pytest.mark.parametrize("kind", [tiny.slow("dflash"), "dspark"])
def test_a_wrong_q_is_noticed(small, kind, monkeypatch):
    monkeypatch.setattr(IN_DRAFTER, drawn_colder)
    assert sampled(small, kind, Sampling(1.0)).p_value < REFUTED


@pytest.mark.parametrize(
    "rule",
    [tiny.EXACT, tiny.relaxed(2, 0.3), tiny.relaxed(2, 0.3, across=True)],
    ids=["exact", "within", "across"],
)
@pytest.mark.parametrize("kind", [tiny.slow("dflash"), "dspark"])
def test_tokens_do_not_depend_on_other_sequences(target, heads, kind, rule):
    wanted, seen = varied_requests(), []
    for slots in (1, 5):
        drafter = block_heads.drafter(heads[kind], target, slots)
        engine = tiny.engine(target, drafter, 4, rule, slots)
        shuffled = random.Random(slots).sample(wanted, len(wanted))
        seen.append({record.request.tag: record.tokens for record in engine.run(shuffled)})
    assert seen[0] == seen[1]
    assert len(seen[0]) == len(wanted)


def test_a_sequence_goes_on_where_it_was_admitted_again(target, heads, expected):
    """As after an interruption: the prompt and what was generated are one text to the head."""
    prompt = PROMPTS[2]
    request = Request(tuple(prompt + expected[2][:10]), BUDGET - 10)
    drafter = block_heads.drafter(heads["dspark"], target, 1)
    (record,) = tiny.engine(target, drafter, 4).run([request])
    assert record.tokens == expected[2][10:]
