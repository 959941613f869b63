"""The embedded pair in bfloat16, where only `batch_invariant` makes exact verification lossless."""

import pytest
import torch
import transformers

from fly.execution import kernels, weights
from fly.execution.kernels import gguf as kernels_gguf
from fly.models import gguf
from fly.models.pairs import store
from fly.settings import ExecutionSettings
from tests import tiny
from tests.gguf_files import load_by_transformers
from tests.real import BUDGET, EOS

pytestmark = pytest.mark.real


def load_kept(file):
    return gguf.load(file, transformers.AutoModelForCausalLM, kernels_gguf.takes)


@pytest.mark.skipif(kernels.why_not() is not None, reason="no kernels here")
def test_weights_in_the_file_give_the_logits_of_bfloat16(prompts):
    file = store.locate("qwen2.5-coder").target
    ours, theirs = load_kept(file), load_by_transformers(file)
    for model in (ours, theirs):
        weights.pack(model, None, ExecutionSettings())
    with torch.inference_mode():
        for prompt in (prompts[0], prompts[1][-40:], prompts[2][-9:], prompts[2][:1]):
            ids = torch.tensor([prompt])
            assert torch.equal(ours(ids).logits, theirs(ids).logits)


@pytest.mark.skipif(kernels.why_not() is not None, reason="no kernels here")
def test_exact_is_target_only_in_bfloat16_where_bits_do_not_depend_on_the_pass(prompts):
    """Every drafter, draft length and number of sequences; `lossless` in float32 is easier."""
    paths = store.locate("qwen2.5-coder")
    target, draft = load_kept(paths.target), load_by_transformers(paths.draft)
    weights.pack(target, draft, ExecutionSettings(batch_invariant=True))

    def decode(name, k, slots):
        drafter = tiny.drafter(name, slots, draft, EOS, max_length=4096)
        engine = tiny.engine(tiny.runner(target, slots, max_length=4096), drafter, k, eos=EOS)
        return [r.tokens for r in tiny.decode_all(engine, prompts, BUDGET)]

    expected = decode("none", 0, 1)
    for name, k, slots in (("model", 8, 1), ("cascade", 4, 3), ("ngram", 8, 3), ("none", 0, 3)):
        assert decode(name, k, slots) == expected, (name, k, slots)
