"""Resident memory while many requests pass through few slots: it must stay flat.

    python benchmarks/memory.py --requests 500 --slots 8 --output memory.json

A random model of a few million parameters decodes prompts of random lengths with a draft model and
n-gram lookup. Prints the curve and, as the last line, one JSON object with the growth after the
first 50 requests.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
from pathlib import Path

import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from fly.execution.model_runner import ModelRunner
from fly.settings import Settings
from fly.speculation.drafters.cascade import CascadeDrafter
from fly.speculation.engine import Engine
from fly.speculation.rules.exact import ExactRule
from fly.speculation.sequence import Request

_WARM = 50
_VOCABULARY = 4096


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    return Qwen2ForCausalLM(config).eval()


def engine(slots: int) -> Engine:
    target = model()
    runner = ModelRunner(copy.deepcopy(target), slots, 2048)
    return Engine(
        ModelRunner(target, slots, 2048),
        CascadeDrafter(runner, frozenset(), (1, 4, 6)),
        ExactRule(Settings()),
        spd_k=8,
        eos_ids=frozenset(),
        decode=lambda ids: "",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--output", type=Path, help="file for the curve")
    args = parser.parse_args()
    if args.requests <= _WARM:
        parser.error(f"--requests {args.requests}: must be above {_WARM}")
    lengths = random.Random(0)
    requests = []
    for index in range(args.requests):
        size = lengths.randrange(10, 400)
        prompt = tuple(lengths.randrange(_VOCABULARY) for _ in range(size))
        requests.append(Request(prompt, lengths.randrange(8, 48), tag=index))
    process, curve = psutil.Process(), []
    for count, _ in enumerate(engine(args.slots).run(requests), start=1):
        if count % 10 == 0:
            gc.collect()
            curve.append((count, process.memory_info().rss))
    warm = next(size for count, size in curve if count >= _WARM)
    for count, size in curve:
        if count % 50 == 0:
            print(f"{count:5} requests: {size / 2**20:7.0f} MiB, {size / warm:.3f} x after {_WARM}")
    if args.output:
        args.output.write_text(json.dumps({"curve": curve}) + "\n")
    growth = max(size for count, size in curve if count > _WARM) / warm
    print(json.dumps({"ratios": {f"peak/after {_WARM} requests": round(growth, 4)}}))


if __name__ == "__main__":
    main()
