"""Plain lm-eval hf, fly target-only, exact and FLy on one task: scores and time in one run.

    python benchmarks/modes.py --config qwen2.5-coder.json --tasks humaneval_instruct --limit 20

All modes share one process (hf has its own copy of the target, as fly prepares its weights);
problems are run in chunks, every mode on each chunk with the order rotated, so that a machine's
drift hits all alike. Prints a table and, as the last line, one JSON object; raw records go to
--output.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from exported import as_folder
from lm_eval.models.huggingface import HFLM
from provenance import commit

from fly import config as fly_config
from fly.execution.device import device_facts
from fly.harness.evaluate import evaluate, load_tasks
from fly.harness.hf import FlyLM
from fly.models import sources
from fly.runs.environment import versions
from fly.runs.records import TIMED, RunStats

MODES: dict[str, dict[str, Any]] = {
    "hf": {},
    "target_only": {"use_sd": False},
    "exact": {"enable_fly": False},
    "fly": {},
}


class CountingHF(HFLM):
    """lm-eval's own backend; counts what it generates and how long that takes."""

    tokens = 0
    seconds = 0.0

    def _model_generate(self, context: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = super()._model_generate(context, *args, **kwargs)
        self.seconds += time.perf_counter() - start
        self.tokens += output.shape[1] - context.shape[1]
        return output


def chosen_filter(args: argparse.Namespace) -> str:
    """The task's filter whose scores count; before models load, as only the task decides."""
    (task,) = load_tasks([args.tasks]).values()
    filters = [part.name for part in task._filters]
    chosen: str = args.filter or filters[0]
    if chosen not in filters or (len(filters) > 1 and not args.filter):
        sys.exit(f"--filter {args.filter}: choose from {', '.join(filters)}")
    return chosen


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.filter = chosen_filter(args)
        self.base = fly_config.load(args.config)
        extra = {"dtype": args.dtype} if args.dtype else {}
        self.fly = FlyLM(config_path=args.config, device=args.device, batch_size=1, **extra)
        self.hf: CountingHF | None = None
        if "hf" in args.modes:
            source = sources.resolve_source(self.base.target_model_path, "target_model_path")
            self.hf = CountingHF(
                pretrained=as_folder(source), device=str(self.fly.device), batch_size=1, **extra
            )
        self.samples: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.stats: dict[str, RunStats] = {name: RunStats() for name in args.modes}
        self.hf_seconds = 0.0

    def run(self, mode: str, indices: list[int]) -> None:
        model: HFLM = self.fly
        if mode == "hf":
            assert self.hf is not None
            model = self.hf
            self.hf.tokens, self.hf.seconds = 0, 0.0
        self.fly.stats = RunStats()
        values = {**self.base.model_dump(), **MODES[mode]}
        self.fly.fly_config = fly_config.build(values, mode)
        samples = evaluate(
            model, self.args.tasks, indices, chat=self.args.chat, gen_kwargs=self.args.gen_kwargs
        )
        self.samples[mode] += [sample for sample in samples if sample["filter"] == self.filter]
        self.stats[mode].merge(self.fly.stats)
        if mode == "hf" and self.hf is not None:
            self.hf_seconds += self.hf.seconds

    def seconds(self, mode: str) -> float:
        """Prefill and decoding, without loading and scoring."""
        if mode == "hf":
            return self.hf_seconds
        return sum(self.stats[mode].seconds[phase] for phase in TIMED)

    def summary(self) -> dict[str, Any]:
        metric = self.args.metric
        reference = {s["doc_id"]: s["resps"] for s in self.samples["target_only"]}
        modes = {}
        for mode, samples in self.samples.items():
            stats = None if mode == "hf" else self.stats[mode].as_dict()
            modes[mode] = {
                "score": sum(s[metric] for s in samples) / len(samples),
                "seconds": self.seconds(mode),
                "texts_equal_to_target_only": sum(
                    s["resps"] == reference[s["doc_id"]] for s in samples
                ),
                "stats": stats,
            }
        ratios = {
            f"{mode}/{base}@1": modes[base]["seconds"] / modes[mode]["seconds"]
            for base in ("hf", "target_only")
            for mode in modes
            if base in modes and mode != base
        }
        return {
            "task": self.args.tasks,
            "problems": len(reference),
            "config": self.base.model_dump(),
            "versions": versions(),
            "device": device_facts(self.fly.device),
            "commit": commit(),
            "modes": modes,
            "ratios": {name: round(value, 3) for name, value in ratios.items()},
        }


def print_table(summary: dict[str, Any]) -> None:
    print(
        f"{'mode':12} {'score':>6} {'time x':>6} {'tau':>6} {'draft':>6} {'verify':>6}  same text"
    )
    for mode, row in summary["modes"].items():
        stats = row["stats"]
        tau, draft, verify = "-", "-", "-"
        if stats:
            total = sum(stats["seconds"].values()) or 1
            tau = f"{stats['tau']:.2f}"
            draft, verify = (f"{stats['seconds'][p] / total:.0%}" for p in ("draft", "verify"))
        times = summary["ratios"].get(f"{mode}/hf@1", 1.0 if mode == "hf" else float("nan"))
        same = f"{row['texts_equal_to_target_only']}/{summary['problems']}"
        print(f"{mode:12} {row['score']:6.3f} {times:6.2f} {tau:>6} {draft:>6} {verify:>6}  {same}")


def check(summary: dict[str, Any]) -> None:
    """A short regression for CI. bfloat16 ties may change a text; broken decoding changes most."""
    modes, problems = summary["modes"], summary["problems"]
    solved = {mode: round(row["score"] * problems) for mode, row in modes.items()}
    same = modes["exact"]["texts_equal_to_target_only"]
    failures = [
        f"{mode} solves {solved[mode]} of {problems}, target-only {solved['target_only']}"
        for mode, allowed in (("exact", 1), ("fly", 2))  # FLy is lossy by design
        if solved[mode] < solved["target_only"] - allowed
    ]
    if same < problems / 2:
        failures.append(f"exact gives target-only's text on {same} of {problems} problems only")
    if modes["exact"]["stats"]["tau"] < 2:
        failures.append(f"exact's tau is {modes['exact']['stats']['tau']}, below 2")
    if failures:
        sys.exit("regression: " + "; ".join(failures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="qwen2.5-coder.json")
    parser.add_argument("--tasks", default="humaneval_instruct")
    parser.add_argument("--metric", default="pass@1")
    parser.add_argument("--filter", default=None, help="of the task's filters, if it has several")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument(
        "--check", action="store_true", help="fail if exact or FLy lost what target-only solves"
    )
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--chunk", type=int, default=5, help="problems per mode and turn")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--gen_kwargs", default=None)
    parser.add_argument("--no-chat", dest="chat", action="store_false")
    parser.add_argument("--output", type=Path, default=None, help="folder for the raw records")
    args = parser.parse_args()
    if "target_only" not in args.modes:
        parser.error("--modes: target_only is what the others are compared with: add it")
    bench = Bench(args)
    names = args.modes
    for turn, start in enumerate(range(0, args.limit, args.chunk)):
        indices = list(range(start, min(start + args.chunk, args.limit)))
        shift = turn % len(names)
        for mode in names[shift:] + names[:shift]:
            bench.run(mode, indices)
            print(f"problems {indices[0]}..{indices[-1]}, {mode}: done", flush=True)
    summary = bench.summary()
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        with open(args.output / "samples.jsonl", "w", encoding="utf-8") as file:
            for mode, samples in bench.samples.items():
                for sample in samples:
                    kept = {key: sample[key] for key in ("doc_id", "resps", args.metric)}
                    file.write(json.dumps({"mode": mode, **kept}, ensure_ascii=False) + "\n")
        (args.output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print_table(summary)
    if args.check:
        check(summary)
    print(json.dumps({"ratios": summary["ratios"]}))


if __name__ == "__main__":
    main()
