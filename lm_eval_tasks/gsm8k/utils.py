"""GSM8K's test split."""

from typing import Any

import datasets

from fly.harness import task_data


def load(**_: Any) -> dict[str, datasets.Dataset]:
    rows = task_data.from_data_dir_or_hub(
        ("gsm8k_test.jsonl",), {"question": str, "answer": str}, ("openai/gsm8k", "main")
    )
    return {"test": rows}
