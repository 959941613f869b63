"""Attention of ragged passes against the textbook's, in float64."""

import math

import pytest
import torch

from fly.execution import grouped_attention as attention
from fly.execution.grouped_attention import grouped_attention


def textbook(query, key, value, lengths):
    """Row b's query i sees keys 0..lengths[b] + i. [B, H, Q, D] -> [B, Q, H, D]."""
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[1] // key.shape[1]
    result = torch.zeros_like(query)
    for b, length in enumerate(lengths):
        for h in range(query.shape[1]):
            for i in range(query.shape[2]):
                keys, values = (x[b, h // group, : length + i + 1] for x in (key, value))
                scores = keys @ query[b, h, i] / math.sqrt(query.shape[-1])
                result[b, h, i] = scores.softmax(dim=0) @ values
    return result.transpose(1, 2)


def inputs(dtype, heads, kv_heads, width):
    torch.manual_seed(0)
    lengths = [0, 21, 9]
    query = 3 * torch.randn(3, width, heads, 16).to(dtype).transpose(1, 2)  # as models make it
    stored = torch.randn(2, 3, kv_heads, 64, 16).to(dtype)
    key, value = stored[:, :, :, : max(lengths) + width]
    positions = torch.tensor(lengths)[:, None] + torch.arange(width)
    hidden = torch.arange(key.shape[2]) > positions[:, :, None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
    return query, key, value, mask[:, None], lengths


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("width", [1, 2, 9, 24])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (7, 1)])
def test_attention_is_the_textbook_s(dtype, tolerance, width, heads, kv_heads):
    query, key, value, mask, lengths = inputs(dtype, heads, kv_heads, width)
    kept = query.clone()
    actual, _ = grouped_attention(
        torch.nn.Identity(), query, key, value, mask, scaling=1 / math.sqrt(16)
    )
    expected = textbook(query, key, value, lengths)
    assert (actual.double() - expected).abs().max() <= tolerance * expected.abs().max()
    assert torch.equal(query, kept)


def test_both_ways_are_taken_and_equally_accurate(monkeypatch):
    query, key, value, mask, lengths = inputs(torch.bfloat16, 6, 2, 24)
    expected = textbook(query, key, value, lengths)
    errors = []
    for most in (1 << 30, 0):
        monkeypatch.setattr(attention, "_MOST_SCORES", most)
        actual, _ = grouped_attention(torch.nn.Identity(), query, key, value, mask, scaling=0.25)
        errors.append((actual.double() - expected).norm())
    assert errors[0] != errors[1]  # else one of them was not taken
    assert errors[0] <= 1.5 * errors[1]


def test_scores_in_bfloat16_would_be_noticed(monkeypatch):
    """The mutant of the test above."""
    query, key, value, mask, lengths = inputs(torch.bfloat16, 6, 2, 24)
    expected = textbook(query, key, value, lengths)

    def rounded(query, key, value, mask, scaling):
        scores = (query @ key.transpose(2, 3)).float() * scaling + mask
        return scores.softmax(dim=-1).bfloat16() @ value

    errors = []
    for products in (attention._products, rounded):
        monkeypatch.setattr(attention, "_products", products)
        actual, _ = grouped_attention(torch.nn.Identity(), query, key, value, mask, scaling=0.25)
        errors.append((actual.double() - expected).norm())
    assert errors[1] > 1.5 * errors[0]
