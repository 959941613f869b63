"""Acceptance by draft position: counted, never averaged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fly.runs.records import Positions

ROUNDS = st.lists(st.integers(0, 9).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))))


def counted(rounds):
    result = Positions()
    for drafted, accepted in rounds:
        result.add_round(drafted, accepted)
    return result


def test_four_rounds_by_hand():
    """A round without a draft is none of them; the draft of two that stands whole never reaches a
    third position."""
    found = counted([(3, 1), (2, 2), (0, 0), (3, 0)])
    assert found.as_dict() == {"drafted": [3, 3, 2], "reached": [3, 2], "accepted": [2, 1]}
    assert found.drafts == 3
    assert found.unconditional == [2 / 3, 1 / 3, 0]
    assert found.conditional == [2 / 3, 1 / 2]


@given(ROUNDS, ROUNDS)
def test_counts_add_up_whatever_the_lengths(first, second):
    found = counted(first)
    found.add(counted(second))
    rounds = first + second
    assert found == counted(rounds)
    assert sum(found.drafted) == sum(drafted for drafted, _ in rounds)
    assert sum(found.accepted) == sum(accepted for _, accepted in rounds)
    for at, reached in enumerate(found.reached):
        assert reached == sum(drafted > at and accepted >= at for drafted, accepted in rounds)
    assert all(0 not in values for values in found.as_dict().values())


@pytest.mark.parametrize(("drafted", "accepted"), [(2, 3), (2, -1)])
def test_more_than_was_drafted_is_refused(drafted, accepted):
    with pytest.raises(ValueError, match=f"accepted={accepted} of {drafted}"):
        Positions().add_round(drafted, accepted)
