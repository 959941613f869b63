"""Odd inputs of every command: refused in one line, before models load, or accepted as they say.

Each table row is an input and words of the line that refuses it: the field, the value, the fix.
"""

import errno
import json
import logging
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from fly.cli import main as cli
from fly.harness import evaluate, sandbox
from fly.runs.jsonl import JsonLines
from tests import tiny, traced_runs, written_runs
from tests.configured_runs import write_run
from tests.integration.test_cli import (  # noqa: F401  fixtures
    config_file,
    run,
    task_dir,
    write_task,
)

DEEP = "[" * 100_000
DIGITS = "9" * 5000
LONG = "x" * 300  # more than a file's name may have
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
# the third: a second line that lm-eval logs, once in a process
_LOG = re.compile(r"\d{4}-\d\d-\d\d|.*(it/s|req/s|\?it)|For example --metadata=|\s*$")


@pytest.fixture(autouse=True)
def no_complaints_of_closed_streams(monkeypatch):
    """lm-eval's log goes to the stderr of whichever test was the first to run a command."""
    monkeypatch.setattr(logging, "raiseExceptions", False)


class Place(NamedTuple):
    pair: Path
    config: Path
    tasks: Path


@pytest.fixture
def place(saved_pair, config_file, task_dir):  # noqa: F811
    """What a run is made of: the models, the pair's file, the tasks."""
    return Place(saved_pair, config_file, task_dir)


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr(
        "fly.harness.hf.FlyLM._load_pair", lambda *args, **kwargs: pytest.fail("loaded")
    )


def refused(capsys, words, *arguments):
    """The one line that refuses these arguments."""
    capsys.readouterr()
    assert run(*arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not _LOG.match(line)]
    assert len(lines) == 1, lines
    assert lines[0].startswith("fly: error: ")
    for word in [words] if isinstance(words, str) else words:
        assert word in lines[0]
    assert len(lines[0]) < 1000
    return lines[0]


# ------------------------------------------------------------------------- a pair's JSON

PAIR_FILES = [
    ("", "not valid JSON at column 1"),
    ("{", "not valid JSON at column 2"),
    ('{"target_model_path": "t",}', "not valid JSON at column"),
    ('{"target_model_path": "t"} x', "Extra data"),
    ("\ufeff{}", "BOM"),
    ("[1]", "must hold one JSON object, got list"),
    ("null", "must hold one JSON object, got NoneType"),
    ('"text"', "must hold one JSON object, got str"),
    (b"\xff\xfe{}", "not UTF-8 at byte 0"),
    ('{"target_model_path": "t", "spd_k": 3, "spd_k": 9}', "key 'spd_k' is there twice"),
    ('{"target_model_path": "t", "$comment": {"a": 1, "a": 2}}', "key 'a' is there twice"),
    ('{"target_model_path": "t", "spd_k": ' + DIGITS + "}", "too many digits"),
    ('{"target_model_path": "t", "spd_k": ' + DEEP, "nested too deeply"),
    ('{"target_model_path": "t", "spd_k": 1e999}', "spd_k=inf"),
    ("{}", ["target_model_path is missing", "add it"]),
]
PAIR_KEYS = [
    ("target_model_path", "", "names no model"),
    ("target_model_path", "  ", "names no model"),
    ("target_model_path", "a\nb", "names no model"),
    ("target_model_path", "a\u0000b", "names no model"),
    ("target_model_path", None, "valid string"),
    ("target_model_path", 7, "valid string"),
    ("target_model_path", ["t"], "valid string"),
    ("target_model_path", "pair:nope/target", "known pairs are qwen2.5-coder"),
    ("target_model_path", "pair:qwen2.5-coder", "pair:NAME/draft or pair:NAME/target"),
    ("target_model_path", "pair:", "pair:NAME/draft or pair:NAME/target"),
    ("draft_model_path", "", "names no model"),
    ("draft_model_path", "pair:nope/draft", "known pairs are"),
    ("draft_model_path", False, "valid string"),
    ("spd_k", -1, "greater than or equal to 0"),
    ("spd_k", 257, "less than or equal to 256"),
    ("spd_k", 2.5, "valid integer"),
    ("spd_k", "8", "valid integer"),
    ("spd_k", True, "valid integer"),
    ("spd_k", None, "valid integer"),
    ("win_len", -1, "greater than or equal to 0"),
    ("win_len", 30, "lower win_len or raise spd_k"),
    ("entropy_thre", float("nan"), "finite number"),
    ("entropy_thre", "0.3", "valid number"),
    ("entropy_kind", "top4", "'top3', 'full' or 'normalized'"),
    ("use_sd", "yes", "valid boolean"),
    ("use_sd", 1, "valid boolean"),
    ("enable_fly", None, "valid boolean"),
    ("verification", "loose", "'fly', 'exact'"),
    ("drafter", "medusa", "'model', 'ngram', 'cascade', 'eagle3', 'block', 'mtp' or 'suffix'"),
    ("max_ngram_size", 0, "greater than or equal to 1"),
    ("num_ngram_pred_tokens", 1000, "less than or equal to 256"),
    ("temperature", -0.5, "greater than or equal to 0"),
    ("top_p", 0, "greater than 0"),
    ("top_k", -1, "greater than or equal to 0"),
    ("min_p", 2, "less than or equal to 1"),
    ("repetition_penalty", 0, "greater than 0"),
    ("seed", -1, "greater than or equal to 0"),
    ("total_gen_tok", 0, "greater than or equal to 1"),
    ("threads", 0, "greater than or equal to 1"),
    ("threads", 10**9, "less than or equal to 4096"),
    ("trace", "on", "valid boolean"),
    ("compile", "on", "'auto', 'inductor' or 'off'"),
    ("execution", "cuda", "'auto', 'kernels'"),
    ("draft_quantization", "int3", "'auto', 'none'"),
    ("draft_policy", "sometimes", "'auto' or 'fixed'"),
    ("relaxed_top_k", 0, "greater than or equal to 1"),
    ("spdk", 3, "did you mean 'spd_k'"),
    ("", 3, "unknown key ''"),
    ("spd_k", [[[[[[[[1]]]]]]]], "valid integer"),
    ("spd_k", "x" * 9000, "valid integer"),
]


@pytest.mark.parametrize(("text", "words"), PAIR_FILES)
def test_files_of_a_pair(tmp_path, capsys, text, words):
    path = tmp_path / "pair.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert str(path) in refused(capsys, words, "config", "check", path)


@pytest.mark.parametrize(("key", "value", "words"), PAIR_KEYS)
def test_keys_of_a_pair(tmp_path, capsys, key, value, words):
    path = tmp_path / "pair.json"
    path.write_text(json.dumps({"target_model_path": "t", key: value}))
    line = refused(capsys, words, "config", "check", path)
    assert key in line
    assert str(path) in line


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("spd_k", "write it as key=value"),
        ("spd_k=3,win_len", "expected `key=value`"),
        ("spd_k=3,spd_k=4", "given twice"),
        ("spdk=3", "did you mean 'spd_k'"),
        ("spd_k=many", "spd_k='many'"),
        ("spd_k=" + DIGITS, "spd_k"),
        ("spd_k=" + "[" * 5000, "spd_k"),
        ("temperature=nan", "temperature=nan"),
        ("=3", "unknown key ''"),
    ],
)
def test_overrides(place, capsys, item, words):
    refused(capsys, words, "config", "show", place.config, item)


def test_files_that_cannot_be_opened(tmp_path, capsys):
    refused(capsys, ["nowhere.json: no such file", "shipped"], "config", "check", "nowhere.json")
    refused(capsys, "no such file", "config", "check", tmp_path)


# --------------------------------------------------------------------- flags of `fly run`

FLAGS = [
    (["--limit", "0"], ["limit=0", "greater than 0"]),
    (["--limit", "-3"], ["limit=-3", "greater than 0"]),
    (["--limit", "nan"], ["limit=nan", "finite"]),
    (["--limit", "inf"], ["limit=inf", "finite"]),
    (["--limit", "2.5"], ["limit=2.5", "whole number"]),
    (["--limit", "1e30"], ["limit=1e+30", "less than or equal to"]),
    (["--limit", "few"], ["--limit", "'few'", "--help"]),
    (["--batch_size", "0"], ["batch_size='0'", "at least 1"]),
    (["--batch_size", "-1"], ["batch_size='-1'", "at least 1"]),
    (["--batch_size", "1.5"], ["batch_size='1.5'", "whole number"]),
    (["--batch_size", "many"], ["batch_size='many'", "auto"]),
    (["--batch_size", "auto:x"], ["batch_size='auto:x'", "auto"]),
    (["--max_batch_size", "0"], ["max_batch_size=0", "greater than 0"]),
    (["--num_fewshot", "-1"], ["num_fewshot=-1", "greater than or equal to 0"]),
    (["--num_fewshot", "two"], ["--num_fewshot", "'two'"]),
    (["--seed", "-1"], ["seed", "-1", "greater than or equal to 0"]),
    (["--seed", "4294967296"], ["seed", "4294967296", "less than"]),
    (["--seed", "1,2"], ["--seed", "'1,2'", "invalid value"]),
    (["--seed", "abc"], ["--seed", "'abc'", "invalid value"]),
    (["--device", "banana"], ["--device=banana", "choose from cpu"]),
    (["--device", "cuda:99"], ["--device=cuda:99", "choose from cpu"]),
    (["--device", "meta"], ["--device=meta", "choose from cpu"]),
    (["--tasks", ""], ["tasks", "at least 1 character"]),
    (["--include_path", "/nowhere"], ["--include_path /nowhere", "no such folder"]),
    (["--model", ""], ["model=''", "at least 1 character"]),
    (["--use_cache", ""], ["use_cache=''", "at least 1 character"]),
    (["--output_path", ""], ["output_path=''", "at least 1 character"]),
    (["--output_path", "/dev/null/x"], ["output_path", "cannot be written"]),
    (["--samples", "{"], ["--samples", "not valid JSON"]),
    (["--samples", "[1, 2]"], ["samples", "valid dictionary"]),
    (["--samples", "7"], ["samples=7", "valid dictionary"]),
    (["--samples", "nowhere.json"], ["--samples nowhere.json", "no such file"]),
    (["--samples", '{"tiny_task": [0]}', "--limit", "1"], ["--samples and --limit", "leave one"]),
    (["--samples", '{"tiny_task": 1}'], ["samples.tiny_task=1", "valid list"]),
    (["--samples", '{"tiny_task": []}'], ["samples.tiny_task=[]", "at least 1 item"]),
    (["--samples", '{"tiny_task": [-1]}'], ["samples.tiny_task.0=-1", "or equal to 0"]),
    (["--samples", '{"tiny_task": ["0"]}'], ["samples.tiny_task.0='0'", "valid integer"]),
    (["--samples", '{"tiny_task": [1.5]}'], ["samples.tiny_task.0=1.5", "valid integer"]),
    (["--samples", '{"tiny_task": [4]}'], ["no document 4", "0 to 3"]),
    (["--samples", '{"tiny_task": [1, 1]}'], ["document 1", "twice"]),
    (["--samples", '{"tiny_task": [1], "tiny_task": [2]}'], ["'tiny_task' is there twice"]),
    (["--samples", '{"other": [1]}'], ["other is not among --tasks", "tiny_task"]),
    (["--gen_kwargs", "until=5"], ["until.0=5 (--gen_kwargs)", "valid string"]),
    (["--gen_kwargs", "until=None"], ["until.0=None", "valid string"]),
    (["--gen_kwargs", "until=[1]"], ["until.0=1", "valid string"]),
    (["--gen_kwargs", '{"until": {"a": 1}}'], ["until.0={'a': 1}", "valid string"]),
    (["--gen_kwargs", "max_gen_toks=1.5"], ["max_gen_toks=1.5", "valid integer"]),
    (["--gen_kwargs", "max_gen_toks=True"], ["max_gen_toks=True", "valid integer"]),
    (["--gen_kwargs", "max_gen_toks=0"], ["max_gen_toks=0", "greater than or equal to 1"]),
    (["--gen_kwargs", "max_new_tokens=-4"], ["max_new_tokens=-4", "equal to 1"]),
    (["--gen_kwargs", "max_gen_toks=lots"], ["max_gen_toks='lots'", "valid integer"]),
    (["--gen_kwargs", "do_sample=maybe"], ["do_sample='maybe'", "valid boolean"]),
    (["--gen_kwargs", "do_sample=1"], ["do_sample=1", "valid boolean"]),
    (["--gen_kwargs", "temperature=None"], ["temperature=None", "valid number"]),
    (["--gen_kwargs", "temperature=True"], ["temperature=True", "valid number"]),
    (["--gen_kwargs", "temperature=hot"], ["temperature='hot'", "valid number"]),
    (["--gen_kwargs", "top_p=[1]"], ["top_p=[1]", "valid number"]),
    (["--gen_kwargs", "{"], ["--gen_kwargs", "not valid JSON"]),
    (["--gen_kwargs", '{"top_k": 1, "top_k": 2}'], ["--gen_kwargs", "'top_k' is there twice"]),
    (["--gen_kwargs", '{"a": ' + DEEP], ["--gen_kwargs", "nested too deeply"]),
    (["--gen_kwargs", "until"], ["--gen_kwargs", "expected `key=value`"]),
    (["--tasks", "humaneval"], ["task humaneval", "add --confirm_run_unsafe_code"]),
    (["--frobnicate", "1"], ["--frobnicate", "--help"]),
    (["--verbosity", "x"], ["verbosity='X'", "'INFO'"]),
    (["--hf_hub_log_args", "publicrepo=1"], ["'publicrepo'", "did you mean 'public_repo'"]),
    (["--wandb_args", "project=x"], ["--wandb_args: needs wandb", "pip install wandb"]),
    (["--trackio_args", "project=x"], ["--trackio_args: needs trackio", "pip install trackio"]),
    (["--model", "hff"], ["--model hff", "no such model", "did you mean 'hf'?"]),
    (["--include_path", LONG], [LONG[:90], "so long a name"]),
    (["--samples", LONG], [LONG[:90], "so long a name"]),
    (["--tasks", LONG], [LONG[:90], "so long a name"]),
    (["--tasks", f"{LONG}.yaml"], [LONG[:90], "so long a name"]),
    (["--config", LONG], [LONG[:90], "too long"]),
    (["--resume", LONG], [LONG[:90], "so long a name"]),
    (["--output_path", LONG], [LONG, "too long"]),
    (["--resume", "/nowhere"], ["--resume /nowhere", "give the run's --output_path"]),
]
MODEL_ARGS = [
    ("spdk=3", "unknown model_args key 'spdk': did you mean 'spd_k'"),
    ("batch_size=2", "give it as --batch_size"),
    ("device=cpu", "give it as --device"),
    ("draft_device=banana", "draft_device=banana: not available here: choose from cpu"),
    ("draft_device=cuda:99", "draft_device=cuda:99: not available here"),
    ("draft_dtype=banana", "draft_dtype=banana: no such dtype"),
    ("dtype=banana", "dtype=banana: no such dtype"),
    ("dtype=nn", "dtype=nn: no such dtype"),
    ("dtype=7", "dtype=7: no such dtype"),
    ("max_length=0", "max_length=0 (model_args): input should be greater than 0"),
    ("max_length=abc", "max_length='abc' (model_args): input should be a valid integer"),
    ("trust_remote_code=maybe", "trust_remote_code='maybe' (model_args)"),
    ("parallelize=2", "parallelize=2 (model_args)"),
    ("gptqmodel=2", "gptqmodel=2 (model_args)"),  # by HFLM's own annotations
    ("pretrained=~nobody-here/x", "~nobody-here/x: no such user"),
    ("prefix_token_id=x", "prefix_token_id='x' (model_args)"),
    ("chat_template_args=x", "chat_template_args='x' (model_args)"),
    ("softmax_dtype=banana", "softmax_dtype=banana: no such dtype"),
    ("mixed_precision_dtype=float16", "set dtype=float16"),
    ("target_model_path=/nowhere", "target_model_path=/nowhere: no such folder"),
    ("target_model_path=nowhere.gguf", "target_model_path=nowhere.gguf: no such file"),
    ("target_model_path=pair:nope/target", "known pairs are qwen2.5-coder"),
    ("pretrained=/nowhere", "pretrained=/nowhere: no such folder"),
    ("pretrained=3", "draft_model_path=3"),
    ("pretrained=", "draft_model_path=''"),
    ("config_path=", "config_path"),
    ("config_path=nowhere", "config_path=nowhere: no such file"),
    (f"config_path={LONG}", "so long a name"),
    (f"pretrained={LONG}", "so long a name"),
    (f"target_model_path={LONG}.gguf", "so long a name"),
    (f"draft_runs={LONG}", "so long a name"),
    ("draft_runs=", ["draft_runs=[]", "list should have at least 1 item"]),
    ("draft_runs=[]", ["draft_runs=[]", "list should have at least 1 item"]),
    ("low_cpu_mem_usage=maybe", "low_cpu_mem_usage='maybe' (model_args)"),
    ("use_safetensors=maybe", "use_safetensors='maybe' (model_args)"),
    ("revision=main", ["revision=main", "target is a local folder", "leave it out"]),
    ("draft_revision=main", ["draft_revision=main", "draft is a local folder", "leave it out"]),
]


def arguments(place, flags=(), model_args=""):
    pair = f"pretrained={place.pair / 'draft'},config_path={place.config},dtype=float32"
    found = {"--model": "hf", "--tasks": "tiny_task", "--include_path": place.tasks}
    found["--device"] = "cpu"
    found["--model_args"] = pair
    flags = list(flags)
    merged = [part for name in found if name not in flags for part in (name, found[name])]
    if model_args:
        merged += ["--model_args", model_args]
    return ["run", *merged, *flags]


@pytest.mark.parametrize(("flags", "words"), FLAGS)
def test_flags_of_a_run(place, capsys, no_model, flags, words):
    refused(capsys, words, *arguments(place, flags))


@pytest.mark.parametrize(("model_args", "words"), MODEL_ARGS)
def test_model_args(place, capsys, no_model, model_args, words):
    refused(capsys, words, *arguments(place, model_args=model_args))


OF_LM_EVAL = [
    ([], ["--model_args names no model", "config_path=", "pretrained="]),
    (["--model", "hf"], "--model_args names no model"),
    (["--model_args", "dtype=float32"], "--model_args names no model"),
    (["--model", "hff"], ["--model hff", "no such model"]),
    (["--model", "vllm", "--model_args", "pretrained=x"], ["lm-eval: ModuleNot", "'vllm'"]),
    (["--model_args", "PAIR,colour=red"], ["lm-eval: TypeError", "'colour'", "line "]),
    (["--model_args", "PAIR,dtype=banana"], ["lm-eval: AttributeError", "banana", "FLY_DEBUG"]),
    (["--model_args", "PAIR", "--check_integrity"], ["Unable to find package root", "lm_eval"]),
]


@pytest.mark.parametrize(("flags", "words"), OF_LM_EVAL)
def test_what_lm_eval_fails_at_by_itself(place, tmp_path, capsys, flags, words):
    """They ended in its traceback. --config's file is read like the command line."""
    if "vllm" in flags and find_spec("vllm"):
        pytest.skip("vLLM is here")
    flags = [flag.replace("PAIR", f"pretrained={place.pair / 'target'}") for flag in flags]
    given = ["--tasks", "tiny_task", "--include_path", place.tasks, "--device", "cpu"]
    refused(capsys, words, "run", *given, "--limit", "1", *flags)
    if not flags:
        file = tmp_path / "run.yaml"
        file.write_text(f"tasks: [tiny_task]\ninclude_path: {place.tasks}\n")
        refused(capsys, words, "run", "--config", file)


@pytest.mark.parametrize("where", ["fly.harness.hf.FlyLM.build_requests", "fly.cli.main._prepare"])
def test_what_flys_own_code_fails_at_keeps_its_traceback(place, monkeypatch, where):
    """lm-eval calls the engine: what the engine fails at is not lm-eval's."""

    def broken(*args, **kwargs):
        raise KeyError("a defect")

    monkeypatch.setattr(where, broken)
    with pytest.raises(KeyError, match="a defect"):
        cli.main(list(map(str, arguments(place, ["--limit", "1"]))))


@pytest.mark.parametrize(
    ("flags", "model_args", "words"),
    [
        ([], "prefix_token_id=999999", ["prefix_token_id=999999", "has ids 0 to"]),
        ([], "think_end_token=999999", ["think_end_token=999999", "has ids 0 to"]),
        (["--apply_chat_template", "unknown"], "", ["--apply_chat_template unknown", "default"]),
    ],
)
def test_what_the_target_does_not_have(place, capsys, flags, model_args, words):
    refused(capsys, words, *arguments(place, flags, model_args))


def test_programs_that_this_machine_cannot_run(place, capsys, monkeypatch, no_model):
    """It was found out after decoding. Answers that are not scored need no sandbox."""
    sandbox.isolation_level.cache_clear()
    monkeypatch.setattr("fly.harness.sandbox.process._BOOTSTRAP", "/nowhere/bootstrap.py")
    code = ["--tasks", "humaneval", "--confirm_run_unsafe_code"]
    words = ["sandbox: no program can be run here", "/nowhere/bootstrap.py"]
    refused(capsys, words, *arguments(place, code))
    evaluate.check_before_models_load(
        ["humaneval"], [], None, confirm_run_unsafe_code=True, is_scored=False
    )


RUN_FILES = [
    ("tasks: [", "not valid YAML at line 1"),
    ("tasks: a\n  b: c", "not valid YAML at line 2, column 4"),
    ("- a\n- b", "must hold `flag: value` lines, got list"),
    ("", "must hold `flag: value` lines, got NoneType"),
    ("taks: [tiny_task]", "unknown key 'taks': did you mean 'tasks'"),
    ("1: 2", "unknown key 1"),
    ("limit: 1\nlimit: 2", "key 'limit' is there twice"),
    ("limit: few", ["limit='few'", "valid number"]),
    ("limit: true", ["limit=True", "valid number"]),
    ("tasks: 5", ["tasks", "5"]),
    ("tasks: []", ["tasks=[]", "at least 1 item"]),
    ("batch_size: 0", ["batch_size=0", "at least 1"]),
    ("batch_size: true", ["batch_size=True", "at least 1"]),
    ("num_fewshot: '5'", ["num_fewshot='5'", "valid integer"]),
    ("model_args: [1]", ["model_args", "[1]"]),
    ("gen_kwargs: {until: 5}", ["until.0=5", "valid string"]),
    ("gen_kwargs: 5", ["gen_kwargs", "5"]),
    ("seed: -1", ["seed", "-1"]),
    ("samples: {tiny_task: all}", ["samples.tiny_task='all'", "valid list"]),
    ("log_samples: maybe", ["log_samples='maybe'", "valid boolean"]),
    ("write_out: 5", ["write_out=5", "valid boolean"]),
    ("device: 7", ["device=7", "valid string"]),
    ("cache_requests: true", ["cache_requests=True", "valid dict"]),
    ("tasks: !!python/object:os.system x", "not valid YAML"),
    ("a: " + "[" * 50_000, "not valid YAML"),
    ("limit: " + DIGITS, "not valid YAML"),
]


@pytest.mark.parametrize(("text", "words"), RUN_FILES)
def test_files_of_a_run(tmp_path, capsys, no_model, text, words):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert str(path) in refused(capsys, words, "run", "--config", path)


TASK_FILES = [
    ("task: odd\n  a: [", ["odd.yaml", "not valid YAML at line 2"]),
    ("- odd", ["odd.yaml", "must hold `key: value` lines"]),
    ("task: odd\ntask: odd", ["odd.yaml", "key 'task' is there twice"]),
    ("until: 5", ["until.0=5", "odd.yaml", "valid string"]),
    ("until: null", ["until.0=None", "odd.yaml"]),
    ("until: [1]", ["until.0=1", "odd.yaml"]),
    ("until: [x], max_gen_toks: 1.5", ["max_gen_toks=1.5", "odd.yaml"]),
    ("until: [x], max_gen_toks: true", ["max_gen_toks=True", "odd.yaml"]),
    ("until: [x], do_sample: maybe", ["do_sample='maybe'", "odd.yaml"]),
    ("doc_to_text", ["task odd: cannot be loaded", "no_such"]),
    ("bad python", ["task odd: cannot be loaded", "SyntaxError"]),
    ("repeats", ["task odd", "pass@8 takes 8 samples", "repeats is 4"]),
    ("repeats: 0", ["task odd: repeats=0", "at least 1"]),
    ("repeats: -1", ["task odd: repeats=-1", "at least 1"]),
    ("repeats: two", ["task odd: repeats='two'", "whole number"]),
    ("repeats: true", ["task odd: repeats=True", "whole number"]),
]


@pytest.mark.parametrize(("text", "words"), TASK_FILES)
def test_files_of_a_task(place, capsys, no_model, text, words):
    whole = (place.tasks / "tiny_task.yaml").read_text().replace("tiny_task", "odd")
    if text.startswith("until"):
        text = re.sub(r"generation_kwargs: .*", "generation_kwargs: {" + text + "}", whole)
    elif text == "doc_to_text":
        text = whole.replace(
            'doc_to_text: "{{question}}"', "doc_to_text: !function x_utils.no_such"
        )
        (place.tasks / "x_utils.py").write_text("a = 1\n")
    elif text == "bad python":
        text = whole.replace("tiny_utils.load", "bad_utils.load")
        (place.tasks / "bad_utils.py").write_text("def load(:\n")
    elif text.startswith("repeats: "):
        text = whole + text
    elif text == "repeats":
        metric = "metric: !function k_utils.pass_at_k, k: [1, 8], aggregation: mean"
        metric = f"metric_list: [{{{metric}, higher_is_better: true}}]\nrepeats: 4"
        text = re.sub(r"metric_list: .*", metric, whole)
        (place.tasks / "k_utils.py").write_text("def pass_at_k(references, predictions, k): ...\n")
    (place.tasks / "odd.yaml").write_text(text)
    flags = ("--tasks", "odd")
    refused(capsys, words, *arguments(place, flags))
    if "cannot be loaded" not in words[0]:
        flags = ("--tasks", place.tasks / "odd.yaml")
        refused(capsys, words, *arguments(place, flags))


@pytest.mark.parametrize(
    "tasks",
    ["tiny_task,wild_*", "tiny_task,FOLDER/wild.yaml", "FOLDER/*.yaml", "tiny_task,wild_?ne"],
)
def test_samples_of_tasks_that_are_named_by_a_wildcard_or_a_file(place, capsys, no_model, tasks):
    """They were refused as not among --tasks; a document that is not there still is."""
    text = (place.tasks / "tiny_task.yaml").read_text().replace("tiny_task", "wild_one")
    (place.tasks / "wild.yaml").write_text(text)
    tasks = tasks.replace("FOLDER", str(place.tasks))
    given = ["--tasks", tasks, "--samples"]
    words = "--samples: wild_one has no document 4"
    refused(capsys, words, *arguments(place, [*given, '{"tiny_task": [0], "wild_one": [4]}']))
    words = ["--samples: other is not among --tasks", "wild_one"]
    refused(capsys, words, *arguments(place, [*given, '{"wild_one": [0], "other": [0]}']))


GROUP = """group: odd_group
task:
  - group: inner
    task: [tiny_task]
"""


@pytest.mark.parametrize(
    ("task", "flags", "words"),
    [
        ("", ("--tasks", "odd_group,tiny_task"), ["Duplicate task 'tiny_task'", "leave one"]),
        ("num_fewshot: 9\n", (), ["num_fewshot", "Sample larger than population"]),
        (
            "num_fewshot: 9\nfewshot_config: {sampler: first_n}\n",
            (),
            ["num_fewshot", "exceeds the 4 that are available", "lower it"],
        ),
    ],
)
def test_what_lm_eval_refuses_once_models_are_loaded(place, capsys, task, flags, words):
    """They ended in its traceback."""
    (place.tasks / "group.yaml").write_text(GROUP)
    file = place.tasks / "tiny_task.yaml"
    file.write_text(file.read_text() + task)
    refused(capsys, words, *arguments(place, flags))


DATA = [
    ("{oops", "row 2: not valid JSON"),
    ('{"question": "q"}', "answer is missing (gsm8k_test.jsonl, row 2)"),
    ("[]", "[] (gsm8k_test.jsonl, row 2): input should be a valid dictionary"),
    ('{"question": "q", "answer": "a", "answer": "b"}', "key 'answer' is there twice"),
    ('{"question": "q", "answer": ' + DIGITS + "}", "row 2: a number has too many digits"),
    ('{"question": "q", "answer": ' + DEEP, "row 2: not valid JSON: nested too deeply"),
    ('{"question": "\\ud800", "answer": "a"}', ["row 2", "\\ud800"]),
    ('{"question": 5, "answer": "a"}', "question=5 (gsm8k_test.jsonl, row 2)"),
]


@pytest.mark.parametrize(("row", "words"), DATA)
def test_data_of_a_task(
    place,
    tmp_path,
    capsys,
    no_model,
    monkeypatch,
    row,
    words,
):
    file = tmp_path / "gsm8k_test.jsonl"
    file.write_text('{"question": "q", "answer": "#### 1"}\n' + row + "\n")
    monkeypatch.setenv("FLY_DATA_DIR", str(tmp_path))
    flags = ("--tasks", "gsm8k_cot")
    refused(capsys, words, *arguments(place, flags))


# ------------------------------------------------------------------------- model folders


def _cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def _without(*names):
    def change(path):
        tensors = load_file(path)
        for name in names:
            del tensors[name]
        save_file(tensors, path, metadata={"format": "pt"})

    return change


def _shaped_otherwise(path):
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, path, metadata={"format": "pt"})


def _all_nan(path):
    tensors = load_file(path)
    tensors["model.norm.weight"] *= float("nan")
    save_file(tensors, path, metadata={"format": "pt"})


WEIGHTS = "model.safetensors"
MODEL_FILES = [
    (WEIGHTS, b"", [WEIGHTS, "is empty", "fetch it again"]),
    (WEIGHTS, POINTER, [WEIGHTS, "git-lfs pointer", "git lfs pull"]),
    (WEIGHTS, b"<html>not found</html>", [WEIGHTS, "cut short", "fetch it again"]),
    (WEIGHTS, b"\x08\0\0\0\0\0\0\0[1,2,3] ", [WEIGHTS, "cut short, or no file of its kind"]),
    (WEIGHTS, _cut, [WEIGHTS, "is cut short", "fetch it again"]),
    (WEIGHTS, None, ["cannot be loaded", WEIGHTS]),
    (WEIGHTS, _without("model.norm.weight"), ["lacks model.norm.weight", "fetch the model again"]),
    (
        WEIGHTS,
        _without(
            "model.layers.1.input_layernorm.weight",
            "model.layers.1.post_attention_layernorm.weight",
        ),
        ["lacks model.layers.1.input_layernorm.weight, model.layers.1.post_attention_layernorm"],
    ),
    (WEIGHTS, _without("lm_head.weight"), "lacks lm_head.weight"),
    (WEIGHTS, _shaped_otherwise, ["cannot be loaded"]),
    (WEIGHTS, _all_nan, ["not finite", "fetch the model again"]),
    ("config.json", b"{", ["config.json", "cut short"]),
    ("config.json", b"[]", ["config.json", "holds no JSON object"]),
    ("config.json", POINTER, ["config.json", "git-lfs pointer"]),
    ("config.json", b"{}", ["cannot be loaded"]),
    ("config.json", b'{"model_type": "nonsense"}', ["cannot be loaded", "nonsense"]),
    ("config.json", b'{"model_type": "qwen2", "hidden_size": "x"}', ["cannot be loaded"]),
    ("config.json", None, ["no config.json"]),
    ("tokenizer.json", b"", ["tokenizer.json", "is empty"]),
    ("tokenizer.json", b"{", ["tokenizer.json", "cut short"]),
    ("tokenizer.json", b"{}", ["cannot be loaded"]),
    ("tokenizer_config.json", b"[]", ["tokenizer_config.json", "holds no JSON object"]),
]


@pytest.fixture
def odd_pair(saved_pair, tmp_path):
    return shutil.copytree(saved_pair, tmp_path / "odd")


def decode(pair, tasks, model_args=""):
    """A run that loads the pair and decodes one document."""
    paths = f"target_model_path={pair / 'target'},pretrained={pair / 'draft'},spd_k=4,win_len=1"
    return [
        "run", "--model", "fly", "--device", "cpu", "--tasks", "tiny_task", "--limit", "1",
        "--include_path", tasks, "--gen_kwargs", "max_gen_toks=4",
        "--model_args", f"{paths},dtype=float32,draft_policy=fixed,{model_args}".rstrip(","),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "words"), MODEL_FILES)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_model_folders(odd_pair, task_dir, capsys, role, name, content, words):  # noqa: F811
    file = odd_pair / role / name
    if content is None:
        file.unlink()
    elif isinstance(content, bytes):
        file.write_bytes(content)
    else:
        content(file)
    field = {"target": "target_model_path", "draft": "pretrained"}[role]
    assert field in refused(capsys, words, *decode(odd_pair, task_dir))


def test_tied_weights_are_stored_once(odd_pair, task_dir):  # noqa: F811
    """The head is not in the file, and is not missed."""
    for role in ("target", "draft"):
        config = odd_pair / role / "config.json"
        values = json.loads(config.read_text())
        config.write_text(json.dumps({**values, "tie_word_embeddings": True}))
        _without("lm_head.weight")(odd_pair / role / WEIGHTS)
    assert run(*decode(odd_pair, task_dir)) == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (POINTER, "git-lfs pointer"),
        (b"<html>", "no GGUF file"),
        (b"GGUF", ["cannot be loaded", "fetch it again"]),
        (
            b"GGUF\x03\0\0\0" + b"\x05" + b"\0" * 7 + b"\x02" + b"\0" * 7,
            ["cannot be loaded", "fetch it again"],
        ),
        (b"GGUF\xff\xff\xff\xff" + b"\xff" * 64, ["cannot be loaded", "fetch it again"]),
    ],
)
def test_gguf_files(saved_pair, task_dir, tmp_path, capsys, content, words):  # noqa: F811
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    arguments = decode(saved_pair, task_dir, f"target_model_path={file}")
    assert "model.gguf" in refused(capsys, words, *arguments)


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(
    "more", ["", "temperature=1.0", tiny.slow("drafter=cascade"), tiny.slow("verification=top_k")]
)
def test_logits_that_are_no_numbers(odd_pair, task_dir, capsys, role, more):  # noqa: F811
    """One embedding, of a byte that the self-check at load does not feed."""
    file = odd_pair / role / WEIGHTS
    tensors = load_file(file)
    token = tiny.byte_tokenizer().convert_tokens_to_ids("~")
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    assert run(*decode(odd_pair, task_dir)) == 0
    utils = task_dir / "tiny_utils.py"
    utils.write_text(utils.read_text().replace("q{i} ", "a~c"))
    field = {"target": "target_model_path", "draft": "pretrained"}[role]
    words = [field, "not finite", "task tiny_task, doc 0, after 0 new tokens", "dtype=float32"]
    refused(capsys, words, *decode(odd_pair, task_dir, more))


# ------------------------------------------------------------------------- finished runs

REMOVED = object()


def changed(value, path, new):
    """The JSON value with the entry at `path` replaced or removed."""
    if not path:
        return new
    copy = list(value) if isinstance(value, list) else dict(value)
    if new is REMOVED and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(copy[path[0]] if path[1:] else None, path[1:], new)
    return copy


def spoil(file, path, new):
    """One value of a JSON file or of the first line of a JSONL file; a text replaces it whole."""
    if not path:
        file.write_text(new)
        return
    first, *rest = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    lines = [json.dumps(changed(json.loads(first), path, new)), *rest]
    file.write_text("\n".join(lines) + "\n")


RUN = [
    ("results_", [], "", "not valid JSON"),
    ("results_", [], "[]", "must hold one JSON object, got list"),
    ("results_", [], "{}", "not a results file"),
    ("results_", [], '{"config": {}, "config": {}}', "'config' is there twice"),
    ("results_", [], '{"a": ' + DEEP, "nested too deeply"),
    ("results_", [], '{"a": ' + DIGITS + "}", "too many digits"),
    ("results_", ["results"], REMOVED, "results is missing"),
    ("results_", ["results"], [1], "results=[1]"),
    ("results_", ["results", "sums"], 3, "results.sums=3"),
    ("results_", ["configs"], "text", "configs='text'"),
    ("results_", ["configs", "sums"], None, "configs.sums=None"),
    ("results_", ["configs"], {"../x": {}}, "configs"),
    ("results_", ["config"], [], "not a results file"),
    ("results_", ["config", "model"], 5, "config.model=5"),
    ("results_", ["config", "model_args"], [1], "config.model_args"),
    ("results_", ["config", "fly"], "x", "config.fly='x'"),
    ("results_", ["config", "fly", "mode"], REMOVED, "config.fly.mode is missing"),
    ("results_", ["config", "fly", "config"], [], "config.fly.config=[]"),
    ("results_", ["config", "fly", "config"], {}, "config.fly.config.target_model_path is missing"),
    ("results_", ["config", "fly", "started"], "../../*", "config.fly.started='../../*'"),
    ("results_", ["config", "fly", "sampling"], [{}], "config.fly.sampling.0.temperature"),
    ("results_", ["n-shot", "sums"], "five", "n-shot.sums='five'"),
    ("results_", ["versions"], [], "versions=[]"),
    ("results_", ["higher_is_better", "sums"], True, "higher_is_better.sums=True"),
    ("samples_", [], "{\n", "line 1: not valid JSON"),
    ("samples_", [], "[1]\n", "samples_"),
    ("samples_", [], "\n", "line 1: not valid JSON"),
    ("samples_", [], b"\xff\n".decode("latin-1"), "line 1: not valid JSON"),
    ("samples_", ["doc_id"], "0", "doc_id='0'"),
    ("samples_", ["doc_id"], REMOVED, "doc_id is missing"),
    ("samples_", ["filter"], None, "filter=None"),
    ("samples_", ["metrics"], {"a": 1}, "metrics={'a': 1}"),
    ("samples_", ["metrics"], [1], "metrics.0=1"),
    ("samples_", ["doc_hash"], 5, "doc_hash=5"),
    ("samples_", ["arguments"], [], "arguments=[]"),
    ("samples_", ["arguments", "gen_args_0"], "x", "arguments.gen_args_0='x'"),
    ("samples_", ["resps"], [3], "resps.0"),
    ("samples_", ["filtered_resps"], 3, "filtered_resps=3"),
    ("samples_", ["target"], ["t"], "target=['t']"),
    ("fly_requests_", [], "{\n", "line 1: not valid JSON"),
    ("fly_requests_", ["task"], 1, "task=1"),
    ("fly_requests_", ["doc_id"], REMOVED, "doc_id is missing"),
    ("fly_requests_", ["emitted"], "12", "emitted='12'"),
    ("fly_requests_", ["rounds"], -1, "rounds=-1"),
    ("fly_requests_", ["seconds"], 1.5, "seconds=1.5"),
    ("fly_requests_", ["sources"], {"a friend": {"drafted": 1, "accepted": 1}}, "sources.a friend"),
    ("fly_requests_", ["sources"], {"own_text": {"drafted": 1}}, "sources.own_text.accepted"),
    ("fly_requests_", ["sources"], {"sibling": {"drafted": -1, "accepted": 0}}, "drafted=-1"),
    ("fly_requests_", ["seconds", "verify"], REMOVED, "seconds.verify is missing"),
    ("fly_requests_", ["seconds", "draft"], -1, "seconds.draft=-1"),
]


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    shape = {"spd_k": 6, "win_len": 2, "trace": traced_runs.lines()}
    for mode, uses_sd in (("target-only", False), ("fly", True)):
        write_run(root / mode, {"sums": [1.0, 0.0, 1.0]}, use_sd=uses_sd, **shape)
    date = next((root / "fly").glob("fly_trace_*")).name.removeprefix("fly_trace_")
    known = [{"id": 7, "bytes": "c3"}, *({"id": i, "text": str(i)} for i in (1, 2, 3, 4, 5, 6))]
    written_runs.write_lines(root / "fly" / f"fly_vocabulary_{date}", known)
    return root


@pytest.mark.parametrize(("name", "path", "new", "words"), RUN)
def test_files_of_finished_runs(two_runs, tmp_path, capsys, name, path, new, words):
    runs = shutil.copytree(two_runs, tmp_path / "runs")
    file = next((runs / "fly").glob(f"{name}*"))
    spoil(file, path, new)
    both = (runs / "target-only", runs / "fly")
    assert str(file) in refused(capsys, words, "compare", *both)
    refused(capsys, words, "report", *both, "--output", tmp_path / "x.html")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


TRACE = [
    ("fly_trace_", [], "{\n", "line 1: not valid JSON"),
    ("fly_trace_", [], "null\n", "fly_trace_"),
    ("fly_trace_", ["draft"], "abc", "draft='abc'"),
    ("fly_trace_", ["draft"], [1.5], "draft.0=1.5"),
    ("fly_trace_", ["native"], "2", "native='2'"),
    ("fly_trace_", ["native"], "1", "cannot be replayed"),
    ("fly_trace_", ["choice"], [], "choice=[]"),
    ("fly_trace_", ["choice"], [1], "cannot be replayed"),
    ("fly_trace_", ["by"], "d", "cannot be replayed"),
    ("fly_trace_", ["by"], "dq", "by='dq'"),
    ("fly_trace_", ["start"], 7, "cannot be replayed"),
    ("fly_trace_", ["round"], None, "round=None"),
    ("fly_trace_", ["rolled_back"], "x", "rolled_back='x'"),
    ("fly_trace_", ["entropy"], [0.1], "cannot be replayed"),
    ("fly_trace_", ["request"], REMOVED, "request is missing"),
    ("fly_vocabulary_", [], "[]\n", "fly_vocabulary_"),
    ("fly_vocabulary_", ["id"], "1", "id='1'"),
    ("fly_vocabulary_", ["text"], 5, "text=5"),
    ("fly_vocabulary_", ["bytes"], "zz", "bytes='zz'"),
]


@pytest.mark.parametrize(("name", "path", "new", "words"), TRACE)
def test_traces_of_finished_runs(two_runs, tmp_path, capsys, name, path, new, words):
    run_folder = shutil.copytree(two_runs / "fly", tmp_path / "runs" / "fly")
    file = next(run_folder.glob(f"{name}*"))
    spoil(file, path, new)
    refused(capsys, words, "report", run_folder, "--output", tmp_path / "x.html")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_names_of_results_files(two_runs, tmp_path, capsys):
    runs = shutil.copytree(two_runs / "fly", tmp_path / "fly")
    file = next(runs.glob("results_*"))
    renamed = file.rename(runs / "mine.json")
    refused(capsys, ["mine.json", "results_DATE.json"], "compare", renamed, two_runs / "fly")
    refused(capsys, "mine.json", "report", renamed, "--output", tmp_path / "x.html")
    next(runs.glob("samples_*")).unlink()
    refused(capsys, "run with --log_samples", "compare", renamed.rename(file), two_runs / "fly")


BASELINE = [
    ([], "", "not valid JSON"),
    ([], "[]", "must hold one JSON object"),
    ([], "{}", ["not a baseline file", "--save-baseline"]),
    ([], '{"a": 1, "a": 1}', "'a' is there twice"),
    ([], DEEP, "nested too deeply"),
    (["format"], 2, "format=2"),
    (["extra"], 1, "extra=1"),
    (["target"], {}, "target={}"),
    (["target", "files"], REMOVED, "at least 4 items"),
    (["target"], [], "target=[]"),
    (["decoding"], [], "decoding=[]"),
    (["tasks"], 3, "tasks=3"),
    (["tasks", "sums", "documents"], {"x": {}}, "tasks.sums.documents.x"),
    (["tasks", "sums", "metrics", 0, "scores", "0"], float("nan"), "scores.0=nan"),
    (["tasks", "sums", "metrics", 0, "scores", "0"], "high", "scores.0='high'"),
    (["tasks", "sums", "metrics", 0, "scores", "0"], 1e308, ["scores.0=1e+308", "less than"]),
    (["tasks", "sums", "metrics", 0, "scores", "0"], -1e308, ["scores.0=-1e+308", "greater"]),
    (["tasks", "sums", "metrics", 0, "scores"], {}, "sums: its scores are not of its documents"),
    (["tasks", "sums", "documents"], {}, "sums: its scores are not of its documents"),
    (["tasks", "sums", "work", "0", "decode"], None, "work.0.decode=None"),
    (["tasks", "sums", "version"], [], "tasks.sums.version=[]"),
    (["tasks"], {}, "sums"),
    (["mode"], "fly", "no baseline"),
]


@pytest.fixture(scope="module")
def baseline(two_runs):
    file = two_runs / "baseline.json"
    assert run("compare", two_runs / "target-only", "--save-baseline", file) == 0
    return file


@pytest.mark.parametrize(("path", "new", "words"), BASELINE)
def test_baseline_files(two_runs, baseline, tmp_path, capsys, path, new, words):
    file = shutil.copy(baseline, tmp_path / "b.json")
    values = json.loads(file.read_text())
    if path == ["extra"]:
        file.write_text(json.dumps({**values, "extra": new}))
    else:
        spoil(file, path, new)
    refused(capsys, words, "compare", two_runs / "fly", "--baseline", file)


COMPARE = [
    ([], "fly compare needs --tasks"),
    (["ONE"], "give at least two runs"),
    (["ONE", "/nowhere"], "/nowhere: no such run"),
    (["ONE", "TWO", "--tasks", "a"], "--tasks: finished runs are compared as they are"),
    (["ONE", "TWO", "--min-recovery", "0"], "min_recovery=0"),
    (["ONE", "TWO", "--min-recovery", "1.01"], "min_recovery=1.01"),
    (["ONE", "TWO", "--min-recovery", "nan"], "min_recovery=nan"),
    (["ONE", "TWO", "--confidence", "1"], "confidence=1"),
    (["ONE", "TWO", "--confidence", "much"], ["--confidence", "'much'", "fly compare --help"]),
    (["ONE", "TWO", "--metric", "nope"], ["--metric nope", "exact_match"]),
    (["ONE", "TWO", "--baseline-run", "nope"], ["--baseline-run nope", "target-only"]),
    (["ONE", "TWO", "--baseline", "/nowhere"], "--baseline /nowhere: cannot be read"),
    (["ONE", "TWO", "--json", "/dev/null/x"], "--json=/dev/null: cannot be written"),
    (["ONE", "TWO", "--json", "/tmp"], "--json /tmp: is a folder"),
    (["ONE", "TWO", "--json", "/dev/full"], "--json /dev/full: cannot be written: No space left"),
    (["ONE", "TWO", "--csv", "/tmp/x.csv"], "--csv: it is of servers' runs"),
    (["ONE", "TWO", "--concurrency", "1", "4"], "--concurrency: finished runs are compared as"),
    (["ONE", "TWO", "--parallel"], "--parallel: finished runs are compared as they are"),
    (["ONE", "TWO", "--frobnicate"], ["--frobnicate", "--help"]),
    (["ONE", "TWO", "--json"], ["--json", "expected one argument"]),
    (["ONE", "TWO", "--json=~nosuchuser/x"], ["--json", "~nosuchuser/x: no such user"]),
    (["ONE", "TWO", "--output_path", "/tmp"], "--output_path: finished runs are compared as they"),
]


@pytest.mark.parametrize(("flags", "words"), COMPARE)
def test_flags_of_compare(two_runs, capsys, flags, words):
    named = {"ONE": two_runs / "target-only", "TWO": two_runs / "fly"}
    refused(capsys, words, "compare", *(named.get(flag, flag) for flag in flags))


OUTPUTS = [
    (["report", "ONE", "TWO"], "--output"),
    (["compare", "ONE", "TWO"], "--json"),
    (["compare", "ONE", "TWO"], "--markdown"),
    (["compare", "ONE", "TWO"], "--junit"),
    (["compare", "ONE", "TWO"], "--save-baseline"),
    (["compare", "ONE", "TWO", "--matrix"], "--json"),
    (["compare", "ONE", "TWO", "--matrix"], "--markdown"),
]


@pytest.mark.parametrize(("command", "flag"), OUTPUTS)
def test_only_what_a_flag_wrote_is_written_over(two_runs, tmp_path, capsys, command, flag):
    """A run was lost to a report that was given the name of its results."""
    runs = shutil.copytree(two_runs, tmp_path / "runs")
    named = {"ONE": runs / "target-only", "TWO": runs / "fly"}
    command = [named.get(word, word) for word in command]
    own = tmp_path / "own"
    own.touch()  # as mktemp does
    for _ in range(2):
        assert run(*command, flag, own) == 0
        assert own.stat().st_size > 0
    files = [file for folder in (runs / "target-only", runs / "fly") for file in folder.iterdir()]
    before = {file: file.read_bytes() for file in files}
    link = tmp_path / "link"
    link.symlink_to(files[0])
    for file in [*files, link]:
        words = [f"{flag} {file}: is there already", "add --force"]
        refused(capsys, words, *command, flag, file)
    assert {file: file.read_bytes() for file in files} == before
    other = tmp_path / "other"
    other.write_text("by hand")
    assert run(*command, flag, other, "--force") == 0
    assert other.read_bytes()[:9] == own.read_bytes()[:9]


def test_two_flags_do_not_write_one_file(two_runs, tmp_path, capsys):
    runs = (two_runs / "target-only", two_runs / "fly")
    given = ("--json", tmp_path / "a", "--markdown", tmp_path / "x" / ".." / "a")
    refused(capsys, "--json names the same file", "compare", *runs, *given)


MODES = [
    (["--mode", "x=spdk=3"], "did you mean 'spd_k'"),
    (["--mode", "x=spd_k=many"], "spd_k='many'"),
    (["--mode", "x=spd_k=3,spd_k=4"], "--mode x 'spd_k=3,spd_k=4': a key is given twice"),
    (["--mode", "x=spd_k=3,win_len"], "expected `key=value`"),
    (["--mode", "x"], "write it as NAME=key=value"),
    (["--mode", "fly=spd_k=3"], "the name fly is taken"),
    (["--mode", "x=draft_device=banana"], "draft_device=banana"),
    (["--mode", "x=dtype=banana"], "dtype=banana"),
    (["--mode", "x=win_len=9"], "lower win_len or raise spd_k"),
    (["--mode", "x=pretrained=/nowhere"], "pretrained=/nowhere: no such folder"),
    (["--mode", "x=target_model_path="], "names no model"),
    (["--modes", "fast"], "--modes fast: choose from"),
    (["--modes", "fly"], "give at least two"),
    (["--baseline-run", "x"], "--baseline-run x: choose one of"),
    (["--limit", "0"], "limit=0.0"),
    (["--batch_size", "0"], "batch_size='0'"),
    (["--samples", '{"tiny_task": [9]}'], "no document 9"),
    (["--gen_kwargs", "until=5"], "until.0=5"),
    (["--seed", "-1"], "seed.0=-1"),
    (["--config", "/nowhere.yaml"], "--config /nowhere.yaml: cannot be read: No such file"),
    (["--output_path", "/dev/null/x"], "cannot be written"),
]


@pytest.mark.parametrize(("flags", "words"), MODES)
def test_modes_are_checked_before_the_first_runs(
    place,
    tmp_path,
    capsys,
    monkeypatch,
    flags,
    words,
):
    monkeypatch.setattr("fly.cli.run_modes.run_children", lambda *args: pytest.fail("ran"))
    defaults = {"--output_path": tmp_path / "out"}
    if flags[0] in defaults:
        defaults = {}
    given = arguments(place, flags)[1:]
    given = given[2:]  # without --model
    refused(capsys, words, "compare", *given, *(p for pair in defaults.items() for p in pair))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [(WEIGHTS, POINTER, "git-lfs pointer"), ("config.json", b"{", "config.json")],
)
def test_a_draft_that_is_damaged_is_met_before_the_first_mode_runs(
    odd_pair,
    place,
    tmp_path,
    capsys,
    monkeypatch,
    name,
    content,
    words,
):
    monkeypatch.setattr("fly.cli.run_modes.run_children", lambda *args: pytest.fail("ran"))
    (odd_pair / "draft" / name).write_bytes(content)
    given = arguments(place._replace(pair=odd_pair))[3:]
    refused(capsys, words, "compare", *given, "--output_path", tmp_path / "out")


# ------------------------------------------------------------------------- other commands

OTHERS = [
    (["tune"], ["required", "fly tune --help"]),
    (["tune", "CONFIG", "TUNE", "--limit", "0"], "limit=0"),
    (["tune", "CONFIG", "TUNE", "--candidates", "0"], "candidates=0"),
    (["tune", "CONFIG", "TUNE", "--max_gen_toks", "1"], "--max_gen_toks 1"),
    (["tune", "CONFIG", "TUNE", "--min-recovery", "nan"], "min_recovery=nan"),
    (["tune", "CONFIG", "TUNE", "--batch_size", "2"], "--batch_size 2"),
    (["tune", "CONFIG", "TUNE", "--model_args", "batch_size=4"], "--model_args batch_size=4"),
    (["tune", "CONFIG", "TUNE", "--model_args", "config_path=x"], "--model_args config_path=x"),
    (["tune", "CONFIG", "TUNE", "--num_fewshot", "-1"], "num_fewshot=-1"),
    (["tune", "CONFIG", "TUNE", "--device", "banana"], "--device=banana"),
    (["tune", "CONFIG", "TUNE", "--output", "x.txt"], "--output x.txt"),
    (["tune", "CONFIG", "TUNE", "--output", "/dev/null/x.json"], "cannot be written"),
    (["tune", "CONFIG", "TUNE", "--model_args", "spdk=3"], "did you mean 'spd_k'"),
    (["tune", "CONFIG", "TUNE", "--model_args", "dtype=banana"], "dtype=banana"),
    (["tune", "/nowhere.json", "TUNE"], "no such file"),
    (["pair", "fetch"], ["name", "fly pair fetch --help"]),
    (["pair", "fetch", "nope"], "known pairs are qwen2.5-coder"),
    (["pair", "path", ""], "known pairs are qwen2.5-coder"),
    (["pair", "steal"], ["steal", "fetch"]),
    (["report"], ["RUN", "fly report --help"]),
    (["report", "/nowhere"], "/nowhere: no such run"),
    (["report", "/dev/null"], "/dev/null"),
    (["report", LONG], "so long a name"),
    (["report", "a", "--output", LONG], "so long a name"),
    (["compare", LONG, "b"], "so long a name"),
    (["compare", "a", "b", "--json", LONG], "so long a name"),
    (["config", "check", LONG], "so long a name"),
    (["ls", "tasks", "--include_path", LONG], "so long a name"),
    (["report", "a", "--traces", "-1"], "--traces -1"),
    (["report", "a", "--output", "/"], "--output /: is a folder"),
    (["plot", "runs/", "--output", "figures"], "fly report RUN..."),
    (["plot"], "fly report RUN..."),
    (["trace", "abc"], "fly report RUN"),
    (["config", "check"], ["file", "fly config check --help"]),
    (["config", "cheque"], ["cheque", "check"]),
    (["banana", "split"], ["banana", "fly --help"]),
    (["validate"], ["--tasks", "fly validate --help"]),
]


@pytest.mark.parametrize(("flags", "words"), OTHERS)
def test_other_commands(
    place,
    tmp_path,
    capsys,
    no_model,
    monkeypatch,
    flags,
    words,
):
    monkeypatch.chdir(tmp_path)
    draft = f"pretrained={place.pair / 'draft'}"
    pair = ["--model_args", f"{draft},config_path={place.config}"]
    tune = ["--tasks", "tiny_task", "--limit", "2", "--output", "new.json", "--include_path"]
    tune += [place.tasks, "--model_args", draft]
    named = {"PAIR": pair, "TUNE": tune, "CONFIG": [place.config]}
    refused(capsys, words, *(part for flag in flags for part in named.get(flag, [flag])))
    assert not (tmp_path / "new.json").exists()


# ------------------------------------------------------------------- runs that were cut short

MANIFEST = [
    ([], "", "not valid JSON"),
    ([], "[]", "must hold one JSON object"),
    ([], '{"format": 1}', "started is missing"),
    (["format"], "1", "not a run's manifest of this version"),
    (["started"], "../x", "started='../x'"),
    (["started"], 5, "started=5"),
    (["finished"], "no", "finished='no'"),
    (["results"], 3, "results=3"),
    (["resumed"], None, "resumed=None"),
    (["working_directory"], 7, "working_directory=7"),
    (["arguments"], [], "arguments=[]"),
    (["arguments", "output_path"], REMOVED, "arguments.output_path is missing"),
    (["arguments", "limit"], 0, "limit=0"),
    (["arguments", "tasks"], 5, "tasks"),
    (["arguments", "model_args"], 5, "model_args"),
    (["arguments", "gen_kwargs"], {"until": 5}, "until.0=5"),
    (["below"], "yes", "below='yes'"),
]
RECORDS = [
    ("fly_requests_", [], "{\n", "line 1: not valid JSON"),
    ("fly_requests_", ["task"], None, "task=None"),
    ("fly_requests_", ["idx"], REMOVED, "idx is missing"),
    ("fly_requests_", ["emitted"], "x", "emitted='x'"),
    ("fly_requests_", ["prompt_tokens"], None, "prompt_tokens=None"),
    ("fly_requests_", ["seconds"], {"sleep": 1}, "seconds.prefill is missing"),
    ("fly_requests_", ["seconds", "sleep"], 1, "sleep"),
    ("fly_requests_", ["decoding"], [], "decoding was []"),
    ("fly_requests_", ["text"], 5, "text=5"),
    ("fly_trace_", ["idx"], REMOVED, "idx is missing"),
    ("fly_trace_", ["request"], "0", "request='0'"),
    ("fly_vocabulary_", ["id"], None, "id=None"),
]


@pytest.fixture(scope="module")
def cut_short(saved_pair, tmp_path_factory):
    """A run of the tiny pair, as one that was killed just before it ended."""
    root = tmp_path_factory.mktemp("cut")
    write_task(root / "tasks", documents=2)
    pair = f"target_model_path={saved_pair / 'target'},pretrained={saved_pair / 'draft'}"
    pair += ",dtype=float32,spd_k=4,win_len=1,draft_policy=fixed,trace=True"
    flags = ["--model", "fly", "--model_args", pair, "--tasks", "tiny_task", "--device", "cpu"]
    flags += ["--include_path", root / "tasks", "--limit", "2", "--output_path", root / "out"]
    assert run(*flags) == 0
    manifest = next(root.rglob("fly_run_*.json"))
    spoil(manifest, ["finished"], False)
    next(root.rglob("results_*.json")).unlink()
    return root


@pytest.mark.parametrize(("path", "new", "words"), MANIFEST)
def test_manifests(cut_short, tmp_path, capsys, no_model, path, new, words):
    out = shutil.copytree(cut_short / "out", tmp_path / "out")
    spoil(next(out.rglob("fly_run_*.json")), path, new)
    refused(capsys, words, "--resume", out)


@pytest.mark.parametrize(("name", "path", "new", "words"), RECORDS)
def test_records_of_a_run_that_goes_on(cut_short, tmp_path, capsys, name, path, new, words):
    out = shutil.copytree(cut_short / "out", tmp_path / "out")
    file = next(out.rglob(f"{name}*"))
    if path == ["seconds", "sleep"]:
        line = json.loads(file.read_text().splitlines()[0])
        path, new = ["seconds"], {**line["seconds"], "sleep": 1}
    spoil(file, path, new)
    before = {path: path.read_bytes() for path in out.rglob("*.jsonl")}
    refused(capsys, words, "--resume", out)
    assert before == {path: path.read_bytes() for path in out.rglob("*.jsonl")}


# ------------------------------------------------------------------------------- a full disk


def _full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("what", ["records", "manifest", "results"])
def test_a_full_disk(place, tmp_path, capsys, monkeypatch, what):
    """Nothing half-done is left behind, and what was finished stays."""
    if what == "records":
        written = []
        write = JsonLines.flush

        def flush(self):
            if len(written) == 2:
                _full()
            written.append(1)
            write(self)

        monkeypatch.setattr(JsonLines, "flush", flush)
    elif what == "manifest":
        monkeypatch.setattr("fly.runs.manifest.write_whole", _full)
    else:
        monkeypatch.setattr("pathlib.Path.write_text", _full)
    out = tmp_path / "out"
    words = ["results could not be saved"] if what == "results" else ["disk is full", "free some"]
    flags = ("--output_path", out)
    refused(capsys, words, *arguments(place, flags))
    assert not list(out.rglob("results_*"))
    monkeypatch.undo()
    if what != "manifest":
        assert run("--resume", out) == 0
        assert len(next(out.rglob("fly_requests_*")).read_text().splitlines()) == 4


def test_accepted_values_mean_what_they_say(place, tmp_path):
    samples = tmp_path / "samples.json"
    samples.write_text('{"tiny_task": [3, 1]}')
    flags = ["--samples", samples, "--gen_kwargs", "max_gen_toks=3.0,until=x,temperature=0"]
    flags += ["--batch_size", "2", "--seed", "None,1,2,3", "--output_path", tmp_path / "out"]
    assert run(*arguments(place, [*flags, "--log_samples"])) == 0
    lines = next((tmp_path / "out").rglob("samples_*.jsonl")).read_text().splitlines()
    found = {json.loads(line)["doc_id"]: json.loads(line)["doc"]["question"] for line in lines}
    assert found == {1: "q1 ", 3: "q3 "}
    for line in next((tmp_path / "out").rglob("fly_requests_*")).read_text().splitlines():
        assert json.loads(line)["emitted"] <= 3
