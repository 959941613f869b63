"""`fly tune` on a tiny pair, run as a user runs it."""

import json
import shutil

import pytest

from fly import config
from fly.errors import FlyError
from fly.tuning import real_runs, tune
from fly.tuning.candidates import candidates, kind
from tests.integration.test_cli import config_file, run, task_dir  # noqa: F401  fixtures
from tests.written_runs import write_lines

SCORED = """task: tiny_scored
custom_dataset: !function tiny_utils.load
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
process_results: !function scored_utils.score
generation_kwargs: {until: ["zzz"], max_gen_toks: 12, do_sample: false}
metric_list:
  - {metric: variety, aggregation: mean, higher_is_better: true}
  - {metric: nothing, aggregation: mean, higher_is_better: true}
"""
SCORE = """def score(doc, results):
    return {"variety": 1 + len(set(results[0])), "nothing": 0.0}
"""


def few(given):
    """One of each kind, for time's sake."""
    wanted = [("exact", 4), ("fly within a round", 8), ("fly across rounds", 4)]
    found = candidates(given)
    return [next(c for c in found if (kind(c), c.spd_k) == each) for each in wanted]


@pytest.fixture
def arguments(saved_pair, config_file, task_dir, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(tune, "candidates", few)
    (task_dir / "tiny_scored.yaml").write_text(SCORED)
    (task_dir / "scored_utils.py").write_text(SCORE)
    return {
        "file": config_file,
        "--tasks": "tiny_scored",
        "--include_path": task_dir,
        "--limit": 3,
        "--max_gen_toks": 24,
        "--device": "cpu",
        "--model_args": f"pretrained={saved_pair / 'draft'},dtype=float32",
        "--output": tmp_path / "new" / "tuned.json",
    }


def tune_it(arguments, *flags, **changed):
    values = {**arguments, **{f"--{key}": value for key, value in changed.items()}}
    file = values.pop("file")
    options = [part for pair in values.items() if pair[1] is not None for part in pair]
    return run("tune", file, *options, *flags)


def test_a_tune_from_end_to_end(arguments, saved_pair, capsys):
    assert tune_it(arguments, min_recovery=0.01, candidates=1) == 0
    printed = capsys.readouterr()
    out, folder = arguments["--output"], arguments["--output"].parent
    assert "settings" in printed.out
    assert f"configuration: {out}" in printed.out
    for stage in ("the target alone", "search, 1 of 2", "search, 2 of 2"):
        assert f"{stage}: " in printed.err
    assert "note: tiny_scored nothing: recovery is undefined" in printed.out

    assert run("config", "check", out) == 0
    values = json.loads(out.read_text())
    tuned = config.load(str(out))
    evidence = values["$comment"]
    assert tuned.draft_model_path == str(saved_pair / "draft")
    assert tuned.trace is False
    record = json.loads((folder / evidence["record"]).read_text())
    # the given one, or the fastest if it was confirmed
    finished = [line for line in record["runs"] if line["documents"] == 3]
    fastest = min(finished, key=lambda line: line["decode_seconds"])
    chosen = evidence["chosen"]
    assert chosen["given"] or chosen["changes"] == fastest["changes"]
    assert evidence["choice"] in printed.out
    for key, value in chosen["changes"].items():
        assert getattr(tuned, key) == value
    assert fastest["stats"]["requests"] == 3
    if not fastest["given"]:
        found = record["confirmation"]
        assert found["documents"] == {"tiny_scored": [1, 2, 3]}  # it has four
        assert not found["unseen_by_the_search"]
        assert found["time_x_over_given"]["value"] > 0
    assert [r["metric"] for r in fastest["recoveries"] if r["is_judged"]] == ["variety"]
    assert fastest["scores"].keys() == {"tiny_scored variety", "tiny_scored nothing"}
    assert fastest["scores"]["tiny_scored variety"].keys() == {"0", "1", "2"}
    # all on two documents; the given one, exact verification and the best of the others on three
    assert len(record["candidates"]) == len(record["runs"]) == 4
    assert {line["documents"] for line in record["runs"]} == {2, 3}
    kinds = {line["kind"]: line for line in record["runs"]}
    assert kinds.keys() == {"exact", "fly within a round", "fly across rounds"}
    assert kinds["exact"]["documents"] == 3
    assert kinds["exact"]["changed"] == 0
    assert sum(line["given"] for line in finished) == 1


def test_a_restart_decodes_nothing_that_is_finished(arguments, capsys, monkeypatch):
    """And refuses to replace what it wrote, unless told; another workload is measured anew."""
    whole, ran = real_runs.TunedPair.run, []

    def stops(self, workload, config):
        if len(ran) == 4:  # the target alone on both sets, the given configuration, a candidate
            raise FlyError("no memory")
        ran.append((config.hash(), str(workload.samples)))
        return whole(self, workload, config)

    def goes_on(self, workload, config):
        ran.append((config.hash(), str(workload.samples)))
        return whole(self, workload, config)

    monkeypatch.setattr(real_runs.TunedPair, "run", stops)
    assert tune_it(arguments, min_recovery=0.01) == 2
    monkeypatch.setattr(real_runs.TunedPair, "run", goes_on)
    capsys.readouterr()
    assert tune_it(arguments, min_recovery=0.01) == 0
    assert len(ran) == len(set(ran)) == 2 + 2 * 4  # nothing twice
    assert tune_it(arguments, min_recovery=0.01) == 2
    assert "is there already" in capsys.readouterr().err
    assert tune_it(arguments, "--force", min_recovery=0.01) == 0
    assert len(ran) == 10
    with monkeypatch.context() as patch:
        patch.setattr(tune, "candidates", lambda given: few(given)[:1])
        assert tune_it(arguments, "--force", min_recovery=0.01, max_gen_toks=12) == 0
    assert len(ran) == 16


@pytest.mark.slow
def test_other_prompts_than_the_kept_ones_are_refused(arguments, capsys):
    """A task's file changed between two tunes: scores of other documents must not be paired."""
    assert tune_it(arguments, min_recovery=0.01) == 0
    for kept in arguments["--output"].with_suffix(".runs").iterdir():
        values = json.loads(kept.read_text())
        if not values["key"]["config"]["use_sd"] and "0" in str(values["key"]["workload"]):
            of_task = values["measured"]["tasks"]["tiny_scored"]
            next(iter(of_task["documents"].values()))["prompt"] = "0123456789abcdef"
            kept.write_text(json.dumps(values))
    assert tune_it(arguments, "--force", min_recovery=0.01) == 2
    assert "holds other documents" in capsys.readouterr().err
    record = max(arguments["--output"].parent.glob("fly_tune_*.json"))  # what ran is there
    (line,) = json.loads(record.read_text())["runs"]
    assert line["held"] is False


def test_no_configuration_is_written_if_none_kept_the_score(arguments, capsys, monkeypatch):
    monkeypatch.setattr(tune.RealRun, "is_held", False)
    assert tune_it(arguments, candidates=1) == 1
    assert "none was written" in capsys.readouterr().err
    assert not arguments["--output"].exists()
    assert list(arguments["--output"].parent.glob("fly_tune_*.json"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 4}, "--batch_size 4: fly tune decodes document by document"),
        ({"limit": 0}, "limit=0"),
        ({"min_recovery": 0}, "min_recovery=0"),
        ({"min-recovery": 1.5}, "min_recovery=1.5"),
        ({"output": "here"}, "--output here: give the name of a .json file"),
        ({"model_args": "drafter=ngram"}, "nothing to tune: no draft model takes part"),
        ({"model_args": "use_sd=false"}, "nothing to tune: no draft model takes part"),
        ({"model_args": ""}, "names no draft model"),
        ({"tasks": "tiny_scored,tiny_tusk"}, "task 'tiny_tusk': no such task: did you mean 'tiny_"),
    ],
)
def test_bad_usage_ends_before_models_load(arguments, capsys, monkeypatch, changed, message):
    monkeypatch.setattr(
        "fly.harness.hf.FlyLM._load_pair", lambda *a, **k: pytest.fail("models were loaded")
    )
    assert tune_it(arguments, **changed) == 2
    assert message in capsys.readouterr().err


def test_model_args_may_be_several_words_as_in_a_run(arguments, capsys):
    """The second word, and a repeated flag, ended in usage or were lost."""
    values = {**arguments, "--model_args": "pretrained=x"}
    file = values.pop("file")
    flags = [part for pair in values.items() for part in pair]
    for words in (["dtype=float32", "use_sd=false"], ["-a", "dtype=float32,use_sd=false"]):
        assert run("tune", file, *flags, *["--model_args", "pretrained=x", *words]) == 2
        assert "nothing to tune: no draft model takes part" in capsys.readouterr().err


def test_a_target_that_scores_nothing_ends_the_tune_early(arguments, capsys):
    """Every candidate was `held`, and written, as there was nothing to lose."""
    assert tune_it(arguments, tasks="tiny_task") == 2
    error = capsys.readouterr().err
    assert "task tiny_task: " in error
    assert "(exact_match 0; 3 documents)" in error
    assert "search" not in error
    assert not arguments["--output"].exists()


def test_a_real_run_that_fails_loses_nothing_of_those_before(arguments, capsys, monkeypatch):
    """The record was written at the end alone: hours of runs were gone with the last one."""
    whole = real_runs.TunedPair.run
    count = iter(range(99))

    def fails(self, workload, config):
        if next(count) == 3:  # after the target alone, twice, and the given configuration
            raise FlyError("no memory")
        return whole(self, workload, config)

    monkeypatch.setattr(real_runs.TunedPair, "run", fails)
    assert tune_it(arguments, min_recovery=0.01) == 2
    (path,) = arguments["--output"].parent.glob("fly_tune_*.json")
    error = capsys.readouterr().err
    assert f"what was measured before: {path}" in error
    assert error.rstrip().endswith("fly: error: no memory")
    record = json.loads(path.read_text())
    assert len(record["candidates"]) > len(record["runs"]) == 1
    assert record["runs"][0]["stats"]["requests"] == 2
    assert record["runs"][0]["held"] is True


def test_earlier_runs_are_left_out(saved_pair, config_file, tmp_path):  # noqa: F811
    """With their outputs as drafts every K would be measured wrongly, and FLy's candidates would
    have decoded exactly."""
    records = [{"task": "t", "doc_id": 0, "prompt_hash": "0" * 64, "text": "a"}]
    write_lines(tmp_path / "fly_requests_2026-01-01T00-00-00.jsonl", records)
    given = {"pretrained": str(saved_pair / "draft"), "dtype": "float32", "device": "cpu"}
    pair = real_runs.TunedPair(str(config_file), {**given, "draft_runs": str(tmp_path)})
    # the rule and drafter in force with them: FLy has to be asked for there
    assert (pair.given.draft_runs, pair.given.rule) == (None, "exact")
    assert pair.given.drafter_name == "cascade"
    assert pair.lm.begin(pair.given).earlier is None
    asked = {"draft_runs": str(tmp_path), "verification": "fly"}
    assert real_runs.TunedPair(str(config_file), {**given, **asked}).given.rule == "fly"


def test_retrained_weights_at_the_same_path_are_measured_anew(
    arguments, saved_pair, tmp_path, capsys, monkeypatch
):
    """The key named paths alone: scores of the weights before were taken for the new ones'."""

    whole, ran = real_runs.TunedPair.run, []

    def stop(self, first):
        raise FlyError("far enough")

    def noted(self, workload, config):
        ran.append(config)
        return whole(self, workload, config)

    monkeypatch.setattr(real_runs.TunedPair, "run", noted)
    monkeypatch.setattr(tune.Tuner, "_check", stop)
    for name in ("target", "draft"):
        shutil.copytree(saved_pair / name, tmp_path / name)
    pair = json.loads(arguments["file"].read_text())
    arguments["file"].write_text(
        json.dumps({**pair, "target_model_path": str(tmp_path / "target")})
    )
    arguments["--model_args"] = f"pretrained={tmp_path / 'draft'},dtype=float32"

    def is_reused():
        ran.clear()
        assert tune_it(arguments, "--force") == 2
        assert "far enough" in capsys.readouterr().err
        return not ran

    assert not is_reused()
    weights = tmp_path / "target" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1  # one weight, a little
    weights.write_bytes(data)
    assert [is_reused(), is_reused()] == [False, True]
    arguments["--model_args"] += ",add_bos_token=True,token=hf_of_mine"
    assert not is_reused()
    kept = [*arguments["--output"].with_suffix(".runs").iterdir()]
    assert kept
    assert not any("hf_of_mine" in path.read_text() for path in kept)


def test_loglikelihood_tasks_are_refused_before_models_load(
    arguments,
    task_dir,  # noqa: F811
    capsys,
    monkeypatch,
):
    load = "fly.tuning.real_runs.TunedPair.__init__"
    monkeypatch.setattr(load, lambda *a: pytest.fail("the models were loaded"))
    text = (task_dir / "tiny_task.yaml").read_text().replace("tiny_task", "tiny_choice")
    text = text.replace("generate_until", "multiple_choice").replace("exact_match", "acc")
    lines = [line for line in text.splitlines() if not line.startswith("generation_kwargs")]
    lines += ['doc_to_choice: ["a", "b"]']
    (task_dir / "tiny_choice.yaml").write_text("\n".join(lines))
    assert tune_it(arguments, tasks="tiny_choice", max_gen_toks=None) == 2
    assert "no request generates text" in capsys.readouterr().err


def test_configurations_in_turns_decode_what_each_does_alone(arguments, saved_pair):
    """Every document by all of them, on the documents that were asked for, counted apart."""
    pair = real_runs.TunedPair(str(arguments["file"]), {
        "pretrained": str(saved_pair / "draft"), "dtype": "float32", "device": "cpu",
        "trace": False,
    })  # fmt: skip
    alone = config.build({**pair.given.model_dump(), "use_sd": False}, "test")
    other = config.build({**pair.given.model_dump(), "spd_k": 2, "win_len": 1}, "test")
    workload = real_runs.Workload(
        ("tiny_scored",), 3, {"tiny_scored": 4}, max_gen_toks=12,
        include_path=str(arguments["--include_path"]),
        samples={"tiny_scored": [0, 2, 3]},
    )  # fmt: skip
    configs = [alone, pair.given, other]
    steps = []
    together = pair.run_in_turns(workload, configs, steps.append)
    assert steps == [3, 3, 3]
    for result, own in zip(together, configs):
        single = pair.run(workload, own)
        assert result.measured.tasks["tiny_scored"].texts == (
            single.measured.tasks["tiny_scored"].texts
        )
        assert result.measured.tasks == single.measured.tasks
        for name in ("requests", "emitted", "rounds", "drafted"):
            assert result.stats[name] == single.stats[name]
        assert set(result.decode_seconds) == {("tiny_scored", i) for i in (0, 2, 3)}
