"""SPEED-Bench: prompts alone, from FLY_DATA_DIR or the hub."""

from typing import Any

import datasets

from fly.harness import task_data


def load(**_: Any) -> dict[str, datasets.Dataset]:
    return task_data.turns(("speed_bench.jsonl",), ("nvidia/SPEED-Bench", "qualitative"))
