"""Draft length as a cost decision: pass costs by rule and by calibration, and what is made of
them."""

import json
import os
import time
from dataclasses import replace

import pytest
import torch

from fly.execution import calibration, kernels, packed_linear
from fly.execution.calibration import calibrate
from fly.execution.pass_costs import (
    PairCosts,
    PassCosts,
    by_rule,
    relative_cost,
    round_cost,
    way_of,
)
from fly.speculation.acceptance import DRAFT_MODEL
from fly.speculation.draft_length import AdaptiveLength, DraftLength, best_length, pays
from tests import tiny


def pair_costs(target, draft=((1,), (0.2,))):
    return PairCosts(PassCosts(*target), PassCosts(*draft), "test")


FLAT = pair_costs(((1,), (1.0,)))  # width costs nothing
STEEP = pair_costs(((1, 11), (1.0, 11.0)))  # every token costs a whole pass


def test_costs_lie_on_lines_and_go_on_after_the_last_size():
    table = PassCosts((1, 4, 12), (1.0, 1.0, 3.0))
    assert [table.at(n) for n in (1, 2, 4, 8, 12, 20)] == [1.0, 1.0, 1.0, 2.0, 3.0, 5.0]
    assert PassCosts((1,), (0.5,)).at(100) == 0.5


def test_drafts_are_as_long_as_they_pay():
    """The optimum by hand: tokens (1 - a^(K+1)) / (1 - a) over 1 + 0.2 K (+ 0.03 a round)."""
    expected = max(range(16), key=lambda k: (1 - 0.8 ** (k + 1)) / 0.2 / (1.03 + 0.2 * k))
    assert best_length(range(16), 1, 0.8, FLAT) == expected > 1
    assert best_length(range(3), 1, 0.8, FLAT) == 2  # spd_k is the most
    assert best_length(range(16), 1, 0.8, STEEP) == 0
    assert best_length(range(16), 1, 0.1, FLAT) == 0
    assert best_length(range(16), 1, 0.95, FLAT) > expected


def test_few_lengths_come_up_where_each_costs_a_graph():
    """In graphs a round costs more beside its passes, which makes drafts longer."""
    costs = replace(by_rule("graphs", "graphs", 0.3), a_round=round_cost("graphs"))
    found = set()
    for accepted in (*range(13), *range(12, -1, -1)):
        length = AdaptiveLength(12, costs, is_coarse=True)
        for _ in range(40):
            length.observe([(accepted, 12)])
        found.add(length.choose(1))
    assert found >= {0, 12}
    assert found < {0, 1, 2, 4, 8, 12}
    assert AdaptiveLength(1, FLAT, is_coarse=True).choose(1) == 1
    assert costs.a_round > by_rule("kernels-avx2", None, 0.0).a_round


def test_a_block_costs_the_same_however_much_of_it_is_drafted():
    """All of it is drafted where the target's width costs nothing."""
    block = replace(FLAT, block=8)
    assert [block.drafting(steps, 3) for steps in (0, 1, 7)] == [0.0, 0.2, 0.2]
    growing = pair_costs(((1,), (1.0,)), ((1, 8), (0.25, 1.0)))
    assert replace(growing, block=8).drafting(7, 1) == 1.0
    assert best_length(range(8), 1, 0.5, block) == 7 > best_length(range(8), 1, 0.5, FLAT)
    assert best_length(range(8), 1, 0.8, replace(STEEP, block=8)) == 0


def test_many_sequences_draft_less_where_width_costs():
    growing = by_rule("kernels-avx2", "kernels-avx2 int8", 0.16)
    lengths = [best_length(range(16), sequences, 0.87, growing) for sequences in (1, 2, 4, 6, 12)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 3
    assert lengths[-1] == 0


def test_wide_passes_are_cheap_with_tiles_and_dear_on_avx2():
    tiles = by_rule("kernels-amx", "kernels-amx int8", 0.16)
    assert pays(8, 12, 0.87, tiles)
    assert not pays(8, 6, 0.87, by_rule("kernels-avx2", "kernels-avx2 int8", 0.16))
    assert pays(8, 1, 0.87, by_rule("kernels-avx2", "kernels-avx2 int8", 0.16))


def test_what_is_never_accepted_is_not_drafted_and_tried_again_later():
    length = AdaptiveLength(8, FLAT)
    assert length.choose(1) > 2
    for _ in range(300):
        length.observe([(0, 8)])
    assert length.choose(1) == 0
    waited = 0
    while length.choose(1) == 0:
        length.observe([(0, 0)])
        waited += 1
    assert 50 < waited < 1000


def test_tokens_behind_a_rejection_tell_nothing():
    """Counted as rejected they would bring the acceptance of 4 in 5 down to 4 in 8."""
    length = AdaptiveLength(8, FLAT)
    for _ in range(300):
        length.observe([(4, 8)])
    assert length._acceptance.chance(DRAFT_MODEL) == pytest.approx(0.8, abs=0.02)


def test_the_same_counts_choose_the_same_again():
    """No clock: two runs over the same rounds decide alike, round by round."""
    rounds = [[(k % 5, 4), (k % 3, 3)] for k in range(60)]

    def decisions():
        length, chosen = AdaptiveLength(8, by_rule("kernels-avx512", "eager", 0.3)), []
        for judged in rounds:
            chosen.append(length.choose(2))
            length.observe(judged)
        return chosen

    assert decisions() == decisions()
    assert DraftLength(5).choose(12) == 5


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FLY_HOME", str(tmp_path))
    return tmp_path / "calibration"


def runners():
    return tiny.runner(tiny.model(1), 2), tiny.runner(tiny.model(2), 2)


def test_a_calibration_is_coarse_kept_and_read_again(home, monkeypatch):
    target, draft = runners()
    made = calibrate(target, draft, {"pair": 1})
    assert made.source == "calibration"
    assert target.lengths == [0, 0]
    assert made.target.costs[0] == 1.0
    assert list(made.target.costs) == sorted(made.target.costs)
    monkeypatch.setattr(calibration, "_seconds", lambda runner: pytest.fail("measured again"))
    kept = calibrate(*runners(), {"pair": 1})
    assert (kept.source, kept.target, kept.draft) == ("cache", made.target, made.draft)
    assert len(list(home.iterdir())) == 1


@pytest.mark.parametrize("spoil", ["other pair", "old", "torn", "other threads", "empty table"])
def test_a_calibration_of_something_else_is_made_anew(home, monkeypatch, spoil):
    calibrate(*runners(), {"pair": 1})
    (path,) = home.iterdir()
    if spoil == "old":
        then = time.time() - 40 * 24 * 3600
        os.utime(path, (then, then))
    if spoil == "torn":
        path.write_text(path.read_text()[:20])
    if spoil == "empty table":
        path.write_text(json.dumps({"target": {}, "draft": {}}))
    if spoil == "other threads":
        monkeypatch.setattr(calibration.torch, "get_num_threads", lambda: 99)
    pair = 2 if spoil == "other pair" else 1
    assert calibrate(*runners(), {"pair": pair}).source == "calibration"


@pytest.mark.parametrize("home", ["file", "~nobody-of-this-name/fly"])
def test_a_home_that_cannot_be_written_only_means_measuring_again(tmp_path, monkeypatch, home):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLY_HOME", home)
    assert calibrate(*runners(), {}).source == "calibration"


def test_noise_of_a_few_percent_does_not_change_a_calibrated_cost():
    def coarse(*seconds):
        return calibration._coarse(list(seconds), 1.0, "kernels-avx2")

    assert coarse(1.0, 1.0, 2.0) == coarse(1.0, 1.03, 2.04)
    assert coarse(1.0, 0.7, 2.0).costs[:3] == (1.0, 1.0, 2.0)  # wider is never cheaper


@pytest.mark.parametrize(
    "way", ["kernels-amx", "kernels-avx512_bf16", "kernels-avx512", "kernels-avx2", "eager"]
)
def test_what_a_short_calibration_did_not_reach_is_not_free(way):
    """A large model's one pass takes the whole budget: wide passes then cost what the rule says."""
    short = calibration._coarse([0.5], 0.5, way)
    assert [short.at(n) for n in (1, 20, 108)] == pytest.approx(
        [relative_cost(way, n) for n in (1, 20, 108)], rel=0.05
    )
    flat = calibration._coarse([0.5, 0.5], 0.5, way)
    assert flat.at(108) > 2


def test_the_rule_of_guesses_and_the_rule_of_lengths_are_one():
    """What a cascade's guesses cost and what drafting costs come from the same table."""
    kinds = ("avx2", "avx512", "avx512_bf16", "amx")
    for way in (*(f"kernels-{kind}" for kind in kinds), "graphs", "eager"):
        table = by_rule(way, None, 0.0).target
        for tokens in (1, 5, 20, 100):
            assert table.at(tokens) == pytest.approx(relative_cost(way, tokens))


def test_the_way_of_a_model_is_read_off_its_layers():
    model, cpu = tiny.model(1), torch.device("cpu")
    assert way_of(model, cpu) == "eager"
    if kernels.why_not() is None:
        model = model.bfloat16()
        packed_linear.use_kernels(model, kernels.Int8Linear)
        assert way_of(model, cpu) == f"kernels-{kernels.instructions()}"
