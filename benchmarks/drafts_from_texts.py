"""How much drafts from texts gain: earlier runs and own text.

    FLY_DATA_DIR=<folder> python benchmarks/drafts_from_texts.py --experiments unchanged changed \\
        --task humaneval_instruct --limit 32 --output <folder>

Every run is `fly run`, as a user types it, in a process of its own and after the one before; a run
that is there already in --output is not made again. Prints each experiment's seconds against its
reference's for the same documents, equal texts, and drafted and accepted tokens by source; raw
records stay in --output, the last line printed is one JSON object.

Experiments (verification is exact in all of them):
  unchanged  the target again, drafting from its own earlier run; no draft model
  changed    the target with int8 weights (rounded to 255 levels per row, kept in its dtype) in the
             next checkpoint's place, drafting from the earlier run: alone, with the draft model as
             fallback, and the draft model without the earlier run
  other      the target, drafting from a run of the draft model
  samples    --samples answers per problem at temperature 0.8, --batch_size sequences
  own        the sequence's own text alone
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from exported import as_folder
from provenance import commit

from fly import config as fly_config
from fly.models import sources
from fly.runs import reader
from fly.runs.reader import Run
from fly.runs.records import DECODING, TIMED

# By experiment: (name, its reference, what model_args change). `@name` is that run's folder.
EXPERIMENTS: dict[str, list[tuple[str, str | None, dict[str, Any]]]] = {
    "unchanged": [
        ("target-only", None, {"use_sd": False}),
        ("from earlier run", "target-only", {"drafter": "ngram", "draft_runs": "@target-only"}),
    ],
    "changed": [
        ("target-only", None, {"use_sd": False}),
        ("int8: target-only", None, {"use_sd": False}),
        (
            "int8: from earlier run",
            "int8: target-only",
            {"drafter": "ngram", "draft_runs": "@target-only"},
        ),
        ("int8: draft model", "int8: target-only", {"verification": "exact"}),
        ("int8: both", "int8: target-only", {"drafter": "cascade", "draft_runs": "@target-only"}),
    ],
    "other": [
        ("target-only", None, {"use_sd": False}),
        ("draft: alone", None, {"use_sd": False}),
        (
            "from the draft's run",
            "target-only",
            {"drafter": "ngram", "draft_runs": "@draft: alone"},
        ),
    ],
    "samples": [
        ("samples: target-only", None, {"use_sd": False}),
        (
            "samples: draft model",
            "samples: target-only",
            {"drafter": "cascade", "verification": "exact", "draft_sources": ["own"]},
        ),
    ],
    "own": [
        ("target-only", None, {"use_sd": False}),
        (
            "own text",
            "target-only",
            {"drafter": "ngram", "verification": "exact", "draft_sources": ["own"]},
        ),
    ],
}
_SAMPLED_TASK = """include: {include}
task: {task}
repeats: {samples}
metric_list:
  - metric: !function utils.pass_at_k
    aggregation: mean
    higher_is_better: true
    k: [1, {samples}]
"""


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.base = fly_config.load(args.config, log=False)

    def folder(self, name: str) -> Path:
        plain = name.replace(": ", "-").replace(" ", "-").replace("'", "")
        return Path(self.args.output, self.args.task, plain).absolute()

    def run(self, name: str, changes: dict[str, Any]) -> Run:
        """The run of that name, made now unless it is there."""
        folder = self.folder(name)
        if not folder.is_dir() or not list(folder.glob("*/results_*.json")):
            print(f"--- {name}", flush=True)
            log = folder.with_suffix(".log")
            log.parent.mkdir(parents=True, exist_ok=True)
            with open(log, "w", encoding="utf-8") as output:
                subprocess.run(
                    self._command(name, changes), stdout=output, stderr=output, check=True
                )
        return reader.load(folder)

    def _command(self, name: str, changes: dict[str, Any]) -> list[str]:
        args = self.args
        model_args: dict[str, Any] = {"config_path": args.config, **self._of_run(name), **changes}
        earlier = str(model_args.get("draft_runs", ""))
        if earlier.startswith("@"):
            model_args["draft_runs"] = [str(self.folder(earlier[1:]))]
        task, flags = args.task, ["--batch_size", str(args.batch_size)]
        if name.startswith("samples"):
            task = f"{args.task}_{args.samples}_samples"
            flags += ["--include_path", str(self._sampled_task(task))]
            flags += ["--gen_kwargs", "do_sample=True,temperature=0.8,top_p=1.0"]
        if args.chat:
            flags += ["--apply_chat_template"]
        return [
            *(sys.executable, "-m", "fly", "run", "--model", "fly"),
            *("--model_args", json.dumps(model_args), "--tasks", task),
            *("--limit", str(args.limit), "--output_path", str(self.folder(name))),
            *("--device", args.device, "--log_samples", "--confirm_run_unsafe_code", *flags),
        ]

    def _of_run(self, name: str) -> dict[str, Any]:
        if name.startswith("int8: "):
            return {"target_model_path": str(self._rounded_target())}
        return {"target_model_path": self.base.draft_model_path} if name == "draft: alone" else {}

    def _rounded_target(self) -> Path:
        """A copy of the target whose linear weights have 255 levels per row."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = Path(self.args.output, "target-int8").absolute()
        if not folder.is_dir():
            named = sources.resolve_source(self.base.target_model_path, "target_model_path")
            source = as_folder(named)
            model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
            for module in model.get_decoder().modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight.data = rounded(module.weight.data)
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        return folder

    def _sampled_task(self, task: str) -> Path:
        folder = Path(self.args.output, "tasks").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        shipped = Path(__file__).parents[1] / "lm_eval_tasks" / "humaneval"
        for file in shipped.glob("*.*"):
            (folder / file.name).write_bytes(file.read_bytes())
        text = _SAMPLED_TASK.format(
            include="humaneval_64_instruct.yaml",
            task=task,
            samples=self.args.samples,
        )
        (folder / f"{task}.yaml").write_text(text, encoding="utf-8")
        return folder


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] with int8's symmetric levels, a scale per row; the dtype stays."""
    scale = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
    return ((weight.float() / scale).round() * scale).to(weight.dtype)


def texts_of(run: Run) -> dict[tuple[Any, ...], str]:
    lines: Any = run.requests
    return {(line["doc_id"], line["repeat"]): line["text"] for line in lines}


def seconds_of(run: Run, phases: tuple[str, ...]) -> float:
    lines: Any = run.requests
    return sum(line["seconds"][phase] for line in lines for phase in phases)


def row(name: str, run: Run, reference: Run | None) -> dict[str, Any]:
    assert run.entry is not None
    stats = run.entry["stats"]
    found: dict[str, Any] = {
        "name": name,
        "requests": stats["requests"],
        "emitted": stats["emitted"],
        "tau": stats["tau"],
        "sources": stats["sources"],
        "draft_runs": {k: v for k, v in (run.entry["draft_runs"] or {}).items() if k != "runs"},
        "decode_seconds": seconds_of(run, DECODING),
        "end_to_end_seconds": seconds_of(run, TIMED),
        "scores": {
            f"{task} {metric}": value
            for (task, _), of_task in run.tasks.items()
            for metric, (value, _) in of_task.aggregated.items()
        },
    }
    if reference is not None:
        ours, theirs = texts_of(run), texts_of(reference)
        found["decode_x"] = seconds_of(reference, DECODING) / found["decode_seconds"]
        found["end_to_end_x"] = seconds_of(reference, TIMED) / found["end_to_end_seconds"]
        found["equal_texts"] = sum(ours[key] == theirs[key] for key in theirs)
    return found


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(f"{'run':24} {'decode x':>8} {'e2e x':>6} {'tau':>6} {'texts':>8}  drafted / accepted")
    for each in rows:
        drafted = ", ".join(
            f"{source} {counts['drafted']}/{counts['accepted']}"
            for source, counts in each["sources"].items()
        )
        times = ["-", "-", "-"]
        if "decode_x" in each:
            equal = f"{each['equal_texts']}/{each['requests']}"
            times = [f"{each['decode_x']:.2f}", f"{each['end_to_end_x']:.2f}", equal]
        print(
            f"{each['name']:24} {times[0]:>8} {times[1]:>6} {each['tau']:6.2f} {times[2]:>8}  "
            f"{drafted}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="qwen2.5-coder.json")
    parser.add_argument("--experiments", nargs="+", choices=list(EXPERIMENTS), required=True)
    parser.add_argument("--task", default="humaneval_instruct")
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--samples", type=int, default=16, help="answers per problem, in `samples`")
    parser.add_argument("--batch_size", default="1", help="running sequences")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-chat", dest="chat", action="store_false")
    parser.add_argument("--output", type=Path, required=True, help="folder for the runs")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    bench = Bench(args)
    results = {}
    for experiment in args.experiments:
        runs: dict[str, Run] = {}
        rows = []
        for name, reference, changes in EXPERIMENTS[experiment]:
            runs[name] = bench.run(name, changes)
            rows.append(row(name, runs[name], runs[reference] if reference else None))
        print(f"\n{experiment}: {args.task}, {args.limit} documents")
        print_rows(rows)
        results[experiment] = rows
    first = next(iter(runs.values()))
    assert first.entry is not None
    facts = {"device": first.entry["device"], "versions": first.entry["versions"]}
    summary = {"commit": commit(), **facts, "task": args.task, "results": results}
    name = f"summary-{args.task}-{'-'.join(args.experiments)}.json"
    Path(args.output, name).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({each["name"]: each.get("decode_x") for r in results.values() for each in r}))


if __name__ == "__main__":
    main()
