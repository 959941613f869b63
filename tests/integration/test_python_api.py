"""lm-eval's Python API with fly's models and tasks, and `fly.compare` and `fly.report`."""

import json
import subprocess
import sys

import pytest
from lm_eval import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager

import fly
from fly.harness.hf import FlyLM
from fly.runs import context, reader
from tests.integration.test_cli import write_task


@pytest.fixture
def tasks(tmp_path):
    context.start()  # what another test ran in this process is no part of it
    write_task(tmp_path / "tasks", documents=4)
    return TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)


@pytest.fixture
def config_file(saved_pair, tmp_path):
    path = tmp_path / "pair.json"
    models = {f"{role}_model_path": str(saved_pair / role) for role in ("draft", "target")}
    path.write_text(json.dumps({**models, "spd_k": 4, "win_len": 1, "draft_policy": "fixed"}))
    return path


def evaluate(model, model_args, tasks, folder=None, **more):
    """Results, saved as lm-eval's documentation says."""
    tracker = EvaluationTracker(output_path=str(folder)) if folder else None
    results = simple_evaluate(
        model=model, model_args=model_args, tasks=["tiny_task"], task_manager=tasks,
        evaluation_tracker=tracker, device="cpu", bootstrap_iters=0, **more,
    )  # fmt: skip
    if tracker:
        samples = results.pop("samples")
        tracker.save_results_aggregated(results, samples)
        for task in results["configs"]:
            tracker.save_results_samples(task, samples[task])
    return results


@pytest.mark.parametrize("model", ["fly", "hf"])
@pytest.mark.parametrize("as_text", [True, False])
def test_a_pair_is_evaluated_by_name(model, as_text, config_file, tasks):
    """`hf` with config_path is fly, as on the command line."""
    given = {"config_path": str(config_file), "dtype": "float32"}
    given = ",".join(f"{key}={value}" for key, value in given.items()) if as_text else given
    entry = evaluate(model, given, tasks, limit=2)["config"]["fly"]
    assert entry["mode"] == "fly"
    assert entry["stats"]["requests"] == 2


def test_hf_without_a_pair_stays_lm_evals(saved_pair, tasks):
    given = {"pretrained": str(saved_pair / "target"), "dtype": "float32"}
    assert "fly" not in evaluate("hf", given, tasks, limit=1)["config"]


@pytest.mark.slow
def test_import_fly_loads_no_torch_and_finds_the_offline_tasks(config_file):
    """In a process of its own: here everything is imported already."""
    code = f"""
import sys, fly
assert not {{"torch", "transformers", "datasets"}} & set(sys.modules)
from lm_eval import simple_evaluate
found = simple_evaluate(
    model="fly", model_args="config_path={config_file},dtype=float32", tasks=["humaneval"],
    limit=1, gen_kwargs="max_gen_toks=4", confirm_run_unsafe_code=True, device="cpu",
)
assert found["config"]["fly"]["stats"]["requests"] == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_statistics_are_of_one_evaluation(config_file, tasks):
    """They were sums over all that a model had decoded."""
    lm = FlyLM(config_path=str(config_file), dtype="float32", device="cpu")
    first = evaluate(lm, None, tasks, limit=2)["config"]["fly"]["stats"]
    again = evaluate(lm, None, tasks, limit=3)["config"]["fly"]["stats"]
    assert (first["requests"], again["requests"]) == (2, 3)


def test_chosen_documents_keep_their_numbers(config_file, tasks, tmp_path):
    """Records counted them from 0, and lm-eval's samples had the order in which they were given."""
    given = {"config_path": str(config_file), "dtype": "float32"}
    chosen = {"alone": {"tiny_task": [3, 1]}, "exact": {"tiny_task": [1, 3]}, "all": None}
    for name, samples in chosen.items():
        keys = {"enable_fly": False, "use_sd": name != "alone"}
        evaluate("fly", {**given, **keys}, tasks, tmp_path / name, samples=samples)
        (folder,) = (tmp_path / name).iterdir()
        (records,) = folder.glob("fly_requests_*")
        prompts = {line["doc_id"]: line["prompt_hash"] for line in map(json.loads, records.open())}
        (task,) = reader.load(folder, name).tasks.values()
        questions = {number: sample.doc["question"] for number, sample in task.samples.items()}
        assert questions == {number: f"q{number} " for number in ((1, 3) if samples else range(4))}
        assert prompts == {number: sample.hashes[1] for number, sample in task.samples.items()}
    (other,) = fly.compare(tmp_path / "alone", tmp_path / "exact").others
    assert other.rows[0].scores.documents == 2
    assert other.speeds[0].decode is not None


def test_saved_runs_are_compared_and_reported(config_file, tasks, saved_pair, tmp_path):
    """Saved by lm-eval's tracker, under the model's name, with the records that times need."""
    for mode, keys in {"target-only": {"use_sd": False}, "exact": {"enable_fly": False}}.items():
        given = {"config_path": str(config_file), "dtype": "float32", **keys}
        evaluate("fly", given, tasks, tmp_path / mode)
    (folder,) = (tmp_path / "exact").iterdir()
    assert folder.name.endswith("__draft")
    result = fly.compare(tmp_path / "target-only", tmp_path / "exact")
    (other,) = result.others
    assert other.rows[0].scores.documents == 4
    assert other.speeds[0].decode is not None
    page = fly.report(tmp_path / "target-only", tmp_path / "exact", output=tmp_path / "r.html")
    assert page.path.read_text().startswith("<!doctype html>")
    assert page._repr_html_().startswith("<iframe srcdoc=")


def test_bad_arguments_get_one_line(tmp_path):
    with pytest.raises(fly.FlyError, match="at least two runs"):
        fly.compare(tmp_path)
    with pytest.raises(fly.FlyError, match="min_recovery=2"):
        fly.compare(tmp_path, tmp_path, min_recovery=2)
    with pytest.raises(fly.FlyError, match="pair_by='doc': choose prompt or document"):
        fly.compare(tmp_path, tmp_path, pair_by="doc")
    with pytest.raises(fly.FlyError, match="at least one run"):
        fly.report()
    with pytest.raises(fly.FlyError, match="--traces -1"):
        fly.report(tmp_path, traces=-1)
