"""Runs written as lm-eval and fly write them, with scores of the test's choice."""

import hashlib
import json
from pathlib import Path

from fly.runs.records import Positions

DATE = "2026-01-01T00-00-00.000000"
STARTED = "2026-01-01T00-00-00"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sample(
    doc_id, values, prompt, *, target="t", response="text", filter_name="none", repeats=1
) -> dict:
    """One line of a samples file. values: by metric."""
    return {
        "doc_id": doc_id,
        "doc": {"question": prompt},
        "target": target,
        "arguments": {"gen_args_0": {"arg_0": prompt}},
        "resps": [[response] * repeats],
        "filtered_resps": [response],
        "filter": filter_name,
        "metrics": list(values),
        "doc_hash": digest(f"doc {doc_id}"),
        "prompt_hash": digest(prompt),
        "target_hash": digest(target),
        **values,
    }


def write_lines(path: Path, records) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def drafted(rounds) -> dict:
    """A record's counts of rounds, each (drafted, accepted) and a token of the target's."""
    positions = Positions()
    for each in rounds:
        positions.add_round(*each)
    emitted = sum(accepted + 1 for _, accepted in rounds)
    return {"emitted": emitted, "rounds": len(rounds), "positions": positions.as_dict()}


def write(
    folder: Path,
    mode: str | None = "fly",
    scores=None,
    *,
    metric="exact_match",
    higher_is_better=True,
    filter_name="none",
    tasks=None,
    versions=None,
    fewshot=0,
    prompt="question",
    target="model",
    dtype="torch.float32",
    gen_kwargs=None,
    round_tokens=4,
    seconds=1.0,
    repeats=1,
    aggregated=None,
    tokens=12,
    machine=None,
    drafts=None,
    responses=None,
    settings=None,
    entry=None,
    output_type="generate_until",
    docs=None,
    ends=None,
) -> Path:
    """Write one run; its folder. scores: of the task `sums`; tasks: by task instead.

    A task's scores are a list, or by metric (None where a document does not have it). mode None is
    lm-eval's own backend. A document takes `seconds` of decoding and a tenth of it of prefill,
    `tokens` in rounds of `round_tokens`.
    drafts: of every document, by its number, (drafted, accepted) per round. responses: likewise.
    machine: what differs from two threads of a CPU and one sequence: keys of `device`, batch_size.
    docs: further fields of every document; ends: why its answer ended.
    settings: keys of the configuration; entry: of `config.fly`, such as drafter and engine.
    """
    tasks = tasks or {"sums": scores}
    tasks = {name: s if isinstance(s, dict) else {metric: s} for name, s in tasks.items()}
    config = {"model": mode or "hf", "model_args": {"pretrained": target}, "model_sha": ""}
    config |= {"model_dtype": dtype, "gen_kwargs": gen_kwargs or {}, "torch_seed": 1}
    if mode:
        config["fly"] = {
            "started": STARTED,
            "mode": mode,
            "dtype": dtype,
            "sampling": [{"temperature": 0.0}],
            "config": {"target_model_path": target, "total_gen_tok": None, "seed": None},
        }
        config["fly"]["config"] |= settings or {}
        config["fly"] |= entry or {}
        machine = dict(machine or {})
        config["batch_size"] = machine.pop("batch_size", 1)
        device = {"type": "cpu", "name": "a CPU", "capability": "AVX2", "threads": 2}
        config["fly"]["device"] = device | machine
    results = {}
    records = []
    folder.mkdir(parents=True)
    for task, by_metric in tasks.items():
        count = len(next(iter(by_metric.values())))
        lines = []
        for doc_id in range(count):
            values = {name: values[doc_id] for name, values in by_metric.items()}
            values = {name: value for name, value in values.items() if value is not None}
            how = {"filter_name": filter_name, "repeats": repeats}
            how |= {"response": responses[doc_id]} if responses else {}
            lines.append(sample(doc_id, values, f"{prompt} {doc_id}", **how))
            lines[-1]["doc"] |= docs[doc_id] if docs else {}
            for _ in range(repeats if mode else 0):
                record = {"task": task, "doc_id": doc_id, "emitted": tokens}
                record["rounds"] = tokens // round_tokens
                record["seconds"] = {"prefill": seconds / 10, "draft": seconds / 4}
                record["seconds"] |= {"verify": seconds / 2, "other": seconds / 4, "compile": 0}
                if ends:
                    record["finish_reason"] = ends[doc_id]
                    record["unclosed_thinking"] = ends[doc_id] == "length"
                if drafts:
                    record |= drafted(drafts[doc_id])
                records.append(record)
        write_lines(folder / f"samples_{task}_{DATE}.jsonl", lines)
        scored = {name: [v for v in values if v is not None] for name, values in by_metric.items()}
        means = {f"{name},{filter_name}": sum(v) / len(v) for name, v in scored.items() if v}
        results[task] = {**means, **(aggregated or {})}
    if mode:
        write_lines(folder / f"fly_requests_{STARTED}.jsonl", records)
    whole = {
        "results": results,
        "configs": {
            name: {"generation_kwargs": {"until": ["x"]}, "output_type": output_type}
            for name in tasks
        },
        "versions": versions or dict.fromkeys(tasks, 1),
        "n-shot": dict.fromkeys(tasks, fewshot),
        "higher_is_better": {n: dict.fromkeys(m, higher_is_better) for n, m in tasks.items()},
        "config": config,
        "max_length": 512,
    }
    (folder / f"results_{DATE}.json").write_text(json.dumps(whole))
    return folder
