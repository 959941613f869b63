"""Seconds of one forward pass of a pair's models, by tokens in the pass and by way to compute it.

    python benchmarks/passes.py --config qwen2.5-coder.json --execution kernels eager

Each way runs in a process of its own (`invariant` is kernels with batch_invariant, which the others
run without); passes of one sequence at --context tokens, by their median. Beside them: the rate of
PyTorch's float32 matrix product (1024 x 1536 x 8960), which bounds a CPU's passes over many tokens
where it has no bfloat16 instructions. The last line printed is one JSON object; restrict the
instructions with ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA and MKL_ENABLE_INSTRUCTIONS to see another
CPU's side.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import commit

_RESTRICTIONS = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "OMP_NUM_THREADS",
)


def seconds_of(call: Callable[[], object], budget: float) -> float:
    """Median of as many calls as fit into `budget` seconds, at least 3, after one uncounted."""
    call()
    taken: list[float] = []
    while len(taken) < 3 or (sum(taken) < budget and len(taken) < 200):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def worker(args: argparse.Namespace) -> None:
    """Print one JSON line: the passes of the pair under one `execution`."""
    from fly.execution.model_runner import ModelRunner
    from fly.harness.hf import FlyLM

    is_invariant = args.execution[0] == "invariant"
    execution: dict[str, Any] = {
        "execution": "kernels" if is_invariant else args.execution[0],
        "batch_invariant": is_invariant,
    }
    lm = FlyLM(config_path=args.config, device="cpu", batch_size=1, **execution)
    models = {"target": lm.model, "draft": lm.pair.draft}
    passes: dict[str, dict[int, float]] = {}
    for role, model in models.items():
        runner = ModelRunner(model, 1, 4096, reuse_prefixes=False)
        runner.prefill(0, [7] * args.context)
        passes[role] = {}
        for tokens in args.tokens:
            runner.truncate(0, args.context)
            feed = [list(range(100, 100 + tokens))]
            passes[role][tokens] = seconds_of(lambda r=runner, f=feed: r.extend(f), args.budget)
    runner = ModelRunner(lm.model, 1, 4096, reuse_prefixes=False)
    prompt = list(range(100, 356))
    prefill = seconds_of(lambda: runner.prefill(0, prompt), args.budget)
    text_model = lm.model.get_decoder()
    weights = sum(
        module.in_features * module.out_features
        for module in {id(m): m for m in _products(text_model)}.values()
    )
    result = {
        "execution": args.execution[0],
        "passes": passes,
        "prefill_256": prefill,
        "prefill_256_flops": 2 * 256 * weights / prefill,
        "preparation": lm.pair.packed.as_dict(),
    }
    print("RESULT " + json.dumps(result))


def _products(model: torch.nn.Module) -> list[Any]:
    """Every linear that multiplies: joined siblings once."""
    found = []
    for module in model.modules():
        has_shape = hasattr(module, "in_features") and hasattr(module, "out_features")
        if has_shape and not hasattr(module, "product"):
            found.append(module)
    return found


def float32_peak() -> float:
    """Floating-point operations per second of a large float32 product."""
    left, right = torch.randn(1024, 1536), torch.randn(1536, 8960)
    return 2 * 1024 * 1536 * 8960 / seconds_of(lambda: left @ right, 2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="qwen2.5-coder.json")
    parser.add_argument("--execution", nargs="+", default=["kernels", "eager"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 6, 9, 16, 32, 64])
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--budget", type=float, default=1.5, help="seconds per number of tokens")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    results = []
    for execution in args.execution:
        command = [sys.executable, __file__, "--worker", "--config", args.config]
        command += ["--execution", execution, "--tokens", *map(str, args.tokens)]
        command += ["--context", str(args.context), "--budget", str(args.budget)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(f"{execution}: failed with exit code {done.returncode}")
            continue
        result = json.loads(lines[0].removeprefix("RESULT "))
        results.append(result)
        how = result["preparation"]
        for role in ("target", "draft"):
            row = result["passes"][role]
            print(f"{how[role]:22} {role}, ms by tokens in the pass:", end=" ")
            print(", ".join(f"{tokens}: {1e3 * row[tokens]:.0f}" for tokens in row), flush=True)
        print(
            f"{'':22} prefill of 256: {1e3 * result['prefill_256']:.0f} ms, "
            f"{result['prefill_256_flops'] / 1e9:.0f} GFLOP/s"
        )
    peak = float32_peak()
    print(f"float32 matrix product: {peak / 1e9:.0f} GFLOP/s")
    summary = {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "restrictions": {k: os.environ[k] for k in _RESTRICTIONS if k in os.environ},
        "commit": commit(),
        "torch": torch.__version__,
        "float32_flops": peak,
        "results": results,
    }
    ratios: dict[str, float] = {}
    for result in results:
        name, target, draft = result["execution"], *result["passes"].values()
        for tokens in ("4", "9", "16"):
            if tokens in target:
                ratios[f"{name}: target, {tokens} tokens / 1"] = target[tokens] / target["1"]
        ratios[f"{name}: draft / target, 1 token"] = draft["1"] / target["1"]
        ratios[f"{name}: prefill / float32 product"] = result["prefill_256_flops"] / peak
    summary["ratios"] = {key: round(value, 3) for key, value in ratios.items()}
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "passes.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({"ratios": summary["ratios"]}))


if __name__ == "__main__":
    main()
