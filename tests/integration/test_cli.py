"""The command line, run as a user runs it: lm-eval's flags, fly's routing, one-line errors."""

import json
import logging
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import lm_eval.utils
import pytest
from lm_eval._cli import HarnessCLI
from lm_eval.tasks import TaskManager, _index

from fly.cli import main as cli
from fly.paths import data_dir
from fly.runs.earlier_outputs import EarlierOutputs
from tests import tiny

OF_LM_EVAL = Path(_index.__file__).parent
TASK = """task: tiny_task
custom_dataset: !function tiny_utils.load
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["zzz"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
UTILS = """import datasets
def load(**kwargs):
    rows = [{"question": f"q{i} ", "answer": "a"} for i in range(COUNT)]
    return {"test": datasets.Dataset.from_list(rows)}
"""


def write_task(folder, documents):
    """tiny_task, whose documents ask q0, q1, ..."""
    folder.mkdir()
    (folder / "tiny_task.yaml").write_text(TASK)
    (folder / "tiny_utils.py").write_text(f"COUNT = {documents}\n{UTILS}")


@pytest.fixture
def task_dir(tmp_path):
    folder = tmp_path / "tasks"
    write_task(folder, documents=4)
    return folder


@pytest.fixture
def config_file(saved_pair, tmp_path):
    path = tmp_path / "pair.json"
    values = {"target_model_path": str(saved_pair / "target"), "spd_k": 4, "win_len": 1}
    values["draft_policy"] = "fixed"
    path.write_text(json.dumps(values))
    return path


def run(*args):
    """In this process: quick, and tracebacks are seen."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(arg) for arg in args])
        raise SystemExit(0)
    return caught.value.code


def evaluate(saved_pair, config_file, task_dir, *extra, model="hf", more_args=""):
    return run(
        "--model", model, "--model_args",
        f"pretrained={saved_pair / 'draft'},config_path={config_file},dtype=float32{more_args}",
        "--tasks", "tiny_task", "--include_path", task_dir, "--device", "cpu", *extra,
    )  # fmt: skip


def test_hf_with_config_path_runs_fly(saved_pair, config_file, task_dir, tmp_path, capsys):
    out = tmp_path / "out"
    code = evaluate(
        saved_pair, config_file, task_dir, "--output_path", out, "--log_samples", "--limit", "3"
    )
    assert code == 0
    printed = capsys.readouterr().out
    assert printed.index("exact_match") < printed.index("emitted tokens / rounds")
    results = json.loads(next(out.rglob("results_*.json")).read_text())
    entry = results["config"]["fly"]
    assert entry["stats"]["requests"] == 3
    assert entry["config_hash"]
    records = [json.loads(x) for x in next(out.rglob("fly_requests_*.jsonl")).open()]
    samples_file = next(out.rglob("samples_tiny_task_*.jsonl"))
    samples = [json.loads(x) for x in samples_file.open()]
    assert {r["prompt_hash"] for r in records} == {s["prompt_hash"] for s in samples}
    assert samples_file.parent == next(out.rglob("fly_requests_*.jsonl")).parent
    assert sum(r["emitted"] for r in records) == entry["stats"]["emitted"]


@pytest.mark.parametrize(("name", "is_looked_for"), [("tiny_task", False), ("tiny_*", True)])
def test_lm_evals_own_tasks_are_looked_for_only_if_one_may_be_meant(
    saved_pair, config_file, task_dir, monkeypatch, name, is_looked_for
):
    """Reading its thousands of files takes seconds, at every start."""
    roots, walk = [], _index.TaskIndex._iter_yaml_files

    def iter_yaml_files(root):
        roots.append(str(root))
        return walk(root) if root != OF_LM_EVAL else iter(())

    monkeypatch.setattr(_index.TaskIndex, "_iter_yaml_files", staticmethod(iter_yaml_files))
    extra = ("--tasks", name, "--limit", "1")
    assert evaluate(saved_pair, config_file, task_dir, *extra) == 0
    assert {str(task_dir), str(data_dir("lm_eval_tasks"))} <= {*roots}
    assert (str(OF_LM_EVAL) in roots) == is_looked_for
    roots.clear()
    TaskManager()  # as a task's own code may
    assert str(OF_LM_EVAL) in roots


def test_hf_without_config_path_stays_lm_evals(saved_pair, task_dir, tmp_path, capsys):
    code = run(
        "--model", "hf", "--model_args", f"pretrained={saved_pair / 'target'},dtype=float32",
        "--tasks", "tiny_task", "--include_path", task_dir, "--limit", "1", "--device", "cpu",
        "--output_path", tmp_path / "out",
    )  # fmt: skip
    assert code == 0
    assert "emitted tokens" not in capsys.readouterr().out
    results = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())
    assert "fly" not in results["config"]


def test_a_model_without_a_name_is_saved_in_a_folder_that_lm_eval_names(task_dir, tmp_path):
    """It was said not to have been saved."""
    code = run(
        "--model", "dummy", "--tasks", "tiny_task", "--include_path", task_dir, "--limit", "1",
        "--output_path", tmp_path / "out",
    )  # fmt: skip
    assert code == 0
    assert len([*(tmp_path / "out").glob("*/results_*.json")]) == 1


def test_a_comparison_that_breaks_down_does_not_say_that_scores_fell(monkeypatch, capsys):
    """A traceback's own status is 1, which CI takes for fell."""

    def broken(*args):
        raise RuntimeError("a defect")

    monkeypatch.setattr(cli.compare, "_load", broken)
    assert run("compare", "a", "b") == 2
    assert "RuntimeError: a defect" in capsys.readouterr().err


def test_what_an_editor_leaves_beside_task_files_is_no_task(
    saved_pair, config_file, task_dir, tmp_path
):
    (task_dir / ".#tiny_task.yaml").symlink_to("user@host.1:2")
    (task_dir / "folder.yaml").mkdir()
    assert evaluate(saved_pair, config_file, task_dir, "--limit", "1") == 0


def test_yaml_config_and_samples(saved_pair, config_file, task_dir, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: hf\nmodel_args:\n  pretrained: {saved_pair / 'draft'}\n"
        f"  config_path: {config_file}\n  dtype: float32\ntasks: [tiny_task]\n"
        f"include_path: {task_dir}\nsamples: {{tiny_task: [1, 3]}}\ndevice: cpu\n"
    )
    assert run("run", "--config", path) == 0
    assert "2 (" in capsys.readouterr().out  # two requests in fly's table


def test_a_resumed_run_of_chosen_documents_decodes_the_others(
    saved_pair, config_file, task_dir, tmp_path
):
    out = tmp_path / "out"
    flags = ("--samples", '{"tiny_task": [3, 0, 1]}', "--log_samples", "--output_path", out)
    assert evaluate(saved_pair, config_file, task_dir, *flags) == 0
    (results,), (samples,) = out.rglob("results_*.json"), out.rglob("samples_*.jsonl")
    (requests,) = out.rglob("fly_requests_*.jsonl")
    lines = requests.read_text().splitlines(keepends=True)
    texts = samples.read_text()
    results.unlink(), samples.unlink()
    requests.write_text("".join(lines[:1]))
    (manifest,) = out.rglob("fly_run_*.json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "finished": False}))
    assert run("--resume", out) == 0
    resumed = [json.loads(line) for line in requests.open()]
    assert resumed[0] == json.loads(lines[0])
    assert sorted(line["doc_id"] for line in resumed) == [0, 1, 3]
    (again,) = out.rglob("samples_*.jsonl")
    assert again.read_text() == texts


def test_use_cache_does_not_mix_configurations(saved_pair, config_file, task_dir, tmp_path):
    """lm-eval's cache keys ignore the model: another K must not read the first one's answers."""
    cache = tmp_path / "cache"
    for more in ("", ",enable_fly=False", ""):
        code = evaluate(
            saved_pair, config_file, task_dir, "--use_cache", cache, "--limit", "1", more_args=more
        )
        assert code == 0
    assert len(list(tmp_path.glob("cache_*.db"))) == 2
    # how many run together decides whether FLy drafts
    for more in ((), ("--batch_size", "4")):
        flags = ("--use_cache", cache, "--limit", "1", *more)
        code = evaluate(saved_pair, config_file, task_dir, *flags, more_args=",draft_policy=auto")
        assert code == 0
    assert len(list(tmp_path.glob("cache_*.db"))) == 4
    file = tmp_path / "run.yaml"
    for most in (2, 3):
        file.write_text(
            f"model: hf\nmodel_args:\n  pretrained: {saved_pair / 'draft'}\n"
            f"  config_path: {config_file}\n  dtype: float32\n  draft_policy: auto\n"
            f"tasks: [tiny_task]\ninclude_path: {task_dir}\nlimit: 1\ndevice: cpu\n"
            f"use_cache: {cache}\nbatch_size: auto\nmax_batch_size: {most}\n"
        )
        assert run("run", "--config", file) == 0
    assert len(list(tmp_path.glob("cache_*.db"))) == 6


def test_runs_draft_from_earlier_ones(saved_pair, config_file, task_dir, tmp_path, monkeypatch):
    """Two folders after one key, which lm-eval's own parser refuses, on the line and in a file.

    They are read once.
    """
    reads, read = [], EarlierOutputs.read
    monkeypatch.setattr(EarlierOutputs, "read", lambda *args: reads.append(args) or read(*args))
    for name in ("a", "b"):
        out = ("--output_path", tmp_path / name, "--limit", len(name))
        assert evaluate(saved_pair, config_file, task_dir, *out, more_args=",use_sd=false") == 0
    earlier = f"{tmp_path / 'a'},{tmp_path / 'b'}"
    more = f",draft_runs={earlier},enable_fly=false"
    out = ("--output_path", tmp_path / "c", "--limit", 2)
    assert evaluate(saved_pair, config_file, task_dir, *out, more_args=more) == 0
    assert len(reads) == 1
    entry = json.loads(next((tmp_path / "c").rglob("results_*.json")).read_text())["config"]["fly"]
    assert entry["config"]["draft_runs"] == earlier.split(",")
    assert (entry["draft_runs"]["matched"], entry["draft_runs"]["missing"]) == (1, 1)
    manifest = json.loads(next((tmp_path / "c").rglob("fly_run_*.json")).read_text())
    assert len(manifest["earlier_outputs"]) == 16
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: hf\nmodel_args: config_path={config_file},drafter=ngram{more}\n"
        f"tasks: [tiny_task]\ninclude_path: {task_dir}\nlimit: 1\ndevice: cpu\n"
        f"output_path: {tmp_path / 'd'}\n"
    )
    assert run("run", "--config", path) == 0
    entry = json.loads(next((tmp_path / "d").rglob("results_*.json")).read_text())["config"]["fly"]
    assert len(entry["draft_runs"]["runs"]) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (",draft_runs=/no,/where", "draft_runs=/no: no such run: give a run's folder"),
        (",spdk=3", "unknown model_args key 'spdk'"),
        (",win_len=4", "win_len=4 needs spd_k >= 5, got 4"),
        (",target_model_path=/nowhere", "target_model_path=/nowhere: no such folder"),
    ],
)
def test_bad_model_args_end_with_one_line(saved_pair, config_file, task_dir, capsys, more, message):
    assert evaluate(saved_pair, config_file, task_dir, more_args=more) == 2
    error = capsys.readouterr().err.splitlines()
    assert message in error[-1]
    assert error[-1].startswith("fly: error: ")


def test_missing_configuration(saved_pair, task_dir, capsys):
    assert evaluate(saved_pair, "nowhere.json", task_dir) == 2
    assert "config_path=nowhere.json: no such file" in capsys.readouterr().err


def test_unwritable_output_path_fails_before_the_models_load(
    saved_pair, config_file, task_dir, tmp_path, capsys
):
    blocker = tmp_path / "file"
    blocker.write_text("")
    code = evaluate(saved_pair, config_file, task_dir, "--output_path", blocker / "x")
    assert code == 2
    assert "cannot be written" in capsys.readouterr().err


def test_max_gen_toks_zero_on_the_command_line(saved_pair, config_file, task_dir, capsys):
    assert evaluate(saved_pair, config_file, task_dir, "--gen_kwargs", "max_gen_toks=0") == 2
    assert "max_gen_toks=0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_task_that_does_not_exist_is_named(config_file, capsys):
    pair = f"config_path={config_file},use_sd=False"
    assert run("--model", "hf", "--model_args", pair, "--tasks", "no_task") == 2
    assert "task 'no_task': no such task" in capsys.readouterr().err.splitlines()[-1]


def test_lm_evals_own_refusals_are_one_line_too(saved_pair, config_file, task_dir, capsys):
    code = evaluate(saved_pair, config_file, task_dir, "--log_samples")
    assert code == 2
    assert "Specify --output_path" in capsys.readouterr().err.splitlines()[-1]


def test_config_commands(config_file, tmp_path, capsys):
    assert run("config", "check", config_file) == 0
    assert "valid (fly, drafter model" in capsys.readouterr().out
    assert run("config", "show", config_file, "spd_k=9", "entropy_thre=None") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["spd_k"], shown["entropy_thre"]) == (9, None)
    assert shown["lookup_k"] == 9  # as a run with spd_k=9 has it
    assert run("config", "schema") == 0
    assert "win_len" in json.loads(capsys.readouterr().out)["properties"]
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    assert run("config", "check", bad) == 2
    assert "not valid JSON" in capsys.readouterr().err
    assert run("config", "show", config_file, "nonsense") == 2


@pytest.mark.slow
def test_our_tasks_are_listed_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("validate", "--tasks", "humaneval_instruct,gsm8k_cot,mbpp") == 0
    assert "All tasks found and valid" in capsys.readouterr().out


def test_python_m_fly_is_the_same_command(tmp_path):
    """A real process in another working directory."""
    result = subprocess.run(
        [sys.executable, "-m", "fly", "config", "schema"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "win_len" in json.loads(result.stdout)["properties"], result.stderr[-500:]


def test_flys_own_log_lines_are_shown(monkeypatch, capsys):
    """lm-eval 0.4.13 sets up its own logger only; what it shows is shown of fly's, too."""
    monkeypatch.setattr(lm_eval.utils, "_LOGGING_CONFIGURED", False, raising=False)
    for name in ("lm_eval", "fly"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    assert run("--version") == 0
    log = logging.getLogger("fly.execution.weights")
    log.info("passes: target eager")
    log.debug("more than that")
    error = capsys.readouterr().err
    assert error.count("passes: target eager") == 1
    assert "more than that" not in error


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("fly ")


def test_help_is_flys_and_names_a_pair(capsys):
    for arguments in (["--help"], ["run", "--help"]):
        assert run(*arguments) == 0
        shown = capsys.readouterr().out
        assert "fly run --model hf --model_args pretrained=<draft>,config_path=<pair>.json" in shown
        assert "lm-eval ls" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compar", "a", "b"], "unknown command 'compar': did you mean 'compare'?"),
        (["compar"], "unknown command 'compar': did you mean 'compare'?"),
        (["zzz"], "unknown command 'zzz': `fly --help` lists the commands"),
        (["config", "chek", "x"], "unknown command 'fly config chek': did you mean 'check'?"),
        (["pair", "zz"], "unknown command 'fly pair zz': choose from fetch, list, path, export"),
        tiny.slow(
            ["--model", "dummy", "--tasks", "humaneval_instrct"],
            "task 'humaneval_instrct': no such task: did you mean 'humaneval_instruct'?",
        ),
        (["--model", "dumy", "--tasks", "TASK"], "--model dumy: no such model: did you mean"),
        (["--model", "zzz", "--tasks", "TASK"], "choose hf, vllm, server, or one of lm-eval's"),
        (
            ["--model", "dummy", "--tasks", "TASK", "--wandb_args", "project=x"],
            "--wandb_args: needs wandb: pip install wandb, or leave it out",
        ),
        (
            [
                "--model",
                "dummy",
                "--tasks",
                "TASK",
                "--hf_hub_log_args",
                "push_results_to_hub=True",
            ],
            "Hugging Face token is not defined",
        ),
        (["--model", "litellm", "--tasks", "TASK"], "`litellm` is not installed"),
        (["--model", "anthropic-completions", "--tasks", "TASK"], "`anthropic` is not installed"),
        (
            ["--model", "hf", "--model_args", "pretrained=pair:q", "--tasks", "TASK"],
            "pair:NAME/dra",
        ),
    ],
)
def test_a_slip_ends_with_one_line_that_says_what_to_change(
    task_dir, arguments, message, monkeypatch, capsys
):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    arguments = ["tiny_task" if each == "TASK" else each for each in arguments]
    more = ["--include_path", task_dir] if "tiny_task" in arguments else []
    assert run(*arguments, *more) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("fly: error: ")
    assert message in last


def test_flags_are_spelled_with_hyphens_or_underscores(saved_pair, config_file, task_dir, capsys):
    """lm-eval's have underscores, fly's hyphens: nobody has to know which flag is whose."""
    extra = ("--gen-kwargs", "max_gen_toks=0")
    assert evaluate(saved_pair, config_file, task_dir, *extra) == 2
    assert "max_gen_toks" in capsys.readouterr().err
    assert run("compare", "A", "B", "--min_recovery", "2") == 2
    assert "min_recovery=2" in capsys.readouterr().err


def test_hf_loads_a_gguf_file_as_fly_names_it(task_dir, monkeypatch):
    """`--model hf --model_args pretrained=pair:NAME/target` is lm-eval's hf on the pair."""
    seen = {}
    monkeypatch.setattr(HarnessCLI, "execute", lambda self, args: seen.update(vars(args)))
    (task_dir / "x.gguf").write_bytes(b"GGUF")
    assert run(
        "--model", "hf", "--model_args", f"pretrained={task_dir / 'x.gguf'}", "--tasks",
        "tiny_task", "--include_path", task_dir,
    ) == 0  # fmt: skip
    assert seen["model"] == "hf"
    assert seen["model_args"] == {"pretrained": str(task_dir), "gguf_file": "x.gguf"}


def test_a_reader_that_leaves_ends_the_output_quietly():
    command = f"{sys.executable} -m fly config schema | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 141)
    assert done.stderr == ""


def test_flys_own_flags_come_before_lm_evals_in_the_help(capsys):
    assert run("compare", "--help") == 0
    shown = capsys.readouterr().out
    assert shown.index("--min-recovery SHARE") < shown.index("--num_fewshot")


def test_a_shell_learns_the_commands_and_flags(capsys):
    assert run("completion", "bash") == 0
    assert "--min-recovery" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "level"), [([], logging.WARNING), (["--verbosity", "DEBUG"], logging.DEBUG)]
)
def test_lm_evals_own_lines_are_shown_on_request(
    saved_pair, config_file, task_dir, flags, level, monkeypatch
):
    monkeypatch.setattr(HarnessCLI, "execute", lambda self, args: None)
    monkeypatch.setattr(cli.resume, "keeping_manifest", lambda *args: nullcontext())
    assert evaluate(saved_pair, config_file, task_dir, *flags) == 0
    assert logging.getLogger("lm_eval").level == level
    logging.getLogger("lm_eval").setLevel(logging.INFO)
