"""The embedded pair: losslessness on real text, float32."""

from pathlib import Path

import pytest

from fly import config
from fly.execution import memory
from fly.models import pairs
from tests import tiny
from tests.real import BUDGET, EOS

pytestmark = pytest.mark.real


def test_the_weights_counted_without_loading_are_those_in_the_files():
    paths = pairs.locate("qwen2.5-coder")
    pair = memory.pair_of(config.load("qwen2.5-coder.json"), "a test", 2048)
    need = pair.need(memory.ONE_GPU, 1)
    for folder, size in ((paths.target, need.target), (paths.draft, need.draft)):
        with open(Path(folder) / "model.safetensors", "rb") as file:
            header = 8 + int.from_bytes(file.read(8), "little")
            assert size == file.seek(0, 2) - header


@pytest.mark.parametrize("name", ["none", "model", "ngram", "cascade"])
def test_lossless_on_humaneval(pair, prompts, expected, name):
    _, target, draft = pair
    drafter = tiny.drafter(name, 1, draft, EOS, max_length=4096)
    engine = tiny.engine(target, drafter, 0 if name == "none" else 8, eos=EOS)
    records = tiny.decode_all(engine, prompts, BUDGET)
    assert [record.tokens for record in records] == expected
    if name != "none":
        assert 0 < tiny.total(records, "native_accepted") < tiny.total(records, "drafted")


def test_tokenizer_is_qwens(tokenizer):
    code = "def f(x):\n    return x + 12345\n"
    for text in (code, "naïve 中文 🎉", "<|im_start|>user\nhi<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_end|>") == [151645]
    assert len(tokenizer.encode("12345")) == 5
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
