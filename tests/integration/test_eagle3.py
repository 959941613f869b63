"""EAGLE-3 heads through the real engine: texts stay the target's, and mistakes cost acceptance.

The head is right by design (tests/heads.py) but for what it cannot know, so that a mistake shows.
"""

import copy
import functools
import time

import pytest
import torch

from fly.execution import weights
from fly.execution.heads import layer_check
from fly.execution.heads.eagle3 import Eagle3Head, Eagle3Runner
from fly.execution.oom import is_out_of_memory
from fly.models.draft_vocabulary import NONE
from fly.models.heads.checkpoint import Checkpoint, TargetShape
from fly.settings import ExecutionSettings
from fly.speculation.draft_length import DraftLength
from fly.speculation.drafters.base import Drafter
from fly.speculation.drafters.eagle3 import Eagle3Drafter
from fly.speculation.sequence import Request
from tests import heads, tiny
from tests.unit.test_linears import needs_kernels

DRAFTED = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:56].sort().values
PROMPTS = [
    torch.randint(3, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (1, 3, 7, 20, 33, 5, 12, 2)
]
BUDGET = 40


@pytest.fixture(scope="module")
def perfect():
    """(target, head) that drafts 56 of 64 tokens."""
    target, tensors, config = heads.perfect(DRAFTED)
    return target, heads.load(target, tensors, **config)


@pytest.fixture(scope="module")
def alone(perfect):
    """The target's own texts."""
    return [tiny.generate(perfect[0], prompt, BUDGET) for prompt in PROMPTS]


def decode(target, drafter, slots, rule=tiny.EXACT, **kwargs):
    engine = tiny.engine(target, drafter, 4, rule, slots, **kwargs)
    return tiny.decode_all(engine, PROMPTS, BUDGET)


def share(records):
    return tiny.total(records, "native_accepted") / tiny.total(records, "drafted")


@pytest.fixture(scope="module")
def honest(perfect):
    """Records by the number of slots if nothing is wrong; decoded once each."""
    target, head = perfect
    return functools.cache(lambda slots: decode(target, heads.drafter(target, head, slots), slots))


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_texts_are_the_targets(honest, alone, slots):
    """Prompts of one token and more, a freed slot taken by the next, rejections in most rounds."""
    records = honest(slots)
    assert [record.tokens for record in records] == alone
    assert 0.3 < share(records) < 0.9
    assert all(record.prompt_tokens_reused == 0 for record in records)
    assert [record.counts for record in records] == [record.counts for record in honest(1)]


class ShiftedFeatures(Eagle3Drafter):
    """Every token has the features of the token before."""

    def admit(self, slot, sequence, features=None, **kwargs):
        super().admit(slot, sequence, features.roll(1, dims=1), **kwargs)

    def commit(self, running, verdicts, features=None):
        super().commit(running, verdicts, features.roll(1, dims=1))


class StaleCache(Eagle3Runner):
    """What was drafted stays in the cache when the round is decided."""

    def truncate(self, slot, length):
        if length == 0:
            super().truncate(slot, length)


def shifted_features(target, head, slots):
    return ShiftedFeatures(Eagle3Runner(head, target, slots, 512), frozenset({tiny.EOS}))


def stale_cache(target, head, slots):
    return Eagle3Drafter(StaleCache(head, target, slots, 512), frozenset({tiny.EOS}))


def d2t_as_a_table(target, head, slots):
    found = heads.drafter(target, head, slots)
    found._vocabulary = copy.copy(found._vocabulary)  # the head's own stays as it is
    found._vocabulary.to_draft_V = torch.full((64,), NONE)
    found._vocabulary.to_draft_V[heads.offsets(DRAFTED)] = torch.arange(len(DRAFTED))
    return found


def one_layer_off(target, head, slots):
    """As if SpecForge's numbers were indexes."""
    _, tensors, config = heads.perfect(DRAFTED)
    checkpoint = Checkpoint("a head", config, tensors)
    shifted = Eagle3Head.from_checkpoint(checkpoint, TargetShape.of(target.config), (1,))
    return heads.drafter(target, shifted.eval(), slots)


@pytest.mark.parametrize("slots", [tiny.slow(1), 3])
@pytest.mark.parametrize(
    "mutant",
    [shifted_features, stale_cache, d2t_as_a_table, one_layer_off],
    ids=lambda m: m.__name__,
)
def test_mistakes_cost_acceptance_and_never_change_a_text(perfect, honest, alone, mutant, slots):
    target, head = perfect
    records = decode(target, mutant(target, head, slots), slots)
    assert [record.tokens for record in records] == alone
    assert share(records) < 0.85 * share(honest(slots))


class Fresh(Eagle3Drafter):
    """Computes the head's whole cache again in every round, from a plain pass of the target."""

    target = None

    def propose(self, running, limits):
        for slot, sequence in enumerate(running):
            ids = torch.tensor([sequence.tokens[:-1]], dtype=torch.long)
            with torch.inference_mode():
                states = self.target(ids, output_hidden_states=True).hidden_states
            self.admit(slot, sequence, states[2], soon=False)
        return super().propose(running, limits)


def same_as_fresh(target, head, slots, rule, lengths=DraftLength):
    """Records of a drafter, whose counts are those of one that starts afresh in every round."""
    fresh = Fresh(Eagle3Runner(head, target, slots, 512), frozenset({tiny.EOS}))
    fresh.target = target
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 1]
    expected, found = (
        tiny.decode_all(
            tiny.engine(target, drafter, 4, rule, slots, draft_length=lengths(4)), prompts, BUDGET
        )
        for drafter in (fresh, heads.drafter(target, head, slots))
    )
    for one, other in zip(expected, found):
        assert (one.tokens, one.counts) == (other.tokens, other.counts)
    return found


@pytest.mark.parametrize("slots", [tiny.slow(1), 3])
@pytest.mark.parametrize("across", [False, True], ids=["within", "across"])
def test_fly_with_a_head_keeps_its_cache_right(perfect, across, slots):
    """Deferrals of earlier rounds that are rolled back included."""
    records = same_as_fresh(*perfect, slots, tiny.relaxed(2, 0.5, across))
    assert tiny.total(records, "deferred_accepted") > 0
    assert tiny.total(records, "deferred_rolled_back") > 0


class Moody(DraftLength):
    """Nothing is drafted for many rounds, then again."""

    rounds = 0

    def choose(self, running):
        self.rounds += 1
        return super().choose(running) if self.rounds // 45 % 2 else 0


def test_a_head_that_paused_catches_up(perfect):
    records = same_as_fresh(*perfect, 2, tiny.EXACT, Moody)
    assert tiny.total(records, "native_accepted") > 0


class Later(Moody):
    """Nothing is drafted at first."""

    def choose(self, running):
        self.rounds += 1
        return DraftLength.choose(self, running) if self.rounds > 5 else 0


@pytest.mark.parametrize("prompt", [100, 300])
def test_a_prompt_that_was_put_off_is_prefill(perfect, monkeypatch, prompt):
    """Short ones are fed when something is drafted, long ones before: as drafting, as the rest."""
    target, head = perfect
    drafter = heads.drafter(target, head)
    honest = drafter.runner.catch_up

    def slow(slot, tokens, states):
        time.sleep(0.3 if len(tokens) > 90 else 0)
        return honest(slot, tokens, states)

    monkeypatch.setattr(drafter.runner, "catch_up", slow)
    request = Request(tuple(3 + i % 60 for i in range(prompt)), 60)
    engine = tiny.engine(target, drafter, 4, draft_length=Later(4))
    (record,) = engine.run([request])
    assert record.counts.drafted > 0
    assert record.seconds["prefill"] > 0.3
    with Drafter().prefilling(None):  # of one that no engine runs
        pass


def test_out_of_memory_goes_on_with_fewer_slots(perfect, alone):
    target, head = perfect

    class Full(Eagle3Runner):
        failures = 0

        def extend(self, tokens, states):
            if self.slots > 2 and max(self.lengths) > 25:
                Full.failures += 1
                raise torch.OutOfMemoryError("out of memory")
            return super().extend(tokens, states)

    assert is_out_of_memory(torch.OutOfMemoryError("out of memory"))
    drafter = Eagle3Drafter(Full(head, target, 8, 512), frozenset({tiny.EOS}))
    records = decode(target, drafter, 8)
    assert Full.failures == 2
    assert [record.tokens for record in records] == alone
    assert share(records) > 0.3


def test_nothing_is_drafted_past_the_context(perfect):
    target, head = perfect
    drafter = Eagle3Drafter(Eagle3Runner(head, target, 1, 24), frozenset({tiny.EOS}))
    engine = tiny.engine(tiny.runner(target, 1, max_length=24), drafter, 4)
    (record,) = engine.run([Request(tuple(PROMPTS[3]), 4)])
    assert record.tokens == tiny.generate(target, PROMPTS[3], 4)


def test_a_head_with_its_own_embeddings_uses_them(perfect, honest):
    target, _ = perfect
    _, tensors, config = heads.perfect(DRAFTED)
    own = target.get_input_embeddings().weight.detach().clone()
    same = heads.load(target, {**tensors, "embed_tokens.weight": own}, **config)
    other = heads.load(target, {**tensors, "embed_tokens.weight": own.roll(1, dims=0)}, **config)
    shares = [share(decode(target, heads.drafter(target, one), 1)) for one in (same, other)]
    assert shares[0] == share(honest(1))
    assert shares[1] < 0.5 * shares[0]


def test_logits_that_are_not_finite_are_named(perfect):
    target, head = perfect
    broken = copy.deepcopy(head)
    with torch.no_grad():
        broken.norm.weight[0] = float("nan")
    with pytest.raises(ArithmeticError, match="draft's logits are not finite"):
        decode(target, heads.drafter(target, broken), 1)


@pytest.mark.parametrize("read", [1, 2, 3])
def test_layers_that_are_one_off_are_noticed(perfect, read, caplog):
    """The head is made for hidden state 2; 3 is the same but for what the head does not read."""
    target, head = perfect
    _, tensors, config = heads.perfect(DRAFTED)
    checkpoint = Checkpoint("a head", config, tensors)
    reading = Eagle3Head.from_checkpoint(checkpoint, TargetShape.of(target.config), (read,)).eval()
    text = [*PROMPTS[4], *tiny.generate(target, PROMPTS[4], 60)]
    with caplog.at_level("WARNING"):
        layer_check.warn_if_layers_are_shifted(reading, target, text)
    if read == 1:
        assert "head_layer_ids=[2]" in caplog.text
    else:
        assert not caplog.text
    assert layer_check.agreements(head, target, text)[0] > 45


@needs_kernels
def test_a_packed_head_drafts(perfect, honest):
    """Of 8 bits; this head, whose numbers differ by 1e3 in size, suffers more than others."""
    target, head = perfect
    packed = copy.deepcopy(head)
    for parameter in packed.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    assert weights.pack_draft(packed, ExecutionSettings()).endswith("int8")
    found = share(decode(target, heads.drafter(target, packed, 3), 3))
    assert found > 0.5 * share(honest(3))
