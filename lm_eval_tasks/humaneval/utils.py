"""HumanEval: data, code extraction and pass@k."""

from typing import Any

import datasets

from fly.harness import code_metrics, task_data
from fly.harness.sandbox import Program


def load(**_: Any) -> dict[str, datasets.Dataset]:
    return {"test": task_data.human_eval()}


def _tests(doc: dict[str, Any]) -> str:
    return f"{doc['test']}\ncheck({doc['entry_point']})"


def _register(candidates: list[list[str]], docs: list[dict[str, Any]]) -> list[list[str]]:
    for row, doc in zip(candidates, docs):
        code_metrics.register(Program(candidate, _tests(doc)) for candidate in row)
    return candidates


def build_predictions(resps: list[list[str]], docs: list[dict[str, Any]]) -> list[list[str]]:
    """The prompt is the beginning of the function that the model completes."""
    rows = zip(resps, docs)
    return _register([[doc["prompt"] + text for text in row] for row, doc in rows], list(docs))


def build_predictions_instruct(
    resps: list[list[str]], docs: list[dict[str, Any]]
) -> list[list[str]]:
    """As above; the model writes inside a code block, which ends at the closing fence."""
    inside = [[text.split("```", 1)[0] for text in row] for row in resps]
    return build_predictions(inside, docs)


def pass_at_k(
    references: list[str], predictions: list[list[str]], k: list[int]
) -> dict[str, float]:
    return code_metrics.pass_at_k([Program(text, references[0]) for text in predictions[0]], k)
