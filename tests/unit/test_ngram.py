"""The incremental n-gram index against a scan of the whole text."""

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from fly.speculation.drafters.ngram import NgramIndex, until_eos


def scan(tokens, pending, count, min_size, max_size):
    """Longest suffix first; its most recent earlier occurrence that has a token after it."""
    suffix_of = tokens + pending
    for size in range(max_size, min_size - 1, -1):
        suffix = suffix_of[-size:]
        if len(suffix) < size:
            continue
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == suffix:
                return tokens[start + size : start + size + count]
    return []


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.integers(0, 3), max_size=4),
    st.integers(1, 5),
    st.integers(1, 2),
    st.integers(2, 4),
)
def test_a_match_equals_a_scan(tokens, pending, count, min_size, max_size):
    index = NgramIndex(min_size, max_size)
    sequence = SimpleNamespace(tokens=[*tokens, *pending[:1]], final_length=len(tokens) // 2)
    index.match(sequence, (), count)
    sequence.final_length = len(tokens)
    _, found = index.match(sequence, pending[1:], count)
    assert found == scan(tokens, pending, count, min_size, max_size)


def test_until_eos_keeps_the_first_eos():
    assert until_eos([1, 0, 2, 0], frozenset({0})) == [1, 0]
    assert until_eos([1, 2], frozenset({0})) == [1, 2]
