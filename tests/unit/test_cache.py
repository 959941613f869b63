"""The ragged cache: after every round its logits equal a fresh prefill, for each architecture."""

import pytest
import torch
import transformers

from fly.errors import FlyError
from fly.execution import self_check
from fly.execution.kv_cache import SlotCache
from fly.execution.model_runner import ModelRunner
from fly.execution.self_check import check_cache_agrees
from fly.models.compatibility import refuse_unsupported
from tests import tiny

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.25,
}
ARCHITECTURES = ("Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "SmolLM3", "Olmo2", "Gemma")


def random_model(name, **extra):
    config_class = getattr(transformers, f"{name}Config", None)
    if config_class is None:
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    sizes = {**SIZES, "head_dim": 8} if name in ("Gemma", "Qwen3") else SIZES
    if name in ("Mistral", "Phi3"):
        extra = {"sliding_window": None, **extra}
    return getattr(transformers, f"{name}ForCausalLM")(config_class(**sizes, **extra)).eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ragged_rounds_equal_fresh_prefill(name):
    """Rows of unequal length, rejected tokens, a moved row, growth past the first block."""
    model = random_model(name)
    refuse_unsupported(model, "target", 512)
    check_cache_agrees(model, "target")
    runner = ModelRunner(model, slots=3, max_length=512)
    rows = [tiny.prompts(3)[index] for index in (1, 2, 0)]
    rows[1] = rows[1] * 13  # longer than one block of capacity
    for slot, tokens in enumerate(rows):
        runner.prefill(slot, tokens[:-1], chunk=16)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        widths = torch.randint(0, 4, (3,), generator=generator).tolist()
        feeds = [
            [tokens[-1], *torch.randint(3, 64, (w,), generator=generator).tolist()]
            for tokens, w in zip(rows, widths)
        ]
        logits = runner.extend(feeds)
        for slot, (tokens, feed) in enumerate(zip(rows, feeds)):
            fresh = model(torch.tensor([tokens[:-1] + feed])).logits[0, -len(feed) :]
            torch.testing.assert_close(logits[slot, : len(feed)], fresh, atol=2e-5, rtol=2e-4)
            kept = 1 + len(feed) // 2  # roll the rest back
            tokens += [*feed[1:kept], int(fresh[kept - 1].argmax())]
            runner.truncate(slot, len(tokens) - 1)
    runner.move(2, 0)
    fresh = model(torch.tensor([rows[2]])).logits[0, -1:]
    torch.testing.assert_close(runner.extend([rows[2][-1:]])[0], fresh, atol=2e-5, rtol=2e-4)


def test_eager_attention_agrees_too():
    model = random_model("Llama", attn_implementation="eager")
    check_cache_agrees(model, "target")


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        ("Mistral", {"sliding_window": 8}, "sliding window of 8 tokens.*max_length=8 or lower"),
        ("Gemma2", {"sliding_window": 8, "head_dim": 8}, "sliding window of 8"),
    ],
)
def test_windows_are_refused_not_decoded_wrongly(name, extra, message):
    model = random_model(name, **extra)
    with pytest.raises(FlyError, match=message):
        refuse_unsupported(model, "target_model_path", 512)


def test_the_narrowest_of_two_windows_counts():
    """Doge has two keys for it; the one that was looked at is wide by default."""
    doge = transformers.DogeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=96,
    )  # fmt: skip
    with pytest.raises(FlyError, match="sliding window of 96"):
        refuse_unsupported(transformers.DogeForCausalLM(doge), "target_model_path", 512)


def test_memory_does_not_grow_past_what_is_expected(target):
    """Growing by half took 1.4 times the K/V that --batch_size auto counts."""
    runner = tiny.runner(target, 1)
    runner.max_length = 2000
    runner.reserve_rows(1300, width=9, spd_k=8)
    for tokens in range(1, 1310):
        runner.reserve(tokens)
    assert runner.cache.capacity == SlotCache.rounded(1309) == 1536
    runner.reserve(1600)  # what is asked for is there all the same
    assert runner.cache.capacity == 1792


def test_a_window_longer_than_the_context_is_accepted():
    refuse_unsupported(random_model("Mistral", sliding_window=600), "target", 512)


def test_alibi_is_caught_by_the_self_check():
    """Bloom takes positions from the mask; decoding it through the ragged cache would be wrong."""
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    torch.manual_seed(0)
    model = transformers.BloomForCausalLM(config).eval()
    with pytest.raises(FlyError, match=r"differs|not supported"):
        check_cache_agrees(model, "target_model_path")


def test_prefill_builds_no_logits_of_the_prompt(target):
    """Full-vocabulary logits of a long prompt would dwarf the model."""
    seen = []
    hook = target.lm_head.register_forward_hook(lambda _m, _i, out: seen.append(out.shape[1]))
    try:
        ModelRunner(target, 1, 512).prefill(0, list(range(3, 60)))
    finally:
        hook.remove()
    assert seen == [0]


def test_small_errors_are_refused_and_rounding_is_not(target, monkeypatch):
    """A tenth of the largest logit was let through, over 13 tokens."""
    honest = ModelRunner.extend
    for dtype, share in ((torch.float32, 0.002), (torch.bfloat16, 0.09)):
        model = tiny.model(1).to(dtype)
        check_cache_agrees(model, "target")

        def slightly_wrong(self, tokens, share=share):
            logits = honest(self, tokens)
            return logits + share * logits.abs().max()

        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "extend", slightly_wrong)
            with pytest.raises(FlyError, match=r"where rounding explains"):
                check_cache_agrees(model, "target")


def test_an_error_far_into_the_context_is_noticed(target, monkeypatch):
    """Positions that stop counting after 32 tokens changed nothing within 13."""
    honest = ModelRunner._call

    def stuck(self, ids, positions, **kwargs):
        return honest(self, ids, positions.clamp(max=32), **kwargs)

    monkeypatch.setattr(ModelRunner, "_call", stuck)
    with pytest.raises(FlyError, match=r"differs from the model's plain pass \(at token"):
        check_cache_agrees(target, "target")


@pytest.mark.parametrize("message", ["std::bad_alloc", "DefaultCPUAllocator: not enough memory: x"])
def test_memory_that_runs_out_in_the_check_is_no_unsupported_architecture(monkeypatch, message):
    def full(*args):
        raise RuntimeError(message)

    monkeypatch.setattr(self_check, "_through_cache", full)
    with pytest.raises(FlyError, match=r"target \(\w+\): memory ran out in its first passes"):
        self_check.check_cache_agrees(tiny.model(1), "target")


def test_a_prefix_copied_over_a_slot_is_what_it_holds():
    model = tiny.model(1)
    runner = ModelRunner(model, 2, 512)
    runner.prefill(0, [5, 6, 7])
    runner.prefill(1, [9, 10, 11, 12, 13])
    assert runner.prefill(1, [5, 6, 7]) == 3
    assert runner.prefill(0, [9, 10, 11, 12]) == 0  # nothing holds these any more
    expected = model(torch.tensor([[9, 10, 11, 12, 14]])).logits[0, -1]
    got = runner.extend([[14], [3]])[0, 0]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_a_moved_slot_brings_no_rejected_tokens():
    runner = ModelRunner(tiny.model(1), 3, 512)
    runner.prefill(2, [5, 6, 7])
    runner.prefill(0, [40, 41, 42, 43, 44])
    runner.prefill(1, [30])
    runner.extend([[1], [1], [8, 9, 10]])
    for slot, length in ((2, 4), (0, 5), (1, 1)):
        runner.truncate(slot, length)
    runner.move(2, 0)
    runner.move(1, 2)
    assert runner.prefill(1, [5, 6, 7, 8, 9, 10]) == 4


def test_padding_of_a_static_pass_is_not_reused():
    runner = tiny.runner(tiny.model(1), 2, capture=False)
    runner.prefill(0, [20, 21])
    runner.prefill(1, [5, 6, 7])
    runner.extend([[22], [8, 9, 10]])
    runner.truncate(0, 3)
    runner.truncate(1, 4)
    runner.extend([[23, 24, 25]])  # pads slot 1 behind its length
    assert runner.prefill(0, [5, 6, 7, 8, 9, 10]) == 4
