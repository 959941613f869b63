"""Which text is drafted from, and how many tokens."""

import pytest

from fly.execution.pass_costs import PairCosts, PassCosts
from fly.runs.records import Counts
from fly.speculation.acceptance import DRAFT_MODEL, START, AcceptanceEstimate
from fly.speculation.drafters.lookup import Choice
from fly.speculation.drafters.texts import EarlierRuns, OwnText, Proposal
from fly.speculation.rules.judged import Resolution
from fly.speculation.sequence import Request, Sequence, Verdict
from fly.speculation.stop_strings import StopMatcher
from tests import tiny

CHEAP = PairCosts(PassCosts((64, 128), (1.0, 2.0)), PassCosts((64, 128), (0.3, 0.6)), "test")
STEEP = PairCosts(PassCosts((1, 2), (1.0, 2.0)), PassCosts((1, 2), (0.3, 0.6)), "test")


def proposal(source=EarlierRuns, size=8, count=100):
    return Proposal(source, size, [7] * count)


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
    for one, other in ((OwnText, EarlierRuns), (EarlierRuns, OwnText)):
        (found,) = chosen.choose([[proposal(one, 1, 6), proposal(other, 32, 6)]], [0])
        assert found.source is other


def test_the_draft_model_drafts_where_that_promises_more():
    chosen = choice(has_model=True)
    assert length(chosen, proposal(EarlierRuns, 32), limit=8) > 8
    for _ in range(100):
        chosen.observe([(proposal(EarlierRuns, 32, 8), verdict(8, 0))])
        chosen.observe([(None, verdict(8, 8, "d"))])
    assert length(chosen, proposal(EarlierRuns, 32), limit=8) == 0


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


def test_without_learning_own_text_is_drafted_as_long_as_the_limit_says():
    assert length(choice(learns=False), proposal(OwnText, 1, 6), limit=8) == 6
    assert length(choice(learns=False), proposal(OwnText, 1, 6), limit=3) == 3
    assert length(choice(learns=False), proposal(OwnText, 1, 6), limit=0) == 0


def test_chances_start_by_succession_and_follow_the_counts():
    acceptance = AcceptanceEstimate()
    assert acceptance.chance(("e", 0)) == 0.5
    sizes = [acceptance.chance(("e", size)) for size in (0, 3, 30)]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] < 1
    assert acceptance.chance(("e", START)) == acceptance.chance(("n", 8))
    assert acceptance.chance(DRAFT_MODEL) == 0.8
    for _ in range(300):
        acceptance.observe(("e", 3), 4, 3)
    assert 0.7 < acceptance.chance(("e", 3)) < 0.8  # three of four that were judged
    acceptance.observe(("n", 3), 4, 0)
    assert acceptance.chance(("n", 3)) < acceptance.chance(("n", 4))  # sizes have their own counts
    assert acceptance.chance(("e", 3)) > acceptance.chance(("n", 3))


@pytest.mark.parametrize(("kept", "is_forgotten"), [(0.99, True), (1.0, False)])
def test_counts_fade_round_by_round_unless_all_are_kept(kept, is_forgotten):
    acceptance = AcceptanceEstimate(weight=3.0, kept=kept, prior=2 / 3)
    assert acceptance.chance(("n", 1)) == acceptance.chance(("n", 4)) == 2 / 3
    acceptance.observe(("n", 1), 9, 0)
    assert acceptance.chance(("n", 1)) == 0.5  # one token was judged; what follows it was not
    for _ in range(2000):
        acceptance.forget()
    assert acceptance.chance(("n", 1)) == pytest.approx(2 / 3 if is_forgotten else 0.5)


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
    return [(p.source.letter, p.tokens) if p else None for p in found]


def test_an_earlier_output_is_followed(texts):
    lookup = texts(1, "runs")
    one = sequence([5, 6], earlier=((11, 12, 13, 14, 15),))
    ((letter, tokens),) = proposed(lookup, one)
    assert letter == "e"
    assert tokens == [11, 12, 13, 14, 15][: len(tokens)]
    emit(one, [11, 12, 13])
    ((_, tokens),) = proposed(lookup, one)
    assert tokens[0] == 14


def test_the_earlier_output_that_agrees_longest_is_followed(texts):
    lookup = texts(1, "runs")
    one = sequence([5], [11, 22, 23], earlier=((11, 12, 23, 41), (11, 22, 23, 51)))
    assert proposed(lookup, one)[0][1][0] == 51


def test_a_sequence_that_memory_ran_out_for_keeps_its_place_in_an_earlier_output(texts):
    """It was taken to be as far on as its tokens: another draft, and so another text under FLy."""
    lookup = texts(1, "runs")
    one = sequence([5], earlier=(tuple(range(20, 40)),))
    for tokens in ([20, 21], [*range(80, 88), 22, 23], [99]):  # eight inserted, one replaced
        proposed(lookup, one)
        emit(one, tokens)
    ((_, before),) = proposed(lookup, one)
    assert before[0] == 25
    assert proposed(lookup, one) == [("e", before)]


def test_proposals_end_at_eos_and_within_the_budget(texts):
    lookup = texts(1, "runs")
    one = sequence([5], earlier=((11, tiny.EOS, 13, 14),))
    assert proposed(lookup, one) == [("e", [11, tiny.EOS])]
    short = sequence([5], budget=3, earlier=((11, 12, 13, 14, 15),))
    assert proposed(lookup, short) == [("e", [11, 12])]
    last = sequence([5], budget=1, earlier=((11, 12),))
    assert proposed(lookup, last) == [None]


def test_a_sequence_keeps_its_texts_when_it_changes_its_slot(texts):
    lookup = texts(2, "runs", "own")
    gone, one = sequence([5]), sequence([6], [11], earlier=((11, 12, 13),))
    assert proposed(lookup, gone, one)[1][1][0] == 12
    assert proposed(lookup, one)[0][1][0] == 12


def test_counts_by_source_are_of_what_stood():
    one = sequence([5])
    one.commit(Verdict([1, 3, 4], [True, True, False], [1, 3, 9, 9], Resolution(2), "eed"))
    assert one.by_source.as_dict() == {
        "draft_model": {"drafted": 1, "accepted": 0},
        "earlier_run": {"drafted": 2, "accepted": 2},
    }
    assert isinstance(one.counts, Counts)
