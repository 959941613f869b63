"""The plan's lines: stages, and time left as soon as it is known."""

import io

from fly.tuning.progress import Plan


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_time_left_is_told_once_every_stage_has_an_expectation():
    clock, out = Clock(), io.StringIO()
    plan = Plan(["one", "two", "three"], out, clock)
    plan.start("one")
    clock.now = 60
    plan.end()
    plan.expect("two", 30)
    plan.start("two")
    plan.expect("three", 100)
    clock.now = 65
    plan.step(1, 4)  # too soon for a line
    clock.now = 90
    plan.step(2, 4)  # half in 30 s: 30 s more, then 100
    plan.start("three")
    plan.end()
    lines = out.getvalue().splitlines()
    assert lines == [
        "[1/3] one (0:00 passed)",
        "[2/3] two (1:00 passed)",
        "    2 of 4, 0:30 left of it; about 2:10 left in all   ",
        "[3/3] three; about 1:40 left in all (1:30 passed)",
    ]


def test_what_is_over_or_skipped_is_expected_no_more():
    clock, out = Clock(), io.StringIO()
    plan = Plan(["one", "two", "three"], out, clock)
    plan.start("one")
    plan.end()
    plan.expect("one", 1000)
    plan.expect("two", 5)
    plan.expect("three", 1000)
    plan.skip("three")
    plan.start("two")
    assert out.getvalue().splitlines()[-1] == "[2/3] two; about 0:05 left in all (0:00 passed)"
