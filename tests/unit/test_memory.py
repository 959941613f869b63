"""`fly config check --memory`: counted from shapes, compared with what models and caches take."""

import json
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from fly import config
from fly.errors import FlyError
from fly.execution import memory
from fly.execution.heads.block import BlockHead
from fly.execution.heads.eagle3 import Eagle3Head
from fly.execution.kv_cache import SlotCache
from fly.execution.memory import GIB
from fly.execution.model_runner import ModelRunner
from fly.models.architectures import (
    KNOWN,
    model_config,
    parameters,
    quantised_bits,
    without_weights,
)
from fly.models.heads.checkpoint import TargetShape, read
from fly.models.sources import ModelSource
from fly.paths import data_dir
from tests import block_heads, heads, tiny
from tests.integration.test_cli import run

LARGE = sorted(data_dir("fly_config").glob("FLy_*.json"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A pair on disk: the target's embeddings are tied, the draft's are not; one layer less."""
    root = tmp_path_factory.mktemp("pair")
    tiny.model(1, layers=3, tie_word_embeddings=True).save_pretrained(root / "target")
    tiny.model(2, layers=2).save_pretrained(root / "draft")
    return root


def settings(saved, **keys):
    models = {"target_model_path": str(saved / "target"), "draft_model_path": str(saved / "draft")}
    return config.build({**models, "spd_k": 6, "enable_fly": False, **keys}, "a test")


def loaded(saved, role):
    return AutoModelForCausalLM.from_pretrained(saved / role).eval()


def stored_bytes(cache):
    return sum(tensor.nbytes for tensor in (*cache._keys, *cache._values))


@pytest.mark.parametrize(("context", "cascade"), [(250, False), (250, True), (30, False)])
def test_weights_and_kv_are_those_of_the_loaded_models_and_their_caches(saved, context, cascade):
    """A wrong number of heads, of layers or of tied tensors, or a K/V block not rounded up."""
    slots = 3
    pair = memory.pair_of(settings(saved, use_ngram=cascade), "a test", context)
    need = pair.need(memory.ONE_GPU, 1)
    for role, weights in (("target", need.target), ("draft", need.draft)):
        held = {id(tensor): tensor.nbytes for tensor in loaded(saved, role).parameters()}
        assert weights == sum(held.values())
        (file,) = (saved / role).glob("*.safetensors")
        header = int.from_bytes(file.read_bytes()[:8], "little")
        assert weights == file.stat().st_size - 8 - header
    target = tiny.runner(loaded(saved, "target"), slots)
    draft = tiny.runner(loaded(saved, "draft"), slots)
    for runner in (target, draft):
        runner.use_static_passes(capture=False)  # as on a GPU
    drafter = tiny.ModelDrafter(draft, frozenset({tiny.EOS}))
    if cascade:
        drafter = tiny.CascadeDrafter(
            draft, frozenset({tiny.EOS}), (1, 4, 6), tiny.lookup(slots, has_model=True)
        )
    prompts = [[5] * (context - 2)] * slots
    tiny.decode_all(tiny.engine(target, drafter, 6, slots=slots), prompts, budget=2)
    assert need.sequence * slots == stored_bytes(target.cache) + stored_bytes(draft.cache)


def test_shards_are_counted_by_hand(saved):
    """Hidden 32, intermediate 64, 4 heads and 2 key/value heads of 8, vocabulary 64, 3 layers."""
    target = memory.pair_of(settings(saved), "a test", 8).target
    attention = 32 * (32 + 16 + 16) + (32 + 16 + 16) + 32 * 32  # with biases of q, k and v
    feed_forward, norms, embedding = 3 * 32 * 64, 2 * 32, 64 * 32
    assert memory.whole(target).weights == 4 * (
        3 * (attention + feed_forward + norms) + 32 + embedding
    )
    split = 3 * (attention + feed_forward)
    plan = memory.by_plan(target, 2)
    is_embedding_split = "embed_tokens" in " ".join(target.plan)  # not before transformers 5
    embedded = embedding // 2 if is_embedding_split else embedding
    assert plan.weights == 4 * (split // 2 + 3 * norms + 32 + embedded)
    assert plan.kv == memory.whole(target).kv // 2
    vllm = memory.by_vllm(target, 4)  # two GPUs share a key/value head; biases of q are whole
    kv, biases = 3 * 2 * 32 * 16, 3 * 64
    matrices = split - kv - biases
    assert vllm.weights == 4 * (
        (matrices + embedding) // 4 + kv // 2 + 3 * (32 + 32 // 2) + 3 * norms + 32
    )
    assert vllm.kv == memory.whole(target).kv // 2
    layers = memory.by_layers(target, 2)
    assert layers.weights == 4 * (2 * (attention + feed_forward + norms) + embedding)
    assert layers.kv == memory.whole(target).kv // 3 * 2


def test_fused_experts_are_sharded_and_gathered_keys_are_whole(saved):
    """MiniMax-M2.5's plan names the experts' own parameters, and gathers q, k and v."""
    plan = {
        "model.layers.*.self_attn.k_proj": "colwise_gather_output",
        "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "model.layers.*.mlp.experts.down_proj": "rowwise",
        "model.layers.*.mlp.experts": "moe_tp_experts",
    }
    names = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "self_attn.k_proj.weight")
    parts = [
        memory.Parameter(f"model.layers.0.{name}", (8, 64), 1000)
        for name in (*names, "mlp.gate.weight")
    ]
    target = memory.pair_of(settings(saved), "a test", 8).target
    share = memory.by_plan(replace(target, parameters=parts, plan=plan), 4)
    assert share.weights == 3 * 250 + 1000
    assert share.kv == memory.whole(target).kv


def test_what_cannot_be_sharded_is_said(saved):
    pair = memory.pair_of(settings(saved), "a test", 8)
    plan, vllm = memory.LAYOUTS[2:]
    with pytest.raises(FlyError, match="the target's 2 key/value heads cannot be divided by 4"):
        pair.need(plan, 4)
    with pytest.raises(FlyError, match="the target's 4 attention and 2 key/value heads"):
        pair.need(vllm, 8)


@pytest.mark.parametrize(
    ("model", "count"),
    [  # as the hub counts them
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("meta-llama/Llama-3.1-70B-Instruct", 70_553_706_496),
        ("meta-llama/Llama-3.1-405B-Instruct", 405_853_388_800),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-72B-Instruct", 72_706_203_648),
        ("Qwen/Qwen2.5-Coder-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        # the model card: 20.91 and 116.83 billion
        ("openai/gpt-oss-20b", 20_914_757_184),
        ("openai/gpt-oss-120b", 116_829_156_672),
    ],
)
def test_the_shipped_architectures_have_the_published_number_of_parameters(model, count):
    found = without_weights(model_config(ModelSource(model), "a test"), "a test")
    assert sum(tensor.numel() for tensor in found.parameters()) == count


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_every_shipped_pair_is_known_without_a_network(path):
    found = config.load(str(path))
    for model in (found.target_model_path, found.draft_model_path):
        assert model in json.loads(KNOWN.read_text())


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        (None, None),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "awq", "bits": 4}, 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, 8),
        ({"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp4"}]}}, 4),
    ],
)  # fmt: skip
def test_bits_of_quantised_checkpoints(quantization, bits):
    found = model_config(ModelSource("Qwen/Qwen2.5-7B-Instruct"), "a test")
    found.quantization_config = quantization
    assert quantised_bits(found) == bits


def test_quantised_layers_take_their_bits_and_the_rest_its_dtype(saved):
    shape = memory.pair_of(settings(saved), "a test", 8).draft
    eight = memory.pair_of(settings(saved, draft_quantization="int8"), "a test", 8).draft
    linear = 2 * (32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64)  # not the output embedding
    assert shape.bytes - eight.bytes == 3 * linear
    found = model_config(ModelSource("Qwen/Qwen2.5-7B-Instruct"), "a test")
    found.quantization_config = {"quant_method": "new"}
    with pytest.raises(FlyError, match="quant_method=new does not say its bits"):
        quantised_bits(found)


@pytest.mark.skipif(transformers.__version__ < "5", reason="experts are linear layers of their own")
@pytest.mark.parametrize(
    ("model", "gib"),  # as the model card has it
    [("openai/gpt-oss-20b", 12.8), ("openai/gpt-oss-120b", 60.8)],
)
def test_experts_take_the_checkpoints_bits_and_attention_only_where_it_does(model, gib):
    config = model_config(ModelSource(model), "a test")
    found = parameters(without_weights(config, "a test"), quantised_bits(config))
    assert round(sum(parameter.bytes for parameter in found) / GIB, 1) == gib


@pytest.mark.parametrize("drafter", ["eagle3", "block"])
def test_a_head_is_counted_from_its_files(saved, tmp_path, drafter):
    target = loaded(saved, "target")
    if drafter == "eagle3":
        config = {**heads.SHAPE, "eagle_aux_hidden_state_layer_ids": [2, 3, 3]}
        folder = heads.save(tmp_path / "head", config, heads.tensors(0, torch.arange(0, 64, 2)))
        head = Eagle3Head
    else:
        folder = block_heads.save(block_heads.published("dspark", target), tmp_path / "head")
        head = BlockHead
    keys = {"draft_model_path": str(folder), "drafter": drafter, "spd_k": 5}
    need = memory.pair_of(settings(saved, **keys), "a test", 100).need(memory.ONE_GPU, 1)
    alone = memory.pair_of(settings(saved, use_sd=False), "a test", 100).need(memory.ONE_GPU, 1)
    checkpoint = read(ModelSource(str(folder)), "head", {})
    held = head.from_checkpoint(checkpoint, TargetShape.of(target.config), None)
    assert need.target == alone.target
    assert need.draft == sum(parameter.nbytes for parameter in held.parameters()) > 0
    tokens = (need.sequence - alone.sequence) / held.bytes_per_token
    assert tokens == SlotCache.rounded(100 + 5)


def test_a_head_on_the_hub_is_one_line(saved):
    with pytest.raises(
        FlyError, match=r"draft_model_path=org/head: .* counted from its files: name"
    ):
        memory.pair_of(settings(saved, draft_model_path="org/head", drafter="eagle3"), "a test", 8)


def test_a_model_that_transformers_loads_as_no_language_model_is_one_line():
    with pytest.raises(FlyError, match=r"x: transformers .* loads kimi_k25 as no causal language"):
        without_weights(model_config(ModelSource("moonshotai/Kimi-K2.5"), "x"), "x")


def check(capsys, path, *flags):
    status = run("config", "check", path, "--memory", *flags)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_the_command_says_what_fits_and_what_would(saved, tmp_path, capsys):
    file = tmp_path / "pair.json"
    file.write_text(settings(saved).model_dump_json())
    status, out, _ = check(capsys, file, "--gpus", "2", "--context", "100")
    assert status == 0
    rows = [line for line in out.splitlines() if line.startswith("tp_plan")]
    need = memory.pair_of(settings(saved), "a test", 100).need(memory.LAYOUTS[2], 2)
    assert rows[0].split()[-1] == str(need.sequences(80 * GIB))
    small = (need.target + need.draft + need.sequence) / GIB  # 15 % short of one sequence
    status, out, _ = check(capsys, file, "--gpu-memory", f"{small:.9f}", "--context", "100")
    assert status == 1
    assert "does not fit: takes GPUs of 1\n" in out
    assert "vllm, tensor_parallel_size: 2 GPUs" in out.splitlines()[-1]
    for flags in (("--gpus", "0"), ("--gpu-memory", "inf"), ("--context", "x")):
        assert check(capsys, file, *flags)[0] == 2


def test_a_model_that_is_not_known_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "pair.json"
    file.write_text(json.dumps({"target_model_path": "org/unknown", "use_sd": False}))
    status, _, err = check(capsys, file)
    assert status == 2
    assert err.count("\n") == 1
    assert "target_model_path=org/unknown: its config.json can neither be read nor" in err


def test_the_draft_of_qwen_cannot_be_split_over_eight_by_vllm(capsys):
    (path,) = [path for path in LARGE if "Qwen25_72b" in path.name]
    status, out, _ = check(capsys, path, "--gpus", "8")
    assert status == 0
    assert "not possible: the draft's 28 attention and 4 key/value heads" in out


PASTED = re.findall(
    r"^    \$ fly (config check .*)\n((?:    .*\n)+)",
    (Path(__file__).parents[2] / "docs/scale.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.skipif(transformers.__version__ < "5", reason="its plan leaves embeddings whole")
@pytest.mark.parametrize(("command", "shown"), PASTED, ids=[command for command, _ in PASTED])
def test_the_output_in_the_documentation_is_the_commands(command, shown, capsys):
    assert run(*command.split()) == 0
    _, printed = capsys.readouterr().out.split("\n", 1)  # without the line that says it is valid
    assert printed == textwrap.dedent(shown)


@pytest.mark.parametrize("name", ["falcon_multi_query", "deepseek_v3", "minicpm3", "qwen2"])
def test_kv_are_what_the_model_caches(name):
    """By keys of other models Falcon's were counted 71 times, DeepSeek's latents 28 times."""
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    of = {
        "falcon_multi_query": {**shape, "multi_query": True, "alibi": False},
        "deepseek_v3": {
            **shape, "intermediate_size": 48, "kv_lora_rank": 12, "q_lora_rank": 12,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4,
            "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
            "moe_intermediate_size": 16, "num_key_value_heads": 4,
        },
        "minicpm3": {
            **shape, "intermediate_size": 48, "kv_lora_rank": 12, "q_lora_rank": 12,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        },
        "qwen2": {**shape, "intermediate_size": 48, "num_key_value_heads": 2},
    }[name]  # fmt: skip
    kind = name.removesuffix("_multi_query")
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    model_config_ = CONFIG_MAPPING[kind](**of)
    model_config_.dtype = torch.float32
    runner = ModelRunner(AutoModelForCausalLM.from_config(model_config_).eval(), 1, 64)
    runner.prefill(0, [5, 6, 7])
    found = memory.ModelShape(
        "a test", model_config_, [], {}, 0, "float32",
        cached=memory._cached(without_weights(model_config_, "a test")),
    )  # fmt: skip
    assert found.cached is not None
    assert found.kv_bytes(found.kv_heads, found.layers) == runner.cache.bytes_per_token
