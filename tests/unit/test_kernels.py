"""fly's own CPU kernels against plain matrix products, for every kind of instruction here."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fly.config import build
from fly.errors import FlyError
from fly.execution import fused_layer, kernels, packed_linear, weights
from fly.execution.kernels import build as compiler
from fly.execution.kernels import vector
from fly.harness.engine_factory import captures_graphs
from tests import tiny

pytestmark = pytest.mark.skipif(kernels.why_not() is not None, reason=str(kernels.why_not()))

_ALL = ("avx2", "avx512", "avx512_bf16", "amx")


def here():
    """What this CPU, as PyTorch is allowed to see it, can run: the better ones know the lesser."""
    found = kernels.instructions() if kernels.why_not() is None else None
    return _ALL[: _ALL.index(found) + 1] if found else ()


@pytest.fixture(params=here())
def isa(request, monkeypatch):
    monkeypatch.setattr(kernels, "instructions", lambda: request.param)
    return request.param


def linear(out, inputs, bias=True, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(inputs, out, bias=bias).bfloat16()


def exact(layer, x):
    result = x.double() @ layer.weight.double().T
    return result if layer.bias is None else result + layer.bias.double()


def error(result, expected):
    return ((result.double() - expected).norm() / expected.norm()).item()


TOLERANCE = {kernels.Bfloat16Linear: (1e-6, 3e-3), kernels.Int8Linear: (2e-2, 2e-2)}  # else, amx
KINDS = [kernels.Bfloat16Linear, kernels.Int8Linear]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("out", "inputs"), [(16, 16), (192, 96), (100, 70), (1000, 256), (17, 33), (330, 600)]
)
def test_products_are_right_for_any_shape(isa, kind, out, inputs):
    layer = linear(out, inputs)
    packed = kind(layer)
    limit = TOLERANCE[kind][isa == "amx"]
    for rows in (1, 2, 5, 6, 7, 13, 16, 17, 32, 33, 50, 545):
        x = torch.randn(rows, inputs).to(kernels.activation_dtype())
        result = packed(x)
        assert result.shape == (rows, out)
        assert result.dtype == kernels.activation_dtype()
        taken = x.bfloat16() if isa == "avx512_bf16" and kind is kernels.Bfloat16Linear else x
        assert error(result, exact(layer, taken)) < limit, rows


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_whatever_shares_its_pass(isa, kind):
    layer = kind(linear(336, 1300))
    x = torch.randn(600, 1300).to(kernels.activation_dtype())
    whole = layer(x)
    for rows in (*range(1, 71), 96, 150, 512, 513):
        assert torch.equal(layer(x[:rows]), whole[:rows]), rows
    assert torch.equal(layer(x.view(6, 100, 1300)).view(600, 336), whole)


def test_the_test_above_notices_sums_in_another_order(isa):
    """Its mutant: PyTorch's own product, whose blocking follows the number of rows."""
    torch.manual_seed(0)
    weight = torch.randn(208, 1600)
    x = torch.randn(70, 1600)
    whole = x @ weight.T
    assert any(not torch.equal(x[:rows] @ weight.T, whole[:rows]) for rows in range(1, 70))


@given(
    rows=st.integers(1, 40), out=st.integers(1, 90), inputs=st.integers(1, 140), seed=st.integers(0)
)
@settings(max_examples=60, deadline=None)
def test_small_integers_are_exact(rows, out, inputs, seed):
    """Sums that every dtype here holds exactly: any element left out or taken twice shows."""
    generator = torch.Generator().manual_seed(seed % 2**32)
    layer = nn.Linear(inputs, out, bias=False).bfloat16()
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-1, 2, (out, inputs), generator=generator))
    x = torch.randint(-1, 2, (rows, inputs), generator=generator)
    expected = x.double() @ layer.weight.double().T
    result = kernels.Bfloat16Linear(layer)(x.to(kernels.activation_dtype()))
    assert torch.equal(result.double(), expected)


def test_int8_rows_do_not_influence_each_other(isa):
    layer = kernels.Int8Linear(linear(64, 64))
    row = torch.randn(1, 64).to(kernels.activation_dtype())
    assert torch.equal(layer(torch.cat([row, 1000 * row]))[:1], layer(row))


def test_zeros_and_no_rows_are_no_special_case(isa):
    for kind in KINDS:
        layer = kind(linear(64, 64, bias=False))
        zeros = torch.zeros(3, 64, dtype=kernels.activation_dtype())
        assert layer(zeros).abs().max() == 0
        assert layer(zeros[:0]).shape == (0, 64)


def test_int8_weights_cannot_overflow_avx2_s_sums_of_two():
    """Two largest unsigned inputs times two largest weights have to fit into 16 bits."""
    assert 2 * 255 * kernels._LEVELS <= 2**15 - 1
    layer = nn.Linear(32, 16, bias=False).bfloat16()
    with torch.no_grad():
        layer.weight.fill_(1.0)
    x = torch.ones(1, 32)
    product = compiler.product
    try:
        compiler.product = lambda *kind, **options: compiler._compile(
            vector.product(vector.AVX2, "int8"), "avx2", "product"
        )
        packed = _on_avx2(layer)
        assert packed(x).sub(32).abs().max() < 0.1
    finally:
        compiler.product = product


def _on_avx2(layer):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "instructions", lambda: "avx2")
        return kernels.Int8Linear(layer)


def test_threads_share_the_panels_without_gaps():
    layer, x = linear(4000, 64), torch.randn(3, 64).to(kernels.activation_dtype())
    packed, before = kernels.Bfloat16Linear(layer), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(packed(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_only_bfloat16_weights_are_packed():
    with pytest.raises(ValueError, match="float16"):
        kernels.Bfloat16Linear(nn.Linear(16, 16).half())


# What stands between the products


def activations(*shape):
    return torch.randn(*shape).to(kernels.activation_dtype())


def near(isa):
    return 1e-5 if isa != "amx" else 1e-2


def test_norm_adds_and_normalises(isa):
    torch.manual_seed(0)
    run, x, delta = kernels.LayerKernels(), activations(5, 96), activations(5, 96)
    weight = torch.rand(96) + 0.5
    total, normed = run.norm(x, weight, 1e-6, delta)
    expected = x.double() + delta.double()
    assert error(total, expected) < near(isa)
    scale = (expected.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert error(normed, weight * expected * scale) < near(isa)
    same, alone = run.norm(x, weight, 1e-6)
    assert same is x
    assert error(alone, weight * x * (x.double().square().mean(-1, keepdim=True)).rsqrt()) < near(
        isa
    )


def test_gated_is_silu_times_up_at_any_size_of_gate(isa):
    run = kernels.LayerKernels()
    gate = torch.cat([torch.linspace(-120, 120, 160), torch.tensor([0.0] * 16)])
    up = torch.full((176,), 1.5)
    x = torch.cat([gate, up]).to(kernels.activation_dtype())[None].repeat(3, 1)
    result = run.gated(x)
    expected = nn.functional.silu(x[:, :176].double()) * 1.5
    assert torch.allclose(result.double(), expected, rtol=near(isa) + 1e-6, atol=1e-30)


def test_rotation_fills_the_cache_at_each_rows_own_positions(isa):
    torch.manual_seed(1)
    run, dtype = kernels.LayerKernels(), kernels.activation_dtype()
    rows, width, heads, kv_heads, size = 2, 3, 4, 2, 32
    x = activations(rows, width, (heads + 2 * kv_heads) * size)
    positions = torch.tensor([[4, 5, 6], [0, 1, 2]])
    angle = positions[..., None] * torch.rand(size // 2).repeat(2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    keys = torch.zeros(3, kv_heads, 8, size, dtype=dtype)
    values = torch.zeros_like(keys)
    query = run.rotate(x, (cos, sin), (keys, values), positions, 1, heads)

    def turned(part):
        low, high = part.double().chunk(2, dim=-1)
        crossed = torch.cat([-high, low], dim=-1)
        return part.double() * cos.double()[:, :, None] + crossed * sin.double()[:, :, None]

    own = x.view(rows, width, heads + 2 * kv_heads, size)
    assert error(query.transpose(1, 2), turned(own[:, :, :heads])) < near(isa)
    for row in range(rows):
        at = positions[row]
        stored_keys, stored_values = keys[row + 1, :, at], values[row + 1, :, at]
        expected = turned(own[:, :, heads : heads + kv_heads])[row].transpose(0, 1)
        assert error(stored_keys, expected) < near(isa)
        assert torch.equal(stored_values, own[row, :, heads + kv_heads :].transpose(0, 1))
    assert keys[0].abs().max() == 0  # no other slot
    assert keys[1, :, :4].abs().max() == 0  # no other position


def test_attention_of_long_contexts_fits_a_threads_stack(isa, monkeypatch):
    """Scores of four heads and 131,072 keys took the 2 MiB that a thread may have. However many
    heads go together, a head's bits are the same."""
    torch.manual_seed(3)
    run, dtype = kernels.LayerKernels(), kernels.activation_dtype()
    capacity, heads, kv_heads, width, size = 48, 8, 2, 3, 32
    query = torch.randn(1, heads, width, size).to(dtype)
    cached = tuple(torch.randn(1, kv_heads, capacity, size).to(dtype) for _ in range(2))
    positions = torch.tensor([[40, 41, 42]])
    taken, outputs = [], []
    function = compiler.elementwise_function
    monkeypatch.setattr(
        kernels.build,
        "elementwise_function",
        lambda *args, **more: taken.append(args[3]) or function(*args, **more),
    )
    for scores in (1 << 17, 3 * capacity, 2 * capacity, capacity):
        monkeypatch.setattr(kernels, "_SCORES", scores)
        outputs.append(run.attention(query, cached, positions, 0, 0.2, capacity))
    assert taken == [4, 3, 2, 1]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    monkeypatch.setattr(kernels, "_SCORES", capacity // 2 - 1)
    with pytest.raises(FlyError, match="a context of 48 tokens is too long for fly's kernels"):
        run.attention(query, cached, positions, 0, 0.2, capacity)


FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def family_model(family, **sizes):
    transformers = pytest.importorskip("transformers")
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    shape = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 256, "sliding_window": None,
        "tie_word_embeddings": family == "qwen2",
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**{**shape, **sizes})
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).bfloat16().eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_decode_as_the_models_own(isa, family):
    model = family_model(family)
    prompt = list(range(3, 40))
    with torch.inference_mode():
        expected = model.double()(torch.tensor([prompt])).logits[0].double()
    model = family_model(family)
    packed_linear.use_kernels(model, kernels.Bfloat16Linear)
    assert fused_layer.replace(model)
    runner = tiny.runner(model, 2, max_length=256)
    runner.prefill(0, prompt[:20])
    runner.prefill(1, prompt[:11])
    logits = runner.extend([prompt[20:25], prompt[11:16]]).double()
    limit = {"amx": 5e-2, "avx512_bf16": 1e-2}.get(isa, 1e-4)  # of rounded activations
    assert error(logits[0], expected[20:25]) < limit
    assert error(logits[1], expected[11:16]) < limit
    with torch.inference_mode():  # loglikelihood: no cache of fly's
        assert error(model(torch.tensor([prompt])).logits[0], expected) < limit


def test_layers_that_do_not_agree_are_not_used(isa, monkeypatch, caplog):
    """The check at load is not for show: a rotation in the wrong direction is found."""
    real = kernels.LayerKernels.rotate
    monkeypatch.setattr(
        kernels.LayerKernels,
        "rotate",
        lambda self, x, angles, *rest: real(self, x, (angles[0], -angles[1]), *rest),
    )
    model = family_model("qwen2")
    packed_linear.use_kernels(model, kernels.Bfloat16Linear)
    assert not fused_layer.replace(model)
    assert "do not agree" in caplog.text


def test_other_architectures_keep_their_layers(isa):
    transformers = pytest.importorskip("transformers")
    model = (
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=96, n_positions=64)
        )
        .bfloat16()
        .eval()
    )
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        expected = model(ids).logits.float()
        packed_linear.use_kernels(model, kernels.Bfloat16Linear)
        assert not fused_layer.replace(model)
        assert model.dtype == kernels.activation_dtype()
        assert (model(ids).logits.float() - expected).abs().max() < 0.05 * expected.abs().max()


# How it is chosen


def config(**values):
    return build({"target_model_path": "t", **values}, "test")


def test_auto_takes_kernels_for_bfloat16_and_leaves_float32_alone():
    target, draft = family_model("qwen2"), family_model("qwen2")
    done = weights.pack(target, draft, config())
    name = f"kernels-{kernels.instructions()}"
    assert (done.target, done.draft) == (name, f"{name} int8")
    assert weights.pack(family_model("llama").float(), None, config()).target == "eager"


def test_naming_a_way_that_cannot_be_had_is_refused():
    with pytest.raises(FlyError, match=r"execution=kernels: only bfloat16 is packed.*float32"):
        weights.pack(family_model("qwen2").float(), None, config(execution="kernels"))
    with pytest.raises(FlyError, match="execution='kernels' contradicts compile='off'"):
        config(execution="kernels", compile="off")


def test_a_model_that_was_packed_to_float32_is_asked_for_no_graphs():
    assert not captures_graphs(config(execution="kernels"), family_model("qwen2").float())


def test_restrictions_of_other_libraries_hold_for_kernels(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    compiler.instructions.cache_clear()
    try:
        assert compiler.instructions() == "avx2"
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        compiler.instructions.cache_clear()
        assert compiler.instructions() is None
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
        for limit, expected in (
            ("AVX512_CORE_BF16", "avx512_bf16"),
            ("AVX512_CORE_FP16", "avx512_bf16"),
            ("AVX10_1_512", "avx512_bf16"),
            ("AVX512_CORE_VNNI", "avx512"),
        ):
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
            compiler.instructions.cache_clear()
            assert compiler.instructions() == expected
    finally:
        compiler.instructions.cache_clear()


def test_a_packed_model_keeps_nothing_of_its_file_in_memory(tmp_path):
    """What stays (embeddings, norms) is a copy: a mapped file would stay resident as a whole."""
    model = family_model("qwen2")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    before = {p.untyped_storage().data_ptr() for p in loaded.parameters()}
    packed_linear.use_kernels(loaded, kernels.Bfloat16Linear)
    kept = [*loaded.parameters(), *loaded.buffers()]
    assert kept
    assert not before & {tensor.untyped_storage().data_ptr() for tensor in kept}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [("answer", "fly's kernels compute wrongly here"), ("compiler", "cannot be compiled here: no")],
)
def test_kernels_that_do_not_work_are_not_used(monkeypatch, spoil, reason):
    """A machine on which code generation goes wrong falls back to slower passes, with a reason."""

    def broken(*args, **kwargs):
        raise RuntimeError("no\nmore")

    if spoil == "answer":
        monkeypatch.setattr(
            kernels.Bfloat16Linear, "_pack", lambda self, w: w.view(torch.int32) * 0
        )
    else:
        monkeypatch.setattr(compiler, "product", broken)
    kernels.why_not.cache_clear()
    try:
        assert reason in kernels.why_not()
        model = family_model("qwen2")
        done = weights.pack(model, None, config())
        assert done.target == "eager"
    finally:
        kernels.why_not.cache_clear()


def test_int8_drafts_get_fused_layers_too(isa):
    """Rounding to the neighbouring int8 must not make the check at load refuse them."""
    for family in FAMILIES:
        model = family_model(family)
        packed_linear.use_kernels(model, kernels.Int8Linear)
        assert fused_layer.replace(model), family


def test_weights_outside_of_plain_linears_are_not_doubled(monkeypatch):
    """GPT-2's products are no nn.Linear, experts are stacked tensors: eager bfloat16, as before."""
    transformers = pytest.importorskip("transformers")
    assert kernels.why_not() is None  # tried before, as activations are here
    monkeypatch.setattr(kernels, "activation_dtype", lambda: torch.float32)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=96, n_positions=64)
    ).bfloat16()
    assert "not in plain linear layers" in packed_linear.why_no_kernels(model)
    assert packed_linear.why_no_kernels(family_model("llama")) is None


def test_a_linear_of_another_dtype_is_a_reason_not_a_crash():
    model = family_model("qwen2")
    model.model.layers[1].mlp.down_proj.float()
    assert packed_linear.why_no_kernels(model) == "some of its linear layers are not in bfloat16"
    assert weights.pack(model, None, config()).target == "eager"


def test_a_model_whose_norms_have_no_weights_keeps_its_dtype_and_device(isa):
    transformers = pytest.importorskip("transformers")
    model = transformers.OlmoForCausalLM(
        transformers.OlmoConfig(
            vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
            tie_word_embeddings=False,
        )
    ).bfloat16().eval()  # fmt: skip
    packed_linear.use_kernels(model, kernels.Bfloat16Linear)
    assert (model.dtype, model.device.type) == (kernels.activation_dtype(), "cpu")
    assert tiny.runner(model, 1, max_length=64).extend([[3, 4, 5]]).isfinite().all()


def test_what_one_process_compiled_the_next_ones_load(monkeypatch, tmp_path):
    """A load of the embedded pair compiled for three seconds. Damaged files are compiled anew."""
    monkeypatch.setenv("FLY_HOME", str(tmp_path))
    linear = nn.Linear(64, 48).to(torch.bfloat16)
    x = torch.randn(3, 64).to(kernels.activation_dtype())
    kept, outputs, optimised, honest = [], [], [], compiler.llvm.create_pass_builder

    def counted(*args):
        optimised.append(args)
        return honest(*args)

    monkeypatch.setattr(compiler.llvm, "create_pass_builder", counted)
    for spoil in (None, None, lambda code: code[:40] + b"x" + code[41:], lambda code: b""):
        for path in tmp_path.rglob("*.o") if spoil else ():
            path.write_bytes(spoil(path.read_bytes()))
        compiler.product.cache_clear()
        outputs.append(kernels.Bfloat16Linear(linear)(x))
        kept.append(len(optimised))
    assert [later - before for before, later in pairwise([0, *kept])] == [2, 0, 2, 2]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    for home in ("/proc/nowhere", "~nobody-of-this-name/fly"):
        monkeypatch.setenv("FLY_HOME", home)
        compiler.product.cache_clear()
        assert torch.equal(kernels.Bfloat16Linear(linear)(x), outputs[0])


def test_kernels_do_not_hang_on_pytorchs_defaults(isa):
    layer = linear(64, 64)
    x = torch.randn(3, 64).to(kernels.activation_dtype())
    expected = [kind(layer)(x) for kind in KINDS]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        again = [kind(layer)(x) for kind in KINDS]
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(a, b) for a, b in zip(expected, again))
