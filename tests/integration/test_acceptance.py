"""Acceptance by draft position of real caches and drafters, against what traces say of it."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.analysis import acceptance
from fly.runs import replay
from fly.runs.records import Positions, RunStats
from fly.runs.trace_writer import line_of
from fly.speculation.sampling import GREEDY, Sampling
from fly.speculation.sequence import Request
from tests import tiny

RULES = {
    "exact": tiny.EXACT,
    "within a round": tiny.relaxed(1, 0.1),
    "no window": tiny.relaxed(0, 0.3),
    "across rounds": tiny.relaxed(3, 0.1, across=True),
    "gates alone": tiny.gated_rule(),
}


def decode(target, draft, rule, drafter, slots, sampling, seed):
    """(records, trace lines) of five requests."""
    lines = []
    runner = tiny.drafter(drafter, slots, draft)
    engine = tiny.engine(
        target, runner, 4, RULES[rule], slots,
        observer=lambda record: lines.append(line_of(record, record.request.tag.doc_id)),
    )  # fmt: skip
    requests = [
        Request(
            tuple(prompt), 24, tag=SimpleNamespace(task_name="t", doc_id=number, idx=0),
            sampling=sampling, seed=seed + number,
        )
        for number, prompt in enumerate(tiny.prompts(seed=seed))
    ]  # fmt: skip
    return list(engine.run(requests)), lines


@settings(max_examples=12, deadline=None)
@given(
    rule=st.sampled_from([*RULES]),
    drafter=st.sampled_from(["model", "cascade", "ngram"]),
    slots=st.integers(1, 3),
    sampling=st.sampled_from([GREEDY, Sampling(temperature=0.7)]),
    seed=st.integers(0, 50),
)
def test_positions_agree_with_counts_and_with_the_trace(
    target, draft, rule, drafter, slots, sampling, seed
):
    records, lines = decode(target, draft, rule, drafter, slots, sampling, seed)
    total = Positions()
    for record in records:
        counts, found = record.counts, record.positions
        assert sum(found.drafted) == counts.drafted
        assert sum(found.accepted) == counts.native_accepted + counts.deferred_accepted
        total.add(found)
    traced = acceptance.measure(replay.generations(lines))
    assert traced.positions == total
    assert traced.deferred.total() == sum(record.counts.deferred_accepted for record in records)


@pytest.mark.parametrize("rule", ["exact", "across rounds"])
def test_statistics_are_those_of_their_records(target, draft, rule):
    """What a resumed run reads back, in any order and in two halves, gives the same statistics."""
    records, lines = decode(target, draft, rule, "model", 2, GREEDY, 3)
    together, halves = RunStats(), [RunStats(), RunStats()]
    for number, record in enumerate(records):
        together.add_request(record)
        halves[number % 2].add_request(record)
    halves[1].merge(halves[0])
    stats = together.as_dict()
    assert halves[1].positions == together.positions
    assert halves[1].as_dict()["tasks"] == stats["tasks"]
    drafts = sum(bool(line["draft"]) for line in lines)
    accepted = stats["native_accepted"] + stats["deferred_accepted"]
    assert 0 < accepted < stats["drafted"]
    assert stats["al"] == round(1 + accepted / drafts, 4)
    own = [record.as_dict() for record in records]
    assert stats["tasks"]["t"] == {
        "documents": 5,
        "tau": stats["tau"],
        "al": stats["al"],
        "tau_document_mean": pytest.approx(sum(line["tau"] for line in own) / 5, abs=1e-4),
        "al_document_mean": pytest.approx(sum(line["al"] for line in own) / 5, abs=1e-4),
    }
