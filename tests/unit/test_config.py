"""Every refusal is one line that names the field, the value and the fix."""

import json
import re

import pytest

from fly import config
from fly.cli.main import FlyCLI
from fly.errors import FlyError
from fly.paths import data_dir
from fly.runs import resume
from fly.settings import GONE
from tests.integration.test_cli import run


def write(tmp_path, text):
    path = tmp_path / "pair.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return str(path)


GOOD = {"target_model_path": "t", "draft_model_path": "d"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("{", "not valid JSON at column 2"),
        ("[1]", "must hold one JSON object, got list"),
        ({}, "target_model_path is missing"),
        ({**GOOD, "spdk": 3}, "unknown key 'spdk'.*did you mean 'spd_k'"),
        ({**GOOD, "spd_k": "8"}, "spd_k='8'.*valid integer"),
        ({**GOOD, "spd_k": -1}, "spd_k=-1.*greater than or equal to 0"),
        ({**GOOD, "spd_k": 6, "win_len": 8}, r"win_len=8 needs spd_k >= 9, got 6.*lower win_len"),
        ({**GOOD, "entropy_thre": -0.1}, "entropy_thre=-0.1"),
        (
            {**GOOD, "entropy_kind": "normalized", "entropy_thre": 1.5},
            "normalized entropy lies between 0 and 1",
        ),
        ({**GOOD, "think_tokens": ["|", "|"]}, r"think_tokens=\['\|', '\|'\]: .* two different"),
        ({**GOOD, "min_ngram_size": 5}, "min_ngram_size=5 is above max_ngram_size=4"),
        ({**GOOD, "drafter": "model", "use_ngram": True}, "drafter='model' contradicts"),
        (
            {**GOOD, "drafter": "model", "draft_runs": ["a"]},
            "draft_runs with drafter='model'",
        ),
        ({**GOOD, "draft_runs": ["a", ""]}, r"draft_runs\.1=''.*at least 1 character"),
        ({**GOOD, "draft_runs": True}, "draft_runs=True.*valid list"),
    ],
)
def test_bad_files_get_one_clear_line(tmp_path, values, message):
    with pytest.raises(FlyError, match=message) as caught:
        config.load(write(tmp_path, values))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"verification": "typical", "enable_fly": False}, "'typical' contradicts enable_fly=fal"),
        ({"window_rule": "reference", "defer_across_rounds": True}, "knows no window across"),
        ({"margin_thre": 1.5}, r"margin_thre=1\.5.*less than or equal to 1"),
        ({"verification": "loose"}, "verification='loose'.*'fly', 'exact', 'typical'"),
        ({"temperature": float("inf")}, "temperature=inf.*finite"),
    ],
)
def test_rules_that_contradict_are_refused(tmp_path, values, message):
    with pytest.raises(FlyError, match=message):
        config.build({**GOOD, **values}, "x.json")


@pytest.mark.parametrize("name", GONE)
@pytest.mark.parametrize("shown", ["{}", "own,{}", "[{}, own]"])
def test_what_is_gone_names_its_successor(name, shown):
    key, _, value = name.partition("=")
    given = {key: shown.format(value)}
    with pytest.raises(FlyError, match=re.escape(GONE[name])) as caught:
        config.build({**GOOD, **given}, "here")
    assert str(caught.value).startswith(f"{name} (here)")
    assert "\n" not in str(caught.value)
    with pytest.raises(FlyError, match=re.escape(GONE[name])):
        config.split_model_args(given)


@pytest.mark.parametrize("name", [name for name in GONE if name.startswith(("--", "fly "))])
def test_a_flag_or_command_that_is_gone_names_its_successor(name, capsys):
    flag = ["config", "check", "x.json", f"{name}=1"]
    assert run(*(flag if name.startswith("--") else name.split()[1:])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"fly: error: {name} (command line) is no longer supported: {GONE[name]}"


def test_windows_across_rounds_need_no_room():
    wide = {**GOOD, "spd_k": 4, "win_len": 6}
    assert config.build({**wide, "defer_across_rounds": True}, "x.json").mode == "fly"
    with pytest.raises(FlyError, match="defer_across_rounds=true"):
        config.build(wide, "x.json")


@pytest.mark.parametrize(
    ("key", "given", "value"),
    [
        ("draft_quantization", None, "none"),  # how lm-eval's API hands on `=None`
        ("draft_quantization", "none", "none"),
        ("margin_thre", "None", None),
        ("margin_thre", None, None),
        ("top_p", "0.9", 0.9),
        ("draft_rank_max", "2", 2),
        ("defer_across_rounds", "True", True),
        ("defer_across_rounds", "perhaps", "perhaps"),  # to be refused
        ("exact_first_tokens", "4", 4),
        ("exact_pattern", "none", None),
        ("compile", False, "off"),
    ],
)
def test_command_line_values_of_every_kind(key, given, value):
    result = config.coerce(key, given)
    assert result == value
    assert type(result) is type(value)


def test_a_whole_number_is_the_same_configuration_as_its_float():
    one, same = (config.build({**GOOD, "margin_thre": value}, "x") for value in (1, 1.0))
    assert one.hash() == same.hash()


@pytest.mark.parametrize(
    ("given", "runs"),
    [
        ("a", ["a"]),
        ("runs/a,b", ["runs/a", "b"]),
        ("[a, b]", ["a", "b"]),
        ("['a', 'b']", ["a", "b"]),
        (["a,b"], ["a,b"]),
        (2026, ["2026"]),
        ([2026, "a"], ["2026", "a"]),
        ("none", None),
    ],
)
def test_earlier_runs_are_a_list_however_they_are_given(given, runs):
    found = config.resolve(None, {**GOOD, "drafter": "ngram", "draft_runs": given}, log=False)
    assert found.draft_runs == runs


@pytest.mark.parametrize(
    ("text", "bracketed", "keys"),
    [
        ("draft_runs=a,b", "draft_runs=[a,b]", {"draft_runs": "[a,b]"}),
        ("x=1,draft_runs=a,b,y=2", "x=1,draft_runs=[a,b],y=2",
         {"x": 1, "draft_runs": "[a,b]", "y": 2}),
        ("x=1,draft_runs=[a,b],y=2", "x=1,draft_runs=[a,b],y=2",
         {"x": 1, "draft_runs": "[a,b]", "y": 2}),
        ("draft_runs=a,x=1,y=2", "draft_runs=a,x=1,y=2", {"draft_runs": "a", "x": 1, "y": 2}),
        ("exact_pattern=[numbers,code_fences],x=1", "exact_pattern=[numbers,code_fences],x=1",
         {"exact_pattern": "[numbers,code_fences]", "x": 1}),
        (r"exact_pattern=\d{1,3},x=1", r"exact_pattern=\d{1,3},x=1",
         {"exact_pattern": r"\d{1,3}", "x": 1}),
    ],
)  # fmt: skip
def test_commas_of_lists_and_patterns_end_no_value(text, bracketed, keys):
    """lm-eval takes what follows a comma for the next key, and refuses it without `=`."""
    assert config.bracket_lists(text) == bracketed
    assert resume.parse_pairs(text) == keys  # a file of --config may have them as text, too
    with pytest.raises(FlyError, match="--config 'x'"):
        resume.parse_pairs("x")
    assert config.bracket_lists("x=1,y=a,b") == "x=1,y=a,b"


@pytest.mark.parametrize(
    "given",
    [
        ["--model_args", r"x=1,p=\d{4},q=[a-z]{2}"],
        [r"--model_args=x=1,p=\d{4},q=[a-z]{2}"],
        ["-a", r"p=\d{4}", "x=1,q=[a-z]{2}"],
    ],
)
def test_a_pattern_with_braces_is_no_json(given, monkeypatch):
    """lm-eval takes the first of the texts for JSON if it has a brace."""
    monkeypatch.setattr("sys.argv", ["fly", "run", "--tasks", "t", *given])
    model_args = FlyCLI().parse_args().model_args
    assert model_args == {"x": 1, "p": r"\d{4}", "q": "[a-z]{2}"}


def test_missing_file_lists_the_shipped_ones():
    with pytest.raises(FlyError, match=r"no such file.*qwen2\.5-coder\.json"):
        config.load("nowhere.json")


def test_overrides_replace_keys_and_are_logged(tmp_path, caplog):
    path = write(tmp_path, {**GOOD, "spd_k": 15})
    with caplog.at_level("INFO", logger="fly"):
        result = config.load(path, {"spd_k": 9, "entropy_thre": 1, "win_len": 3})
    assert (result.spd_k, result.entropy_thre, result.win_len) == (9, 1.0, 3)
    assert "spd_k: 15 -> 9" in caplog.text


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ({"verification": "typical", "margin_thre": 0.2, "typical_delta": 0.5}, ["margin_thre"]),
        ({"verification": "exact", "margin_thre": 0.2, "relaxed_delta": 0.5}, ["relaxed_delta"]),
        ({"relaxed_top_k": 3, "win_len": 4}, ["relaxed_top_k"]),
        ({"use_sd": False, "relaxed_top_k": 3}, []),
        ({"drafter": "ngram", "num_ngram_pred_tokens": 6}, ["drafter"]),
        ({"drafter": "ngram", "num_ngram_pred_tokens": 7}, []),
        ({"drafter": "ngram", "num_ngram_pred_tokens": 6, "defer_across_rounds": True}, []),
        ({"drafter": "ngram", "num_ngram_pred_tokens": 6, "enable_fly": False}, []),
    ],
)
def test_what_has_no_effect_is_said(tmp_path, caplog, own, named):
    """Somebody who tunes a threshold that nothing reads would believe that it changes nothing;
    an n-gram's draft that no window fits into is decoded exactly, called FLy.
    """
    config.resolve(write(tmp_path, GOOD), own)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    said = [warning.removeprefix("model_args ").split("=")[0] for warning in warnings]
    assert said == named


def test_command_line_values_take_the_keys_type(tmp_path):
    path = write(tmp_path, GOOD)
    result = config.load(path, {"entropy_thre": "None", "enable_fly": "False", "temperature": 0})
    assert result.entropy_thre is None
    assert result.enable_fly is False
    assert result.temperature == 0.0


def test_pretrained_names_the_draft():
    own, rest = config.split_model_args({"pretrained": "x", "spd_k": 3, "dtype": "float32"})
    assert own == {"draft_model_path": "x", "spd_k": 3}
    assert rest == {"dtype": "float32"}


@pytest.mark.parametrize(
    "path", sorted(p for p in data_dir("fly_config").glob("*.json") if p.name != "schema.json")
)
def test_shipped_configurations_are_valid(path):
    result = config.load(str(path))
    assert result.mode == "fly"
    assert json.loads(path.read_text())["$schema"] == "./schema.json"


def test_shipped_schema_is_current():
    """Catches a new key without `fly config schema > fly_config/schema.json`."""
    assert json.loads((data_dir("fly_config") / "schema.json").read_text()) == config.schema()


@pytest.mark.parametrize("comment", ["words", {"tok_s": 3.5}, [1, None]])
def test_comments_are_for_readers(tmp_path, comment):
    """Any value, in no hash, so that evidence in a file makes it no other configuration."""
    found = config.load(write(tmp_path, {"$comment": comment, **GOOD}))
    assert found.hash() == config.build(GOOD, "x.json").hash()


def test_modes_and_drafters():
    def build(**keys):
        return config.build({**GOOD, **keys}, "test")

    assert build().drafter_name == "model"
    assert build(use_ngram=True).drafter_name == "cascade"
    assert build(drafter="ngram").needs_draft_model is False
    assert build(use_sd=False).mode == build(spd_k=0, win_len=0, enable_fly=False).mode
    assert build(enable_fly=False, spd_k=1).mode == "exact"
    assert build(abla_no_window=True, spd_k=2).window == 0
    assert build().hash() != build(spd_k=9).hash()


def test_with_earlier_runs_fly_has_to_be_asked_for():
    """The mutant that keeps FLy's rule lets a text lean towards an old one unasked."""

    def build(**keys):
        return config.build({**GOOD, "drafter": "ngram", "draft_runs": ["a"], **keys}, "test")

    assert build().mode == "exact"
    assert build(verification="fly").mode == "fly"
    assert build().earlier_runs == ["a"]
    assert build(use_sd=False).earlier_runs == build(draft_sources=["own"]).earlier_runs == []
    assert build(use_sd=False, drafter="model").mode == "target-only"  # ignored, not refused
    assert build(draft_runs=["b"]).hash() != build().hash()


def test_only_who_sets_spd_k_for_the_run_caps_drafts_from_texts(tmp_path):
    """A file's spd_k is the draft model's."""
    file = write(tmp_path, {**GOOD, "spd_k": 8, "enable_fly": False})
    assert config.resolve(file, {}, log=False).lookup_k is None
    assert config.resolve(file, {"spd_k": 4}, log=False).lookup_k == 4
    assert config.resolve(file, {"spd_k": 4, "lookup_k": 32}, log=False).lookup_k == 32
    assert config.resolve(file, {"spd_k": 0}, log=False).lookup_k is None


def test_compiled_passes_are_not_of_one_shape():
    with pytest.raises(FlyError, match="compile='inductor' contradicts batch_invariant=true"):
        config.build({"target_model_path": "t", "compile": "inductor", "batch_invariant": True}, "")


def test_what_is_written_down_of_a_run_is_in_no_hash():
    """Switching it re-ran finished modes."""
    plain = config.build({"target_model_path": "t"}, "test")
    for key, value in {"verbose": True, "trace": True, "enable_statistics": False}.items():
        assert config.build({"target_model_path": "t", key: value}, "test").hash() == plain.hash()
    assert config.build({"target_model_path": "t", "spd_k": 9}, "test").hash() != plain.hash()


HASHES = {
    "FLy_DeepSeek_R1_Llama_70b": "f5248056390c",
    "FLy_Llama33_70b": "028fc484f40d",
    "FLy_Llama3_405b": "0ac3e138dc7b",
    "FLy_Llama3_70b": "3ffe1f164a9d",
    "FLy_Qwen25_72b": "8507983fa334",
    "FLy_Qwen25_Coder_1.5b": "f98291eae428",
    "gpt-oss-120b-eagle3": "fa8c2f41f89c",
    "gpt-oss-20b-eagle3": "8e659f139fe5",
    "kimi-k2.5-eagle3": "bbc18e7b0131",
    "llama-3.1-8b-eagle3": "d4d7f6580a5a",
    "llama-3.3-70b-eagle3": "7235c7ee76f6",
    "minimax-m2.5-eagle3": "014136d3e9a3",
    "qwen2.5-coder-guarded": "965f059e3755",
    "qwen2.5-coder": "8179e46071be",
    "qwen3-8b-dflash": "ace18b2dbcaf",
    "qwen3-8b-dspark": "46a6b79acb82",
    "qwen3-8b-eagle3": "1a44d06b741b",
}


@pytest.mark.parametrize("name", HASHES)
def test_the_hashes_of_the_shipped_files_stay(name):
    """Finished runs are matched by it. A draft model's n-grams are on where kernels compute it."""
    is_model = config.load(f"{name}.json").drafter is None
    resolved = {"use_ngram": True} if is_model else {}
    assert config.load(f"{name}.json", resolved).hash() == HASHES[name]
