"""Spec-Bench: prompts alone. Its questions are a file of its repository, not on the hub."""

from typing import Any

import datasets

from fly.harness import task_data


def load(**_: Any) -> dict[str, datasets.Dataset]:
    return task_data.turns(("spec_bench.jsonl", "question.jsonl"))
