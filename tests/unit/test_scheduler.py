"""Which sequence runs in which slot, without models: the calls of `fill`, and their sum."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.speculation.scheduler import Scheduler


class Item:
    """As much of a sequence as a scheduler looks at."""

    def __init__(self, name):
        self.name = name
        self.is_open = True
        self.is_reported = False

    def __repr__(self):
        return str(self.name)


class Slots:
    """What the caches of a run hold, by what they are told."""

    def __init__(self):
        self.held, self.admitted, self.moved = {}, [], []

    def admit(self, slot, item, running):
        self.held[slot] = item
        self.admitted.append((item.name, slot, running))

    def move(self, source, destination, item):
        assert self.held[source] is item
        self.held[destination] = item
        self.moved.append((item.name, source, destination))


def filled(names, slots):
    """(the items by name, the scheduler, its slots) after the first `fill`."""
    items = {name: Item(name) for name in names}
    scheduler, caches = Scheduler(items.values()), Slots()
    scheduler.fill(slots, caches.admit, caches.move)
    return items, scheduler, caches


def end(items, names):
    for name in names:
        items[name].is_open = False


def names_of(scheduler):
    return "".join(item.name for item in scheduler.running)


def test_sequences_start_in_order_and_know_how_many_will_run():
    _, scheduler, caches = filled("abcde", 3)
    assert caches.admitted == [("a", 0, 3), ("b", 1, 3), ("c", 2, 3)]
    assert names_of(scheduler) == "abc"
    _, _, few = filled("ab", 3)
    assert few.admitted == [("a", 0, 2), ("b", 1, 2)]


def test_slots_of_finished_sequences_are_refilled_and_nobody_moves():
    items, scheduler, caches = filled("abcdef", 3)
    end(items, "ac")
    scheduler.fill(3, caches.admit, caches.move)
    assert names_of(scheduler) == "dbe"
    assert caches.admitted[3:] == [("d", 0, 3), ("e", 2, 3)]
    assert caches.moved == []


def test_slots_of_finished_sequences_come_before_free_ones():
    items, scheduler, caches = filled("ab", 4)
    end(items, "a")
    scheduler._waiting.extend(map(Item, "cd"))
    scheduler.fill(4, caches.admit, caches.move)
    assert names_of(scheduler) == "cbd"
    assert caches.admitted[2:] == [("c", 0, 3), ("d", 2, 3)]


@pytest.mark.parametrize(
    ("ended", "left", "moved"),
    [
        ("a", "dbc", [("d", 3, 0)]),
        ("d", "abc", []),
        ("cd", "ab", []),
        ("ad", "cb", [("c", 2, 0)]),
        ("abcd", "", []),
    ],
)
def test_gaps_are_closed_from_the_end(ended, left, moved):
    items, scheduler, caches = filled("abcd", 4)
    end(items, ended)
    scheduler.fill(4, caches.admit, caches.move)
    assert names_of(scheduler) == left
    assert caches.moved == moved
    assert scheduler.has_work == bool(left)


def test_one_waiting_sequence_fills_the_first_gap_and_the_end_closes_the_next():
    items, scheduler, caches = filled("abcde", 4)
    end(items, "ac")
    scheduler.fill(4, caches.admit, caches.move)
    assert names_of(scheduler) == "ebd"
    assert caches.admitted[4:] == [("e", 0, 3)]
    assert caches.moved == [("d", 3, 2)]


def test_finished_sequences_are_told_once():
    items, scheduler, caches = filled("abc", 3)
    assert list(scheduler.finished()) == []
    end(items, "bc")
    assert [item.name for item in scheduler.finished()] == ["b", "c"]
    assert list(scheduler.finished()) == []
    scheduler.fill(3, caches.admit, caches.move)
    assert names_of(scheduler) == "a"
    assert scheduler.has_work
    end(items, "a")
    assert not scheduler.has_work
    assert [item.name for item in scheduler.finished()] == ["a"]


def test_interrupted_sequences_start_again_first_and_in_order():
    items, scheduler, caches = filled("abcdef", 4)
    end(items, "b")
    scheduler.interrupt()
    assert scheduler.running == []
    assert scheduler.has_work
    scheduler.fill(2, caches.admit, caches.move)
    assert names_of(scheduler) == "ac"
    end(items, "ac")
    scheduler.fill(2, caches.admit, caches.move)
    assert names_of(scheduler) == "de"


def test_a_sequence_whose_start_fails_still_waits():
    items, scheduler, caches = filled("abcd", 2)
    end(items, "a")

    def fail(slot, item, running):
        raise MemoryError

    with pytest.raises(MemoryError):
        scheduler.fill(2, fail, caches.move)
    scheduler.interrupt()
    scheduler.fill(1, caches.admit, caches.move)
    assert names_of(scheduler) == "b"
    end(items, "b")
    scheduler.fill(1, caches.admit, caches.move)
    assert names_of(scheduler) == "c"


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 12), st.integers(1, 5), st.integers(0, 2**32))
def test_every_sequence_runs_where_the_caches_hold_it(count, slots, seed):
    """All slots are in use while there is work, and each sequence ends, and is told, once."""
    rng, told = random.Random(seed), []
    items = [Item(name) for name in range(count)]
    scheduler, caches = Scheduler(items), Slots()
    while scheduler.has_work:
        scheduler.fill(slots, caches.admit, caches.move)
        left = sum(item.is_open for item in items)
        assert len(scheduler.running) == min(slots, left)
        assert all(item.is_open for item in scheduler.running)
        assert all(caches.held[slot] is item for slot, item in enumerate(scheduler.running))
        for item in scheduler.running:
            item.is_open = rng.random() < 0.6
        told += scheduler.finished()
        if rng.random() < 0.1:
            scheduler.interrupt()
            slots = max(1, slots // 2)
    assert sorted(told, key=lambda item: item.name) == items
