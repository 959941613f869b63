"""MBPP: data, code extraction and pass@1."""

import re
from typing import Any

import datasets

from fly.harness import code_metrics, task_data
from fly.harness.sandbox import Program

_FIELDS = {"task_id": int, "text": str, "code": str, "test_list": list[str]}
_LANGUAGE = re.compile(r"\A\s*(?:python3?|py)[ \t]*\n", re.IGNORECASE)  # on a line of its own
_TEST_SPLIT = range(11, 511)  # task ids of the published test split


def load(**_: Any) -> dict[str, datasets.Dataset]:
    rows = task_data.from_data_dir_or_hub(
        ("mbpp_test.jsonl", "mbpp.jsonl"),
        _FIELDS,
        ("google-research-datasets/mbpp", "full"),
    )
    return {"test": rows.filter(lambda row: row["task_id"] in _TEST_SPLIT)}


def _tests(doc: dict[str, Any]) -> str:
    return "\n".join(doc["test_list"][:3])


def register(resps: list[list[str]], docs: list[dict[str, Any]]) -> list[list[str]]:
    for row, doc in zip(resps, docs):
        code_metrics.register(Program(candidate, _tests(doc)) for candidate in row)
    return [list(row) for row in resps]


def first_code_block(text: str) -> str:
    """The first fenced block; the prompt has already opened one, the answer may do so again, or
    name its language once more.

    (lm-eval 0.4.13 reads the answer's first word, often `def`, as the fence's language.)
    """
    opened = text if text.lstrip().startswith("```") else f"```python\n{text}"
    block = re.search(r"```[ \t]*\w*[ \t]*\n(.*?)(?=\n?```)", opened, re.DOTALL)
    return _LANGUAGE.sub("", block.group(1)) if block else ""


def build_predictions(resps: list[list[str]], docs: list[dict[str, Any]]) -> list[list[str]]:
    return register([[first_code_block(text) for text in row] for row in resps], docs)


def pass_at_1(references: list[str], predictions: list[Any]) -> float:
    candidates = predictions[0] if isinstance(predictions[0], list) else predictions
    return code_metrics.pass_at_k([Program(text, references[0]) for text in candidates], [1])[
        "pass@1"
    ]
