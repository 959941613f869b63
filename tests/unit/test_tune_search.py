"""The grid, what is predicted from known costs, and which few are run."""

import pytest

from fly import config
from fly.errors import FlyError
from fly.runs.records import Counts
from fly.speculation.rules.gates import AnyGate, EntropyGate
from fly.speculation.sequence import Request
from fly.tuning import search
from fly.tuning.pass_seconds import PassSeconds
from fly.tuning.recorder import Recorder
from fly.tuning.search import (
    Grid,
    Machine,
    Prediction,
    changes,
    choose,
    gates_of,
    kind,
    predict,
    predict_one,
)
from fly.tuning.simulate import CascadeCounter, DraftCounter
from tests.positional import Positional, ScriptedModel
from tests.unit.test_simulate import answers_of

BASE = config.build(
    {
        "target_model_path": "t", "draft_model_path": "d", "spd_k": 8, "win_len": 4,
        "draft_policy": "fixed",
        "draft_quantization": "none",
    },
    "test",
)  # fmt: skip
SMALL = Grid(spd_k=(1, 4, 8), win_len=(2, 4), gates=((0.3, None, None),), ngrams=(None, (1, 4, 6)))


def flat(seconds, slope=0.0):
    by_width = {width: (seconds + slope * width,) * 2 for width in range(1, 20)}
    return PassSeconds((10, 100), by_width, seconds)


def machine(draft=0.1, slope=0.0, overhead=0.01):
    return Machine(
        flat(1.0, slope), overhead, {"none": flat(draft)}, {"none": lambda tokens: 1.0 + tokens}
    )


@pytest.fixture(scope="module")
def eos():
    return frozenset({7})


@pytest.fixture(scope="module")
def recordings(eos):
    requests = [Request((1, 2, 3), 60), Request((4,), 50)]
    found = []
    for agree in (0.7, 0.9):
        target = ScriptedModel(Positional(5, agree=agree, eos=0.0), 3)
        draft = ScriptedModel(Positional(5, agree=agree, eos=0.0, is_draft=True), 3)
        alone = ScriptedModel(Positional(5, agree=agree, eos=0.0), 1)
        gates = gates_of(configs[0] for configs in SMALL.configs(BASE, "none"))
        recorder = Recorder(target, draft, eos, gates, length=16)
        found.append([recorder.record(answer) for answer in answers_of(alone, requests, eos)])
    return found


def test_the_grid_holds_the_given_setting_and_only_valid_ones():
    grid = Grid().around(BASE)
    assert 8 in grid.spd_k
    assert 4 in grid.win_len
    assert (0.3, None, None) in grid.gates
    assert (1, 4, 6) in grid.ngrams
    for rule in grid.rules():
        config.build({**BASE.model_dump(), **rule}, "grid")  # raises if fly would refuse it


def test_predicted_seconds_are_passes_times_costs(recordings):
    (found,) = [
        p
        for p in predict(BASE, SMALL, {"none": recordings[0]}, machine(), str)
        if kind(p.config) == "exact" and p.config.spd_k == 4 and p.config.drafter_name == "model"
    ]
    assert found.verify_seconds == pytest.approx(found.counts.rounds * 1.0)
    assert found.draft_seconds == pytest.approx(found.counts.drafted * 0.1)
    assert found.other_seconds == pytest.approx(found.counts.rounds * 0.01)
    assert found.tok_s == pytest.approx(110 / found.seconds)
    assert found.changed == 0


def test_speed_follows_costs_and_agreement(recordings):
    """A dearer draft favours short drafts, a better draft long ones; relaxing never lowers tau."""

    def best(draft, which=0, slope=0.0):
        found = predict(BASE, SMALL, {"none": recordings[which]}, machine(draft, slope), str)
        return next(p for p in found if kind(p.config) == "exact")

    assert best(0.01).config.spd_k > best(0.9).config.spd_k
    assert best(0.1).tok_s > best(0.3).tok_s
    assert best(0.1, which=1).tok_s > best(0.1, which=0).tok_s
    found = predict(BASE, SMALL, {"none": recordings[0]}, machine(), str)
    assert [p.tok_s for p in found] == sorted((p.tok_s for p in found), reverse=True)
    tau = {(kind(p.config), p.config.spd_k, p.config.win_len): p.tau for p in found}
    assert tau["fly within a round", 8, 2] > tau["exact", 8, 4]


def test_n_grams_change_the_cost_of_drafting_alone(recordings):
    found = predict(BASE, SMALL, {"none": recordings[0]}, machine(), str)
    pairs = {}
    for p in found:
        key = (kind(p.config), p.config.spd_k, p.config.win_len)
        pairs.setdefault(key, []).append(p)
    for one, other in pairs.values():
        assert one.counts == other.counts
        assert one.verify_seconds == other.verify_seconds


def test_without_its_own_text_a_cascade_guesses_nothing():
    """With draft_sources that lack `own` the engine's cascade has no n-grams to confirm; the tune
    predicted that it had."""
    for sources, counter in ((["others"], DraftCounter), (["own"], CascadeCounter)):
        keys = {"use_ngram": True, "draft_sources": sources}
        found = search._counter_for(config.build({**BASE.model_dump(), **keys}, "test"), float)
        assert type(found) is counter


def test_the_given_setting_is_predicted_where_recordings_tell(recordings):
    found = predict_one(BASE, recordings[0], machine(), str)
    assert found.config == BASE
    assert 0 < found.changed < 1
    for unknown in ({"draft_policy": "auto"}, {"verification": "typical"}):
        other = config.build({**BASE.model_dump(), **unknown}, "test")
        assert predict_one(other, recordings[0], machine(), str) is None


def made(tok_s, changed=0.0, **keys):
    values = config.build({**BASE.model_dump(), **keys}, "test")
    counts = Counts(rounds=10, emitted=1000, deferred_accepted=int(changed * 1000))
    return Prediction(values, counts, 1000 / tok_s, 0.0, 0.0)


EXACT = {"enable_fly": False}
ACROSS = {"defer_across_rounds": True}


def test_candidates_are_the_best_of_every_kind_then_the_next():
    everything = [
        made(9, 0.5, win_len=2), made(8, **ACROSS), made(7, win_len=3, **ACROSS),
        made(6), made(5, use_ngram=True), made(2, **EXACT), made(1, spd_k=9, **EXACT),
    ]  # fmt: skip
    assert [p.tok_s for p in choose(everything, 3, 0.1)] == [8, 6, 2]
    assert [p.tok_s for p in choose(everything, 4, 0.1)] == [8, 7, 6, 2]
    assert [p.tok_s for p in choose(everything, 1, 0.1)] == [2]  # few: the one that keeps scores
    assert [p.tok_s for p in choose(everything, 3, 1.0)] == [9, 8, 2]
    # n-grams alone are no second candidate, K is
    assert [p.tok_s for p in choose(everything, 5, 0.1)] == [8, 7, 6, 2, 1]
    with pytest.raises(FlyError, match="--max_changed"):
        choose(everything[:1], 3, 0.1)


def test_changes_name_what_differs():
    other = config.build({**BASE.model_dump(), "spd_k": 9, "entropy_thre": None}, "test")
    assert changes(BASE, other) == {"spd_k": 9, "entropy_thre": None}
    assert gates_of([other, BASE]) == {AnyGate(), EntropyGate(0.3)}
