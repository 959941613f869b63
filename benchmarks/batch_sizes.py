"""fly's own modes at several batch sizes: does speculation ever lose to the target alone?

    python benchmarks/batch_sizes.py --max_gen_toks 64 --batch_sizes 1 2 4 6 8 12

One process, one pair of loaded models; as many documents as sequences, or --limit. Prints
time x, target-only's seconds over the mode's for the same documents at the same batch size, in
decoding and end to end; the order of modes turns with the batch size. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from provenance import commit

from fly import config as fly_config
from fly.execution.device import device_facts
from fly.harness.evaluate import evaluate
from fly.harness.hf import FlyLM
from fly.runs.environment import versions
from fly.runs.records import RunStats

MODES: dict[str, dict[str, Any]] = {
    "target_only": {"use_sd": False},
    "exact": {"enable_fly": False},
    "fly": {"enable_fly": True},
}


def seconds(stats: dict[str, Any]) -> tuple[float, float]:
    """(decoding, end to end)."""
    spent = {key: value for key, value in stats["seconds"].items() if key != "compile"}
    return sum(spent.values()) - spent["prefill"], sum(spent.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="qwen2.5-coder.json")
    parser.add_argument("--task", default="humaneval_instruct")
    parser.add_argument("--limit", type=int, help="documents; default: the batch size, at least 4")
    parser.add_argument("--max_gen_toks", type=int, default=64)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 2, 4, 6, 8, 12])
    parser.add_argument("--output", type=Path, default=None, help="folder of the records")
    args = parser.parse_args()
    lm = FlyLM(config_path=args.config, device="cpu", batch_size=1)
    base = lm.fly_config.model_dump()
    records: list[dict[str, Any]] = []
    names = list(MODES)
    for turn, size in enumerate(args.batch_sizes):
        lm.batch_size_per_gpu = size
        shift = turn % len(names)
        for mode in names[shift:] + names[:shift]:
            lm.fly_config = fly_config.build({**base, **MODES[mode]}, mode)
            lm.stats = RunStats()
            evaluate(
                lm,
                args.task,
                list(range(args.limit or max(4, size))),
                chat="instruct" in args.task,
                gen_kwargs=f"max_gen_toks={args.max_gen_toks}",
            )
            records.append(
                {
                    "batch_size": size,
                    "mode": mode,
                    "stats": lm.stats.as_dict(),
                    "draft_length": lm.draft_length,
                }
            )
            print(f"batch size {size}, {mode}: done", flush=True)
    ratios: dict[str, dict[str, float]] = {}
    print(
        f"{'batch size':>10} {'mode':12} {'decode x':>8} {'all x':>6} {'tau':>5}  drafted/emitted"
    )
    for size in args.batch_sizes:
        own = {r["mode"]: r for r in records if r["batch_size"] == size}
        alone = seconds(own["target_only"]["stats"])
        for mode in names:
            stats = own[mode]["stats"]
            decode, whole = (a / b for a, b in zip(alone, seconds(stats)))
            ratios[f"{mode}@{size}"] = {"decode": round(decode, 3), "all": round(whole, 3)}
            print(
                f"{size:10} {mode:12} {decode:8.2f} {whole:6.2f} {stats['tau']:5.2f}  "
                f"{stats['drafted']} for {stats['emitted']}"
            )
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        facts = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "commit": commit(),
            "arguments": {k: v for k, v in vars(args).items() if k != "output"},
            "device": device_facts(torch.device("cpu")),
            "preparation": lm.pair.packed.as_dict(),
            "versions": versions(),
            "ratios": ratios,
            "records": records,
        }
        (args.output / "batch_sizes.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps({"time_ratios": ratios}))


if __name__ == "__main__":
    main()
