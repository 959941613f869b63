"""Exactness on an accelerator, in float32."""

import pytest
import torch

from tests import tiny

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["none", "model", "ngram", "cascade"])
@pytest.mark.parametrize("slots", [1, 3])
def test_strict_equals_generate_on_the_device(name, slots):
    torch.backends.cuda.matmul.allow_tf32 = False
    target = tiny.model(seed=0).cuda()
    draft = tiny.noisy_copy(target, 0.01)
    expected = [tiny.generate(target, prompt, 60) for prompt in tiny.prompts()]
    engine = tiny.engine(
        target, tiny.drafter(name, slots, draft), 0 if name == "none" else 6, slots=slots
    )
    records = tiny.decode_all(engine, tiny.prompts())
    assert [record.tokens for record in records] == expected
