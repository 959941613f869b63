"""Finished runs as lm-eval and fly leave them on disk, written without decoding anything."""

import itertools
import json
from pathlib import Path

from fly import config
from fly.runs import reader
from tests.written_runs import sample, write_lines

_dates = itertools.count(1)


def write_run(
    folder: Path,
    scores: dict[str, list[float]],
    *,
    rounds: int = 100,
    emitted: int = 100,
    seconds: float = 10.0,
    wall_seconds: float | None = None,
    devices: int = 1,
    backend: str = "fly",
    metric: str = "exact_match",
    higher_is_better: bool = True,
    batch_size: int | str = 1,
    prompts: str = "question",
    with_records: bool = True,
    trace: list[dict] | None = None,
    **settings,
) -> Path:
    """One run; returns its results file.

    scores: by task, one per document. rounds, emitted, seconds: of every document. settings: keys
    of the configuration. backend: `hf` is a run of lm-eval's own. trace: lines of a trace file.
    wall_seconds: of every document.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = next(_dates)
    date = f"2026-01-01T00-{number // 60:02d}-{number % 60:02d}"
    samples = {
        task: [
            sample(i, {metric: score}, f"{prompts} {i}", response=f"answer {score}")
            for i, score in enumerate(values)
        ]
        for task, values in scores.items()
    }
    means = {task: sum(values) / len(values) for task, values in scores.items()}
    results = {
        "results": {
            task: {f"{metric},none": mean, f"{metric}_stderr,none": 0.1}
            for task, mean in means.items()
        },
        "configs": {task: {} for task in scores},
        "versions": dict.fromkeys(scores, 1.0),
        "n-shot": dict.fromkeys(scores, 0),
        "higher_is_better": {task: {metric: higher_is_better} for task in scores},
        "config": {"model": backend, "batch_size": batch_size},
    }
    records = [
        _record(task, document, rounds, emitted, seconds) | {"wall_seconds": wall_seconds}
        for task, values in scores.items()
        for document in range(len(values))
    ]
    if trace:
        settings["trace"] = True
    if backend in ("fly", "vllm"):
        told = {"devices": devices, "engine": backend}
        results["config"]["fly"] = _entry(date, records, settings) | told
        if with_records:
            write_lines(folder / f"fly_requests_{date}.jsonl", records)
        if trace:
            write_lines(folder / f"fly_trace_{date}.jsonl", trace)
    for task, lines in samples.items():
        write_lines(folder / f"samples_{task}_{date}.000000.jsonl", lines)
    path = folder / f"results_{date}.000000.json"
    path.write_text(json.dumps(results), encoding="utf-8")
    return path


def load_all(folder: Path) -> list[reader.Run]:
    """Every run at or below a folder, in the order of their writing."""
    return [
        reader.load(path) for path in sorted(folder.rglob("results_*.json"), key=lambda p: p.name)
    ]


def _record(task: str, document: int, rounds: int, emitted: int, seconds: float) -> dict:
    split = {"prefill": 0.1, "draft": 0.3, "verify": 0.5, "other": 0.1}
    return {
        "task": task,
        "doc_id": document,
        "rounds": rounds,
        "emitted": emitted,
        "tau": emitted / rounds,
        "end_to_end_tok_s": emitted / seconds,
        "seconds": {phase: share * seconds for phase, share in split.items()} | {"compile": 9.0},
    }


def _entry(date: str, records: list[dict], settings: dict) -> dict:
    values = {"target_model_path": "/models/target", "draft_model_path": "/models/draft"}
    resolved = config.build({**values, **settings}, "a test")
    emitted = sum(record["emitted"] for record in records)
    rounds = sum(record["rounds"] for record in records)
    seconds = sum(2 * record["seconds"]["verify"] for record in records)
    return {
        "started": date,
        "mode": resolved.mode,
        "drafter": resolved.drafter_name,
        "config": resolved.model_dump(),
        "config_hash": resolved.hash(),
        "device": {"type": "cpu", "name": "x86_64", "threads": 2},
        "dtype": "torch.bfloat16",
        "stats": {
            "requests": len(records),
            "seconds": {
                phase: sum(record["seconds"][phase] for record in records)
                for phase in ("prefill", "draft", "verify", "other", "compile")
            },
            "emitted": emitted,
            "rounds": rounds,
            "tau": emitted / rounds,
            "end_to_end_tok_s": emitted / seconds,
        },
    }
