"""Runs of two processes.

Catches documents that are decoded twice or by nobody, sums and orders that differ from one
process's, and a lost process that takes finished work along or leaves the others waiting.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fly import launch
from fly.harness.backend import Backend, FlyError
from fly.runs import reader
from tests import killing
from tests.integration.test_resume import traced

REQUESTS = killing.REQUESTS
ADDS_UP = ("requests", "rounds", "drafted", "native_accepted", "deferred_accepted", "emitted")


@pytest.fixture(scope="module")
def place(saved_pair, tmp_path_factory):
    return killing.make_place(tmp_path_factory.mktemp("processes"), saved_pair)


@pytest.fixture(scope="module")
def alone(place):
    """The folder of a run of one process."""
    status, output = killing.Run(killing.arguments("alone"), place).end()
    assert status == 0, output[-3000:]
    return place / "alone"


def check_equal(out, alone):
    """Records, traces, samples, scores and sums are one process's."""
    assert killing.records(out) == killing.records(alone)
    assert traced(out) == traced(alone)
    ours, theirs = reader.load(out), reader.load(alone)
    assert ours.results["results"] == theirs.results["results"]
    for key, task in theirs.tasks.items():
        assert [*ours.tasks[key].samples] == [*task.samples]  # in the documents' order
        assert ours.tasks[key] == task
    stats = ours.entry["stats"]
    assert stats["requests"] == len(ours.requests) == REQUESTS
    assert {name: stats[name] for name in ADDS_UP} == {
        name: theirs.entry["stats"][name] for name in ADDS_UP
    }
    seconds = sum(record["seconds"]["verify"] for record in ours.requests)
    assert stats["seconds"]["verify"] == pytest.approx(seconds, abs=1e-3)


def errors(output):
    assert "Traceback" not in output, output[-6000:]
    return [line for line in output.splitlines() if "fly: error: " in line]


def test_two_processes_end_like_one(place, alone):
    """lm-eval takes every process on a CPU for the first of one; its padding was scored twice."""
    status, output = killing.Launched(killing.arguments("data"), place).end()
    assert status == [0, 0], output[-6000:]
    check_equal(place / "data", alone)
    ours = reader.load(place / "data")
    assert ours.entry["processes"] == 2
    places = [(r["task"], r["doc_id"], r["idx"], r["repeat"]) for r in ours.requests]
    assert places == sorted(places)
    assert len(list((place / "data").rglob("fly_requests_*_rank1.jsonl"))) == 1
    assert output.count("matches accepted") == output.count("results: ") == 1  # shown once
    assert not list((place / "data").rglob(".fly_run_*"))


@pytest.mark.slow
def test_unequal_shares_are_not_evened_out(place):
    """lm-eval asks a process for its last document again, and keeps both answers."""
    command = ("--limit", "3")
    status, output = killing.Run(killing.arguments("three", *command), place).end()
    assert status == 0, output[-3000:]
    status, output = killing.Launched(killing.arguments("three2", *command), place).end()
    assert status == [0, 0], output[-6000:]
    ours, theirs = (reader.load(place / name) for name in ("three2", "three"))
    assert ours.tasks == theirs.tasks
    assert killing.records(place / "three2") == killing.records(place / "three")


def test_what_earlier_runs_had_adds_up(place, alone):
    command = killing.arguments("drafted", tasks="tiny_greedy")
    command[3] += f",drafter=ngram,draft_runs={alone}"
    status, output = killing.Launched(command, place).end()
    assert status == [0, 0], output[-6000:]
    entry = reader.load(place / "drafted").entry
    assert entry["draft_runs"]["matched"] == 12
    assert entry["stats"]["sources"]["earlier_run"]["accepted"] > 0


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_lost_process_costs_only_what_it_was_about(place, alone, victim):
    """Any of them killed, the others ended by the launcher: nothing twice, nothing lost."""
    out = place / f"lost{victim}"
    run = killing.Launched(killing.arguments(out.name), place)
    assert run.runs[victim].kill_when(lambda: killing.count(out) >= 12)
    status, output = run.end()
    assert status[victim] == -signal.SIGKILL
    assert status[1 - victim] in (2, 128 + signal.SIGTERM)
    assert "Traceback" not in output, output[-6000:]
    with pytest.raises(FlyError, match="has not ended"):
        reader.load(out)
    kept = killing.records(out)
    assert 12 <= len(kept) < REQUESTS
    for name in ("fly_requests_*", "fly_trace_*"):  # a line that the kill tore
        for path in out.rglob(f"{name}.jsonl"):
            with path.open("ab") as file:
                file.write(path.read_bytes()[:9])
    status, output = killing.Launched(["--resume", out], place).end()
    assert status == [0, 0], output[-6000:]
    check_equal(out, alone)
    assert reader.load(out).entry["resumed"]["requests"] == len(kept)


@pytest.mark.slow
def test_a_run_of_two_goes_on_in_one(place, alone):
    """Whose share a document is differs then; its record counts all the same."""
    out = place / "fewer"
    run = killing.Launched(killing.arguments(out.name), place)
    assert run.runs[1].kill_when(lambda: killing.count(out) >= 8)
    run.end()
    status, output = killing.Run(["--resume", out], place).end()
    assert status == 0, output[-3000:]
    check_equal(out, alone)


def refuse_on_one():
    if launch.rank() == 1:
        Backend.build_requests = refused


def refused(self, instances):
    raise FlyError("x=1: only here: set it to 2")


@pytest.mark.slow
def test_an_error_of_one_process_ends_all_with_its_line(place):
    """The others waited for ever where lm-eval has all meet."""
    run = killing.Launched(killing.arguments("refused"), place, refuse_on_one)
    status, output = run.end()
    assert all(status)
    assert errors(output) == ["fly: error: x=1: only here: set it to 2"]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (("--gen_kwargs", "max_gen_toks=0"), "max_gen_toks"),
        (("--limit", "1"), "fewer documents than the run has processes (2)"),
    ],
)
def test_what_all_processes_refuse_is_said_once(place, more, line):
    status, output = killing.Launched(killing.arguments("bad", *more), place).end()
    assert all(status)
    (said,) = errors(output)
    assert line in said


def test_comparing_and_tuning_take_one_process(place):
    status, output = killing.Launched(["compare", "--tasks", "x"], place).end()
    assert all(status)
    (line,) = errors(output)
    assert "fly compare: works in one process" in line


LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    # with --cpu it starts one process
    "accelerate": ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
}


def launched(name, place, command, shown):
    return subprocess.Popen(
        [sys.executable, "-m", *LAUNCHERS[name], "-m", "tests.killing", *map(str, command)],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=shown.open("w"),
        stderr=subprocess.STDOUT,
    )


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_starts_it_and_ends_it_with_a_process(place, alone, launcher):
    out, shown = place / launcher, place / f"{launcher}.txt"
    process = launched(launcher, place, killing.arguments(out.name), shown)
    deadline = time.monotonic() + killing.PATIENCE
    while killing.count(out) < 6:
        assert time.monotonic() < deadline
        assert process.poll() is None, shown.read_text()[-6000:]
        time.sleep(0.001)
    (second,) = [
        child
        for child in psutil.Process(process.pid).children()
        if child.environ().get("RANK") == "1"
    ]
    second.kill()
    assert process.wait(killing.PATIENCE) != 0
    assert killing.count(out) < REQUESTS
    status, output = killing.Launched(["--resume", out], place).end()
    assert status == [0, 0], output[-6000:]
    check_equal(out, alone)
