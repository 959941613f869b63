"""What followed the longest suffix, in texts that grow side by side."""

import random

import pytest

from fly.speculation.drafters.suffix_index import SuffixIndex


def index_of(*texts, size=2):
    index = SuffixIndex(size)
    for tokens in texts:
        index.extend(index.begin(), tokens)
    return index


def test_the_longest_suffix_decides():
    found = index_of([1, 2, 3, 4], [9, 2, 3, 5]).match([7, 1, 2, 3], 1)
    assert (found.size, found.tokens, found.shares) == (3, [4], [1.0])


def test_the_most_frequent_continuation_is_taken_with_its_share_at_every_step():
    index = index_of([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 5], [1, 2, 8])
    found = index.match([1, 2], 5)
    assert found.tokens == [3, 4, 5]
    assert found.shares == [3 / 4, 1.0, 2 / 3]


def test_of_equals_the_latest_is_taken():
    assert index_of([1, 2, 3], [1, 2, 4]).match([1, 2], 1).tokens == [4]


def test_texts_grow_side_by_side():
    index = SuffixIndex(2)
    left, right = index.begin(), index.begin()
    for ours, theirs in zip([1, 2, 3, 4], [5, 6, 7, 8]):
        index.extend(left, [ours])
        index.extend(right, [theirs])
    assert index.match([1, 2], 9).tokens == [3, 4]
    assert index.match([5, 6], 9).tokens == [7, 8]
    assert not index.match([2, 6], 9).tokens  # they never met


def test_a_text_can_be_left_out():
    index = index_of([1, 2, 3], [1, 2, 4])
    assert index.match([1, 2], 1, without=1).tokens == [3]
    assert index.match([1, 2], 1, without=0).tokens == [4]


def test_a_texts_end_has_nothing_to_propose_until_it_grows():
    index = index_of([1, 2])
    assert index.match([1, 2], 3).tokens == []
    index.extend(0, [3])
    assert index.match([1, 2], 3).tokens == [3]


def test_less_than_the_shortest_suffix_is_not_found():
    assert index_of([1, 2, 3]).match([2], 1).tokens == []
    assert index_of([1, 2, 3, 4], size=3).match([9, 2, 3], 1).tokens == []


@pytest.mark.parametrize("size", [1, 2, 3])
def test_against_a_search_of_everything(size):
    rng = random.Random(size)
    for _ in range(60):
        texts = [[rng.randrange(3) for _ in range(rng.randrange(1, 15))] for _ in range(4)]
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 10))]
        found = index_of(*texts, size=size).match(tokens, 1)
        longest, votes = best_by_definition(texts, tokens, size)
        assert (found.size if found.tokens else 0) == longest
        if longest:
            most = max(votes.count(token) for token in votes)
            assert votes.count(found.tokens[0]) == most
            assert found.shares == [most / len(votes)]


def best_by_definition(texts, tokens, size):
    """(size of the longest suffix that is followed by something, all that follows it)."""
    for length in range(min(len(tokens), 32), size - 1, -1):
        suffix = tokens[-length:]
        votes = [
            text[end]
            for text in texts
            for end in range(length, len(text))
            if text[end - length : end] == suffix
        ]
        if votes:
            return length, votes
    return 0, []
