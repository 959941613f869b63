"""Commit clips at EOS, stop string and budget, and counts nothing past them; its round's record."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.speculation.rules.judged import Resolution
from fly.speculation.sampling import Sampling
from fly.speculation.sequence import Request, Sequence, Verdict
from fly.speculation.stop_strings import StopMatcher

EOS = frozenset({0})


def letters(ids):
    return "".join(chr(96 + i) if i else "<eos>" for i in ids)


def made(budget=10, stops=()):
    return Sequence(Request((5,), budget, tuple(stops)), EOS, StopMatcher(stops, letters))


def verdict(draft, accepted, next_token, deferred=(), **resolution):
    matches = [position < accepted and position not in deferred for position in range(len(draft))]
    targets = [next_token] * (len(draft) + 1)
    found = Resolution(accepted, tuple(deferred), **resolution)
    return Verdict(draft, matches, targets, found, ("nd" * len(draft))[: len(draft)])


def test_counts_add_up_and_a_recovered_token_is_no_bonus():
    sequence = made()
    counts = sequence.commit(verdict([1, 2, 3], 2, 9, deferred=[1]))
    assert sequence.generated == [1, 2, 9]
    assert (counts.native_accepted, counts.deferred_accepted) == (1, 1)
    assert (counts.corrections, counts.bonus, counts.emitted) == (1, 0, 3)
    counts = sequence.commit(verdict([4], 1, 6))
    assert (counts.corrections, counts.bonus) == (0, 1)


def test_eos_inside_an_accepted_block_ends_the_sequence():
    sequence = made()
    counts = sequence.commit(verdict([1, 0, 3], 3, 9))
    assert sequence.generated == [1, 0]
    assert sequence.finish_reason == "eos"
    assert (counts.emitted, counts.native_accepted, counts.bonus) == (2, 2, 0)


def test_budget_is_exact():
    sequence = made(budget=2)
    counts = sequence.commit(verdict([1, 2, 3], 3, 9))
    assert sequence.generated == [1, 2]
    assert sequence.finish_reason == "length"
    assert counts.emitted == 2


def test_stop_string_in_the_middle_of_an_accepted_block():
    sequence = made(stops=["bc"])
    counts = sequence.commit(verdict([1, 2, 3, 4], 4, 9))
    assert letters(sequence.generated) == "abc"
    assert sequence.finish_reason == "stop"
    assert (counts.emitted, counts.bonus) == (3, 0)


def test_stop_string_spanning_rounds():
    sequence = made(stops=["abc"])
    sequence.commit(verdict([1], 1, 2))
    assert sequence.finish_reason is None
    sequence.commit(verdict([3], 1, 9))
    assert letters(sequence.generated) == "abc"


def test_stop_after_eos_does_not_count():
    sequence = made(stops=["d"])
    sequence.commit(verdict([0, 4], 2, 9))
    assert sequence.finish_reason == "eos"
    assert sequence.generated == [0]


def test_a_clipped_rollback_is_not_counted():
    """A rejection past the end of the sequence did not happen."""
    sequence = made(budget=1)
    counts = sequence.commit(verdict([1, 2], 1, 9, rolled_back=True))
    assert counts.deferred_rolled_back == 0


def test_a_rounds_record_has_values_of_its_own():
    """What later rounds do to the sequence must not change what an observer was given."""
    sequence = made()
    first = verdict([1, 2], 2, 9, deferred=[1], open_at=1, open_matches=1)
    start = sequence.round_record(first, sequence.commit(first), 0)
    assert (start.number, start.drafted_by, start.start, start.length) == (1, "nd", 0, 3)
    assert (start.draft, start.matches, start.target_tokens) == ([1, 2], [True, False], [9, 9, 9])
    assert (start.deferred, start.open_at, start.rolled_back, start.finish) == ([1], 1, None, None)
    assert start.counts.emitted == 1  # the others are provisional
    assert start.request is sequence.request
    then = verdict([4], 0, 9, rolls_back_earlier=True)
    end = sequence.round_record(then, sequence.commit(then), 3)
    assert sequence.generated == [1, 9]
    assert (end.number, end.start, end.length, end.rolled_back) == (2, 3, 2, 1)
    assert (end.deferred, end.open_at, end.counts.discarded) == ([], None, 2)
    assert start.request is end.request
    assert (start.length, start.open_at, start.counts.emitted) == (3, 1, 1)


def test_a_record_leaves_out_deferrals_past_the_end():
    sequence = made(budget=1)
    past = verdict([1, 2], 2, 9, deferred=[1])
    record = sequence.round_record(past, sequence.commit(past), 0)
    assert (record.length, record.deferred, record.finish) == (1, [], "length")


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


def test_a_roll_back_leaves_no_number_to_be_drawn_again():
    request = Request((5,), 20, sampling=Sampling(1.0), seed=1)
    sequence = Sequence(request, frozenset(), StopMatcher((), str))
    first = sequence.noise(3)
    rolled_back = Resolution(0, rolled_back=True)
    matches, target = [False, False, True], [1, 2, 3, 4]
    sequence.commit(Verdict([9, 8, 7], matches, target, rolled_back, "ddd"))
    again = sequence.noise(3)
    assert sequence.generated == [1]
    for name in ("draft", "accept", "target"):
        assert not {*getattr(first, name).tolist()} & {*getattr(again, name).tolist()}


def test_a_draft_that_fails_an_earlier_window_earned_its_matches():
    resolution = Resolution(0, rolls_back_earlier=True)
    verdict = Verdict([1, 2, 3], [True, True, False], [1, 2, 9, 9], resolution, "ddd")
    assert verdict.earned == 2
