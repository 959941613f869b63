"""The pages docs/extending.md: each example is one file and one line, and works."""

import json
import re
import sys
import types
from pathlib import Path

import pytest

from fly import registry
from tests.integration.test_cli import config_file, evaluate, run, task_dir  # noqa: F401

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
MODULES: dict[str, types.ModuleType] = {}


def install(heading: str, monkeypatch) -> None:
    """What a developer does with the section: write its first block to its file, add the second,
    one line, to the registry."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    code, line = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    path = re.match(r"# (fly/[\w/]+)\.py\n", code)[1]
    place = re.match(r"# fly/registry\.py, in (\w+)\n(.+)\n$", line)
    name = path.replace("/", ".")
    is_new = name not in MODULES  # lm-eval registers a class once only
    module = MODULES.setdefault(name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, name, module)
    if is_new:
        exec(compile(code, f"{path}.py", "exec"), module.__dict__)
    (entry,) = eval(f"{{{place[2]}}}", dict(vars(registry))).items()
    monkeypatch.setitem(getattr(registry, place[1]), *entry)


def texts_and_entry(folder: Path) -> tuple[list[str], dict]:
    (samples,) = folder.rglob("samples_*.jsonl")
    (results,) = folder.rglob("results_*.json")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    texts = [line["resps"][0][0] for line in sorted(lines, key=lambda line: line["doc_id"])]
    return texts, json.loads(results.read_text())["config"]["fly"]


@pytest.fixture
def decode(saved_pair, config_file, task_dir, tmp_path):  # noqa: F811
    def decode(name: str, more_args: str, model: str = "hf") -> tuple[list[str], dict]:
        out = ("--output_path", tmp_path / name, "--log_samples")
        assert (
            evaluate(saved_pair, config_file, task_dir, *out, model=model, more_args=more_args) == 0
        )
        return texts_and_entry(tmp_path / name)

    return decode


def test_a_drafter_is_one_file_and_one_line(decode, monkeypatch):
    install("Adding a drafter", monkeypatch)
    alone, _ = decode("alone", ",use_sd=false")
    texts, entry = decode("drafted", ",verification=exact,drafter=last_token")
    assert texts == alone
    assert entry["drafter"] == "last_token"
    assert entry["draft_dtype"] is None  # no draft model was loaded
    assert 0 < entry["stats"]["native_accepted"] < entry["stats"]["drafted"]


def test_a_rule_is_one_file_and_one_line(decode, monkeypatch):
    install("Adding a verification rule", monkeypatch)
    exact, _ = decode("exact", ",verification=exact")
    narrow, _ = decode("narrow", ",verification=nucleus,nucleus_p=1e-9")
    _, entry = decode("wide", ",verification=nucleus,nucleus_p=0.999")
    assert narrow == exact  # only the likeliest token is in so small a nucleus
    assert entry["mode"] == "nucleus"
    assert entry["config"]["nucleus_p"] == 0.999
    assert entry["stats"]["deferred_accepted"] > 0


@pytest.mark.parametrize("rule", ["nucleus", "exact"])
@pytest.mark.parametrize(
    ("key", "message"),
    [("nucleus_p=2", "nucleus_p=2"), ("nucleus_q=0.5", "did you mean 'nucleus_p'")],
)
def test_a_rules_own_keys_are_checked(
    saved_pair, monkeypatch, tmp_path, capsys, key, message, rule
):
    """Also while another rule is in force, as in the exact mode of fly compare."""
    install("Adding a verification rule", monkeypatch)
    name, value = key.split("=")
    file = tmp_path / "pair.json"
    target = str(saved_pair / "target")
    values = {"target_model_path": target, "verification": rule, name: float(value)}
    file.write_text(json.dumps(values))
    assert run("config", "check", file) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("refused", ["", ",use_sd=false,temperature=0.7"])
def test_an_engine_refuses_what_it_cannot_do(
    saved_pair,
    config_file,  # noqa: F811
    task_dir,  # noqa: F811
    monkeypatch,
    capsys,
    refused,
):
    install("Adding an engine", monkeypatch)
    if "temperature" in refused:
        yaml = task_dir / "tiny_task.yaml"
        yaml.write_text(yaml.read_text().replace(", do_sample: false", ""))
    code = evaluate(saved_pair, config_file, task_dir, model="fly_generate", more_args=refused)
    assert code == 2
    assert "--model fly_generate" in capsys.readouterr().err


def test_a_rules_keys_are_unknown_without_it(saved_pair, tmp_path, capsys):
    file = tmp_path / "pair.json"
    file.write_text(json.dumps({"target_model_path": str(saved_pair / "target"), "nucleus_p": 0.5}))
    assert run("config", "check", file) == 2
    assert "unknown key 'nucleus_p'" in capsys.readouterr().err


def test_an_engine_is_one_file_and_one_line(decode, monkeypatch, tmp_path):
    install("Adding an engine", monkeypatch)
    own, _ = decode("own", ",use_sd=false")
    texts, entry = decode("generated", ",use_sd=false", model="fly_generate")
    assert texts == own
    assert entry["stats"]["requests"] == len(own)
    assert run("compare", tmp_path / "own", tmp_path / "generated") == 0
