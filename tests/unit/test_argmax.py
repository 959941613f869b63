"""The fast argmax is argmax, ties included."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fly.execution.argmax import greedy


@given(st.integers(0, 10_000), st.sampled_from([128, 384, 100, 1]), st.integers(0, 3))
def test_greedy_is_the_first_of_the_largest(seed, vocabulary, rows):
    """Values from a few levels only: most maxima are tied."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(-3, 3, (rows, 2, vocabulary), generator=generator)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = levels.to(dtype)
        assert torch.equal(greedy(logits), levels.double().argmax(dim=-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_infinities(dtype):
    logits = torch.full((2, 256), -torch.inf, dtype=dtype)
    logits[1, 200] = 0
    assert greedy(logits).tolist() == [0, 200]
