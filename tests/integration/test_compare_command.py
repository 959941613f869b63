"""`fly compare` that makes its own runs, on the tiny pair, in real processes."""

# ruff: noqa: F811  fixtures by their names

import functools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import transformers
import yaml
from lm_eval._cli import HarnessCLI
from lm_eval.utils import hash_string

from fly.cli import compare_plan, run_inputs, run_modes
from fly.errors import FlyError
from fly.runs import output_ids
from fly.runs.manifest import Manifest
from tests import configured_runs, killing, tiny, written_runs
from tests.integration.test_cli import config_file, run, task_dir  # noqa: F401  fixtures

ROOT = Path(__file__).resolve().parents[2]
TASK_UTILS = """import datasets, json, pathlib
def load(**kwargs):
    rows = json.loads((pathlib.Path(__file__).parent / "documents.json").read_text())
    return {"test": datasets.Dataset.from_list(rows)}
def process_results(doc, results):
    return {"as_target": float(results[0] == doc["answer"])}
"""


@pytest.fixture
def graded_tasks(task_dir, saved_pair):
    """The tiny task, solved where the text is the target's own, as transformers generates it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved_pair / "target")
    target = transformers.AutoModelForCausalLM.from_pretrained(saved_pair / "target")
    rows = []
    for number in range(12):
        question = f"q{number} "
        tokens = tiny.generate(target, tokenizer.encode(question), 12, eos=257)
        answer = tokenizer.decode(tokens, skip_special_tokens=True)
        rows.append({"question": question, "answer": answer})
    (task_dir / "documents.json").write_text(json.dumps(rows))
    path = task_dir / "tiny_task.yaml"
    text = path.read_text().replace("exact_match", "as_target")
    path.write_text(text + "process_results: !function tiny_utils.process_results\n")
    (task_dir / "tiny_utils.py").write_text(TASK_UTILS)
    return task_dir


@pytest.fixture
def forked(monkeypatch, tmp_path):
    """Modes run in forks of a process that has imported everything; the CI examples' do not."""

    def start(commands, *output):
        (command,) = commands
        assert command[1:4] == ["-m", "fly", "run"]
        return [killing.Run(command[3:], tmp_path).end()[0]]

    monkeypatch.setattr(run_modes, "run_children", start)


def flags(saved_pair, config_file, tasks, out):
    return [
        "compare", "--model_args",
        f"pretrained={saved_pair / 'draft'},config_path={config_file},dtype=float32",
        "--tasks", "tiny_task", "--include_path", tasks, "--device", "cpu", "--output_path", out,
    ]  # fmt: skip


def test_modes_are_run_once_compared_and_judged(
    forked,
    saved_pair,
    config_file,
    graded_tasks,
    tmp_path,
    capfd,
):
    """One walk through form two, as each run costs seconds: an unchanged engine passes the gate, a
    rule that takes every draft token does not, finished runs and a stored baseline are reused."""
    out, stored = tmp_path / "out", tmp_path / "baseline.json"
    common = flags(saved_pair, config_file, graded_tasks, out)
    gate = ("--min-recovery", "0.99", "--save-baseline", stored)
    assert run(*common, "--modes", "target-only", "exact", *gate) == 0
    printed = capfd.readouterr().out
    assert "every document scored the same" in printed
    assert "--- exact (2 of 2) ---" in printed
    entry = json.loads(next(out.glob("exact/*/results_*.json")).read_text())["config"]["fly"]
    assert (entry["mode"], entry["stats"]["requests"]) == ("exact", 12)
    assert run(*common, "--modes", "target-only", "exact", *gate) == 0
    assert capfd.readouterr().out.count("finished before") == 2
    assert (
        run(*common, "--modes", "target-only", "exact", "--noise-floor", "--json", out / "j") == 0
    )
    assert (
        json.loads(next(out.glob("noise/*/results_*.json")).read_text())["config"]["batch_size"]
        == "8"
    )
    (row,) = json.loads((out / "j").read_text())["noise_floor"]
    # float32 rounds so little that no text of a tiny model differs
    nothing = {"documents": 12, "by_rounding": 0, "by_run": 0, "p": 1.0}
    assert (row["run"], row["scores"], row["texts"]) == ("exact", nothing, nothing)
    assert "noise floor" in capfd.readouterr().out
    junit = tmp_path / "junit.xml"
    code = run(
        *common, "--baseline", stored, "--modes", "exact", "--mode", "any=verification=accept_all",
        "--junit", junit, "--min-recovery", "0.99",
    )  # fmt: skip
    assert code == 1
    printed = capfd.readouterr().out
    assert printed.count("finished before") == 1
    suites = ElementTree.parse(junit).getroot().findall("testsuite")
    assert [suite.get("failures") for suite in suites] == ["0", "1"]
    # a baseline that was decoded otherwise is refused before anything runs
    code = run(*common, "--baseline", stored, "--gen_kwargs", "max_gen_toks=5")
    assert code == 2
    assert "decoded otherwise (gen_kwargs" in capfd.readouterr().err.splitlines()[-1]


def test_a_rule_that_the_tasks_may_refuse_comes_first(tmp_path, monkeypatch):
    """cactus is for samples: a greedy task refused it once everything before it was decoded."""
    monkeypatch.setattr(run_modes, "run_children", lambda commands, *_: [2])
    rules = ("target-only", "fly", "cactus")
    modes = {rule: compare_plan.Mode(rule, "fly", {}, "identity", rule=rule) for rule in rules}
    with pytest.raises(FlyError, match="mode cactus failed"):
        run_modes.run_missing(compare_plan.PlannedRuns(modes, tmp_path))


def test_a_command_that_is_refused_forgets_no_finished_run(tmp_path, monkeypatch):
    """One mistyped flag had hours decoded again."""
    made = []

    def ends(commands, *output):
        if "--typo" in commands[0]:
            return [2]
        made.append(configured_runs.write_run(tmp_path / "hf/m", {"t": [1, 0]}, backend="hf"))
        return [0]

    def compare(flag):
        mode = compare_plan.Mode("hf", "hf", {}, "")
        planned = compare_plan.PlannedRuns({"hf": mode}, tmp_path, [flag, "1"])
        return run_modes.run_missing(planned)["hf"]

    monkeypatch.setattr(run_modes, "run_children", ends)
    compare("--limit")
    with pytest.raises(FlyError, match=r"kept: once what the run says is mended, the same command"):
        compare("--typo")
    assert compare("--limit") == made[0]
    compare("--seed")
    assert (compare("--limit"), compare("--seed")) == tuple(made)


def test_a_run_is_its_own_command_s_whoever_ends_it(tmp_path, monkeypatch, capsys):
    """A is cut short, B begins in its folder, and then A is resumed by hand: it was taken for B."""

    def begins(commands, *output):
        manifests.append(Manifest.create(tmp_path / "fly/m", {"output_path": "fly"}))
        manifests[-1].release()
        return [-9]

    def call(limit):
        planned = compare_plan.PlannedRuns({"fly": mode}, tmp_path, ["--limit", limit])
        return run_modes.run_missing(planned)["fly"]

    manifests = []
    monkeypatch.setattr(run_modes, "run_children", begins)
    monkeypatch.setattr("fly.runs.manifest.timestamp", lambda: f"2025-01-0{len(manifests) + 1}")
    mode = compare_plan.Mode("fly", "fly", {}, "identity")
    for limit in ("1", "2"):
        with pytest.raises(FlyError, match="killed"):
            call(limit)
    results = configured_runs.write_run(tmp_path / "fly/m", {"t": [1, 0]}, with_records=False)
    values = json.loads(results.read_text())
    values["config"]["fly"]["started"] = manifests[0].data["started"]
    results.write_text(json.dumps(values))
    manifests[0].finish(results)
    with pytest.raises(FlyError, match="killed"):
        call("2")
    assert call("1") == results


def test_a_commit_that_was_not_known_is_not_forgotten(tmp_path, monkeypatch):
    """Comparing marks blanked it in the one that was kept: later any commit matched."""
    commit, made = ["abc"], []

    def ends(commands, *output):
        made.append(configured_runs.write_run(tmp_path / "fly/m", {"t": [1, 0]}, backend="hf"))
        return [0]

    def call(path, *flags):
        look = lambda: {"target": {"path": path, "commit": commit[0]}}  # noqa: E731
        mode = compare_plan.Mode("fly", "hf", {}, "identity", look)
        run_modes.run_missing(compare_plan.PlannedRuns({"fly": mode}, tmp_path, flags))
        return len(made)

    monkeypatch.setattr(run_modes, "run_children", ends)
    assert call("org/model") == 1
    commit[0] = None
    assert call("org/model", "--limit", "1") == 2
    commit[0] = "def"
    assert call("org/model") == 3


def test_a_finished_mode_is_not_held_while_servers_are_asked(tmp_path, monkeypatch):
    made = []

    def ends(commands, *output):
        if made:  # b is asked, and a is finished
            assert run_modes.run_missing(compare_plan.PlannedRuns({"a": modes["a"]}, tmp_path))
        made.append(configured_runs.write_run(tmp_path / "a/m", {"t": [1, 0]}, backend="hf"))
        return [0 for _ in commands]

    monkeypatch.setattr(run_modes, "_MOMENT", 0)
    monkeypatch.setattr(run_modes, "run_children", ends)
    modes = {name: compare_plan.Mode(name, "hf", {}, name) for name in "ab"}
    run_modes.run_missing(compare_plan.PlannedRuns({"a": modes["a"]}, tmp_path))
    run_modes.run_missing(compare_plan.PlannedRuns(modes, tmp_path, at_once=True))
    assert len(made) == 2


def test_two_comparisons_do_not_make_one_run(tmp_path, monkeypatch):
    """Both decoded everything, and took each other's time."""
    seen = []

    def begin_another(commands, *output):
        with pytest.raises(FlyError, match="another fly compare is making this run"):
            run_modes.run_missing(planned)
        seen.append((tmp_path / "fly" / ".fly_compare.lock").exists())
        return [0]

    monkeypatch.setattr(run_modes, "_MOMENT", 0)
    monkeypatch.setattr(run_modes, "run_children", begin_another)
    mode = compare_plan.Mode("fly", "fly", {}, "identity")
    planned = compare_plan.PlannedRuns({"fly": mode}, tmp_path)
    run_modes.run_missing(planned)
    assert seen == [True]
    assert not (tmp_path / "fly" / ".fly_compare.lock").exists()


def test_a_mode_that_was_cut_short_goes_on(tmp_path, monkeypatch):
    """Killed in the middle of a mode, a comparison must neither decode again what is recorded nor
    go on with a run of another command."""
    calls, status = [], -9

    def cut_short(commands, *output):
        calls.extend(command[4:] for command in commands)
        return [status for _ in commands]

    monkeypatch.setattr(run_modes, "run_children", cut_short)
    mode = compare_plan.Mode("fly", "fly", {}, "identity")
    folder = tmp_path / "fly"
    with pytest.raises(FlyError, match=r"killed by signal 9.*goes on with fly$"):
        run_modes.run_missing(compare_plan.PlannedRuns({"fly": mode}, tmp_path, ["--limit", "1"]))
    begun = Manifest.create(folder, {"output_path": str(folder)})
    begun.release()
    with pytest.raises(FlyError, match="goes on with fly; to start it anew, remove"):
        run_modes.run_missing(compare_plan.PlannedRuns({"fly": mode}, tmp_path, ["--limit", "1"]))
    with pytest.raises(FlyError, match=r"goes on with fly$"):
        run_modes.run_missing(compare_plan.PlannedRuns({"fly": mode}, tmp_path, ["--limit", "2"]))
    with pytest.raises(FlyError, match=r"goes on with fly$"):  # the first command's run is there
        run_modes.run_missing(compare_plan.PlannedRuns({"fly": mode}, tmp_path, ["--limit", "2"]))
    status = 2  # as where memory runs out; with the first command's run again
    with pytest.raises(FlyError, match=r"goes on with fly; to start it anew, remove .*fly_run_"):
        run_modes.run_missing(compare_plan.PlannedRuns({"fly": mode}, tmp_path, ["--limit", "1"]))
    status = -9
    changed = compare_plan.Mode("fly", "fly", {}, "identity", lambda: {"target": {"path": "new"}})
    with pytest.raises(FlyError, match=r"goes on with fly$"):
        run_modes.run_missing(
            compare_plan.PlannedRuns({"fly": changed}, tmp_path, ["--limit", "1"])
        )
    assert calls[0][:2] == ["--limit", "1"]
    # the whole command again, as secrets are not in the manifest
    assert calls[1] == [*calls[0], "--resume", str(begun.path)]
    assert calls[4] == calls[1]
    others = [call[:2] for call in (*calls[2:4], calls[5])]
    assert others == [["--limit", "2"], ["--limit", "2"], ["--limit", "1"]]
    assert "--resume" not in calls[2] + calls[3] + calls[5]


def test_a_hub_models_commit_becomes_known_while_it_runs(tmp_path, monkeypatch, capsys):
    """On a fresh cache the first call knows no commit; the second must find what it began."""
    commit = [None]
    calls = []

    def fetched(commands, *output):
        calls.extend(command[4:] for command in commands)
        commit[0] = commit[0] or "abc"
        return [status for _ in commands]

    look = lambda: {"target": {"path": "org/model", "commit": commit[0]}}  # noqa: E731
    mode = compare_plan.Mode("fly", "fly", {}, "identity", look)
    monkeypatch.setattr(run_modes, "run_children", fetched)
    status = -9
    with pytest.raises(FlyError, match="killed by signal 9"):
        run_modes.run_missing(compare_plan.PlannedRuns({"fly": mode}, tmp_path, []))
    begun = Manifest.create(tmp_path / "fly", {"output_path": "fly"})
    begun.release()
    status = 0
    run_modes.run_missing(compare_plan.PlannedRuns({"fly": mode}, tmp_path, []))
    assert calls[1][-2:] == ["--resume", str(begun.path)]
    run = SimpleNamespace(
        rounds=[], requests=[1], entry=None, path=tmp_path / "fly" / "results.json"
    )
    monkeypatch.setattr(run_modes.reader, "load", lambda folder: run)
    run_modes.run_missing(compare_plan.PlannedRuns({"fly": mode}, tmp_path, []))
    assert len(calls) == 2
    commit[0] = "def"
    capsys.readouterr()
    run_modes.run_missing(compare_plan.PlannedRuns({"fly": mode}, tmp_path, []))
    assert len(calls) == 3
    assert 'made anew: models.target.commit was "abc", is now "def"' in capsys.readouterr().out


def test_a_failing_mode_ends_with_one_line_and_keeps_the_finished(
    forked,
    saved_pair,
    config_file,
    graded_tasks,
    tmp_path,
    capfd,
    monkeypatch,
):
    out = tmp_path / "out"
    common = flags(saved_pair, config_file, graded_tasks, out)
    command = (*common, "--limit", "1", "--modes", "target-only", "--mode", "bad=spd_k=3")
    start = run_modes.run_children

    def fails(commands, *output):
        return [1] if str(out / "bad") in commands[0] else start(commands, *output)

    monkeypatch.setattr(run_modes, "run_children", fails)
    for finished_before in (0, 1):
        assert run(*command) == 2
        captured = capfd.readouterr()
        assert captured.err.splitlines()[-1] == (
            "fly: error: mode bad failed (exit status 1); finished modes are kept: "
            "the same command goes on with bad"
        )
        assert captured.out.count("target-only: finished before") == finished_before
    assert list(out.glob("target-only/*/results_*.json"))


def test_bad_modes_are_refused_before_anything_runs(
    saved_pair,
    config_file,
    graded_tasks,
    tmp_path,
    capsys,
):
    common = flags(saved_pair, config_file, graded_tasks, tmp_path / "out")
    for more, message in [
        (("--modes", "fast"), "--modes fast: choose from target-only, exact, fly, hf"),
        (("--modes", "fly"), "give at least two"),
        (("--mode", "a/b=spd_k=1"), "write it as NAME=key=value"),
        (("--mode", "..=spd_k=1"), "NAME begins with a letter, digit or _"),
        (
            ("--mode", "exact-model=use_sd=false", "--drafters", "model", "ngram"),
            "two modes are called exact-model",
        ),
        (("--drafters", "model", "model"), "two modes are called exact-model"),
        (("--mode", "fly=spd_k=1"), "the name fly is taken"),
        (("--mode", "wide=win_len=9"), "win_len=9 needs spd_k >= 10"),
        (("--baseline-run", "x"), "--baseline-run x: choose one of target-only, exact, fly"),
        (("--mode", "old=draft_runs=no,where"), "draft_runs=no: no such run: give a run's folder"),
        (("--with-outputs",), "--with-outputs: says what a stored baseline holds"),
        (
            ("--save-baseline", tmp_path / "b", "--with-outputs", "--modes", "hf", "exact"),
            "--with-outputs: hf keeps no token ids",
        ),
        (("--noise-floor", "--use_cache", tmp_path / "c"), "--noise-floor with --use_cache"),
        (
            ("--noise-floor", "--mode", "noise=enable_fly=false"),
            "--mode noise: --noise-floor makes it",
        ),
        (("--noise-floor", "--modes", "hf", "exact"), "--noise-floor with hf as the baseline"),
        (
            ("--modes", "target-only", "--save-baseline", tmp_path / "b", "--min-recovery", "0.97"),
            "--min-recovery: nothing to compare target-only with",
        ),
        (
            ("--modes", "target-only", "--save-baseline", tmp_path / "b", "--noise-floor"),
            "--noise-floor: nothing to compare target-only with",
        ),
    ]:
        assert run(*common, *more) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


class Killed(BaseException):
    """The parent's end, at a moment of the test's choice."""


def test_a_mode_whose_end_nobody_saw_is_not_decoded_again(tmp_path, monkeypatch, capsys):
    """The mark was written by the parent, after the child's end: a kill between the two, or a child
    that outlived its parent, had hours decoded again. Another command's run is still another's."""
    made = []

    def ends_unseen(commands, *output):
        made.append(configured_runs.write_run(tmp_path / "hf/m", {"t": [1, 0]}, backend="hf"))
        raise Killed

    def compare(limit):
        capsys.readouterr()  # of what was killed
        try:
            run_modes.run_missing(
                compare_plan.PlannedRuns(
                    {"hf": compare_plan.Mode("hf", "hf", {}, "")}, tmp_path, ["--limit", limit]
                )
            )
        except Killed:
            return "decoded"
        return capsys.readouterr().out.split(",")[0].split(": ")[1]

    monkeypatch.setattr(run_modes, "run_children", ends_unseen)
    assert [compare("1"), compare("1")] == ["decoded", "finished before"]
    assert [compare("2"), compare("2")] == ["decoded", "finished before"]
    assert [compare("1"), compare("2")] == ["finished before"] * 2
    # half of the samples, as a kill in the middle of their writing leaves them
    results = json.loads(made[-1].read_text())
    samples = next(made[-1].parent.glob(f"samples_t_{made[-1].stem.split('_')[1]}*"))
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    hashes = [line[f"{kind}_hash"] for line in lines for kind in ("doc", "prompt", "target")]
    made[-1].write_text(json.dumps({**results, "task_hashes": {"t": hash_string("".join(hashes))}}))
    assert compare("2") == "finished before"
    written_runs.write_lines(samples, lines[:1])
    assert compare("2") == "decoded"


def test_a_run_of_another_configuration_is_not_taken_for_finished(
    saved_pair,
    config_file,
    tmp_path,
    monkeypatch,
):
    """Another K, another limit, a killed run: each must run again."""
    calls = []
    monkeypatch.setattr(run_modes, "_run", lambda begun, *_: calls.extend(begun))
    run = SimpleNamespace(
        rounds=[], requests=[1], entry=None, path=tmp_path / "out/fly/results.json"
    )
    monkeypatch.setattr(run_modes.reader, "load", lambda folder: run)
    values = {"pretrained": str(saved_pair / "draft"), "config_path": str(config_file)}
    out = tmp_path / "out"
    (out / "fly").mkdir(parents=True)
    for more, given, expected in [
        ({}, ["--limit", "2"], 1),
        ({}, ["--limit", "2"], 1),
        ({}, ["--limit", "3"], 2),
        ({"spd_k": 5}, ["--limit", "3"], 3),
        ({"spd_k": 5}, ["--limit", "3"], 3),
    ]:
        modes = compare_plan.plan_modes(["fly"], [], {**values, **more})
        run_modes.run_missing(compare_plan.PlannedRuns(modes, out, given))
        assert len(calls) == expected


def test_what_has_changed_under_the_same_command_runs_again(
    saved_pair, config_file, tmp_path, monkeypatch, capsys
):
    """A YAML of arguments or a task that changed in place, and another machine's seconds, were
    served as this command's; what only switches records on was run again."""
    calls = []
    monkeypatch.setattr(run_modes, "_run", lambda begun, *_: calls.extend(begun))
    run = SimpleNamespace(
        rounds=[], requests=[1], entry=None, path=tmp_path / "out/fly/results.json"
    )
    monkeypatch.setattr(run_modes.reader, "load", lambda folder: run)
    values = {"pretrained": str(saved_pair / "draft"), "config_path": str(config_file)}
    facts = {"name": "a CPU"}
    monkeypatch.setattr(run_modes, "machine_facts", lambda: dict(facts))
    files = {"--config": {"a.yaml": "1"}}

    def made(**more):
        planned = compare_plan.plan_modes(["fly"], [], {**values, **more})
        run_modes.run_missing(
            compare_plan.PlannedRuns(planned, tmp_path / "out", ["--config", "a.yaml"], files)
        )
        return len(calls), capsys.readouterr().out

    assert made()[0] == 1
    assert made()[0] == 1
    count, printed = made(trace=True, verbose=True)
    assert count == 1
    assert f"(without a trace: to have this, remove {run.path})" in printed
    files["--config"]["a.yaml"] = "2"
    count, printed = made()
    assert count == 2
    assert 'fly: made anew: files.--config.a.yaml was "1", is now "2"' in printed
    facts["name"] = "another CPU"
    count, printed = made()
    assert count == 3
    assert 'made anew: machine.name was "a CPU", is now "another CPU"' in printed
    count, printed = made(win_len=0)
    assert count == 4
    assert "made anew: flags or settings are not those of the run before in" in printed


def test_the_files_behind_a_command_are_known_by_content(tmp_path, monkeypatch):
    config, tasks, data = (tmp_path / name for name in ("run.yaml", "tasks", "data"))
    tasks.mkdir()
    data.mkdir()
    monkeypatch.setenv("FLY_DATA_DIR", str(data))
    config.write_text("limit: 2\n")
    own = tmp_path / "own"
    own.mkdir()
    (own / "mine.yaml").write_text("task: mine\n")
    written = {
        name: tasks / f"a.{name}"
        for name in ("json", "markdown", "junit", "csv", "save_baseline", "history")
    }
    args = SimpleNamespace(
        config=str(config),
        include_path=str(tasks),
        tasks=["t", str(own / "mine.yaml")],
        baseline=tasks / "before.json",
        use_cache=str(tasks / "cache"),
        **written,
    )
    output, samples = tasks / "runs", tmp_path / "samples.json"
    samples.write_text('{"t": [0]}')
    files = functools.partial(run_inputs.hash_inputs, args, output, str(samples))
    seen = [files()]
    changed = (config, tasks / "t.yaml", data / "gsm8k_test.jsonl", own / "utils.py", samples)
    for path in changed:
        path.write_text("limit: 3\n")
        seen.append(files())
        assert seen[-1] != seen[-2], path
    assert seen[0]["fly's tasks"]
    output.mkdir()
    (output / "results.json").write_text("what the runs write changes nothing")
    (tasks / ".git").mkdir()
    (tasks / ".git" / "index").write_text("nor do hidden files")
    for path in (*written.values(), args.baseline, tasks / "cache_1f_rank0.db"):
        path.write_text("nor what the command reads and writes beside them")
    kept = os.dup(1)
    try:
        with (tasks / "log.txt").open("w") as log:
            log.write("nor its own log")
            os.dup2(log.fileno(), 1)
        assert files() == seen[-1]
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert files() != seen[-1]


def test_an_exact_mode_drafts_from_a_baseline_with_outputs(
    forked, saved_pair, config_file, graded_tasks, tmp_path, capfd
):
    """And its speed is not shown as the mode's own; nothing else of the command changes."""
    stored = tmp_path / "baseline.json"
    common = flags(saved_pair, config_file, graded_tasks, tmp_path / "out")
    command = (*common, "--modes", "target-only", "--limit", "3", "--save-baseline", stored)
    assert run(*command, "--with-outputs") == 0
    for again in (False, True):
        capfd.readouterr()
        assert run(*common, "--limit", "3", "--baseline", stored, "--modes", "exact") == 0
        printed = capfd.readouterr().out
        assert f"exact: drafts from the outputs in {stored}" in printed
        assert ("exact: finished before" in printed) is again
        assert "exact + earlier" in printed
        assert "every document scored the same" in printed
    (results,) = (tmp_path / "out/exact").rglob("results_*.json")
    entry = json.loads(results.read_text())["config"]["fly"]
    found = {**entry["draft_runs"], "runs": None}
    counts = {"matched": 3, "changed": 0, "missing": 0, "untokenized": 0}
    assert found == {"runs": None, **counts, "same_target": True}
    assert entry["stats"]["sources"]["earlier_run"]["accepted"] > 0
    assert (entry["mode"], entry["drafter"]) == ("exact", "cascade")


def baseline_of(path, text="a"):
    """A baseline file with the outputs of one document, which are nothing but this."""
    ids = [output_ids.encode([ord(text)])]
    task = {"documents": {"0": {"prompt": "0" * 16}}, "outputs": {"tokenizer": "x", "ids": {}}}
    task["outputs"]["ids"]["0"] = ids
    path.write_text(json.dumps({"format": 1, "target": {}, "tasks": {"t": task}}))
    return path


def test_which_modes_draft_from_earlier_outputs(saved_pair, config_file, tmp_path, capsys):
    """Exact ones that may, unless the command says otherwise; FLy only where it is asked to."""
    file = baseline_of(tmp_path / "b.json")
    given = {"pretrained": str(saved_pair / "draft"), "config_path": str(config_file)}

    def drafted(names=("target-only", "exact", "fly", "hf"), **more):
        custom = ["plain=drafter=model,enable_fly=false", "own=draft_sources=own,enable_fly=false"]
        planned = compare_plan.plan_modes(names, custom, {**given, **more}, file)
        return {
            name: (mode.rule, mode.model_args["draft_runs"])
            for name, mode in planned.items()
            if mode.model_args.get("draft_runs")
        }

    assert drafted() == {"exact": ("exact", [str(file)])}
    assert capsys.readouterr().out == f"exact: drafts from the outputs in {file}\n"
    assert drafted(draft_runs=None) == {}
    other = str(baseline_of(tmp_path / "c.json"))
    with pytest.raises(FlyError, match="draft_runs with drafter='model'"):
        drafted(draft_runs=other)
    planned = compare_plan.plan_modes(["exact", "fly"], [], {**given, "draft_runs": other}, file)
    assert [(mode.rule, mode.model_args["draft_runs"]) for mode in planned.values()] == [
        ("exact", other),
        ("fly", other),
    ]
    assert capsys.readouterr().out == ""


def test_a_mode_is_known_by_the_outputs_that_it_drafts_from(saved_pair, config_file, tmp_path):
    """The same file name with other outputs was taken for finished before."""
    given = {"pretrained": str(saved_pair / "draft"), "config_path": str(config_file)}
    given["draft_runs"] = str(tmp_path / "b.json")
    identities = []
    for text in "aab":
        baseline_of(tmp_path / "b.json", text)
        identities.append(compare_plan.plan_modes(["exact"], [], given)["exact"].identity)
    assert identities[0] == identities[1] != identities[2]
    alone = compare_plan.plan_modes(["target-only"], [], given)["target-only"].identity
    baseline_of(tmp_path / "b.json", "c")
    assert compare_plan.plan_modes(["target-only"], [], given)["target-only"].identity == alone


def test_hf_mode_is_lm_evals_backend_on_the_target(saved_pair, config_file):
    given = {"pretrained": "x", "config_path": str(config_file), "dtype": "float32", "spd_k": 6}
    given["pretrained"] = str(saved_pair / "draft")
    mode = compare_plan.plan_modes(["hf"], [], given)["hf"]
    assert mode.model == "hf"
    assert mode.model_args == {"pretrained": str(saved_pair / "target"), "dtype": "float32"}


def test_hf_modes_of_two_targets_have_caches_of_their_own(
    saved_pair, config_file, graded_tasks, tmp_path, monkeypatch
):
    """lm-eval's cache knows no model: a second pair's hf run got the first one's answers."""
    commands = []
    ends = lambda run, *output: commands.extend(run) or [9]  # noqa: E731
    monkeypatch.setattr(run_modes, "run_children", ends)
    common = flags(saved_pair, config_file, graded_tasks, tmp_path / "out")
    given = ("--modes", "hf", "exact", "--use_cache", tmp_path / "cache")
    other = saved_pair / "draft"
    for more in ((), (), ("--model_args", f"target_model_path={other}")):
        assert run(*common, *given, *more) == 2
    caches = [command[len(command) - command[::-1].index("--use_cache")] for command in commands]
    assert caches[0] == caches[1] != caches[2]
    assert all(cache.startswith(f"{tmp_path / 'cache'}_") for cache in caches)


@pytest.mark.slow
def test_the_ci_examples_parse_and_their_commands_run(
    saved_pair,
    config_file,
    graded_tasks,
    tmp_path,
):
    """Both files' own command lines, with the tiny pair in FLY_ARGS: a checkpoint that writes what
    the stored one did passes, one that does not fails, in the status as in the JUnit file."""
    github = yaml.safe_load((ROOT / "docs/examples/github-actions.yml").read_text())
    gitlab = yaml.safe_load((ROOT / "docs/examples/gitlab-ci.yml").read_text())
    steps = {step.get("name"): step for step in github["jobs"]["scores"]["steps"]}
    assert gitlab["scores"]["allow_failure"]["exit_codes"] == 3
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    arguments = flags(saved_pair, config_file, graded_tasks, tmp_path)[1:-2]
    arguments[1] += ",enable_fly=false"
    env["FLY_ARGS"] = shlex.join(str(flag) for flag in arguments)
    env["BASELINE"] = str(tmp_path / "good")
    shell = f'set -e; fly() {{ {shlex.quote(sys.executable)} -m fly "$@"; }}\n'

    def job(script):
        return subprocess.run(
            ["bash", "-c", shell + script],
            cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip

    score, compare = steps["Score"]["run"], steps["Compare"]["run"]
    assert job(score.replace("out/new", '"$BASELINE"')).returncode == 0
    done = job("\n".join(gitlab["scores"]["script"]))
    assert done.returncode == 0, done.stderr[-2000:]
    assert job(compare).returncode == 0
    assert job(steps["Summary"]["run"]).returncode == 0
    assert "tiny_task: as_target" in (tmp_path / "summary").read_text()
    (samples,) = (tmp_path / "out/new").rglob("samples_*.jsonl")
    samples.write_text(samples.read_text().replace('"as_target": 1.0', '"as_target": 0.0'))
    (results,) = (tmp_path / "out/new").rglob("results_*.json")
    results.write_text(
        results.read_text().replace('"as_target,none": 1.0', '"as_target,none": 0.0')
    )
    assert job(compare).returncode == 1
    suite = ElementTree.parse(tmp_path / "compare.xml").find("testsuite")
    assert suite.get("failures") == "1"
    for text in (
        github["jobs"]["scores"]["env"]["FLY_ARGS"],
        gitlab["scores"]["variables"]["FLY_ARGS"],
    ):
        HarnessCLI()._parser.parse_args(["run", *shlex.split(text)])


@pytest.mark.slow
def test_rules_by_drafters_are_one_matrix(
    forked, saved_pair, config_file, graded_tasks, tmp_path, capfd
):
    """The target alone is decoded once; Holm over all cells; answers cut off are told."""
    common = flags(saved_pair, config_file, graded_tasks, tmp_path / "out")
    found = tmp_path / "matrix.json"
    assert (
        run(
            *common, "--limit", "3", "--rules", "exact", "cascade", "asd", "--matrix",
            "--drafters", "model", "ngram", "--json", found,
            "--mode", "loose=verification=cascade,cascade_alpha=0.9",
        )
        == 0
    )  # fmt: skip
    modes = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}
    crossed = {f"{m}-{d}" for m in ("exact", "cascade", "asd", "loose") for d in ("model", "ngram")}
    assert modes == {"target-only", *crossed}
    cells = json.loads(found.read_text())["cells"]
    primary = [cell for cell in cells if cell["task"] == cells[0]["task"]]
    assert {(cell["rule"].split(",")[0], cell["drafter"].split(",")[0]) for cell in primary} == {
        (rule, drafter) for rule in ("exact", "cascade", "asd") for drafter in ("model", "ngram")
    }
    assert len(primary) == 8
    assert json.loads(found.read_text())["tests"] == len(cells)
    printed = " ".join(capfd.readouterr().out.split())
    assert "target-only: 3 of 3 answers (100%) ended at the length limit" in printed


def test_rules_that_cannot_be_are_refused_before_anything_runs(
    saved_pair, config_file, graded_tasks, tmp_path, capfd
):
    common = flags(saved_pair, config_file, graded_tasks, tmp_path / "out")
    for more, told in [
        (("--rules", "casacde"), "--rules casacde: choose from fly, exact"),
        (("--rules", "exact", "--modes", "exact"), "--rules exact: a mode has that name"),
        (("--rules", "exact", "exact"), "--rules exact: a mode has that name"),
        (("--rules", "fsd", "--drafters", "ngram"), "needs the draft's probabilities"),
    ]:
        assert run(*common, *more) == 2
        assert told in capfd.readouterr().err
