"""Which process this is, and lm-eval's shares put together.

Catches a rank that is taken from an environment without a launcher, and documents out of order.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fly import launch
from fly.harness.backend import _in_order
from fly.paths import run_files

NAMES = (*launch._RANK, *launch._SIZE, *launch._SIZE_HERE)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, (0, 1, 1)),
        ({"RANK": "3", "WORLD_SIZE": "1"}, (0, 1, 1)),
        ({"RANK": "3", "WORLD_SIZE": ""}, (0, 1, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (3, 8, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2, 1)),
    ],
)
def test_a_launcher_says_which_process_this_is(monkeypatch, environment, found):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (launch.rank(), launch.processes(), launch.processes_here()) == found


@given(documents=st.integers(1, 9), processes=st.integers(1, 4), filters=st.integers(1, 2))
def test_shares_come_back_in_the_documents_order(documents, processes, filters):
    def share(rank):
        return range(documents)[rank::processes]

    samples = [(name, doc) for name in range(filters) for doc in range(documents)]
    shares = [
        [{"filter": name, "doc": doc} for name, doc in samples if doc in share(rank)]
        for rank in range(processes)
    ]
    assert [(s["filter"], s["doc"]) for s in _in_order(shares)] == samples
    metrics = [{("acc", "none"): [*share(rank)]} for rank in range(processes)]
    assert _in_order(metrics) == {("acc", "none"): [*range(documents)]}


def test_files_of_a_run_come_by_rank(tmp_path):
    for end in ("", "_rank10", "_rank2", "_rankx", "-old"):
        (tmp_path / f"fly_requests_S{end}.jsonl").touch()
    assert [*run_files(tmp_path, "fly_requests", "S")] == [0, 2, 10]
