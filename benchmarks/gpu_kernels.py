"""What a captured pass costs per layer on an accelerator, and which kernels it takes.

    python benchmarks/gpu_kernels.py
    python benchmarks/gpu_kernels.py --shapes qwen2.5-0.5b --widths 1 --ways graph fused inductor

Random weights at real shapes (gpu.py's), one sequence of 512 tokens. A layer's microseconds are
the difference of passes with 8 and with 2 layers; `rest` is what a pass takes beside its layers.
The kernels are those of a pass with 2 layers, the dearest first. Last come the pieces of a sampled
draft step (1 and 8 sequences) and of its verification (72 positions). Without an accelerator it
exits with 2.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable

import torch
from gpu import SHAPES, build, measure
from torch.profiler import ProfilerActivity, profile

from fly.execution import fused_layer
from fly.execution.argmax import greedy
from fly.execution.model_runner import ModelRunner
from fly.speculation.sampling import Sampling, draw, keep_top_p

CONTEXT, FEW, MANY = 512, 2, 8
WAYS = ("graph", "inductor", "fused")


def make(shape: str, layers: int, way: str, device: torch.device) -> ModelRunner:
    config = copy.deepcopy(SHAPES[shape])
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    model = build(config, device, torch.bfloat16)
    if way == "fused" and not fused_layer.replace_on_gpu(model):
        sys.exit(f"{shape}: no fused layers here")
    runner = ModelRunner(model, 1, 4 * CONTEXT)
    runner.reserve(2 * CONTEXT)
    runner.prefill(0, [3 + index * index % 5000 for index in range(CONTEXT)])
    runner.use_static_passes(capture=True, compiles=way == "inductor")
    return runner


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    shapes = [name for name in SHAPES if name != "toy"]
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=shapes[:2])
    parser.add_argument("--widths", nargs="+", type=int, default=[1, 9], help="tokens of a pass")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--kernels", type=int, default=12, help="how many are listed")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "no accelerator here\n")
    device = torch.device("cuda")
    for shape in args.shapes:
        for width in args.widths:
            for way in args.ways:
                show(shape, width, way, args.kernels, device)
    for rows in (1, 8, 72):
        show_sampling(rows, device)


def show_sampling(rows: int, device: torch.device) -> None:
    logits_NV = 3 * torch.randn(rows, 151_936, device=device).bfloat16()
    scores_NV = Sampling(0.8).process(logits_NV)
    p_NV = torch.softmax(scores_NV, dim=-1)
    uniform_N = torch.rand(rows, dtype=torch.float64, device=device)
    pieces: dict[str, Callable[[], object]] = {
        "argmax": lambda: greedy(logits_NV),
        "temperature": lambda: Sampling(0.8).process(logits_NV),
        "softmax": lambda: torch.softmax(scores_NV, dim=-1),
        "draw": lambda: draw(p_NV, uniform_N),
        "top-p": lambda: keep_top_p(scores_NV, 0.95),
    }
    taken = {name: 1e3 * measure(call, device, 30)["device_ms"] for name, call in pieces.items()}
    print(f"{rows} rows:", ", ".join(f"{name} {us:.0f} us" for name, us in taken.items()))


def show(shape: str, width: int, way: str, listed: int, device: torch.device) -> None:
    taken = {}
    for layers in (MANY, FEW):
        start = time.perf_counter()
        runner = make(shape, layers, way, device)

        def call(runner: ModelRunner = runner) -> None:
            runner.truncate(0, CONTEXT)
            runner.extend([[7] * width])

        call()
        made = time.perf_counter() - start
        taken[layers] = 1e3 * measure(call, device, 30)["device_ms"]
        assert runner.static is not None
        if runner.static.failure is not None:
            sys.exit(f"{shape}, {way}: no graph: {runner.static.failure}")
    layer = (taken[MANY] - taken[FEW]) / (MANY - FEW)
    print(
        f"{shape}, {width} tokens, {way}: {layer:.1f} us per layer, "
        f"{taken[FEW] - FEW * layer:.0f} us the rest; {FEW} layers made in {made:.1f} s"
    )
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    events = [event for event in profiled.key_averages() if event.device_time_total > 0]
    events.sort(key=lambda event: -event.device_time_total)
    for event in events[:listed]:
        each = event.device_time_total / event.count
        print(f"    {event.count:4} x {each:6.2f} us  {event.key[:80]}")
    print(flush=True)


if __name__ == "__main__":
    main()
