"""One matrix product by the kernels that a CPU has, by rows of input: fly's beside PyTorch's.

    python benchmarks/products.py --shape 17920 1536

Several weights in turn, more than the caches hold, so that they come from memory as in decoding.
Kernels are timed in turns, round by round, and compared by their medians. The last line is one JSON
object; restrict the instructions with ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA,
MKL_ENABLE_INSTRUCTIONS and FBGEMM_ENABLE_INSTRUCTIONS.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from provenance import commit
from torch import Tensor, nn

from fly.execution import kernels

Multiply = Callable[[Tensor], Any]


def float32(layer: nn.Linear) -> Multiply:
    weight = layer.weight.detach().float()
    return lambda x: nn.functional.linear(x.float(), weight)


def onednn(layer: nn.Linear, dtype: torch.dtype) -> Multiply:
    """The weight in oneDNN's blocked layout."""
    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().to(dtype), 1)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x.to(dtype), packed, None, "none", [], "")


def fbgemm_float16(layer: nn.Linear) -> Multiply:
    packed = torch.ops.quantized.linear_prepack_fp16(layer.weight.detach().float(), None)
    return lambda x: torch.ops.quantized.linear_dynamic_fp16(x.float(), packed)


def fbgemm_int8(layer: nn.Linear) -> Multiply:
    weight = layer.weight.detach().float()
    scale, zero = weight.abs().amax(1) / 127, torch.zeros(len(weight), dtype=torch.long)
    quantized = torch.quantize_per_channel(weight, scale, zero, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(quantized, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x.float(), packed, False)


def of(kind: Callable[[nn.Linear], nn.Module]) -> Callable[[nn.Linear], Multiply]:
    return lambda layer: kind(layer)


def contenders() -> dict[str, Callable[[nn.Linear], Multiply]]:
    found: dict[str, Callable[[nn.Linear], Multiply]] = {}
    if kernels.why_not() is None:
        found["fly bfloat16"] = of(kernels.Bfloat16Linear)
        found["fly int8"] = of(kernels.Int8Linear)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        found["onednn bfloat16"] = partial(onednn, dtype=torch.bfloat16)
    found["fbgemm float16"] = fbgemm_float16
    found["fbgemm int8"] = fbgemm_int8
    found["onednn float32"] = partial(onednn, dtype=torch.float32)
    found["float32"] = float32
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=2, default=[17920, 1536], help="out, in")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 9, 16, 64, 256])
    parser.add_argument("--copies", type=int, default=12, help="weights in turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    out, inputs = args.shape
    layers = []
    for _ in range(args.copies):
        layer = nn.Linear(inputs, out, bias=False).bfloat16()
        layers.append(layer)
    milliseconds: dict[str, dict[int, float]] = {}
    made = {name: [make(layer) for layer in layers] for name, make in contenders().items()}
    with torch.inference_mode():
        for rows in args.rows:
            x = torch.randn(rows, inputs).bfloat16()
            taken: dict[str, list[float]] = {name: [] for name in made}
            for turn in range(args.rounds + 1):
                for name, products in made.items():
                    start = time.perf_counter()
                    for product in products:
                        product(x)
                    if turn:  # the first round warms up
                        taken[name].append((time.perf_counter() - start) / args.copies)
            for name, values in taken.items():
                milliseconds.setdefault(name, {})[rows] = 1e3 * statistics.median(values)
    print(f"{out} x {inputs}, ms by rows", *(f"{rows:>8}" for rows in args.rows))
    for name, row in milliseconds.items():
        print(f"{name:20}", *(f"{row[rows]:8.2f}" for rows in args.rows))
    best = "fly bfloat16" if "fly bfloat16" in milliseconds else next(iter(milliseconds))
    ratios = {
        f"{name} / {best}": {r: round(row[r] / milliseconds[best][r], 2) for r in args.rows}
        for name, row in milliseconds.items()
        if name != best
    }
    summary = {
        "shape": args.shape,
        "instructions": kernels.instructions(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit(),
        "milliseconds": milliseconds,
        "ratios": ratios,
    }
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "products.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({"ratios": ratios}))


if __name__ == "__main__":
    main()
