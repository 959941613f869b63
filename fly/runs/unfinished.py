"""A run that goes on, read as far as it has come: outputs, counts and seconds, no scores yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fly.paths import run_files
from fly.runs import manifest, shapes
from fly.runs.reader import Run, Sample, TaskRun, iterate_lines
from fly.runs.records import RunStats


def read(folder: Path) -> Run | None:
    """The newest run in the folder, or in one below it; None if it has ended, or none is there."""
    runs = manifest.all_in(folder)
    if not runs or runs[-1].finished:
        return None
    going = runs[-1]
    paths = run_files(going.folder, "fly_requests", going.started).values()
    records: list[Any] = [r for path in paths for r in iterate_lines(path, shapes.ResumableLine)]
    stats, texts = RunStats(), dict[str, dict[int, list[Any]]]()
    for record in records:
        stats.merge(RunStats.of_line(record))
        texts.setdefault(record["task"], {}).setdefault(record["doc_id"], []).append(record)
    arguments = going.data["arguments"].get("model_args", {})
    target = str(arguments.get("target_model_path") or arguments.get("config_path") or "?")
    entry = {
        "started": going.started, "mode": "running", "dtype": "?", "stats": stats.as_dict(),
        "config": {"target_model_path": target, "total_gen_tok": None, "seed": None},
    }  # fmt: skip
    tasks = {(name, "none"): _task(name, documents) for name, documents in texts.items()}
    results = {"config": {"model": "fly", "model_args": arguments, "fly": entry}, "configs": {}}
    return Run(going.path, "running", results, tasks)


def _task(name: str, documents: dict[int, list[Any]]) -> TaskRun:
    samples = {}
    for doc_id, records in documents.items():
        outputs = tuple(record["text"] for record in records)
        hashes = records[0].get("doc_hash", ""), records[0].get("prompt_hash", ""), ""
        samples[doc_id] = Sample(doc_id, {}, hashes, "", "", outputs, outputs[0], {})
    return TaskRun(name, "none", "", 0, {}, {}, {}, samples)
