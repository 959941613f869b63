"""What benchmarks/throughput.py counts, and the ratios it makes of that."""

import pytest

from tests import benchmark_scripts


@pytest.fixture(scope="module")
def throughput():
    return benchmark_scripts.load("throughput")


def decode(ids):
    return "".join(chr(96 + token) for token in ids)


def prompt(throughput, budget=10, stops=()):
    return throughput.Prompt(0, "", [1], {}, list(stops), budget)


@pytest.mark.parametrize(
    ("ids", "stops", "budget", "expected"),
    [
        ([1, 2, 3], [], 3, ([1, 2, 3], "abc", "length")),
        ([1, 2, 3, 4], [], 3, ([1, 2, 3], "abc", "length")),
        ([1, 2, 0, 5, 5], [], 10, ([1, 2, 0], "ab", "eos")),  # padding after EOS
        ([1, 2, 3, 4], ["bc"], 10, ([1, 2, 3], "a", "stop")),
        ([1, 2, 3, 0], ["bc"], 10, ([1, 2, 3], "a", "stop")),
        ([1, 2, 0, 2, 3], ["bc"], 10, ([1, 2, 0], "ab", "eos")),  # a stop past EOS is no stop
        ([1, 2], [], 10, ([1, 2], "ab", "unfinished")),
    ],
)
def test_tokens_past_eos_stop_string_or_budget_do_not_count(
    throughput, ids, stops, budget, expected
):
    counted = throughput.count(ids, prompt(throughput, budget, stops), frozenset({0}), decode)
    assert (counted.ids, counted.text, counted.finish_reason) == expected


def test_ratios_compare_equals(throughput):
    speeds = {
        ("hf", 1): 2.0, ("hf", 6): 8.0, ("target_only", 6): 10.0, ("target_only", 12): 20.0,
        ("fly", 1): 6.0, ("fly", 6): 15.0, ("fly", 12): 18.0, ("vllm", 6): 5.0,
        ("vllm_draft", 6): 6.0,
    }  # fmt: skip
    found = throughput.ratios(speeds, set())
    assert found["fly/hf@1"] == 3.0
    assert found["fly/hf@best"] == 18 / 8
    assert found["fly/target_only@same"] == 1.5
    assert found["fly/target_only@best"] == 0.9
    assert found["fly/vllm@best"] == 3.0
    assert "fly/target_only@1" not in found


def test_a_failed_batch_size_leaves_the_best_unsaid(throughput):
    speeds = {("hf", 1): 2.0, ("fly", 1): 6.0, ("fly", 6): 15.0}
    found = throughput.ratios(speeds, {("hf", 6)})
    assert found["fly/hf@1"] == 3.0
    assert "fly/hf@best" not in found
