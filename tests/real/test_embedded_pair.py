"""The embedded pair: losslessness on real text, float32."""

import pytest

from tests import tiny
from tests.real import BUDGET, EOS

pytestmark = pytest.mark.real


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
