"""The verification rules against a slow, obvious oracle, and tables that pin the window."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.decoding.verification import (
    Relaxation,
    entropy,
    full_entropy,
    top_k_entropy,
    verify_greedy,
)

V = 8
HIGH, LOW = 1.0, 0.1  # entropies above and below the tests' threshold of 0.3


def logits_for(choice: int, uncertain: bool) -> torch.Tensor:
    """A distribution whose argmax is `choice`: nearly flat, or nearly certain."""
    logits = torch.zeros(V)
    logits[choice] = 0.5 if uncertain else 9.0
    return logits


def stream(native: str, uncertain: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A draft of token 1 per position. native: 'y' where the target agrees. Plus the bonus row."""
    rows = [logits_for(1 if n == "y" else 2, u == "h") for n, u in zip(native, uncertain)] + [
        logits_for(3, False)
    ]
    return torch.ones(1, len(native), dtype=torch.long), torch.stack(rows)[None]


def oracle(native, deferrable, length, window):
    """One position at a time, as DESIGN section 3 says it: accepted count, stood, rolled back."""
    accepted, stood, rolled_back = 0, [], []
    for j in range(1, length + 1):
        if native[j - 1]:
            accepted += 1
            continue
        fits = j + window <= length
        if not (deferrable[j - 1] and fits):
            break
        if all(native[j : j + window]):
            stood.append(j - 1)
            accepted += 1
            continue
        rolled_back.append(j - 1)
        break
    return accepted, stood, rolled_back


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_agrees_with_the_slow_oracle(data):
    """Catches any off-by-one in the batched window, and padding that leaks between rows."""
    rows = data.draw(st.integers(1, 4))
    k = data.draw(st.integers(1, 12))
    window = data.draw(st.integers(0, 7))
    lengths = data.draw(st.lists(st.integers(0, k), min_size=rows, max_size=rows))
    flags = st.lists(st.booleans(), min_size=k, max_size=k)
    native = [data.draw(flags) for _ in range(rows)]
    uncertain = [data.draw(flags) for _ in range(rows)]
    draft, logits = [], []
    for b in range(rows):
        chain, scores = stream(
            "".join("y" if n else "n" for n in native[b]),
            "".join("h" if u else "l" for u in uncertain[b]),
        )
        chain[0, lengths[b] :] = -1
        draft.append(chain[0])
        logits.append(scores[0])
    verdict = verify_greedy(
        torch.stack(draft), torch.tensor(lengths), torch.stack(logits), Relaxation(window, 0.3)
    )
    for b in range(rows):
        accepted, stood, rolled_back = oracle(native[b], uncertain[b], lengths[b], window)
        assert verdict.accepted_B[b] == accepted
        assert verdict.stood_BK[b].nonzero().flatten().tolist() == stood
        assert verdict.rolled_back_BK[b].nonzero().flatten().tolist() == rolled_back


@pytest.mark.parametrize(
    ("native", "uncertain", "window", "accepted", "why"),
    [
        ("nyyyyyy", "hhhhhhh", 6, 7, "window of 6 ends exactly at the draft's end"),
        ("ynyyyyy", "hhhhhhh", 6, 1, "only 5 positions follow: rejected"),
        ("nyyyyyn", "hhhhhhh", 6, 0, "mismatch at the last window position rolls back"),
        ("nyyynyyy", "hhhhhhhh", 3, 8, "second mismatch one past the window: both stand"),
        ("nyynyyyy", "hhhhhhhh", 3, 0, "two mismatches W apart: the first is rolled back"),
        ("nyyyyyyy", "lhhhhhhh", 6, 0, "certain target: the gate is shut"),
        ("nnnn", "hhhh", 0, 4, "no window: every uncertain mismatch is accepted"),
        ("nnln".replace("l", "n"), "hhlh", 0, 2, "no window still asks the gate"),
        ("yyyyyyyy", "llllllll", 6, 8, "all native: nothing to relax"),
        ("y" * 8 + "n" + "y" * 6, "h" * 15, 6, 15, "last relaxable position of K=15"),
        ("y" * 9 + "n" + "y" * 5, "h" * 15, 6, 9, "last W positions cannot be relaxed"),
    ],
)
def test_window_table(native, uncertain, window, accepted, why):
    draft, logits = stream(native, uncertain)
    verdict = verify_greedy(draft, torch.tensor([len(native)]), logits, Relaxation(window, 0.3))
    assert verdict.accepted_B.item() == accepted, why
    expected = 3 if accepted == len(native) else 2
    assert verdict.next_token_B.item() == expected, "bonus after K, else the target's own token"


def test_gate_passes_at_equality():
    """Catches > written for >=."""
    draft, logits = stream("nyy", "hhh")
    exact = entropy(logits[0, 0], "top3").item()
    length = torch.tensor([3])
    at = verify_greedy(draft, length, logits, Relaxation(2, exact))
    above = verify_greedy(draft, length, logits, Relaxation(2, math.nextafter(exact, 9) + 1e-6))
    assert at.accepted_B.item() == 3
    assert above.accepted_B.item() == 0


def test_threshold_none_is_off_and_zero_is_zero():
    draft, logits = stream("nyy", "lll")
    length = torch.tensor([3])
    assert verify_greedy(draft, length, logits, Relaxation(2, None)).accepted_B.item() == 3
    assert verify_greedy(draft, length, logits, Relaxation(2, 0.0)).accepted_B.item() == 3


def test_exact_rule_never_relaxes():
    draft, logits = stream("nyyyyyyy", "hhhhhhhh")
    verdict = verify_greedy(draft, torch.tensor([8]), logits, None)
    assert verdict.accepted_B.item() == 0
    assert not verdict.stood_BK.any()


def test_empty_draft_yields_the_targets_token():
    verdict = verify_greedy(
        torch.empty(1, 0, dtype=torch.long),
        torch.tensor([0]),
        logits_for(5, False)[None, None],
        Relaxation(6, 0.3),
    )
    assert verdict.next_token_B.item() == 5


def test_entropies_against_the_definition():
    logits = torch.randn(3, 4, 50, dtype=torch.float64)
    p = torch.softmax(logits, -1)
    plogp = -(p * p.log())
    top = p.topk(3, -1).indices
    torch.testing.assert_close(
        top_k_entropy(logits, 3).double(), plogp.gather(-1, top).sum(-1), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(full_entropy(logits).double(), plogp.sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        entropy(torch.zeros(2, 50), "normalized"), torch.ones(2), atol=1e-5, rtol=1e-5
    )
    with pytest.raises(ValueError, match="exceeds the vocabulary"):
        top_k_entropy(torch.zeros(2), 3)
