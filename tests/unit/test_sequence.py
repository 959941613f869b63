"""Commit clips at EOS, stop string and budget, and counts nothing past them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.speculation.rules.verification import Resolution
from fly.speculation.sequence import Request, RowVerdict, Sequence
from fly.speculation.stop_strings import StopMatcher

EOS = frozenset({0})


def letters(ids):
    return "".join(chr(96 + i) if i else "<eos>" for i in ids)


def row(budget=10, stops=()):
    return Sequence(Request((5,), budget, tuple(stops)), EOS, letters)


def verdict(draft, accepted, next_token, deferred=(), **resolution):
    native = [position < accepted and position not in deferred for position in range(len(draft))]
    choice = [next_token] * (len(draft) + 1)
    return RowVerdict(draft, native, choice, Resolution(accepted, tuple(deferred), **resolution))


def test_counts_add_up_and_correction_is_not_bonus():
    sequence = row()
    counts = sequence.commit(verdict([1, 2, 3], 2, 9, deferred=[1]))
    assert sequence.generated == [1, 2, 9]
    assert (counts.native_accepted, counts.deferred_accepted) == (1, 1)
    assert (counts.corrections, counts.bonus, counts.emitted) == (1, 0, 3)
    counts = sequence.commit(verdict([4], 1, 6))
    assert (counts.corrections, counts.bonus) == (0, 1)


def test_eos_inside_an_accepted_block_ends_the_row():
    sequence = row()
    counts = sequence.commit(verdict([1, 0, 3], 3, 9))
    assert sequence.generated == [1, 0]
    assert sequence.finish_reason == "eos"
    assert (counts.emitted, counts.native_accepted, counts.bonus) == (2, 2, 0)


def test_budget_is_exact():
    sequence = row(budget=2)
    counts = sequence.commit(verdict([1, 2, 3], 3, 9))
    assert sequence.generated == [1, 2]
    assert sequence.finish_reason == "length"
    assert counts.emitted == 2


def test_stop_string_in_the_middle_of_an_accepted_block():
    sequence = row(stops=["bc"])
    counts = sequence.commit(verdict([1, 2, 3, 4], 4, 9))
    assert letters(sequence.generated) == "abc"
    assert sequence.finish_reason == "stop"
    assert (counts.emitted, counts.bonus) == (3, 0)


def test_stop_string_spanning_rounds():
    sequence = row(stops=["abc"])
    sequence.commit(verdict([1], 1, 2))
    assert sequence.finish_reason is None
    sequence.commit(verdict([3], 1, 9))
    assert letters(sequence.generated) == "abc"


def test_stop_after_eos_does_not_count():
    sequence = row(stops=["d"])
    sequence.commit(verdict([0, 4], 2, 9))
    assert sequence.finish_reason == "eos"
    assert sequence.generated == [0]


def test_a_clipped_rollback_is_not_counted():
    """A rejection behind the end of the row did not happen."""
    sequence = row(budget=1)
    counts = sequence.commit(verdict([1, 2], 1, 9, rolled_back=True))
    assert counts.deferred_rolled_back == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), min_size=1, max_size=8),
    st.lists(st.text("abcd", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_incremental_match_is_the_first_match(blocks, stops):
    """Against the obvious way: decode everything after each single token."""
    matcher, generated, found = StopMatcher(stops, letters), [], None
    for block in blocks:
        if (count := matcher.tokens_until_match(generated, block)) is not None:
            found = len(generated) + count
            break
        generated += block
    flat = [token for block in blocks for token in block]
    expected = next(
        (n for n in range(1, len(flat) + 1) if any(s in letters(flat[:n]) for s in stops)), None
    )
    assert found == expected


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="prompt is empty"):
        Request((), 5)
    with pytest.raises(ValueError, match="budget=0"):
        Request((1,), 0)
