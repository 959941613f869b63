"""Decoding on CUDA devices that are played on a CPU (tests/played.py)."""

import copy

import pytest
import torch

from fly import config as fly_config
from fly.errors import FlyError
from fly.execution import calibration, oom, self_check, weights
from fly.execution.batch_size import SequenceWork, sequences_that_fit
from fly.execution.cuda_graphs import CudaGraphRunner
from fly.execution.heads.block import BlockHead, BlockRunner
from fly.execution.model_runner import ModelRunner
from fly.harness.engine_factory import EngineFactory, LoadedPair
from fly.models.heads.checkpoint import TargetShape
from fly.settings import ExecutionSettings, Settings, TopKSettings, TypicalSettings
from fly.speculation.drafters import cascade
from fly.speculation.drafters.block import BlockDrafter
from fly.speculation.engine import Engine
from fly.speculation.rules.base import Rule
from fly.speculation.rules.block import BlockRule
from fly.speculation.rules.top_k import TopKRule
from fly.speculation.rules.typical import TypicalRule
from fly.speculation.sampling import GREEDY, Sampling
from fly.speculation.sequence import Request
from tests import block_heads, heads, played, tiny
from tests.tiny import slow

TARGET = tiny.model(0)
DRAFT = tiny.noisy_copy(TARGET, 0.02)
SAMPLED = Sampling(0.7, top_k=20, top_p=0.9)
PENALISED = Sampling(0.9, top_p=0.95, repetition_penalty=1.2)
EAGLE3 = heads.tensors(0, reads=1)
HEADS = {name: block_heads.published(name, TARGET) for name in ("dflash", "dspark")}
DRAFTERS = ["none", "model", "cascade", "ngram", "eagle3", *HEADS]
RULES = {
    "exact": tiny.EXACT,
    "fly": tiny.relaxed(2, 0.3),
    "fly-across": tiny.relaxed(2, 0.3, across=True),
    "top_k": TopKRule(TopKSettings()),
    "typical": TypicalRule(TypicalSettings()),
    "accept_all": Rule(Settings()),
    "block": BlockRule(Settings()),
}
CAPTURE = {"graphs": True, "eager": None}
K = 4
EOS, NO_EOS = frozenset({tiny.EOS}), frozenset({999})


def same(module, where=None):
    """As it is: on the CPU."""
    return module


def drafter_of(name, target, draft, rows, capture, put=same, where="cuda:0", eos=EOS):
    if name == "eagle3":
        head = put(heads.load(TARGET, EAGLE3, eagle_aux_hidden_state_layer_ids=[1]), where)
        return heads.drafter(target, head, rows, eos)
    if name in HEADS:
        head = BlockHead.from_checkpoint(HEADS[name], TargetShape.of(TARGET.config), None)
        return BlockDrafter(BlockRunner(put(head.eval(), where), target, rows), eos)
    return tiny.drafter(name, rows, draft, eos, capture=capture)


def requests(count, samplings, budget=12):
    prompts = [*tiny.prompts(8), *(p[::-1] for p in tiny.prompts(8))] * 2
    return [
        Request(tuple(prompt), budget, tag=tag, seed=tag, sampling=samplings[tag % len(samplings)])
        for tag, prompt in enumerate(prompts[:count])
    ]


def texts_of(engine, wanted):
    found = {record.request.tag: record.tokens for record in engine.run(wanted)}
    return [found[request.tag] for request in wanted]


def on_cpu(name, rows, rule, wanted):
    drafter = drafter_of(name, TARGET, DRAFT, rows, None)
    return texts_of(tiny.engine(tiny.runner(TARGET, rows), drafter, K, rule), wanted)


def engine_on_gpu(name, rows, rule=tiny.EXACT, capture=True, draft_on="cuda:0", k=K, eos=EOS):
    target = played.put(copy.deepcopy(TARGET))
    draft = played.put(copy.deepcopy(DRAFT), draft_on)
    drafter = drafter_of(name, target, draft, rows, capture, played.put, draft_on, eos)
    return tiny.engine(tiny.runner(target, rows, capture), drafter, k, rule, eos=eos)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("rows", [slow(1), 3, slow(32)])
def test_texts_are_those_of_the_cpu(rows, name):
    """Greedy and sampled requests, with and without a penalty, side by side."""
    wanted = requests(rows + 1 + rows // 4, [GREEDY, SAMPLED, SAMPLED, PENALISED])
    expected = on_cpu(name, rows, tiny.EXACT, wanted)
    with played.devices() as meter:
        assert texts_of(engine_on_gpu(name, rows), wanted) == expected
        assert meter.replays > 0


# Every rule with every drafter, and each of both with graphs and with eager passes: a rule sees
# no pass, only what it gave.
DECIDING = ("model", "eagle3", "dspark")
CASES = [
    (pytest.param if i % 3 == j else slow)(rule, name, "graphs" if (i + j) % 2 else "eager")
    for i, rule in enumerate(RULES)
    for j, name in enumerate(DECIDING)
]


@pytest.mark.parametrize(("rule", "name", "passes"), CASES)
def test_every_rule_decides_as_on_the_cpu(rule, name, passes):
    wanted = requests(10, [GREEDY, SAMPLED])
    expected = on_cpu(name, 8, RULES[rule], wanted)
    with played.devices():
        engine = engine_on_gpu(name, 8, RULES[rule], CAPTURE[passes])
        assert texts_of(engine, wanted) == expected


@pytest.mark.parametrize("name", ["model", slow("cascade"), "eagle3", slow("dflash")])
def test_a_draft_on_another_gpu(name):
    wanted = requests(5, [GREEDY, SAMPLED, PENALISED])
    expected = on_cpu(name, 4, tiny.EXACT, wanted)
    with played.devices() as meter:
        engine = engine_on_gpu(name, 4, draft_on="cuda:1")
        assert texts_of(engine, wanted) == expected
        assert meter.copies["P2P"] > 0


@pytest.mark.parametrize(
    "name", [name if name in ("model", "dspark") else slow(name) for name in DRAFTERS]
)
def test_layers_over_two_gpus(name):
    """An index for no logits was moved to the first GPU, while the last layer's states lay on the
    last one."""
    wanted = requests(5, [GREEDY, SAMPLED])
    expected = on_cpu(name, 4, tiny.relaxed(2, 0.3), wanted)
    with played.devices():
        target, draft = played.spread(copy.deepcopy(TARGET)), played.put(copy.deepcopy(DRAFT))
        drafter = drafter_of(name, target, draft, 4, True, played.put)
        engine = tiny.engine(tiny.runner(target, 4), drafter, K, tiny.relaxed(2, 0.3))
        assert texts_of(engine, wanted) == expected


def rounds_of(engine, rows, sampling, budget, monkeypatch):
    """(launches, waits) of each round over all rows in which nothing was captured."""
    found, honest = [], Engine._round

    def counted(self, running):
        played.METER.reset()
        honest(self, running)
        if len(running) == rows and not played.METER.captures:
            found.append((played.METER.launches, sum(played.METER.waits.values())))

    monkeypatch.setattr(Engine, "_round", counted)
    wanted = [Request((5 + tag, 6, 7), budget, tag=tag, sampling=sampling) for tag in range(rows)]
    list(engine.run(wanted))
    return found


# Most launches of a round with K = 8, a replayed graph being one, and the times that the host
# waits: for what was decided. docs/performance.md has the same table.
MOST = {
    ("model", "graphs", "greedy"): 85,
    ("model", "graphs", "sampled"): 135,
    ("model", "eager", "greedy"): 1000,
    ("model", "eager", "sampled"): 1300,
    ("eagle3", "graphs", "greedy"): 1000,
    ("eagle3", "graphs", "sampled"): 1000,
    ("dspark", "graphs", "greedy"): 1000,
    ("dspark", "graphs", "sampled"): 1000,
}


@pytest.mark.parametrize(
    ("name", "passes", "how"),
    [case if case[1:] == ("graphs", "greedy") else slow(*case) for case in MOST],
)
def test_a_round_waits_once_and_launches_the_same_for_any_number_of_sequences(
    name, passes, how, monkeypatch
):
    """A hidden `.item()`, or work per sequence, fails here."""
    sampling = SAMPLED if how == "sampled" else GREEDY
    budget = 20 if name == "dspark" else 40  # the others draft less well, or pad drafts, or both
    most = []
    with played.devices() as meter:
        for rows in (1, 32 if (name, passes) == ("model", "graphs") else 4):
            k, capture = 4 if name in HEADS else 8, CAPTURE[passes]
            engine = engine_on_gpu(name, rows, tiny.relaxed(2, 0.3), capture, k=k, eos=NO_EOS)
            with monkeypatch.context() as patch:
                found = rounds_of(engine, rows, sampling, budget, patch)
            assert len(found) >= 5
            assert {waits for _, waits in found} == {1}, meter.waits
            most.append(max(launches for launches, _ in found))
        assert max(most) - min(most) <= 20  # heads copy each sequence's states
        assert max(most) <= MOST[name, passes, how]


def loaded(target, draft, settings, monkeypatch):
    """A pair of played models."""
    monkeypatch.setattr(cascade, "relative_cost", lambda way, tokens: float(tokens))
    packed = weights.pack(target, draft, settings)
    return LoadedPair(target, draft, tiny.byte_tokenizer(), EOS, 512, packed)


def test_results_say_what_the_passes_were_and_why(monkeypatch, caplog):
    """They said `graphs` for layers over two GPUs, for heads, and where a capture had failed."""
    settings = ExecutionSettings()
    config = fly_config.build({"target_model_path": "t", "draft_model_path": "d"}, "test")

    def refuse(self, *args):
        raise RuntimeError("operation not permitted when stream is capturing")

    with played.devices():
        spread = played.spread(copy.deepcopy(TARGET))
        draft = played.put(copy.deepcopy(DRAFT))
        head = played.put(heads.load(TARGET, EAGLE3, eagle_aux_hidden_state_layer_ids=[1]))
        with caplog.at_level("INFO"):
            facts = weights.pack(spread, head, settings).as_dict()
        assert (facts["target"], facts["draft"]) == ("eager", "eager")
        assert facts["eager"]["target"] == "its layers are spread over devices"
        assert "eager passes for the target: its layers are spread over devices" in caplog.text
        target = played.put(copy.deepcopy(TARGET))
        pair = loaded(target, draft, settings, monkeypatch)
        facts = pair.packed.as_dict()
        assert (facts["target"], facts["eager"]) == ("graphs", {})
        monkeypatch.setattr(CudaGraphRunner, "_make", refuse)
        wanted = requests(3, [GREEDY])
        factory = EngineFactory(pair, config, wanted, wanted, 3, 2, 64)
        engine = factory.engine(lambda record: None)
        list(engine.run(wanted))
        facts = pair.packed.as_dict()
        assert (facts["target"], facts["draft"]) == ("eager", "eager")
        assert facts["eager"]["target"] == "operation not permitted when stream is capturing"


@pytest.mark.parametrize("change", [None, "fly", "eagle3", "inductor"])
def test_drafts_are_as_long_as_passes_say_where_texts_do_not_depend_on_it(
    change, monkeypatch, tmp_path
):
    """Passes are timed on the device; the first of a shape captures its graph, and does not count.
    A draft step that costs half of the target's pass makes drafts of 12 tokens too long. Heads
    decided by costs of another device, as no timing has what they read."""
    monkeypatch.setenv("FLY_HOME", str(tmp_path))
    keys = {"target_model_path": "t", "draft_model_path": "d", "spd_k": 12}
    keys |= {"verification": "fly" if change == "fly" else "exact", "win_len": 2}
    keys |= {"drafter": "eagle3"} if change == "eagle3" else {}
    keys |= {"compile": "inductor"} if change == "inductor" else {}
    config = fly_config.build(keys, "test")
    wanted, lengths = requests(3, [GREEDY]), set()
    with played.devices():
        target, draft = (played.put(copy.deepcopy(model)) for model in (TARGET, DRAFT))

        if change == "eagle3":
            draft = played.put(heads.load(TARGET, EAGLE3, eagle_aux_hidden_state_layer_ids=[1]))
        honest, seen = calibration._pass_seconds, set()

        def seconds(runner, tokens, count):
            assert runner.slots == 1  # there may be no memory for more
            if (runner, tokens) not in seen:
                seen.add((runner, tokens))
                honest(runner, tokens, count)
                return 9.0
            return 1.0 if runner.model is target else 0.5

        monkeypatch.setattr(calibration, "_pass_seconds", seconds)
        pair = loaded(target, draft, config, monkeypatch)
        factory = EngineFactory(pair, config, wanted, wanted, 3, 2, 64)
        engine = factory.engine(lambda record: lengths.add(len(getattr(record, "draft", ()))))
        if change is None:
            found = texts_of(engine, wanted)
    if change is not None:
        assert factory.draft_length == {"policy": "fixed", "spd_k": 12}
        return
    assert found == on_cpu("model", 2, tiny.EXACT, wanted)
    assert factory.draft_length["policy"] == "adaptive"
    assert factory.draft_length["draft"]["1"] == 0.5
    assert {2, 4} & lengths
    assert lengths < {*range(5)}


def test_costs_of_passes_that_could_not_be_captured_are_not_kept(monkeypatch, tmp_path):
    """They would be taken for those of captured ones for a month."""

    def refuse(self, *args):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setenv("FLY_HOME", str(tmp_path))
    for is_kept in (True, False):
        with played.devices():
            target = tiny.runner(played.put(copy.deepcopy(TARGET)), 3, True)
            calibration.calibrate(target, None, {"captured": is_kept})
        assert (target.static.failure is None) == is_kept
        assert target.slots == 3
        assert len(list(tmp_path.rglob("*.json"))) == 1
        monkeypatch.setattr(CudaGraphRunner, "_make", refuse)


def test_auto_batch_counts_every_gpu_by_its_own_layers(monkeypatch):
    """All layers' K/V were counted against the first GPU."""
    kv = 2 * 2 * 8 * 4 * 256  # K and V, K/V heads, head size, float32, tokens; of a layer
    free = {torch.device("cuda", 0): 100 * kv, torch.device("cuda", 1): 50 * kv}
    monkeypatch.setattr(oom, "free_bytes", free.__getitem__)
    with played.devices():
        target = played.spread(copy.deepcopy(TARGET))
        work = SequenceWork(ModelRunner(target, 1, 512), width=5)
        assert work.bytes_for(100) == dict.fromkeys(free, kv)
        assert sequences_that_fit([work], 100, at_most=64) == int(0.85 * 50)


def test_a_wrong_graph_is_refused_at_load(monkeypatch):
    """The mutant: a captured pass that is not told the lengths."""
    honest = CudaGraphRunner._fill

    def forget(self, captured, *given):
        lengths = captured.inputs[1].clone()
        honest(self, captured, *given)
        captured.inputs[1].copy_(lengths)

    with played.devices() as meter:
        target = played.put(copy.deepcopy(TARGET))
        self_check.check_cache_agrees(target, "target", capture=True)
        assert meter.replays > 0
        monkeypatch.setattr(CudaGraphRunner, "_fill", forget)
        with pytest.raises(FlyError, match="its captured passes are wrong: set compile=off"):
            self_check.check_cache_agrees(target, "target", capture=True)


def test_devices_are_not_mixed():
    with played.devices():
        here, there = (played.Played(torch.ones(3), f"cuda:{index}") for index in range(2))
        with pytest.raises(RuntimeError, match="device"):
            here + there


def test_waits_and_launches_are_counted():
    with played.devices() as meter:
        x = played.Played(torch.ones(3), "cuda:0")
        meter.reset()
        y = x + x
        assert (meter.launches, sum(meter.waits.values())) == (1, 0)
        assert float(y.sum()) == 6
        assert sum(meter.waits.values()) == 1
