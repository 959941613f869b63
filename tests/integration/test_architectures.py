"""Every architecture: decoded exactly through the ragged cache, or refused with a clear line.

Tiny random models of each. The oracle of a row is a forward pass of that row's tokens alone,
without any cache; what must not pass comes as mutants of the runner and of what it tells the model.
"""

import copy
import functools
import random

import pytest
import torch
import transformers

from fly.errors import FlyError
from fly.execution.merged_linear import Sibling, concatenate, merge
from fly.execution.model_runner import ModelRunner
from fly.execution.self_check import check_cache_agrees
from fly.models.compatibility import refuse_unsupported
from fly.speculation.sequence import Request
from tests import tiny

FIELD = "target_model_path"
CONTEXT = 512
VOCAB = 64
TOLERANCE = 1e-4  # of the largest logit; float32 agrees to about 1e-6
BUDGET = 16
TRANSFORMERS_5 = int(transformers.__version__.split(".")[0]) >= 5

TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": tiny.EOS, "pad_token_id": 0}
BASE = TOKENS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}
GROUPED = BASE | {"num_key_value_heads": 2}
HEADS_OF_8 = GROUPED | {"head_dim": 8}  # where the default does not follow from the hidden size
FULL = {"layer_types": ["full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT = TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
GPT_NEO = TOKENS | {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_position_embeddings": CONTEXT,
}
BART = TOKENS | {
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": CONTEXT,
}
LATENT = BASE | {  # multi-head latent attention: keys and values of different width
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def rope(rope_type, **parameters):
    parameters["rope_type"] = rope_type
    if TRANSFORMERS_5:
        return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}
    return {"rope_scaling": parameters}


def longrope(switch_at, frequencies=4):
    factors = {"short_factor": [1.0] * frequencies, "long_factor": [4.0] * frequencies}
    if TRANSFORMERS_5:
        settings = rope(
            "longrope", factor=4.0, original_max_position_embeddings=switch_at, **factors
        )
    else:
        settings = {"rope_scaling": {"type": "longrope", **factors}}
    return settings | {"original_max_position_embeddings": switch_at}


LLAMA3_ROPE = rope(
    "llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small only wait for each other on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# name: (config class, model class, settings)
EXACT = {
    "afmoe": (
        "AfmoeConfig",
        "AfmoeForCausalLM",
        HEADS_OF_8 | FULL | EXPERTS | {"num_dense_layers": 1},
    ),
    "apertus": ("ApertusConfig", "ApertusForCausalLM", GROUPED),
    "biogpt": ("BioGptConfig", "BioGptForCausalLM", BASE),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", GPT | {"rotary_dim": 4, "n_ctx": CONTEXT}),
    "cohere": ("CohereConfig", "CohereForCausalLM", GROUPED),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", HEADS_OF_8 | FULL),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        LATENT
        | EXPERTS
        | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", HEADS_OF_8),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", GROUPED | FULL),
    "falcon": ("FalconConfig", "FalconForCausalLM", BASE),
    "falcon_grouped": (
        "FalconConfig",
        "FalconForCausalLM",
        BASE | {"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", HEADS_OF_8),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", HEADS_OF_8 | FULL),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", HEADS_OF_8 | FULL),
    "glm": ("GlmConfig", "GlmForCausalLM", HEADS_OF_8),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", HEADS_OF_8),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT),
    "gpt_bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", GPT),
    "gpt_neo_global": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        GPT_NEO | {"attention_types": [[["global"], 2]]},
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", BASE),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        HEADS_OF_8 | FULL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", GPT | {"rotary_dim": 4}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", GROUPED),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM", GROUPED | {"num_local_experts": 4}),
    "helium": ("HeliumConfig", "HeliumForCausalLM", HEADS_OF_8),
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "llama3_rope": ("LlamaConfig", "LlamaForCausalLM", GROUPED | LLAMA3_ROPE),
    "llama_eager": (
        "LlamaConfig",
        "LlamaForCausalLM",
        GROUPED | {"attn_implementation": "eager"},
    ),
    "minicpm3": ("MiniCPM3Config", "MiniCPM3ForCausalLM", LATENT),
    "mistral": ("MistralConfig", "MistralForCausalLM", HEADS_OF_8 | {"sliding_window": None}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        GROUPED | {"sliding_window": None, "num_local_experts": 4},
    ),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", HEADS_OF_8),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", GROUPED),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", GROUPED),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", GROUPED | FULL),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", GROUPED | EXPERTS),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        BASE | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    "persimmon": ("PersimmonConfig", "PersimmonForCausalLM", BASE),
    "phi": ("PhiConfig", "PhiForCausalLM", GROUPED),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", GROUPED | {"sliding_window": None}),
    "phi3_longrope": (  # its other frequencies would begin where the context ends
        "Phi3Config",
        "Phi3ForCausalLM",
        GROUPED | {"sliding_window": None} | longrope(CONTEXT),
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        GROUPED | EXPERTS | {"shared_expert_intermediate_size": 16},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", HEADS_OF_8),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", HEADS_OF_8 | EXPERTS),
    "smollm3": (  # one layer with rotary positions, one without any
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        GROUPED | {"no_rope_layers": [1, 0]},
    ),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", GROUPED),
    "starcoder2": (
        "Starcoder2Config",
        "Starcoder2ForCausalLM",
        GROUPED | {"sliding_window": None},
    ),
}


def build(config_name, model_name, settings):
    """A random model whose output depends on its whole context; skips where there is none such."""
    config_class = getattr(transformers, config_name, None)
    model_class = getattr(transformers, model_name, None)
    if config_class is None or model_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {model_name}")
    torch.manual_seed(0)
    model = model_class(config_class(**settings)).float().eval()
    model.generation_config.eos_token_id = tiny.EOS
    with torch.no_grad():  # initializer_range is ignored by some, and called otherwise by others
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.25)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.05)
    return model


@functools.cache
def exact_model(name):
    model = build(*EXACT[name])
    row = [5, 9, 33, 7, 21, 50, 12, 9]
    one, other = logits_of(model, row)[-1], logits_of(model, [6, *row[1:]])[-1]
    assert (one - other).abs().max() > 0.05 * one.abs().max(), "the context hardly matters"
    return model


def logits_of(model, row):
    """[Q, V] of one plain pass over one row: no cache, no mask, no positions from fly."""
    with torch.inference_mode():
        return model(torch.tensor([row]), use_cache=False).logits[0].float()


class Rows:
    """Rows in a runner beside their plain token lists; every pass is compared with the oracle."""

    def __init__(self, model, runner_type=ModelRunner, slots=3, seed=0):
        self.model = model
        self.random = random.Random(seed)
        self.runner = runner_type(model, slots, CONTEXT)
        self.rows = []

    def tokens(self, count):
        return [self.random.randrange(3, VOCAB) for _ in range(count)]

    def admit(self, length, like=None, shared=0):
        """A new row in the next slot; its first tokens may be those of the row in slot `like`."""
        prefix = [] if like is None else self.rows[like][:shared]
        row = prefix + self.tokens(length - len(prefix))
        self.runner.prefill(len(self.rows), row[:-1])
        self.rows.append(row)

    def retire(self, slot):
        """As the engine does: the last row moves into the free slot."""
        last = self.rows.pop()
        if slot < len(self.rows):
            self.runner.move(len(self.rows), slot)
            self.rows[slot] = last

    def round(self, drafted):
        """Feed every row its last token and a draft, compare, then accept a part of each draft."""
        drafts = [self.tokens(count) for count in drafted]
        logits_BQV = self.runner.extend([[row[-1], *d] for row, d in zip(self.rows, drafts)])
        for slot, (row, draft) in enumerate(zip(self.rows, drafts)):
            expected = logits_of(self.model, row + draft)[len(row) - 1 :]
            actual = logits_BQV[slot, : len(expected)].float()
            difference = ((actual - expected).abs().max() / expected.abs().max()).item()
            assert difference <= TOLERANCE, f"row {slot} of {len(row)} tokens: {difference:.3g}"
            accepted = self.random.randint(0, len(draft))
            self.rows[slot] = row + draft[:accepted] + self.tokens(1)
            self.runner.truncate(slot, len(self.rows[slot]) - 1)


def compare_with_fresh_passes(model, runner_type=ModelRunner, longest=70):
    """Unequal rows, unequal feeds, rollbacks, rows that end, move and make room for others."""
    rows = Rows(model, runner_type)
    for length in (1, longest, 9):
        rows.admit(length)
    rows.round([5, 2, 7])
    rows.round([0, 6, 3])
    rows.retire(0)
    rows.round([4, 1])
    rows.admit(30)
    rows.round([3, 0, 6])
    rows.retire(2)
    rows.retire(0)
    rows.round([6])
    rows.admit(2)
    rows.admit(17, like=0, shared=8)
    for _ in range(2):
        rows.round([rows.random.randint(0, 8) for _ in rows.rows])


@pytest.mark.parametrize("name", EXACT)
def test_rows_equal_fresh_passes_after_every_round(name):
    model = exact_model(name)
    refuse_unsupported(model, FIELD, CONTEXT)
    check_cache_agrees(model, FIELD)
    compare_with_fresh_passes(model)


@pytest.mark.parametrize("name", [x if i % 3 == 0 else tiny.slow(x) for i, x in enumerate(EXACT)])
def test_engine_equals_generate(name):
    model = exact_model(name)
    draft = tiny.noisy_copy(model, 0.02)
    prompts = tiny.prompts(4, VOCAB)
    expected = [tiny.generate(model, prompt, BUDGET) for prompt in prompts]
    engine = tiny.engine(model, tiny.drafter("model", 3, draft), 4, slots=3)
    records = tiny.decode_all(engine, prompts, BUDGET)
    assert [record.tokens for record in records] == expected
    assert 0 < tiny.total(records, "native_accepted") < tiny.total(records, "drafted")


@pytest.mark.parametrize("name", EXACT)
def test_joined_siblings_answer_as_before(name):
    """Every product is asked for once per pass, in the order that joining expects."""
    model = copy.deepcopy(exact_model(name))
    row = list(range(3, 40))
    expected = logits_of(model, row)
    calls = []
    merge(model, concatenate)
    products = {module.product for module in model.modules() if isinstance(module, Sibling)}
    for product in products:
        product.register_forward_hook(lambda module, *args: calls.append(module))
    torch.testing.assert_close(logits_of(model, row), expected, atol=1e-4, rtol=1e-4)
    assert all(calls.count(product) <= 1 for product in products)
    if name in ("llama", "qwen3", "opt"):
        assert products
    check_cache_agrees(model, FIELD)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_row_past_the_first_block_of_the_cache(name):
    """Capacity grows while shorter rows are in flight."""
    compare_with_fresh_passes(exact_model(name), longest=255)


class NeverRollsBack(ModelRunner):
    fed = None

    def extend(self, tokens):
        logits_BQV = super().extend(tokens)
        self.fed = [length + len(row) for length, row in zip(self.lengths, tokens)]
        return logits_BQV

    def truncate(self, slot, length):
        super().truncate(slot, max(length, self.fed[slot]))


class KeepsOneTooFew(ModelRunner):
    def truncate(self, slot, length):
        super().truncate(slot, length - 1)


class MovesOnlyTheLength(ModelRunner):
    def move(self, source, destination):
        self.truncate(destination, self.lengths[source])


class MovesToTheNextSlot(ModelRunner):
    def move(self, source, destination):
        super().move(source, (destination + 1) % len(self.lengths))
        self.truncate(destination, self.lengths[source])


@pytest.mark.parametrize(
    "mutant", [NeverRollsBack, KeepsOneTooFew, MovesOnlyTheLength, MovesToTheNextSlot]
)
@pytest.mark.parametrize("name", ["llama", "gpt2", "olmoe", "deepseek_v3"])
def test_mutant_runner_is_caught(name, mutant):
    with pytest.raises(AssertionError, match="row"):
        compare_with_fresh_passes(exact_model(name), mutant)


def tell(monkeypatch, model, new_tokens_only=False, **changes):
    """Change what fly tells the model: `changes` maps an argument to a function of its value."""
    state = {"extending": False}
    honest_extend, honest_forward = ModelRunner.extend, model.forward

    def extend(self, tokens):
        state["extending"] = True
        try:
            return honest_extend(self, tokens)
        finally:
            state["extending"] = False

    @functools.wraps(honest_forward)
    def forward(*args, **kwargs):
        through_cache = kwargs.get("past_key_values") is not None
        if through_cache and (state["extending"] or not new_tokens_only):
            kwargs |= {key: change(kwargs[key]) for key, change in changes.items()}
        return honest_forward(*args, **kwargs)

    monkeypatch.setattr(ModelRunner, "extend", extend)
    monkeypatch.setattr(model, "forward", forward)


def one_later(positions_BQ):
    return positions_BQ + 1


def rows_all_as_long_as_the_longest(positions_BQ):
    return positions_BQ.max(0, keepdim=True).values.expand_as(positions_BQ)


def hide_nothing(mask_B1QK):
    if mask_B1QK.dtype == torch.bool:
        return torch.ones_like(mask_B1QK)
    return torch.zeros_like(mask_B1QK)


ROTARY = ["llama", "gpt_neox", "gptj", "phi3", "deepseek_v3"]
LEARNED = ["gpt2", "opt", "gpt_neo_global"]


@pytest.mark.parametrize(
    ("name", "new_tokens_only"),
    [*((name, True) for name in (*ROTARY, *LEARNED)), *((name, False) for name in LEARNED)],
)
def test_mutant_positions_one_too_far_are_caught(name, new_tokens_only, monkeypatch):
    """Of all tokens, or of those after the prompt only, which keeps its own."""
    model = exact_model(name)
    tell(monkeypatch, model, new_tokens_only=new_tokens_only, position_ids=one_later)
    with pytest.raises(AssertionError, match="row"):
        compare_with_fresh_passes(model)


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_models_cannot_notice_a_shift_of_all_positions(name, monkeypatch):
    """Why the mutant above shifts new tokens only: rotary attention sees distances."""
    model = exact_model(name)
    tell(monkeypatch, model, position_ids=one_later)
    compare_with_fresh_passes(model)


@pytest.mark.parametrize(
    ("argument", "change"),
    [("position_ids", rows_all_as_long_as_the_longest), ("attention_mask", hide_nothing)],
)
@pytest.mark.parametrize("name", ["llama", "llama_eager", "gpt2", "smollm3", "gemma3"])
def test_mutant_of_what_the_model_is_told_is_caught(name, argument, change, monkeypatch):
    model = exact_model(name)
    tell(monkeypatch, model, **{argument: change})
    with pytest.raises(AssertionError, match="row"):
        compare_with_fresh_passes(model)


# Refused by their configuration: what the line names, beside the field.
WINDOW = {"sliding_window": 64}
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
T5 = TOKENS | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
REFUSED = {
    "mistral": ("MistralConfig", "MistralForCausalLM", HEADS_OF_8 | WINDOW, "sliding"),
    "ministral": ("MinistralConfig", "MinistralForCausalLM", HEADS_OF_8 | WINDOW, "sliding"),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        GROUPED | WINDOW | {"num_local_experts": 4},
        "sliding",
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", GROUPED | WINDOW, "sliding"),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", GROUPED | WINDOW, "sliding"),
    "qwen2": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        GROUPED | WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
        "sliding",
    ),
    "qwen3": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        HEADS_OF_8 | WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
        "sliding",
    ),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", HEADS_OF_8 | WINDOW, "sliding"),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM", HEADS_OF_8 | WINDOW, "sliding"),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", HEADS_OF_8 | WINDOW, "sliding"),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", GROUPED | WINDOW, "sliding"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", GROUPED | WINDOW, "sliding"),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        HEADS_OF_8 | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
        "sliding",
    ),
    "llama4_text": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        HEADS_OF_8 | {"intermediate_size_mlp": 48, "num_local_experts": 2},
        "chunked_attention",
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        GROUPED | {"layer_types": ["conv", "full_attention"]},
        "conv",
    ),
    "minimax": (
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        HEADS_OF_8 | {"layer_types": ["linear_attention", "full_attention"]},
        "linear_attention",
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        HEADS_OF_8
        | EXPERTS
        | LINEAR
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 16,
        },
        "recurrent",
    ),
    "bamba": (
        "BambaConfig",
        "BambaForCausalLM",
        GROUPED | MAMBA | {"attn_layer_indices": [1]},
        "recurrent",
    ),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        GROUPED | MAMBA | {"mamba_d_ssm": 64},
        "recurrent",
    ),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        TOKENS | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
        "recurrent",
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        TOKENS
        | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
        | {"num_heads": 8, "head_dim": 8, "n_groups": 1},
        "recurrent",
    ),
    "rwkv": (
        "RwkvConfig",
        "RwkvForCausalLM",
        TOKENS | {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2},
        "recurrent",
    ),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5, "encoder-decoder"),
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        BART | {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48},
        "encoder-decoder",
    ),
}


def assert_one_clear_line(error, model):
    line = str(error)
    assert "\n" not in line
    assert line.startswith(f"{FIELD} ({model.config.model_type})")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_its_configuration(name):
    *classes, settings, word = REFUSED[name]
    model = build(*classes, settings)
    with pytest.raises(FlyError, match=word) as caught:
        refuse_unsupported(model, FIELD, CONTEXT)
    assert_one_clear_line(caught.value, model)
    assert model.config.model_type == name


@pytest.mark.parametrize(
    ("config_name", "model_name", "settings"),
    [
        (
            "BloomConfig",
            "BloomForCausalLM",
            TOKENS | {"hidden_size": 32, "n_layer": 2, "n_head": 4},
        ),
        ("FalconConfig", "FalconForCausalLM", BASE | {"alibi": True}),
    ],
)
def test_alibi_is_refused_by_the_trial(config_name, model_name, settings):
    """These compute positions from a 2D mask, which ragged rows do not have."""
    model = build(config_name, model_name, settings)
    refuse_unsupported(model, FIELD, CONTEXT)
    with pytest.raises(FlyError, match="this architecture is not supported yet") as caught:
        check_cache_agrees(model, FIELD)
    assert_one_clear_line(caught.value, model)


@pytest.mark.parametrize(
    ("config_name", "model_name"),
    [
        ("Gemma2Config", "Gemma2ForCausalLM"),
        ("Gemma3TextConfig", "Gemma3ForCausalLM"),
        ("MistralConfig", "MistralForCausalLM"),
        ("Phi3Config", "Phi3ForCausalLM"),
    ],
)
def test_a_window_of_the_whole_context_is_exact_and_one_less_is_refused(config_name, model_name):
    longest = 140
    model = build(config_name, model_name, HEADS_OF_8 | {"sliding_window": longest})
    with pytest.raises(FlyError, match="sliding"):
        refuse_unsupported(model, FIELD, longest + 1)
    refuse_unsupported(model, FIELD, longest)
    check_cache_agrees(model, FIELD)
    compare_with_fresh_passes(model, longest=100)


def refused(model):
    try:
        refuse_unsupported(model, FIELD, CONTEXT)
        check_cache_agrees(model, FIELD)
    except FlyError as error:
        assert_one_clear_line(error, model)
        return True
    return False


# Neither a promise to decode these nor one to refuse them: never silently wrong.
EITHER = {
    "doge": ("DogeConfig", "DogeForCausalLM", GROUPED),
    "mpt": (
        "MptConfig",
        "MptForCausalLM",
        TOKENS | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": CONTEXT},
    ),
    "xglm": (
        "XGLMConfig",
        "XGLMForCausalLM",
        TOKENS | {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
    ),
    "bert": ("BertConfig", "BertLMHeadModel", BASE | {"is_decoder": True}),
    "bert_bidirectional": ("BertConfig", "BertLMHeadModel", BASE),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        GROUPED | {"lru_width": 32, "attention_window_size": 16},
    ),
    "llama4_full": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        HEADS_OF_8 | FULL | {"intermediate_size_mlp": 48, "num_local_experts": 2},
    ),
}


@pytest.mark.parametrize("name", EITHER)
def test_refused_or_exact(name):
    model = build(*EITHER[name])
    if not refused(model):
        compare_with_fresh_passes(model)


# Wrong beyond some length, or for rows of unequal length only.
EASY_TO_MISS = {
    "gpt_neo_local": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        GPT_NEO | {"attention_types": [[["global", "local"], 1]], "window_size": 64},
    ),
    "llama_dynamic_rope": (
        "LlamaConfig",
        "LlamaForCausalLM",
        GROUPED | {"max_position_embeddings": 64} | rope("dynamic", factor=4.0),
    ),
    "phi3_longrope_switches": (
        "Phi3Config",
        "Phi3ForCausalLM",
        GROUPED | {"sliding_window": None} | longrope(64),
    ),
    "minicpm3_longrope_switches": (
        "MiniCPM3Config",
        "MiniCPM3ForCausalLM",
        LATENT | longrope(64, frequencies=2),
    ),
    "llama4_temperature": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        EITHER["llama4_full"][2] | {"no_rope_layers": [1, 0], "floor_scale": 16, "attn_scale": 0.5},
    ),
    "bart_decoder": ("BartConfig", "BartForCausalLM", BART),
    "trocr": ("TrOCRConfig", "TrOCRForCausalLM", BART),
    "roformer": ("RoFormerConfig", "RoFormerForCausalLM", BASE | {"is_decoder": True}),
    "doge_keeps_some_keys": ("DogeConfig", "DogeForCausalLM", GROUPED | {"keep_window_size": 16}),
}


@pytest.mark.parametrize("name", EASY_TO_MISS)
def test_what_one_short_row_does_not_show_is_refused(name):
    model = build(*EASY_TO_MISS[name])
    if not refused(model):
        compare_with_fresh_passes(model)


TABLES_OF_POSITIONS = ["gpt2", "opt", "gptj", "gpt_bigcode", "codegen", "biogpt"]


@pytest.mark.parametrize("name", ["llama", *TABLES_OF_POSITIONS])
def test_a_row_at_the_end_of_the_context_beside_a_longer_feed(name):
    """The short feed is padded: the padding has no position of its own in a table."""
    rows = Rows(exact_model(name))
    rows.admit(CONTEXT)
    rows.admit(4)
    rows.round([0, 5])


def test_engine_fills_the_context_beside_another_row():
    model = exact_model("gpt2")
    drafter = tiny.drafter("model", 2, tiny.noisy_copy(model, 0.05), eos=frozenset())
    engine = tiny.engine(model, drafter, 15, slots=2, eos=frozenset())
    rows = Rows(model)
    requests = [
        Request(tuple(rows.tokens(length)), budget, (), tag=length)
        for length, budget in ((CONTEXT - BUDGET, BUDGET), (6, 6 * BUDGET))
    ]
    records = list(engine.run(requests))
    for record in records:
        request = record.request
        assert record.tokens == tiny.generate(model, list(request.prompt), request.budget, None)
