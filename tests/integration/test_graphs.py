"""Passes of fixed shapes, as CUDA graphs run them, computed here without capturing them."""

import pytest
import torch
import torch._inductor as inductor
import torch._inductor.metrics

from fly.execution.cuda_graphs import CapturedPass, CudaGraphRunner
from fly.execution.model_runner import ModelRunner
from fly.speculation.drafters.draft_model import ModelDrafter
from fly.speculation.rules import base as rules
from fly.speculation.rules.gates import EntropyGate, all_pass
from fly.speculation.sequence import Request
from tests import tiny

EOS = frozenset({tiny.EOS})


@pytest.fixture(scope="module")
def pair():
    target = tiny.model(1)
    return target, tiny.noisy_copy(target, 0.01)


def decode(pair, name, slots, static, rule=tiny.EXACT, budget=24, k=5):
    capture = False if static else None
    drafter = tiny.drafter(name, slots, pair[1], capture=capture)
    engine = tiny.engine(tiny.runner(pair[0], slots, capture), drafter, k, rule)
    records = tiny.decode_all(engine, tiny.prompts(8), budget)
    return engine, records


def outcome(records):
    return [(record.tokens, record.counts, record.prompt_tokens_reused) for record in records]


@pytest.mark.parametrize(
    ("slots", "rule"), [(1, tiny.EXACT), (3, tiny.relaxed(2, 0.3))], ids=["exact", "fly-of-three"]
)
@pytest.mark.parametrize("name", ["none", "model", tiny.slow("ngram"), "cascade"])
def test_static_passes_decode_as_eager_ones_do(pair, name, slots, rule):
    engine, static = decode(pair, name, slots, True, rule)
    _, eager = decode(pair, name, slots, False, rule)
    assert outcome(static) == outcome(eager)
    assert engine._target.static._captured  # and it was they that ran


def test_the_draft_loop_runs_in_one_piece(pair, monkeypatch):
    """A plain drafter asks the device once per round, and never reads a step's logits."""
    asked = []
    honest = ModelRunner.chain

    def chain(self, feeds, steps, choose):
        asked.append(steps)
        return honest(self, feeds, steps, choose)

    monkeypatch.setattr(ModelRunner, "chain", chain)
    engine, records = decode(pair, "model", 1, True)
    rounds = tiny.total(records, "rounds")
    kinds = {key[0] for key in engine._drafter.runner.static._captured}
    assert kinds == {"feed", "chain"}  # prompts, drafts
    assert 0 < len(asked) <= rounds
    assert tiny.total(records, "native_accepted") > 0


def test_a_graph_that_forgets_the_lengths_is_noticed(pair, monkeypatch):
    """The mutant: inputs other than the ids are not brought up to date."""
    honest = CudaGraphRunner._fill

    def forget(self, captured, *given):
        lengths = captured.inputs[1].clone()
        honest(self, captured, *given)
        captured.inputs[1].copy_(lengths)

    expected = outcome(decode(pair, "model", 3, False)[1])
    monkeypatch.setattr(CudaGraphRunner, "_fill", forget)
    assert outcome(decode(pair, "model", 3, True)[1]) != expected


def prefilled(model, capture):
    """A runner of prompts in both slots, in pieces, and what they answer to a token."""
    runner = tiny.runner(model, 2, capture, reuse_prefixes=False)
    runner.reserve(256)
    for slot, tokens in ((0, [9] * 7), (0, [*range(2, 62)]), (1, [*range(60, 2, -1)])):
        runner.prefill(slot, tokens, chunk=30)
    return runner, runner.extend([[5], [6]]).clone()


def test_pieces_of_prompts_share_a_graph(pair):
    """In any slot, wherever they begin: a GPU computes them faster than its host launches them."""
    runner, static = prefilled(pair[0], False)
    torch.testing.assert_close(static, prefilled(pair[0], None)[1], atol=1e-4, rtol=1e-4)
    assert [key for key in runner.static._captured if key[0] == "feed"] == [("feed", 32, 256)]


@pytest.mark.parametrize("forgotten", [1, 2], ids=["length", "slot"])
def test_a_piece_that_forgets_its_place_is_noticed(pair, monkeypatch, forgotten):
    honest = CudaGraphRunner.get

    def get(self, key, inputs, compute):
        captured = honest(self, key, inputs, compute)
        given = [*captured.inputs]
        if key[0] == "feed":
            given[forgotten] = given[forgotten].clone()
        return CapturedPass(tuple(given), captured.output, captured.replay)

    expected = prefilled(pair[0], None)[1]
    monkeypatch.setattr(CudaGraphRunner, "get", get)
    assert (prefilled(pair[0], False)[1] - expected).abs().max() > 1e-2


@pytest.mark.parametrize(("k", "buckets"), [(5, {1, 2, 3, 4, 5}), (10, {1, 2, 3, 4, 6, 8, 10})])
def test_shapes_are_few_and_fit_the_usual_draft(pair, k, buckets):
    """Batch sizes and widths come in buckets: sequences that end and short last rounds cost no
    capture. Rounded to powers of two, every round of K = 10 would compute 16 steps."""
    engine, _ = decode(pair, "model", 3, True, budget=40, k=k)
    target, draft = (
        [key for key in runner.static._captured if key[0] != "feed"]
        for runner in (engine._target, engine._drafter.runner)
    )
    steps = {key[4] for key in draft}
    assert k in steps
    assert steps <= buckets  # budgets end anywhere
    assert {key[2] for key in target} <= {1, *(1 + bucket for bucket in buckets)}


def test_a_pass_that_cannot_be_captured_falls_back_and_says_why(pair, monkeypatch, caplog):
    def refuse(self, *args):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(CudaGraphRunner, "_make", refuse)
    engine, static = decode(pair, "model", 2, True)
    assert engine._target.static.failure == "operation not permitted when stream is capturing"
    assert "eager passes from here on: operation not permitted" in caplog.text
    assert outcome(static) == outcome(decode(pair, "model", 2, False)[1])


@pytest.mark.slow
def test_compiled_passes_are_eager_ones_with_fewer_kernels(pair):
    """`compile=inductor`, on a CPU in float32, without capture: eager passes launch 42 to 45
    kernels per layer."""
    compiled, eager = (tiny.runner(pair[0], 2) for _ in range(2))
    compiled.use_static_passes(capture=False, compiles=True)
    for runner in (compiled, eager):
        for slot in range(2):
            runner.prefill(slot, [5, 6, 7])
    inductor.metrics.reset()
    for feeds in ([[8], [11]], [[8, 9, 10], [11]]):
        found_BQV, expected_BQV = compiled.extend(feeds), eager.extend(feeds)
        torch.testing.assert_close(found_BQV[0], expected_BQV[0], atol=1e-4, rtol=1e-4)
    assert compiled.static.failure is None
    assert 0 < inductor.metrics.generated_kernel_count < 2 * 2 * 42  # passes, layers


def test_growing_the_cache_drops_graphs_that_read_the_old_one(pair):
    model, _ = pair
    grown = tiny.runner(model, 1, capture=False)
    grown.prefill(0, list(range(3, 40)))
    grown.extend([[5, 6, 7]])
    assert grown.static._captured
    grown.reserve(4000)
    assert not grown.static._captured
    torch.testing.assert_close(
        grown.extend([[5, 6, 7]]), expected_logits(model, [*range(3, 40), 5, 6, 7], 3)
    )


def expected_logits(model, tokens, last):
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[:, -last:]


def test_a_dense_gate_judges_as_the_sparse_one():
    """Accelerators compute every position's entropy; CPUs only the candidates'."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(4, 6, 50)
    candidates = torch.rand(4, 6) < 0.5
    gates, draft = (EntropyGate(0.5),), torch.zeros(4, 6, dtype=torch.long)
    sparse = rules._gate(logits, draft, candidates, gates)
    everywhere = all_pass(gates, logits.flatten(0, 1), draft.flatten()).view(4, 6)
    assert torch.equal(sparse, candidates & everywhere)
    assert sparse.any()
    assert not torch.equal(sparse, candidates)


def test_sequences_that_are_not_drafted_for_keep_their_books(pair):
    """One at the end of its budget, and one past the draft's context, beside an open one."""
    target, draft = pair
    requests = [
        Request((5, 6, 7), 30, tag=0),
        Request((8, 9), 1, tag=1),
        Request(tuple(range(3, 43)), 30, tag=2),
    ]
    results = []
    for static in (True, False):
        drafting = tiny.runner(draft, 3, False if static else None, max_length=40)
        engine = tiny.engine(target, ModelDrafter(drafting, EOS), 5, slots=3)
        fed = []
        for record in engine.run(requests):
            fed.append((record.request.tag, record.tokens, record.counts))
        results.append(sorted(fed, key=lambda item: item[0]))
        for slot in range(3):
            held = drafting._written[slot][: drafting.lengths[slot]]
            assert len(held) == drafting.lengths[slot]
    assert results[0] == results[1]


def test_a_runner_is_freed_with_its_keys_and_values(pair):
    """No cycle keeps the K/V of a finished run on the device."""
    made = [tiny.runner(pair[0], 1, capture=False)]
    made[0].prefill(0, [5, 6, 7])
    made[0].extend([[8]])
    assert tiny.is_freed_at_once(made)
