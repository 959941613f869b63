"""A run that is killed at any moment and resumed ends as if nothing had happened.

Catches a resume that decodes or scores a request twice, keeps a torn line, or goes on under other
settings than the run was started with.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from fly.errors import FlyError
from fly.runs import context, reader, replay, resume
from tests import killing, tiny
from tests.killing import REQUESTS, arguments, count, records

KILLS = 10


@pytest.fixture(scope="module")
def place(saved_pair, tmp_path_factory):
    """A folder with two generating tasks, a choosing one, and a pair's configuration."""
    return killing.make_place(tmp_path_factory.mktemp("resume"), saved_pair)


@pytest.fixture(scope="module")
def unbroken(place):
    """The folder of a run that nobody killed."""
    status, output = killing.Run(arguments("unbroken"), place).end()
    assert status == 0, output[-2000:]
    return place / "unbroken"


def traced(folder):
    """By request: its rounds, without the number of the request."""
    found = defaultdict(list)
    numbers = defaultdict(set)
    for line in killing.lines(folder, "fly_trace_*.jsonl"):
        key = (line["task_name"], line["doc_id"], line["idx"], line["repeat"])
        numbers[line.pop("request")].add(key)
        found[key].append(line)
    assert all(len(keys) == 1 for keys in numbers.values()), "a number was given twice"
    assert len(numbers) == len(found)
    return dict(found)


def check_equal(folder, unbroken):
    """Records, traces, texts, scores and sums of the broken run are the unbroken one's."""
    assert records(folder) == records(unbroken)
    assert traced(folder) == traced(unbroken)
    for rounds in traced(folder).values():
        assert replay.replay([{**line, "request": 0} for line in rounds]).tokens
    ours, theirs = reader.load(folder), reader.load(unbroken)
    assert ours.tasks == theirs.tasks
    assert ours.results["results"] == theirs.results["results"]
    stats = ours.entry["stats"]
    assert stats["requests"] == len(ours.requests) == REQUESTS
    for name in ("rounds", "drafted", "native_accepted", "emitted", "tau", "prompt_tokens"):
        assert stats[name] == theirs.entry["stats"][name]
    for phase in ("prefill", "draft", "verify", "other"):
        total = sum(record["seconds"][phase] for record in ours.requests)
        assert stats["seconds"][phase] == pytest.approx(total, abs=1e-3)


def goings_on(out):
    """How often the run was gone on with: its manifest is replaced as a whole."""
    return sum(len(json.loads(file.read_text())["resumed"]) for file in out.rglob("fly_run_*.json"))


def tear(out, rng):
    """What a kill in the middle of a write leaves: the beginning of a line."""
    for name in ("fly_requests_*.jsonl", "fly_trace_*.jsonl"):
        for file in out.rglob(name):
            line = file.read_bytes().split(b"\n")[0]
            with file.open("ab") as end:
                end.write(line[: rng.randrange(1, len(line))])


def moments(rng):
    """When to kill: (records there, seconds later, tear the last line), `KILLS` of them.

    Two runs of five kills. Every run is killed before its first record, once after its last
    record (while it scores), and in between.
    """
    for _ in range(KILLS // 5):
        middle = sorted(rng.sample(range(1, REQUESTS), 3))
        yield [
            (None, rng.uniform(0, 0.5), False),
            *((n, rng.choice([0, rng.uniform(0, 0.03)]), rng.random() < 0.7) for n in middle),
            (REQUESTS, 0, rng.random() < 0.5),
        ]


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, KILLS // 5))]
)
def test_killed_at_any_moment_and_resumed_a_run_ends_like_an_unbroken_one(place, unbroken, number):
    rng = random.Random(20)
    plan = list(moments(rng))[number]
    out = place / f"killed{number}"
    command = arguments(out.name)
    for times, (at, wait, torn) in enumerate(plan):
        run = killing.Run(command, place)

        def reached(at=at, times=times):
            if at is None:
                return any(out.rglob("fly_run_*.json"))
            return goings_on(out) == times and count(out) >= at

        assert run.kill_when(reached, wait), "it ended before it could be killed"
        if torn:
            tear(out, rng)
        with pytest.raises(FlyError, match=r"has not ended: `fly --resume .*killed"):
            reader.load(out)
        command = ["--resume", out]
    status, output = killing.Run(command, place).end()
    assert status == 0, output[-2000:]
    check_equal(out, unbroken)
    resumed = reader.load(out).entry["resumed"]
    assert resumed["requests"] == REQUESTS
    assert len(resumed["at"]) == len(plan)
    assert ("a torn last line" in output) == plan[-1][2]
    assert not list(out.rglob(".fly_run_*"))


@pytest.mark.slow
def test_a_command_of_its_own_killed_in_the_middle(place, unbroken):
    """As a user starts it, without a fork server; and it goes on from another folder."""
    out = place / "alone"
    with (place / "alone.txt").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.killing", *arguments(out.name)],
            cwd=place,
            # as many threads as the run that goes on with it has
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "OMP_NUM_THREADS": "1",
            },
            stdout=log,
            stderr=log,
        )
        alive = lambda: process.poll() is None  # noqa: E731
        killing.kill_when(process.pid, lambda: count(out) >= 7, 0, alive)
        assert process.wait() == -signal.SIGKILL
    assert 7 <= count(out) < REQUESTS
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    status, output = killing.Run([f"--resume={out}"], elsewhere).end()
    assert status == 0, output[-2000:]
    check_equal(out, unbroken)
    assert reader.load(out).entry["resumed"]["requests"] >= 7
    status, output = killing.Run(["--resume", out], elsewhere).end()
    assert status == 0
    assert "has ended: results: " in output


@pytest.fixture(scope="module")
def cut_short(place):
    """A run of the greedy task that was killed after some records."""
    out = place / "cut"
    run = killing.Run(arguments(out.name, tasks="tiny_greedy"), place)
    assert run.kill_when(lambda: count(out) >= 4)
    return out


@pytest.fixture
def broken(place, cut_short, tmp_path):
    """A copy of it, and of all that it was started from: a test may change anything."""
    folder = tmp_path / "place"
    shutil.copytree(
        place, folder, ignore=shutil.ignore_patterns("killed*", "unbroken", "alone*", "else*")
    )
    for path in (folder / "cut").rglob("fly_run_*.json"):
        text = path.read_text().replace(str(place), str(folder))
        path.write_text(text)
    return folder


def refusal(folder, *more):
    """The one line that `--resume` ends with; nothing was decoded or lost before it."""
    before = {path: path.read_bytes() for path in (folder / "cut").rglob("*.json*")}
    status, output = killing.Run(["--resume", "cut", *more], folder).end()
    assert status == 2, output[-2000:]
    assert {path: path.read_bytes() for path in (folder / "cut").rglob("*.json*")} == before
    last = output.splitlines()[-1]
    assert last.startswith("fly: error: ")
    return last


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--limit", "3"), "--limit was not given, is now 3.0"),
        (("--batch_size", "4"), '--batch_size was "3", is now "4"'),
        (("--model_args", "spd_k=9"), "--model_args.spd_k was absent, is now 9"),
        (("--model_args", "dtype=bfloat16"), '--model_args.dtype was "float32", is now "bfloat16"'),
        (("--output_path", "other"), '--output_path was "cut", is now "other"'),
    ],
)
def test_other_arguments_are_refused(broken, more, message):
    assert message in refusal(broken, *more)


def test_a_changed_configuration_is_refused(broken):
    edit(broken / "pair.json", '"entropy_thre": 0.0', '"entropy_thre": 0.5')
    assert "config.entropy_thre was 0.0, is now 0.5" in refusal(broken)


def test_another_draft_in_the_pair_s_file_is_named(tmp_path, place):
    """The folder is named after the draft: it was said to have been renamed."""
    for name in ("pair", "tasks"):
        shutil.copytree(place / name, tmp_path / name)
    pair = json.loads((place / "pair.json").read_text())
    pair["draft_model_path"] = "pair/draft"
    (tmp_path / "pair.json").write_text(json.dumps(pair))
    command = arguments("cut", tasks="tiny_greedy")
    command[3] = command[3].replace("pretrained=pair/draft,", "")
    run = killing.Run(command, tmp_path)
    assert run.kill_when(lambda: count(tmp_path / "cut") >= 4)
    (tmp_path / "pair/draft").rename(tmp_path / "pair/other")
    edit(tmp_path / "pair.json", "pair/draft", "pair/other")
    before = sorted(tmp_path.rglob("*"))
    line = refusal(tmp_path)
    assert 'config.draft_model_path was "pair/draft", is now "pair/other"' in line
    assert sorted(tmp_path.rglob("*")) == before


def test_a_changed_model_is_refused(broken):
    shutil.copy(broken / "pair/draft/model.safetensors", broken / "pair/target/model.safetensors")
    assert "models.target.files.model.safetensors was " in refusal(broken)


def test_another_version_of_a_library_is_refused(broken):
    (manifest,) = (broken / "cut").rglob("fly_run_*.json")
    data = json.loads(manifest.read_text())
    data["versions"]["transformers"] = "4.0.0"
    manifest.write_text(json.dumps(data))
    assert 'versions.transformers was "4.0.0", is now' in refusal(broken)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("greedy.yaml", "{{question}}", "Q: {{question}}", "prompt_hash was "),
        (
            "greedy.yaml",
            "max_gen_toks: 24",
            "max_gen_toks: 25",
            "decoding.budget was 24, is now 25",
        ),
        tiny.slow("greedy.yaml", '["zzz"]', '["zz"]', 'decoding.stops was ["zzz"], is now ["zz"]'),
        tiny.slow(
            "greedy.yaml", "do_sample: false", "temperature: 1.0, do_sample: true", "decoding.temp"
        ),
        ("tiny_utils.py", '"answer": "a"', '"answer": "b"', "doc_hash was "),
        ("tiny_utils.py", "range(12)", "range(1)", "is no longer asked for"),
    ],
)
def test_a_changed_task_is_refused(broken, file, old, new, message):
    edit(broken / "tasks" / file, old, new)
    line = refusal(broken)
    assert "task tiny_greedy, doc " in line
    assert message in line


def test_a_second_process_is_refused_and_a_moved_folder_is_not(broken):
    """Two processes on one file would answer its requests twice."""
    (manifest,) = (broken / "cut").rglob("fly_run_*.json")
    first = killing.Run(["--resume", "cut"], broken)
    deadline = time.monotonic() + 60
    while not json.loads(manifest.read_text())["resumed"]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(first.process.pid, signal.SIGSTOP)
    elsewhere = broken / "elsewhere"
    elsewhere.mkdir()
    try:
        status, output = killing.Run(["--resume", broken / "cut"], elsewhere).end()
    finally:
        os.kill(first.process.pid, signal.SIGKILL)
    assert status == 2
    assert "another process is working on this run" in output.splitlines()[-1]
    first.process.join()
    moved = broken / "moved"
    (broken / "cut").rename(moved)
    status, output = killing.Run(["--resume", moved], elsewhere).end()
    assert status == 0, output[-2000:]
    assert reader.load(moved).entry["resumed"]["requests"] >= 4


def test_with_use_cache_nothing_is_asked_or_counted_twice(place):
    """lm-eval's cache answers first; the records of those answers are counted all the same."""
    out = place / "cached"
    command = arguments(out.name, "--use_cache", "cache/answers")
    run = killing.Run(command, place)
    assert run.kill_when(lambda: count(out) >= 20)
    status, output = killing.Run(["--resume", out], place).end()
    assert status == 0, output[-2000:]
    counted = Counter(record["task"] for record in killing.lines(out, "fly_requests_*.jsonl"))
    assert counted == {"tiny_greedy": 12, "tiny_sampled": 24}
    assert reader.load(out).entry["stats"]["requests"] == REQUESTS


def test_a_file_in_place_of_the_folder_hides_no_error(place, monkeypatch):
    """Removing the manifest of a run without records failed there, with a traceback."""
    monkeypatch.chdir(place)
    folder = place / "replaced"
    folder.mkdir()
    model_args = {"pretrained": "pair/draft", "config_path": "pair.json"}
    run = context.start(folder)
    with (
        pytest.raises(FlyError, match="what was wrong"),
        resume.keeping_manifest(run, None, {"output_path": str(folder)}, model_args),
    ):
        shutil.rmtree(folder)
        folder.write_text("a file")
        raise FlyError("what was wrong")


def test_a_run_that_is_refused_leaves_no_manifest(place):
    status, output = killing.Run(arguments("bad", "--gen_kwargs", "max_gen_toks=0"), place).end()
    assert status == 2, output[-2000:]
    assert not [path for path in (place / "bad").rglob("*") if path.is_file()]
