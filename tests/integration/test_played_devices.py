"""Greedy decoding on a CUDA device that is played on a CPU (tests/played.py)."""

import copy

import pytest
import torch

from tests import played, tiny

TARGET = tiny.model(0)
DRAFT = tiny.noisy_copy(TARGET, 0.02)


def texts_of(target, draft, rows, capture=None):
    drafter = tiny.drafter("draft", rows, draft, capture=capture)
    engine = tiny.engine(tiny.runner(target, rows, capture), drafter, 4)
    return [record.tokens for record in tiny.decode_all(engine, tiny.prompts(5), 20)]


@pytest.mark.parametrize("rows", [1, 4])
def test_texts_are_those_of_the_cpu(rows):
    expected = texts_of(TARGET, DRAFT, rows)
    with played.devices() as meter:
        models = [played.put(copy.deepcopy(model)) for model in (TARGET, DRAFT)]
        assert texts_of(*models, rows, capture=True) == expected
        assert meter.replays > 0


def test_devices_are_not_mixed():
    with played.devices():
        here, there = (played.Played(torch.ones(3), f"cuda:{index}") for index in range(2))
        with pytest.raises(RuntimeError, match="device"):
            here + there


def test_waits_and_launches_are_counted():
    with played.devices() as meter:
        x = played.Played(torch.ones(3), "cuda:0")
        meter.reset()
        y = x + x
        assert (meter.launches, sum(meter.waits.values())) == (1, 0)
        assert float(y.sum()) == 6
        assert sum(meter.waits.values()) == 1


def test_layers_over_two_gpus():
    expected = texts_of(TARGET, DRAFT, 1)
    with played.devices():
        target, draft = played.spread(copy.deepcopy(TARGET)), played.put(copy.deepcopy(DRAFT))
        assert texts_of(target, draft, 1) == expected
