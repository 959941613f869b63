"""Replays of hand-written traces: sources, windows, texts, what was rolled back, and the sums."""

import pytest

from fly.analysis.acceptance import measure
from fly.errors import FlyError
from fly.runs import replay
from fly.runs.records import SOURCES
from tests import traced_runs


def replayed(rounds=traced_runs.ROUNDS, window=2):
    return replay.replay(traced_runs.lines(rounds=rounds), traced_runs.vocabulary(), window)


def line(start, draft, native, choice, length, **more):
    rest = {"deferred": [], "rolled_back": None, "open": None, "finish": None}
    return {
        "start": start, "draft": draft, "by": "d" * len(draft), "native": native,
        "choice": choice, "length": length, **rest, **more,
    }  # fmt: skip


def test_sources_and_texts():
    """Catches a dropped token left in the text, and a character that two tokens share."""
    generation = replayed()
    assert [token.source for token in generation.shown] == [
        "ngram", "draft", "deferred", "draft", "draft", "recovered",
        "draft", "rolled_back", "rolled_back", "recovered", "ngram", "bonus",
    ]  # fmt: skip
    text = "".join(token.text for token in generation.tokens)
    assert text == " alpha beta gamma delta epsilon\né<b id=pwned>bold</b> eta"
    assert [token.text for token in generation.tokens][6:8] == ["", "é"]
    assert generation.finish == "eos"
    assert [token.index for token in generation.tokens] == list(range(10))


def test_a_match_has_the_source_that_drafted_it():
    """Catches letters that fall through to the draft model's, and a mismatch that is taken for a
    match of its source."""
    assert replay.MATCHES.keys() == SOURCES.keys()
    for letter, source in replay.MATCHES.items():
        rounds = [line(0, [1, 2], "10", [1, 9, 3], 3, deferred=[1], by=letter * 2, finish="eos")]
        shown = replayed(rounds).shown
        assert [token.source for token in shown] == [source, "deferred", "bonus"]
        assert [token.by for token in shown] == [letter, letter, ""]
    assert len({*replay.MATCHES.values()}) == len(SOURCES)


def test_target_token_entropy_and_what_was_replaced():
    shown = replayed().shown
    deferred, recovered, own = shown[2], shown[5], shown[9]
    assert (deferred.target_text, deferred.entropy, deferred.matches_target) == (
        "<b id=pwned>bold</b>", 0.9, False,
    )  # fmt: skip
    assert (recovered.replaced, recovered.entropy, recovered.position) == (1, 0.8, None)
    assert (own.id, own.replaced_text, own.by) == (8, " gamma", "")
    assert all(token.replaced is None for token in shown if token.source != "recovered")


def test_windows_follow_their_deferral():
    shown = replayed(window=2).shown
    assert [token.window for token in shown][:6] == [None, None, None, 2, 2, None]
    assert [token.window for token in shown][6:10] == [None, None, 7, None]
    assert all(token.window is None for token in replayed(window=0).shown)


def test_a_deferral_of_an_earlier_round_is_rolled_back():
    """Across rounds: the provisional tokens of both rounds fall, and the first one's own choice
    stands in their place."""
    generation = replayed(
        [
            line(0, [1, 2], "10", [1, 9, 3], 3, deferred=[1], open=1),
            line(3, [4, 5], "10", [4, 6, 7], 2, rolled_back=1),
            line(2, [3], "1", [3, 2], 4, finish="length"),
        ]
    )
    assert [token.id for token in generation.tokens] == [1, 9, 3, 2]
    fallen = [token for token in generation.shown if not token.stands]
    assert [(token.id, token.index) for token in fallen] == [(2, 1), (3, 2), (4, 3)]
    own = generation.tokens[1]
    assert (own.source, own.replaced, own.round, own.by) == ("recovered", 2, 2, "")


def test_a_block_is_cut_where_the_row_ended():
    generation = replayed([line(0, [1, 2, 3], "111", [1, 2, 3, 4], 2, finish="stop")])
    assert [token.id for token in generation.tokens] == [1, 2]


def test_a_row_may_end_before_its_last_round_began():
    """A stop string among provisional tokens ends the row when their window closes, rounds later:
    a negative cut would keep what came after it."""
    rounds = [
        line(0, [1, 2], "10", [1, 9, 3], 3, deferred=[1], open=1),
        line(3, [4, 5], "11", [4, 5, 6], 2, finish="stop"),
    ]
    assert [token.id for token in replayed(rounds).tokens] == [1, 2]
    rounds[1] = line(3, [4, 5], "10", [4, 6, 7], 1, rolled_back=1, finish="length")
    assert [token.id for token in replayed(rounds).tokens] == [1]


def test_half_a_character_at_the_end_is_not_lost():
    generation = replayed([line(0, [1], "1", [1, 7], 2, finish="length")])
    assert [token.text for token in generation.tokens] == [" alpha", "\ufffd"]


def test_without_a_vocabulary_tokens_are_numbers():
    assert replay.replay(traced_runs.lines(), {}).tokens[0].text == "<1>"


def test_a_missing_line_is_noticed():
    lines = traced_runs.lines()
    with pytest.raises(FlyError, match="round 3 does not follow"):
        replay.replay([lines[0], lines[2]])


def test_a_rollback_of_what_is_not_there_is_noticed():
    with pytest.raises(FlyError, match="token 2 is rolled back, but is not there"):
        replayed([line(0, [1, 2], "10", [1, 9, 3], 3, rolled_back=2)])


def test_rows_in_flight_take_turns_and_a_cut_short_request_starts_again():
    """A run that was killed and goes on writes the same request anew; both must not be joined."""
    one, other = traced_runs.lines(0, 0), traced_runs.lines(1, 1)
    mixed = [one[0], other[0], one[1], *one, other[1], other[2]]
    found = list(replay.generations(mixed))
    assert [(g.doc_id, len(g.tokens), g.finish) for g in found] == [(0, 10, "eos"), (1, 10, "eos")]
    (unfinished,) = replay.generations(one[:2])
    assert unfinished.finish is None


def test_sums_over_generations():
    """Numbers counted by hand from the three rounds; what was rolled back did not stand."""
    result = measure([replayed()])
    assert result.positions.as_dict() == {
        "drafted": [3, 2, 2, 2, 1, 1],
        "reached": [3, 2, 1, 1, 1, 1],
        "accepted": [3, 1, 1, 1, 1],
    }
    assert result.deferred == {2: 1}
    assert dict(result.blocks) == {6: 1, 2: 2}
    assert (result.stood, result.rolled_back, result.rejected) == ([0.9], [0.7], [0.8])
    assert measure([replayed(traced_runs.ROUNDS[:2])]).blocks == {}  # cut short
