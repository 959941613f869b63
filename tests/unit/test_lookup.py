"""Which text is drafted from, and how many tokens."""

import pytest

from fly.execution.pass_costs import PairCosts, PassCosts
from fly.runs.records import Counts
from fly.speculation.drafters.lookup import Chances, Choice
from fly.speculation.drafters.texts import START, Proposal
from fly.speculation.rules.base import Resolution
from fly.speculation.sequence import Request, Sequence, Verdict
from fly.speculation.stop_strings import StopMatcher
from tests import tiny

CHEAP = PairCosts(PassCosts((64, 128), (1.0, 2.0)), PassCosts((64, 128), (0.3, 0.6)), "test")
STEEP = PairCosts(PassCosts((1, 2), (1.0, 2.0)), PassCosts((1, 2), (0.3, 0.6)), "test")


def proposal(letter="e", size=8, count=100, share=1.0):
    return Proposal(letter, size, [7] * count, [share] * count)


def verdict(drafted, accepted, by="e"):
    matches = [position < accepted for position in range(drafted)]
    return Verdict([7] * drafted, matches, [7] * (drafted + 1), Resolution(accepted), by * drafted)


def length(choice, *proposals, limit=0):
    (found,) = choice.choose([list(proposals)], [limit])
    return len(found.tokens) if found else 0


def choice(costs=CHEAP, learns=True, has_model=False, sequences=1):
    return Choice(costs, sequences, learns=learns, has_model=has_model)


def test_a_draft_grows_while_all_of_it_is_accepted_and_shrinks_after_a_rejection():
    chosen = choice()
    lengths = [length(chosen, proposal(size=size)) for size in (0, 2, 8, 32)]
    assert lengths == sorted(set(lengths))
    assert lengths[0] < 8 < lengths[-1]


def test_no_more_is_drafted_than_the_machine_verifies_at_little_cost():
    assert length(choice(STEEP), proposal(size=32)) == 0
    assert length(choice(CHEAP), proposal(size=32)) > 30


def test_what_a_source_earned_lately_decides():
    chosen = choice()
    before = length(chosen, proposal(size=8))
    for _ in range(30):
        chosen.observe([(proposal(size=8, count=8), verdict(8, 0))])
    assert length(chosen, proposal(size=8)) < before
    for _ in range(200):
        chosen.observe([(proposal(size=8, count=8), verdict(8, 8))])
    assert length(chosen, proposal(size=8)) > before


def test_what_earned_nothing_is_tried_again_later():
    """A first task whose texts all differ must not decide of a second one."""
    chosen = choice()
    before = length(chosen, proposal(size=8))
    for _ in range(50):
        chosen.observe([(proposal(size=8, count=8), verdict(8, 0))])
    assert length(chosen, proposal(size=8)) < before / 4
    for _ in range(800):
        chosen.observe([(None, verdict(0, 0))])
    assert length(chosen, proposal(size=8)) > before / 2


def test_the_source_with_more_expected_tokens_is_taken():
    chosen = choice()
    weak, strong = proposal("n", 1, 6), proposal("o", 32, 6)
    (found,) = chosen.choose([[weak, strong]], [0])
    assert found.letter == "o"
    (found,) = chosen.choose([[proposal("o", 32, 6, share=0.2), proposal("n", 4, 6)]], [0])
    assert found.letter == "n"


def test_frequencies_are_part_of_the_expectation():
    assert length(choice(), proposal(share=0.5)) < length(choice(), proposal(share=1.0))


def test_the_draft_model_drafts_where_that_promises_more():
    chosen = choice(has_model=True)
    assert length(chosen, proposal("e", 32), limit=8) > 8
    for _ in range(100):
        chosen.observe([(proposal("e", 32, 8), verdict(8, 0))])
        chosen.observe([(None, verdict(8, 8, "d"))])
    assert length(chosen, proposal("e", 32), limit=8) == 0


def test_a_batch_is_no_wider_than_pays_for_all_of_it():
    costs = PairCosts(PassCosts((8, 16), (1.0, 2.0)), PassCosts((8, 16), (0.3, 0.6)), "test")
    chosen = choice(costs, sequences=4)
    alone = length(choice(costs), proposal(size=64))
    together = chosen.choose([[proposal(size=64)], [], [], []], [0] * 4)
    assert len(together[0].tokens if together[0] else []) < alone


def test_without_learning_counts_and_neighbours_decide_nothing():
    """Where drafts change texts, a text would depend on what else is decoded, and on a resume."""
    chosen = choice(learns=False, sequences=2)
    before = length(chosen, proposal(size=8))
    for _ in range(50):
        chosen.observe([(proposal(size=8, count=8), verdict(8, 0))])
    assert length(chosen, proposal(size=8)) == before
    alone, _ = chosen.choose([[proposal(size=8)], []], [0, 0])
    both = chosen.choose([[proposal(size=8)], [proposal(size=64)]], [0, 0])
    assert len(alone.tokens) == before == len(both[0].tokens)


def test_without_learning_a_rare_text_pays_for_the_whole_pass():
    """Eight sequences of which one had a sibling's text halved the speed of all."""
    costs = PairCosts(PassCosts((8, 24), (1.0, 2.0)), PassCosts((8, 24), (0.3, 0.6)), "test")
    for letter, sequences, is_drafted in (("s", 8, 0), ("s", 1, 1), ("e", 8, 1), ("o", 8, 0)):
        chosen = choice(costs, learns=False, sequences=sequences)
        assert (length(chosen, proposal(letter, 16, 8)) > 0) == is_drafted, (letter, sequences)
    assert length(choice(learns=False, sequences=8), proposal("s", 16, 8))  # wide passes are cheap


def test_without_learning_own_text_is_drafted_as_long_as_the_limit_says():
    assert length(choice(learns=False), proposal("n", 1, 6), limit=8) == 6
    assert length(choice(learns=False), proposal("n", 1, 6), limit=3) == 3
    assert length(choice(learns=False), proposal("n", 1, 6), limit=0) == 0


def test_chances_start_by_succession_and_follow_the_counts():
    chances = Chances()
    assert chances.of("e", 0) == 0.5
    assert chances.of("e", 0) < chances.of("e", 3) < chances.of("e", 30) < 1
    assert chances.of("e", START) == chances.of("s", 8)
    for _ in range(300):
        chances.observe("e", 3, [1.0] * 4, 3)
    assert 0.7 < chances.of("e", 3) < 0.8  # three of four that were judged
    chances.observe("s", 3, [0.5] * 4, 0)
    assert chances.of("s", 3) < chances.of("s", 4)  # sizes have counts of their own


# ------------------------------------------------------------------------------------------ sources


def sequence(prompt, generated=(), budget=60, earlier=(), tag=None):
    made = Sequence(
        Request(tuple(prompt), budget, tag=tag, earlier=earlier),
        frozenset({tiny.EOS}),
        StopMatcher((), str),
    )
    if generated:
        emit(made, generated)
    return made


def emit(made, tokens):
    draft = list(tokens[:-1])
    made.commit(
        Verdict(draft, [True] * len(draft), list(tokens), Resolution(len(draft)), "n" * len(draft))
    )


@pytest.fixture
def texts():
    def make(slots, *names, **keys):
        return tiny.lookup(slots, names, learns=True, num_ngram_pred_tokens=6, **keys)

    return make


def proposed(lookup, *running, limits=None):
    found = lookup.propose(list(running), limits or [0] * len(running))
    return [(p.letter, p.tokens) if p else None for p in found]


def test_an_earlier_output_is_followed(texts):
    lookup = texts(1, "runs")
    one = sequence([5, 6], earlier=((11, 12, 13, 14, 15),))
    lookup.admit(0, one)
    ((letter, tokens),) = proposed(lookup, one)
    assert letter == "e"
    assert tokens == [11, 12, 13, 14, 15][: len(tokens)]
    emit(one, [11, 12, 13])
    ((_, tokens),) = proposed(lookup, one)
    assert tokens[0] == 14


def test_the_earlier_output_that_agrees_longest_is_followed(texts):
    lookup = texts(1, "runs")
    one = sequence([5], [11, 22, 23], earlier=((11, 12, 23, 41), (11, 22, 23, 51)))
    lookup.admit(0, one)
    assert proposed(lookup, one)[0][1][0] == 51


def test_a_sequence_that_memory_ran_out_for_keeps_its_place_in_an_earlier_output(texts):
    """It was taken to be as far on as its tokens: another draft, and so another text under FLy."""
    lookup = texts(1, "runs")
    one = sequence([5], earlier=(tuple(range(20, 40)),))
    lookup.admit(0, one)
    for tokens in ([20, 21], [*range(80, 88), 22, 23], [99]):  # eight inserted, one replaced
        proposed(lookup, one)
        emit(one, tokens)
    ((_, before),) = proposed(lookup, one)
    assert before[0] == 25
    lookup.admit(0, one)
    assert proposed(lookup, one) == [("e", before)]


def test_proposals_end_at_eos_and_within_the_budget(texts):
    lookup = texts(1, "runs")
    one = sequence([5], earlier=((11, tiny.EOS, 13, 14),))
    lookup.admit(0, one)
    assert proposed(lookup, one) == [("e", [11, tiny.EOS])]
    short = sequence([5], budget=3, earlier=((11, 12, 13, 14, 15),))
    lookup.admit(0, short)
    assert proposed(lookup, short) == [("e", [11, 12])]
    last = sequence([5], budget=1, earlier=((11, 12),))
    lookup.admit(0, last)
    assert proposed(lookup, last) == [None]


def test_siblings_are_those_of_the_same_prompt_running_ones_included(texts):
    lookup = texts(3, "siblings")
    one, other = sequence([5, 6, 7, 8], tag=1), sequence([5, 6, 7, 8], tag=2)
    stranger = sequence([5, 6, 7, 9], tag=3)
    running = [one, other, stranger]
    for slot, each in enumerate(running):
        lookup.admit(slot, each)
    lookup.propose(running, [0] * 3)
    emit(one, [21, 22, 23, 24, 25])
    emit(other, [21, 22])
    emit(stranger, [21, 22])
    lookup.commit(running, [verdict(0, 0)] * 3)
    found = proposed(lookup, *running)
    assert found[0] is None  # its own text is no sibling's
    assert found[1][0] == "s"
    assert found[1][1][0] == 23
    assert found[2] is None


def test_other_documents_are_drafted_from_once_they_are_finished(texts):
    lookup = texts(1, "others")
    first = sequence([5, 6, 7], budget=5)
    lookup.admit(0, first)
    emit(first, [21, 22, 23])
    lookup.propose([first], [0])
    lookup.commit([first], [verdict(0, 0)])
    second = sequence([8, 6, 7], [21, 22, 23])
    lookup.admit(0, second)
    assert proposed(lookup, second) == [None]
    emit(first, [24, 25])
    assert not first.is_open
    lookup.propose([first], [0])
    lookup.commit([first], [verdict(0, 0)])
    (found,) = proposed(lookup, second)
    assert (found[0], found[1][0]) == ("o", 24)


def test_only_final_tokens_are_learned(texts):
    """What a rollback may take back must not be proposed to others."""
    lookup = texts(2, "siblings")
    one, other = sequence([5, 6, 7], tag=1), sequence([5, 6, 7], tag=2)
    for slot, each in enumerate((one, other)):
        lookup.admit(slot, each)
    lookup.propose([one, other], [0, 0])
    deferred = Verdict(
        [31, 32], [False, True], [30, 32, 33],
        Resolution(2, (0,), open_at=0, open_matches=1), "dd",
    )  # fmt: skip
    one.commit(deferred)
    assert one.generated == [31, 32, 33]
    lookup.commit([one, other], [verdict(0, 0)] * 2)
    emit(other, [31, 32])
    assert proposed(lookup, one, other)[1] is None


def test_a_sequence_keeps_its_texts_when_it_changes_its_slot(texts):
    lookup = texts(2, "runs", "siblings", "own")
    gone, one = sequence([5]), sequence([6], [11], earlier=((11, 12, 13),))
    lookup.admit(0, gone)
    lookup.admit(1, one)
    lookup.move(1, 0)
    assert proposed(lookup, one)[0][1][0] == 12


def test_counts_by_source_are_of_what_stood():
    one = sequence([5])
    one.commit(Verdict([1, 3, 4], [True, True, False], [1, 3, 9, 9], Resolution(2), "eed"))
    assert one.by_source.as_dict() == {
        "draft_model": {"drafted": 1, "accepted": 0},
        "earlier_run": {"drafted": 2, "accepted": 2},
    }
    assert isinstance(one.counts, Counts)
