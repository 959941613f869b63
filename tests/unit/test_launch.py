"""Which process this is, and lm-eval's shares put together.

Catches a rank that is taken from an environment without a launcher, and documents out of order.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fly import launch
from fly.cli import main
from fly.harness.backend import _in_order
from fly.paths import run_files

NAMES = (*launch._RANK, *launch._SIZE, *launch._SIZE_HERE, launch._RANK_HERE)


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


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK=3: WORLD_SIZE=2 has ranks 0 to 1: start with"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2: WORLD_SIZE=2 has ranks 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1: must be a whole number"),
        ({"RANK": "\u0663", "WORLD_SIZE": "8"}, "must be a whole number"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2: without RANK"),
        ({"WORLD_SIZE": "2", "RANK": ""}, "WORLD_SIZE=2: without RANK"),
        ({"WORLD_SIZE": "abc", "RANK": "0"}, "WORLD_SIZE=abc: must be a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: must be at least 1"),
        ({"LOCAL_RANK": "abc"}, "LOCAL_RANK=abc: must be a whole number"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0: without RANK"),
        ({"RANK": "abc"}, "RANK=abc: must be a whole number"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "8"},
            "LOCAL_WORLD_SIZE=8: more than",
        ),
        (
            {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "8"},
            "LOCAL_WORLD_SIZE=8: more than WORLD_SIZE=1",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2: without OMPI_COMM_WORLD_RANK"),
    ],
)
def test_variables_that_no_launcher_sets_are_refused_before_all_else(
    monkeypatch, capsys, environment, words
):
    """The first process waited for others for ever, or the target's path was blamed."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(main, "_set_up_logging", lambda: pytest.fail("went on"))
    monkeypatch.setattr(main.time, "sleep", lambda seconds: pytest.fail("waited"))
    with pytest.raises(SystemExit) as caught:
        main.main(["run", "--tasks", "x"])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("names", zip(launch._RANK, launch._SIZE, launch._SIZE_HERE))
@pytest.mark.parametrize("values", ["0 1 1", "7 8 4", "1 2", "3"])
def test_what_launchers_set_is_accepted(monkeypatch, names, values):
    """A RANK alone is of something else."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in zip(names, values.split()):
        monkeypatch.setenv(name, value)
    launch.check()


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
