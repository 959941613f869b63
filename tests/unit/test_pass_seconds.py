"""Measured pass times against a scripted machine."""

import random

import pytest

from fly.tuning.pass_seconds import Anchor, PassSeconds, measure, timed, typical_contexts
from fly.tuning.simulate import Passes


class Machine:
    """A clock, and passes that cost 1 + 0.1 * width + 0.001 * context seconds times a pace."""

    def __init__(self, pace):
        self.now, self.pace = 0.0, pace

    def clock(self):
        return self.now

    def run(self, width, context):
        self.now += (1 + 0.1 * width + 0.001 * context) * self.pace(self.now)


def expected(width, context):
    return 1 + 0.1 * width + 0.001 * context


def measured(pace, sweeps=7):
    machine = Machine(pace)
    return measure(machine.run, [1, 5, 9], [100, 300], sweeps=sweeps, clock=machine.clock)


def test_a_steady_machine_is_measured_exactly():
    found = measured(lambda now: 1.0)
    for width in (1, 3, 5, 9, 12):
        for context in (100, 250, 500):
            assert found.at(width, context) == pytest.approx(expected(width, context))
    assert found.anchor == pytest.approx(expected(1, 100))


def test_a_machine_that_slows_down_does_not_bend_the_ratios():
    """Catches seconds taken without their neighbour: the last widths would look expensive."""
    found = measured(lambda now: 1 + now / 50)
    ratio = found.at(9, 300) / found.at(1, 100)
    assert ratio == pytest.approx(expected(9, 300) / expected(1, 100), rel=0.04)


def test_single_interruptions_do_not_count():
    chance = random.Random(0)
    found = measured(lambda now: 20.0 if chance.random() < 0.15 else 1.0, sweeps=15)
    for width in (1, 5, 9):
        assert found.at(width, 300) == pytest.approx(expected(width, 300), rel=0.02)


def test_a_sum_of_passes_is_the_sum_of_each():
    found, passes, total = measured(lambda now: 1.0), Passes(), 0.0
    for width, context in [(1, 120), (1, 180), (4, 200), (9, 290), (4, 100)]:
        passes.add(width, context)
        total += expected(width, context)
    assert found.total(passes) == pytest.approx(total)


def test_noise_never_makes_longer_contexts_cheaper():
    found = PassSeconds((100, 200), {1: (2.0, 1.9)}, 2.0)
    assert found.at(1, 1000) == 2.0
    assert found.at(3, 1000) == 2.0


def test_timed_gives_each_pass():
    machine = Machine(lambda now: 2.0)
    assert timed(lambda: machine.run(1, 100), 3, machine.clock) == pytest.approx([2.4] * 3)


def test_another_models_anchor_sets_the_pace():
    """Passes of two models timed an hour apart, on a machine three times slower by then, are
    comparable: catches an anchor of the draft's own."""
    early, late = Machine(lambda now: 1.0), Machine(lambda now: 3.0)
    target = measure(early.run, [1, 5], [100], sweeps=3, clock=early.clock)
    anchor = Anchor(lambda: late.run(1, 100), target.anchor)
    found = measure(late.run, [1, 5, 9], [100], sweeps=3, anchor=anchor, clock=late.clock)
    assert found.at(9, 100) == pytest.approx(expected(9, 100))
    assert found.at(5, 100) == pytest.approx(target.at(5, 100))
    assert found.anchor == target.anchor


def test_typical_contexts_lie_between_prompts_and_ends():
    assert typical_contexts([(50, 100)]) == (49, 150)
    lengths = [(10, 5), *[(100 + i, 50) for i in range(18)], (5000, 50)]
    low, high = typical_contexts(lengths)
    assert 99 <= low <= 105  # neither the shortest nor the longest decides
    assert 150 <= high <= 170
