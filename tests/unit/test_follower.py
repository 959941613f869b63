"""The place in an earlier output, as a sequence goes on, differs, and is rolled back."""

import pytest

from fly.speculation.drafters.follower import Follower, Place

EARLIER = [*range(10, 60)]


def drafts(follower, generated, count=3):
    return follower.following(follower.find(generated), count)


def test_it_follows_from_the_first_token_to_the_last():
    follower = Follower(EARLIER)
    for length in range(len(EARLIER)):
        assert drafts(follower, EARLIER[:length]) == EARLIER[length : length + 3]
    assert drafts(follower, EARLIER) == []


@pytest.mark.parametrize(
    ("generated", "then"),
    [
        pytest.param([10, 11, 12, 99], [14, 15, 16], id="replaced"),
        pytest.param([10, 11, 12, 99, 13], [14, 15, 16], id="inserted"),
        pytest.param([10, 11, 12, 16], [17, 18, 19], id="deleted"),
        pytest.param([10, 11, 12, 98, 99, 13, 14], [15, 16, 17], id="two inserted"),
        pytest.param([10, 11, 12, 45, 46], [47, 48, 49], id="far ahead, two tokens agree"),
    ],
)
def test_the_place_is_found_again(generated, then):
    follower = Follower(EARLIER)
    for length in range(3, len(generated) + 1):
        place = follower.find(generated[:length])
    assert follower.following(place, 3) == then


def test_one_token_far_away_is_no_place():
    follower = Follower(EARLIER)
    follower.find([10, 11, 12])
    assert follower.find([10, 11, 12, 55]) == Place(4, 0)


def test_the_place_goes_back_with_a_rollback():
    """A place that was kept would propose what follows the tokens that are gone."""
    follower = Follower(EARLIER)
    assert drafts(follower, EARLIER[:20]) == EARLIER[20:23]
    rolled_back = [*EARLIER[:8], 99]  # the tokens from the ninth on gave way to the target's own
    assert drafts(follower, rolled_back) == EARLIER[9:12]
    assert drafts(follower, EARLIER[:8]) == EARLIER[8:11]
    assert drafts(follower, []) == EARLIER[:3]


def test_how_many_tokens_speak_for_the_place():
    follower = Follower(EARLIER)
    assert follower.find([]).agreed == 0
    assert follower.find(EARLIER[:5]).agreed == 5
    assert follower.find([*EARLIER[:5], 99]).agreed == 0
    assert follower.find([*EARLIER[:5], 99, 16, 17]) == Place(8, 2)


def test_an_empty_earlier_output_proposes_nothing():
    assert drafts(Follower([]), [1, 2]) == []
