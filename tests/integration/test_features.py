"""The target's hidden states for drafters that read them: transformers' own, position by position.

Each is held against a fresh pass over the whole text.
"""

import pytest
import torch

from fly.speculation.drafters.draft import Draft
from fly.speculation.drafters.draft_model import ModelDrafter
from fly.speculation.sequence import Request
from tests import tiny

EOS = frozenset({tiny.EOS})
LAYERS = (0, 1, 3)  # embeddings, after the first layer, and after the last but before the norm
WIDTH = len(LAYERS) * 32
TEXT = torch.randint(3, 64, (21,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def model():
    return tiny.model(1, layers=3)


@torch.inference_mode()
def expected(model, tokens):
    """[1, N, F], by transformers: its last hidden state is the last layer's after the norm."""
    before_norm = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    hook.remove()
    return torch.cat([states[0], states[1], *before_norm], dim=-1)


def reading(model, slots, capture=None):
    runner = tiny.runner(model, slots, capture)
    runner.hidden_layers = LAYERS
    return runner


def close(actual, wanted):
    assert actual.shape == wanted.shape
    torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [None, 1, 8, 21])
def test_a_prefill_in_chunks_gives_all_of_its_tokens(model, chunk):
    runner = reading(model, 2)
    runner.prefill(1, TEXT, chunk)
    close(runner.take_hidden(), expected(model, TEXT))


def test_copied_tokens_have_no_hidden_states(model):
    """So whoever needs them all has them computed."""
    runner = reading(model, 2)
    runner.prefill(0, TEXT)
    assert runner.prefill(1, [*TEXT, 5, 6]) == len(TEXT)
    close(runner.take_hidden(), expected(model, [*TEXT, 5, 6])[:, -2:])
    assert runner.prefill(1, TEXT, reuse=False) == 0
    close(runner.take_hidden(), expected(model, TEXT))
    runner.prefill(0, [])
    assert runner.take_hidden().shape == (1, 0, WIDTH)


@pytest.mark.parametrize("capture", [None, False], ids=["eager", "static"])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_verification_gives_every_position(model, capture, on_device):
    """Ragged, after a rollback, and twice: static outputs are written over by the next pass."""
    runner = reading(model, 3, capture)
    texts = [TEXT, TEXT[::-1][:9], [7]]
    for slot, text in enumerate(texts):
        runner.prefill(slot, text)
    runner.take_hidden()
    taken = []
    for feeds in ([[5, 6, 7], [8], [9, 10]], [[11], [12, 13, 14, 15], [16]]):
        if on_device:
            feeds = [[*feed, *[3] * (4 - len(feed))] for feed in feeds]
            runner.extend_ids(torch.tensor(feeds))
        else:
            runner.extend(feeds)
        taken.append((feeds, runner.take_hidden()))
    for feeds, hidden_BQF in taken:
        assert hidden_BQF.shape == (3, max(map(len, feeds)), WIDTH)
        for text, feed, hidden_QF in zip(texts, feeds, hidden_BQF):
            close(hidden_QF[: len(feed)], expected(model, text + feed)[0, len(text) :])
    assert (runner.static is None) == (capture is None)
    assert runner.static is None or runner.static._captured


@pytest.mark.parametrize("capture", [None, False], ids=["eager", "static"])
def test_nothing_is_kept_unless_asked_for(model, capture):
    runner = tiny.runner(model, 1, capture)
    for layers in ((), LAYERS, (2,), ()):
        runner.hidden_layers = layers
        runner.prefill(0, TEXT)
        first = runner.take_hidden()
        runner.extend([[5, 6]])
        second = runner.take_hidden()
        if not layers:
            assert first is second is None
            continue
        assert first.shape[-1] == second.shape[-1] == 32 * len(layers)
    assert runner.take_hidden() is None


def test_a_runner_that_read_is_freed_and_the_model_is_as_it_was():
    """Hooks of finished runs would slow every later pass and hold their K/V."""
    model = tiny.model(2)
    made = [tiny.runner(model, 1, capture=False)]
    made[0].hidden_layers = (0, 2)
    made[0].prefill(0, TEXT)
    made[0].extend([[5]])
    assert made[0].take_hidden().shape == (1, 1, 64)
    assert tiny.is_freed_at_once(made)
    assert not any(module._forward_hooks for module in model.modules())


class Reader(ModelDrafter):
    """Notes (text, which part of it, its features) of every call; drafts as its draft model."""

    wants_features = LAYERS

    def __init__(self, runner, eos_ids):
        super().__init__(runner, eos_ids)
        self.admitted, self.committed = [], []

    def admit(self, slot, sequence, features=None, *, soon=True):
        self.admitted.append((sequence.tokens[:-1], features))
        super().admit(slot, sequence, features, soon=soon)

    def propose(self, running, limits):
        self.before = [list(sequence.tokens) for sequence in running]
        draft = super().propose(running, limits)
        assert isinstance(draft, Draft)
        return draft

    def commit(self, running, verdicts, features=None):
        assert len(self.before) == len(running) == len(features)
        drafted = [len(verdict.draft) for verdict in verdicts]
        assert features.shape[1] >= max(drafted) + 1
        for before, verdict, hidden_QF in zip(self.before, verdicts, features):
            self.committed.append((before, verdict.draft, hidden_QF[: len(verdict.draft) + 1]))
        super().commit(running, verdicts, features)


@pytest.mark.parametrize("capture", [None, False], ids=["eager", "static"])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("across", [False, True], ids=["within", "across"])
def test_a_drafter_that_reads_features_gets_them(model, capture, slots, across):
    """Of all tokens, a shared prefix included: it is computed, not copied."""
    drafter = Reader(tiny.runner(tiny.noisy_copy(model, 0.01), slots, capture), EOS)
    rule = tiny.relaxed(2, 0.1, across)
    engine = tiny.engine(tiny.runner(model, slots, capture), drafter, 4, rule)
    prompts = [*tiny.prompts(), tiny.prompts()[3], [*tiny.prompts()[3], 9]]
    records = list(engine.run(Request(tuple(p), 12, tag=i) for i, p in enumerate(prompts)))
    assert 0 < tiny.total(records, "native_accepted") < tiny.total(records, "drafted")
    assert all(record.prompt_tokens_reused == 0 for record in records)
    assert sorted(len(text) for text, _ in drafter.admitted) == sorted(len(p) - 1 for p in prompts)
    for text, features in drafter.admitted:
        assert features.shape == (1, len(text), WIDTH)
        if text:
            close(features, expected(model, text))
    assert len(drafter.committed) == tiny.total(records, "rounds")
    for before, draft, features in drafter.committed:
        close(features, expected(model, before + draft)[0, len(before) - 1 :])


def test_a_drafter_that_reads_nothing_gets_nothing(model):
    class Blind(Reader):
        wants_features = ()

        def commit(self, running, verdicts, features=None):
            assert features is None

    drafter = Blind(tiny.runner(model, 2), EOS)
    engine = tiny.engine(model, drafter, 3, slots=2)
    prompts = [tiny.prompts()[3]] * 3
    records = tiny.decode_all(engine, prompts, 3)
    assert all(features is None for _, features in drafter.admitted)
    assert any(record.prompt_tokens_reused for record in records)
