"""The decode loop at real shapes with random weights, against the machine's own copy bandwidth.

    python benchmarks/gpu.py --output
    python benchmarks/gpu.py --output --end-to-end qwen2.5-coder.json --with-vllm PYTHON
    python benchmarks/gpu.py --dry-run

Needs one accelerator and no downloads; --dry-run is toy shapes on a CPU. A pass's floor is the
bytes that it must read, its weights and its sequences' K/V, over the bandwidth of a large copy.
Random weights never agree, so rounds replay recorded numbers of accepted tokens: every pass,
verification kernel, host sync and commit runs, only the outcome is replaced. Rounds are timed with
all sequences running, without prefill and capture. In `ratios`, X/ceiling is time over the floor
(1.3 is 1.3 times as long); every other X/Y is X's speed over Y's, graph/eager too. Mode `uniform`
is graphs with `batch_invariant`, where the target's passes are of one shape; at each pair's shapes
it is checked that a token's bits do not depend on its place in a pass. `inductor` is graphs of
compiled passes; `fused`, what runs have by default, graphs of fly's layers (Triton's kernels
between merged products); `spread` has the target's layers over all GPUs. `fly_sampled` draws its
tokens, and `fly_head` drafts by an EAGLE-3 head. --end-to-end also decodes a real pair with FlyLM,
lm-eval's hf, transformers' assisted generation and vLLM (throughput.py). A verdict follows for each
claim. The last line printed is one JSON object. Exit status: 1 if a check or a measurement failed,
2 without an accelerator.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import math
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model
from provenance import commit
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen2Config,
)

from fly.errors import FlyError
from fly.execution import fused_layer, self_check
from fly.execution.cuda_graphs import CudaGraphRunner
from fly.execution.device import device_facts
from fly.execution.heads.eagle3 import Eagle3Head
from fly.execution.model_runner import ModelRunner
from fly.execution.oom import free_bytes
from fly.execution.slot_runner import SlotRunner
from fly.models.heads.checkpoint import Checkpoint, TargetShape
from fly.models.heads.eagle3 import files_of
from fly.runs.environment import versions
from fly.settings import FlySettings, Settings
from fly.speculation.drafters.base import Drafter, NoDrafter
from fly.speculation.drafters.draft import Draft
from fly.speculation.drafters.draft_model import ModelDrafter
from fly.speculation.drafters.eagle3 import Eagle3Drafter
from fly.speculation.engine import Engine
from fly.speculation.rules.exact import ExactRule
from fly.speculation.rules.fly import FlyRule
from fly.speculation.rules.judged import Resolution
from fly.speculation.sampling import GREEDY, Sampling
from fly.speculation.sequence import Request, Sequence, Verdict

# the shipped configurations' values
FLY = FlyRule(FlySettings.model_validate({"entropy_thre": 0.3, "win_len": 6}))
SAMPLED = Sampling(0.7, top_k=20, top_p=0.9)
WARM_UP, SLACK = 4, 8  # rounds: before the measured ones, and for those that captured a graph
PHASES = ("draft", "verify", "other")
MODES = ("eager", "graph", "uniform", "inductor", "fused")
PERIOD = 32  # of the built-in acceptance stream


def _shape(family: Any, *sizes: int, tied: bool) -> Any:
    """A published architecture, by the sizes that decide its speed. No token ends a text."""
    names = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
    names += "intermediate_size vocab_size"
    rest = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    rest |= {"tie_word_embeddings": tied, "max_position_embeddings": 32768}
    return family(**dict(zip(names.split(), sizes)), **rest)


SHAPES = {
    "qwen2.5-0.5b": _shape(Qwen2Config, 896, 24, 14, 2, 4864, 151936, tied=True),
    "qwen2.5-1.5b": _shape(Qwen2Config, 1536, 28, 12, 2, 8960, 151936, tied=True),
    "llama-1b": _shape(LlamaConfig, 2048, 16, 32, 8, 8192, 128256, tied=True),
    "llama-8b": _shape(LlamaConfig, 4096, 32, 32, 8, 14336, 128256, tied=False),
    # Qwen2.5-32B's sizes with the drafts' vocabulary: both models of a pair must share it.
    "32b": _shape(LlamaConfig, 5120, 64, 40, 8, 27648, 128256, tied=False),
    "toy": _shape(LlamaConfig, 64, 2, 4, 2, 128, 512, tied=True),
}
TOY, TOY_VOCAB = SHAPES["toy"], 512
PAIRS = {  # name: (draft, target)
    "qwen-0.5b-1.5b": ("qwen2.5-0.5b", "qwen2.5-1.5b"),
    "llama-1b-8b": ("llama-1b", "llama-8b"),
    "llama-1b-32b": ("llama-1b", "32b"),
    "llama-8b-32b": ("llama-8b", "32b"),
    "toy": ("toy", "toy"),
}


def build(shape: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Random weights, made on the device in their final dtype."""
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(shape), dtype=dtype)
    return model.eval().requires_grad_(False)


def build_head(target: Any) -> Any:
    """An EAGLE-3 head of random weights, of the target's sizes."""
    shape, sizes = target.config, TargetShape.of(target.config)
    keys = {
        **shape.to_dict(),
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    layers: int = shape.num_hidden_layers
    keys["eagle_aux_hidden_state_layer_ids"] = sorted({1, layers // 2, layers - 1})
    tensors = {"lm_head.weight": torch.empty(shape.vocab_size, shape.hidden_size, device="meta")}
    with torch.device(target.device):
        head = Eagle3Head(files_of(Checkpoint("random", keys, tensors), sizes, None))
    for parameter in head.parameters():
        parameter.data = parameter.data.to(target.dtype)
    return head.eval().requires_grad_(False)


def kv_bytes(shape: Any, dtype: torch.dtype) -> int:
    """K and V of one token in all layers."""
    head_size: int = shape.hidden_size // shape.num_attention_heads
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * head_size * dtype.itemsize


def read_bytes(model: Any) -> int:
    """Weight bytes that every pass reads: all but an embedding table that is not the head too."""
    total: int = sum(weight.nbytes for weight in model.parameters())
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total if head is table else total - table.nbytes


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(call: Callable[[], Any], device: torch.device, repeats: int) -> dict[str, Any]:
    """Medians, warm-up excluded. `ms`: what the host waits, from idle to idle; `device_ms`: what
    passes between two events on the stream (None without one)."""
    on_cuda = device.type == "cuda"
    begin, calls = time.perf_counter(), 0
    while calls < 3 or (on_cuda and time.perf_counter() - begin < 0.2):  # clocks go up meanwhile
        call()
        synchronize(device)
        calls += 1
    wall, on_device = [], []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        if on_cuda:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            call()
            last.record()
            synchronize(device)
            on_device.append(first.elapsed_time(last))
        else:
            call()
        wall.append(1e3 * (time.perf_counter() - start))
    device_ms = statistics.median(on_device) if on_cuda else None
    samples = [round(value, 4) for value in wall]
    return {"ms": statistics.median(wall), "device_ms": device_ms, "samples_ms": samples}


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy within the device, read and written bytes both counted."""
    size = 1 << (30 if device.type == "cuda" else 25)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copied = torch.empty_like(source)
    found = measure(lambda: copied.copy_(source), device, 15)
    return 2 * size / (found["device_ms"] or found["ms"]) * 1e3


def stream_of(tau: float, k: int) -> list[int]:
    """PERIOD accepted counts whose mean is tau - 1 (to 1/PERIOD): a geometric law cut at K,
    by its quantiles, in an order whose every stretch has about the same mean."""
    low, high = 0.0, 1.0  # bounds of the chance that the next token stands too
    for _ in range(60):
        chance = (low + high) / 2
        mean = sum(chance**count for count in range(1, k + 1))
        low, high = (chance, high) if mean < tau - 1 else (low, chance)
    at_least = [chance**count for count in range(1, k + 1)]
    counts = [sum((i + 0.5) / PERIOD < share for share in at_least) for i in range(PERIOD)]
    index = 0
    while missing := round((tau - 1) * PERIOD) - sum(counts):  # rounding left it off by a few
        counts[index] = min(k, max(0, counts[index] + (1 if missing > 0 else -1)))
        index = (index + 1) % PERIOD
    return [counts[19 * i % PERIOD] for i in range(PERIOD)]


class EnoughRounds(Exception):  # noqa: N818 - not an error
    """Raised out of the loop once all rounds are measured."""


class ReplayEngine(Engine):
    """The real loop; only how many draft tokens stood comes from `stream`, in slot order."""

    def __init__(self, *args: Any, stream: Iterator[int], rounds: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stream, self._rounds, self._warm_up = stream, rounds, WARM_UP
        self.measured: list[dict[str, float]] = []

    def _verify(self, running: list[Sequence], draft: Draft) -> tuple[list[Verdict], Tensor]:
        verdicts, logits_BKV = super()._verify(running, draft)
        return [self._replayed(verdict) for verdict in verdicts], logits_BKV

    def _replayed(self, verdict: Verdict) -> Verdict:
        drafted = len(verdict.draft)
        accepted = min(next(self._stream), drafted)
        matches = [index < accepted for index in range(drafted)]
        return replace(verdict, matches=matches, resolution=Resolution(accepted))

    def _round(self, running: list[Sequence]) -> None:
        captured, before = CudaGraphRunner.all_seconds, _sums(running)
        start = time.perf_counter()
        super()._round(running)  # ends with the verdict; the next draft waits for the rest
        seconds = time.perf_counter() - start
        if self._warm_up > 0:
            self._warm_up -= 1
        elif CudaGraphRunner.all_seconds == captured:
            spent = {key: value - before[key] for key, value in _sums(running).items()}
            self.measured.append({"s": seconds, **spent})
        if len(self.measured) == self._rounds:
            raise EnoughRounds

    def _halve(self, error: Exception, *, alone: bool) -> None:
        raise torch.OutOfMemoryError(str(error)) from None  # fewer sequences would be another batch


def _sums(running: list[Sequence]) -> dict[str, float]:
    phases = {key: sum(sequence.seconds[key] for sequence in running) for key in PHASES}
    return {"emitted": sum(len(sequence.tokens) for sequence in running), **phases}


class StepClock(LogitsProcessor):
    """Stamps the first and the last step of one `generate`: decode time without prefill."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self._at, self._last, self._device = 0, steps, device
        self._stamps: dict[int, float] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._at += 1
        if self._at in (1, self._last):
            synchronize(self._device)
            self._stamps[self._at] = time.perf_counter()
        return scores

    @property
    def seconds(self) -> float:
        return self._stamps[self._last] - self._stamps[1]


def compiled_generate(model: Any, ids_BT: Tensor, tokens: int) -> dict[str, Any]:
    """Decode speed of `generate` over a static cache, which transformers compiles by itself."""
    start, warm_up, seconds = time.perf_counter(), 0.0, list[float]()
    options = {"cache_implementation": "static", "do_sample": False, "max_new_tokens": tokens}
    for turn in range(4):  # the first two compile and capture
        clock = StepClock(tokens, ids_BT.device)
        own = {"logits_processor": LogitsProcessorList([clock])}
        model.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), **options, **own)
        if turn < 2:
            warm_up = time.perf_counter() - start
        else:
            seconds.append(clock.seconds)
    if "_compiled_call" not in model.__dict__:
        raise RuntimeError("this version did not compile")
    per_step = statistics.median(seconds) / (tokens - 1)
    speed = ids_BT.shape[0] / per_step
    return {"ms": 1e3 * per_step, "tok_s": speed, "capture_seconds": round(warm_up, 1)}


def forget_compiled(model: Any) -> None:
    """Else a second batch size would be compiled for any batch size, and the memory kept."""
    for name in ("_compiled_call", "_cache"):
        model.__dict__.pop(name, None)
    torch.compiler.reset()


def eager_chain(runner: ModelRunner, feeds: list[list[int]], steps: int) -> list[list[int]]:
    """Greedy drafts by one eager pass and one word from the host per token: chain's oracle."""
    drafted: list[list[int]] = [[] for _ in feeds]
    for _ in range(steps):
        own_tokens = runner.extend(feeds).float().argmax(dim=-1).tolist()
        for slot, feed in enumerate(feeds):
            runner.truncate(slot, runner.lengths[slot] + len(feed))
            drafted[slot].append(own_tokens[slot][len(feed) - 1])
        feeds = [[chain[-1]] for chain in drafted]
    return drafted


def toy_model(seed: int, device: torch.device, dtype: torch.dtype) -> Any:
    """The same weights on every machine, large enough that argmaxes are no near-ties."""
    torch.manual_seed(seed)
    model = build(TOY, torch.device("cpu"), torch.float32)
    for weight in model.parameters():
        weight.mul_(5 if weight.dim() > 1 else 1)
    return model.to(device=device, dtype=dtype)


def check_passes(device: torch.device, dtype: torch.dtype, tolerance: float) -> dict[str, Any]:
    """Graph passes against eager ones: ragged feeds, several widths, after rollbacks.

    Logits within `tolerance` of the largest; in float32 also the very tokens of chains.
    """
    rng = random.Random(0)
    runner = ModelRunner(toy_model(0, device, dtype), 8, 1024)
    for slot in range(8):
        runner.prefill(slot, rng.choices(range(TOY_VOCAB), k=600))
    runner.use_static_passes(capture=device.type == "cuda")
    static, worst, chains, same = runner.static, 0.0, 0, 0
    assert static is not None
    for sequences, width, longest in itertools.product((1, 3, 8), (1, 2, 5, 9), (60, 250, 590)):
        widths = [width, *(rng.randint(1, width) for _ in range(sequences - 1))]
        feeds = [rng.choices(range(TOY_VOCAB), k=count) for count in widths]
        for path in (None, static):
            runner.lengths[:] = [longest - 7 * slot for slot in range(8)]  # rolled back
            runner.static = path
            logits_BQV = runner.extend(feeds).float().cpu()
            if path is None:
                eager_BQV = logits_BQV
        for left, right, count in zip(eager_BQV, logits_BQV, widths):
            difference = (left[:count] - right[:count]).abs().max() / left[:count].abs().max()
            worst = max(worst, float(difference.nan_to_num(math.inf)))
        if dtype is torch.float32 and width <= 2:
            drafted_BK = runner.chain(feeds, 6).tokens
            runner.lengths[:] = [longest - 7 * slot for slot in range(8)]
            runner.static = None
            expected = eager_chain(runner, feeds, 6)
            chains += 1
            same += drafted_BK.tolist() == expected
    passed = static.failure is None and worst <= tolerance and same == chains
    found = {"passed": passed, "worst": worst, "tolerance": tolerance, "failure": static.failure}
    return {**found, "same_chains": same, "chains": chains}


def check_engine(device: torch.device) -> dict[str, Any]:
    """Whole decodes in float32, graph against eager, with drafts of which some are rejected."""
    target, other = (toy_model(seed, device, torch.float32) for seed in (0, 1))
    draft = copy.deepcopy(target)
    for weight, noise in zip(draft.parameters(), other.parameters()):
        weight.add_(noise, alpha=0.05 if weight.dim() > 1 else 0.0)
    prompts = [tuple(range(size, 2 * size)) for size in (5, 30, 17)]
    none = frozenset({TOY_VOCAB})
    outputs, accepted, drafted, failures = [], 0, 0, []
    for static in (False, True):
        runners = [ModelRunner(model, 2, 1024) for model in (target, draft)]
        for runner in runners if static else ():
            runner.use_static_passes(capture=device.type == "cuda")
        rest: dict[str, Any] = {"eos_ids": none, "decode": lambda ids: ""}
        engine = Engine(runners[0], ModelDrafter(runners[1], none), FLY, spd_k=8, **rest)
        records = list(engine.run(Request(prompt, 48) for prompt in prompts))
        outputs.append({record.request.prompt: record.tokens for record in records})
        accepted = sum(record.counts.native_accepted for record in records)
        drafted = sum(record.counts.drafted for record in records)
        failures = [runner.static.failure for runner in runners if runner.static]
    passed = outputs[0] == outputs[1] and 0 < accepted < drafted and not any(failures)
    return {"passed": passed, "accepted": accepted, "drafted": drafted, "failures": failures}


class DoesNotFit(Exception):  # noqa: N818 - a line, and the rest goes on
    """The models or the K/V need more memory than there is."""


@dataclass
class Bench:
    args: argparse.Namespace
    device: torch.device
    stream: list[int]
    dtype: torch.dtype = torch.bfloat16
    bandwidth: float = 0.0
    checks: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    peers: dict[str, float] = field(default_factory=dict)  # ratios of --end-to-end

    def __post_init__(self) -> None:
        k = self.args.k
        self.tau = 1 + statistics.fmean(min(count, k) for count in self.stream)
        self.rounds = math.ceil(self.args.tokens / self.tau)
        room = max((self.rounds + WARM_UP + SLACK) * (k + 1), self.args.tokens + WARM_UP + SLACK)
        # Tokens per sequence: the bucket of the graphs in which the longest one ends.
        self.capacity = max(256, 1 << (self.args.context + room + 2 * k + 4).bit_length())

    def keep(self, **record: Any) -> None:
        self.records.append(record)
        if self.args.output:
            with open(self.args.output / "records.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def attempt(self, label: str, call: Callable[..., None], *args: Any) -> None:
        """One part of the run: what goes wrong in it is one line, and the next part follows."""
        try:
            call(*args)
        except Exception as error:
            does_not_fit = isinstance(error, (DoesNotFit, torch.OutOfMemoryError))
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            (self.skipped if does_not_fit else self.failures).append(f"{label}: {reason}")
            print(f"{'skipped' if does_not_fit else 'failed'}: {label}: {reason}", flush=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def check(self) -> None:
        for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
            self.checks[f"passes {dtype}"] = check_passes(self.device, dtype, tolerance)
        self.checks["engine"] = check_engine(self.device)

    def check_places(self, pair: str, target: Any) -> None:
        name, failure = f"places {pair}", None
        try:
            self_check.check_places(target, pair, capture=self.device.type == "cuda")
        except FlyError as error:
            failure = str(error)
        self.checks[name] = {"passed": failure is None, "failure": failure}
        print(f"{'WRONG' if failure else 'ok'}: {name}: {self.checks[name]}", flush=True)

    def pair(self, name: str) -> None:
        shapes = [SHAPES[shape] for shape in PAIRS[name]]
        metas = [build(shape, torch.device("meta"), self.dtype) for shape in shapes]
        weights = sum(weight.nbytes for meta in metas for weight in meta.parameters())
        self.must_fit(weights + min(self.args.batches) * self.sequence_bytes(shapes))
        models = [build(shape, self.device, self.dtype) for shape in shapes]
        self.attempt(f"{name} places", self.check_places, name, models[1])
        on_cuda = self.device.type == "cuda"
        left_out = ("fused",) if on_cuda else ("fused", "inductor")
        modes = [mode for mode in self.args.modes if mode not in left_out]
        for batch in self.args.batches if modes else ():
            self.attempt(f"{name} batch {batch}", self.batch, name, batch, shapes, models, modes)
        if not on_cuda or self.args.no_transformers:
            print(f"skipped: {name}: transformers' compiled generate (asked to, or no accelerator)")
        else:
            for batch in self.args.batches:
                label = f"{name} batch {batch}: transformers' compiled generate"
                self.attempt(label, self.transformers, name, batch, models[1])
                forget_compiled(models[1])
        if "fused" in self.args.modes and on_cuda:
            if not all(fused_layer.replace_on_gpu(model) for model in models):
                raise RuntimeError("no fused layers")
            for batch in self.args.batches:
                label = f"{name} batch {batch}, fused"
                self.attempt(label, self.batch, name, batch, shapes, models, ["fused"])
        if on_cuda and torch.cuda.device_count() > 1:
            models[1] = build(shapes[1], self.device, self.dtype)  # with its own layers
            self.attempt(f"{name} spread", self.spread, name, min(self.args.batches), models)
        else:
            print(f"skipped: {name}: layers spread over GPUs (there are not two)")

    def end_to_end(self) -> None:
        """A real pair by FlyLM and its peers: throughput.py's own process, records and ratios."""
        script = Path(__file__).with_name("throughput.py")
        command = [sys.executable, str(script), "--config", self.args.end_to_end]
        command += ["--device", str(self.device)]
        if self.args.with_vllm:
            command += ["--with-vllm", self.args.with_vllm]
        if self.args.output:
            command += ["--output", str(self.args.output / "end_to_end")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(done.stdout[-4000:], flush=True)
        if done.returncode:
            raise RuntimeError(f"throughput.py ended with {done.returncode}: {done.stderr[-300:]}")
        self.peers = json.loads(done.stdout.strip().splitlines()[-1])["ratios"]

    def sequence_bytes(self, shapes: list[Any]) -> int:
        """One sequence's K/V in both models and the workspace of its verification."""
        kv = sum(kv_bytes(shape, self.dtype) for shape in shapes)
        return self.capacity * kv + 6 * 4 * (self.args.k + 1) * shapes[1].vocab_size

    def must_fit(self, needed: int) -> None:
        free = free_bytes(self.device)
        if needed > 0.95 * free:
            raise DoesNotFit(f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")

    def prompt(self, length: int) -> list[int]:
        return random.Random(0).choices(range(TOY_VOCAB), k=length)

    def batch(
        self, pair: str, batch: int, shapes: list[Any], models: list[Any], modes: list[str]
    ) -> None:
        """All of fly's measurements of one pair at one batch size, by these modes."""
        self.must_fit(batch * self.sequence_bytes(shapes))
        longest = 2 * self.capacity + self.args.tokens  # never reached
        draft, target = (ModelRunner(model, batch, longest) for model in models)
        for runner in (draft, target):
            runner.reserve(self.capacity)
            for slot in range(batch):  # the first is computed, the others copy it
                runner.prefill(slot, self.prompt(self.args.context))
        capture = self.device.type == "cuda"
        for mode in modes:
            for runner in (draft, target):
                runner.static = runner.uniform = None
                if mode == "uniform" and runner is target:
                    runner.use_uniform_passes(capture=capture)
                elif mode != "eager":
                    runner.use_static_passes(capture=capture, compiles=mode == "inductor")
            where = {"pair": pair, "batch": batch, "mode": mode}
            self.passes(where, draft, target)
            drafter = ModelDrafter(draft, frozenset({target.model.config.vocab_size}))
            self.play(where, f"fly_tau{self.tau:.3g}", target, drafter)
            self.play(where, "target_only", target, NoDrafter())
            if mode in ("eager", "graph", "fused"):
                self.play(where, "fly_sampled", target, drafter, SAMPLED)
                self.play(where, "fly_head", target, self.head_drafter(target, batch, longest))
                target.hidden_layers = ()

    def head_drafter(self, target: ModelRunner, batch: int, longest: int) -> Eagle3Drafter:
        runner = build_head(target.model).runner(target.model, batch, longest)
        return Eagle3Drafter(runner, frozenset({target.model.config.vocab_size}))

    def spread(self, pair: str, batch: int, models: list[Any]) -> None:
        """The target's layers over all GPUs; the draft stays on the first. Afterwards the models
        are of no use to another measurement."""
        layers, gpus = models[1].config.num_hidden_layers, torch.cuda.device_count()
        places = {f"model.layers.{i}": i * gpus // layers for i in range(layers)}
        places |= {"model.embed_tokens": 0, "model.rotary_emb": 0}
        places |= {"model.norm": gpus - 1, "lm_head": gpus - 1}
        model = dispatch_model(models[1], places)
        longest = 2 * self.capacity + self.args.tokens
        target, draft = ModelRunner(model, batch, longest), ModelRunner(models[0], batch, longest)
        draft.use_static_passes(capture=True)
        where = {"pair": pair, "batch": batch, "mode": "spread"}
        drafter = ModelDrafter(draft, frozenset({model.config.vocab_size}))
        self.play(where, f"fly_tau{self.tau:.3g}", target, drafter)
        self.play(where, "target_only", target, NoDrafter())

    def passes(self, where: dict[str, Any], draft: ModelRunner, target: ModelRunner) -> None:
        """Draft step, chain of K, verify pass and target step, each over `context` tokens."""
        k, context, batch = self.args.k, self.args.context, where["batch"]

        def chain() -> None:
            if draft.static is None:
                eager_chain(draft, [[7]] * batch, k)
            else:
                draft.chain([[7]] * batch, k)
            draft.lengths[:] = [context] * batch

        def prefill() -> None:
            target.truncate(0, 0)
            target.catch_up(0, self.prompt(context))

        calls: dict[str, tuple[ModelRunner, int, Callable[[], Any]]] = {
            "draft_step": (draft, 1, lambda: draft.extend([[7]] * batch)),
            "draft_chain": (draft, k, chain),
            "verify": (target, 1, lambda: target.extend([[7] * (k + 1)] * batch)),
            "target_step": (target, 1, lambda: target.extend([[7]] * batch)),
            "prefill": (target, 1, prefill),
        }
        for what, (runner, steps, call) in calls.items():
            runner.lengths[:] = [context] * batch
            captured = CudaGraphRunner.all_seconds
            found = measure(call, self.device, self.args.repeats)
            must_be_static(runner)
            moved = read_bytes(runner.model) + batch * context * sum(
                runner.cache.bytes_per_token.values()
            )
            found["floor_ms"] = 1e3 * steps * moved / self.bandwidth
            found["x_ceiling"] = found["ms"] / found["floor_ms"]
            found["capture_seconds"] = round(CudaGraphRunner.all_seconds - captured, 3)
            self.keep(kind="pass", what=what, **where, **found)

    def play(
        self,
        where: dict[str, Any],
        what: str,
        target: ModelRunner,
        drafter: Drafter,
        sampling: Sampling = GREEDY,
    ) -> None:
        """Whole rounds through the engine."""
        draft = drafter.runner
        k, batch = self.args.k if draft else 0, where["batch"]
        captured = CudaGraphRunner.all_seconds
        rounds = self.rounds if draft else self.args.tokens
        no_token = frozenset({target.model.config.vocab_size})
        # The warm-up's outcomes bring about every shape of feed: all accepted, and none.
        warm_up = [k] * (2 * batch) + [0] * ((WARM_UP - 2) * batch)
        stream = itertools.chain(warm_up, itertools.cycle(self.stream))
        rule = FLY if draft else ExactRule(Settings())
        rest: dict[str, Any] = {"eos_ids": no_token, "decode": lambda ids: ""}
        engine = ReplayEngine(target, drafter, rule, spd_k=k, stream=stream, rounds=rounds, **rest)
        prompt = tuple(self.prompt(self.args.context + 1))
        budget = (WARM_UP + rounds + SLACK) * (k + 1) + k + 1
        try:
            wanted = [Request(prompt, budget, tag=tag, sampling=sampling) for tag in range(batch)]
            for _ in engine.run(wanted):
                raise RuntimeError("a sequence ended before all rounds were measured")
        except EnoughRounds:
            pass
        for runner in (target, draft):
            must_be_static(runner)
        sums = {key: sum(r[key] for r in engine.measured) for key in engine.measured[0]}
        found: dict[str, Any] = {
            "ms": 1e3 * statistics.median(r["s"] for r in engine.measured),
            "tok_s": sums["emitted"] / sums["s"],
            "tau": sums["emitted"] / rounds / batch,
            "phases_ms": {key: 1e3 * sums[key] / rounds for key in PHASES},
            "capture_seconds": round(CudaGraphRunner.all_seconds - captured, 3),
            "samples_ms": [round(1e3 * r["s"], 4) for r in engine.measured],
        }
        self.keep(kind="rounds", what=what, **where, **found)

    def transformers(self, pair: str, batch: int, model: Any) -> None:
        ids_BT = torch.tensor([self.prompt(self.args.context)] * batch, device=self.device)
        found = compiled_generate(model, ids_BT, self.args.tokens)
        where = {"pair": pair, "batch": batch, "mode": "compiled"}
        self.keep(kind="rounds", what="transformers", **where, **found)


def must_be_static(runner: SlotRunner | None) -> None:
    """A graph that failed leaves eager passes behind, which must not count as graphs."""
    for passes in (runner.static, runner.uniform) if isinstance(runner, ModelRunner) else ():
        if passes is not None and passes.failure is not None:
            raise RuntimeError(f"no graph: {passes.failure}")


def ratios(records: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    speeds: dict[str, dict[str, float]] = {}  # by place, then by what and mode
    best = "fused" if any(r["mode"] == "fused" for r in records) else "graph"
    for r in records:
        at = f"@{r['batch']}:{r['pair']}"
        speeds.setdefault(at, {})[f"{r['what']} {r['mode']}"] = r.get("tok_s") or 1 / r["ms"]
        if r["mode"] == best and r["kind"] == "pass":
            found[f"{r['what']}/ceiling{at}"] = round(r["x_ceiling"], 3)
    fly = next((r["what"] for r in records if r["what"].startswith("fly")), "fly")
    for at, here in speeds.items():
        named = {f"{fly}/target_only{at}": (f"{fly} {best}", f"target_only {best}")}
        named[f"{fly}_eager/target_only_eager{at}"] = (f"{fly} eager", "target_only eager")
        for what in (fly, "target_only"):
            compiled = (f"{what} {best}", "transformers compiled")
            named[f"{what}/transformers_compiled{at}"] = compiled
        for what in ("fly_sampled", "fly_head"):
            named[f"{what}/{fly}{at}"] = (f"{what} {best}", f"{fly} {best}")
        named[f"{fly}/target_only spread{at}"] = (f"{fly} spread", "target_only spread")
        for what in dict.fromkeys(name.split()[0] for name in here):
            named[f"inductor/graph {what}{at}"] = (f"{what} inductor", f"{what} graph")
            named[f"fused/graph {what}{at}"] = (f"{what} fused", f"{what} graph")
            named[f"graph/eager {what}{at}"] = (f"{what} graph", f"{what} eager")
            named[f"uniform/graph {what}{at}"] = (f"{what} uniform", f"{what} graph")
        for name, (above, below) in named.items():
            if above in here and below in here:
                found[name] = round(here[above] / here[below], 3)
    return found


CLAIMS = {  # by the start of the ratios that it holds for, each at least so large
    "graphs are faster than eager passes": (r"graph/eager ", 1.0),
    "FLy is faster than the target alone": (r"fly_tau[^/ ]*/target_only(@| spread)", 1.0),
    "sampled rounds cost little more than greedy ones": (r"fly_sampled/", 0.9),
    "a head drafts no slower than the draft model": (r"fly_head/", 1.0),
    "the target alone keeps up with transformers' compiled generate": (
        r"target_only/transformers_compiled", 1.0,
    ),
    "fused layers are faster than transformers'": (r"fused/graph ", 1.0),
    "compile=inductor pays": (r"inductor/graph ", 1.0),
    "end to end FLy is faster than lm-eval's hf": (r"fly/hf@", 1.0),
    "end to end FLy is faster than assisted generation": (r"fly/assisted@", 1.0),
    "end to end FLy keeps up with vLLM": (r"fly/vllm@", 1.0),
}  # fmt: skip


def verdicts(found: dict[str, float]) -> dict[str, str]:
    """By claim: held, or the worst ratio that does not hold it, or not measured."""
    result = {}
    for claim, (pattern, least) in CLAIMS.items():
        here = {name: ratio for name, ratio in found.items() if re.match(pattern, name)}
        worst = min(here, key=here.__getitem__, default=None)
        if worst is None:
            result[claim] = "not measured"
        else:
            holds = "holds" if here[worst] >= least else "does not hold"
            result[claim] = f"{holds}: at worst {here[worst]} ({worst}), {least} wanted"
    return result


def print_table(records: list[dict[str, Any]]) -> None:
    numbers = {"ms": 3, "device_ms": 3, "floor_ms": 3, "x_ceiling": 2, "tok_s": 1, "tau": 3}
    numbers["capture_seconds"] = 1
    heads = "".join(f"{name.removesuffix('_seconds'):>11}" for name in numbers)
    print(f"\n{'pair':16}{'batch':>6}  {'what':12} {'mode':9}{heads}")
    for r in records:
        values = [f"{r[key]:.{digits}f}" if r.get(key) is not None else "-"
                  for key, digits in numbers.items()]  # fmt: skip
        cells = "".join(f"{value:>11}" for value in values)
        print(f"{r['pair']:16}{r['batch']:6}  {r['what']:12} {r['mode']:9}{cells}")
    print()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    real = [name for name in PAIRS if name != "toy"]
    add("--dry-run", action="store_true", help="toy shapes and sizes, on a CPU in seconds")
    add("--device", help="default: cuda (ROCm too), or cpu with --dry-run")
    add("--pairs", nargs="*", choices=real, default=real, help="none: only the checks")
    add("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    add("--modes", nargs="+", choices=MODES, default=MODES, help="default: all")
    add("--context", type=int, default=512, help="tokens already cached per sequence")
    add("--tokens", type=int, default=256, help="new tokens per sequence")
    add("--repeats", type=int, default=30, help="timed calls of each pass")
    add("--k", type=int, default=8, help="draft tokens per round")
    add("--tau", type=float, default=8.0, help="of the built-in stream, at most K + 1")
    add("--stream", type=Path, help="accepted draft tokens per round of a real run, one per line")
    add("--no-transformers", action="store_true", help="leave its compiled generate out")
    add("--end-to-end", metavar="CONFIG", help="also a real pair, with all peers (throughput.py)")
    add("--with-vllm", metavar="PYTHON", help="interpreter of vLLM's environment, for that")
    add("--output", type=Path, nargs="?", const=Path(), help="folder of the raw records; without a "
        "value: benchmarks/results/<date>-<device>-gpu")  # fmt: skip
    args = parser.parse_args(argv)
    args.device = args.device or ("cpu" if args.dry_run else "cuda")
    if not torch.cuda.is_available() and not (args.dry_run and args.device == "cpu"):
        parser.exit(2, "no accelerator here: pass --dry-run for toy shapes on the CPU\n")
    if args.dry_run:
        toy = {"pairs": ["toy"], "batches": [1, 3], "context": 24, "tokens": 64, "repeats": 3}
        vars(args).update(toy)
    if min(args.k, args.context, args.repeats, *args.batches) < 1 or args.tokens < 2:
        parser.error("--k, --context, --repeats and --batches must be at least 1, --tokens 2")
    if args.stream is None and not 1 <= args.tau <= args.k + 1:
        parser.error(f"--tau {args.tau}: a round emits 1 to K + 1 = {args.k + 1} tokens")
    return args


def read_stream(args: argparse.Namespace) -> list[int]:
    if args.stream is None:
        return stream_of(args.tau, args.k)
    try:
        counts = [int(word) for word in args.stream.read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        sys.exit(f"--stream {args.stream}: {error}")
    if not counts or min(counts) < 0:
        sys.exit(f"--stream {args.stream}: needs accepted counts >= 0, one per line")
    return counts


def open_output(folder: Path | None, device: str) -> Path | None:
    """The folder of the raw records; an empty path stands for the default."""
    if folder == Path():
        name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        stamp = time.strftime("%Y-%m-%d-%H%M%S")
        folder = Path(__file__).parent / "results" / f"{stamp}-{name}-gpu"
    if folder is not None:
        if (folder / "records.jsonl").exists():
            sys.exit(f"--output {folder}: holds the records of a run: choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    if args.dry_run:
        torch.set_num_threads(1)
    facts = device_facts(device)
    bench = Bench(args, device, read_stream(args))
    args.output = open_output(args.output, facts["name"])
    captured = device.type == "cuda"
    note = "" if captured else "; graph = the same static passes, not captured"
    print(f"device: {facts['name']}{note}", flush=True)
    bench.attempt("correctness", bench.check)
    for name, check in bench.checks.items():
        print(f"{'ok' if check['passed'] else 'WRONG'}: graph path = eager path, {name}: {check}")
    bench.bandwidth = copy_bandwidth(device)
    print(f"copy bandwidth: {bench.bandwidth / 1e9:.1f} GB/s, read + written", flush=True)
    for name in args.pairs:
        bench.attempt(name, bench.pair, name)
    if args.end_to_end:
        bench.attempt("end to end", bench.end_to_end)
    print_table(bench.records)
    passed = len(bench.checks) >= 3 and all(check["passed"] for check in bench.checks.values())
    hidden = ("output", "stream", "with_vllm")  # paths of this machine
    summary = {
        "commit": commit(),
        "versions": versions(),
        "device": facts,
        "captured": captured,
        "arguments": {key: value for key, value in vars(args).items() if key not in hidden},
        "stream": bench.stream,
        "stream_tau": bench.tau,
        "copy_bandwidth": bench.bandwidth,
        "checks": bench.checks,
        "records": [{k: v for k, v in r.items() if k != "samples_ms"} for r in bench.records],
        "skipped": bench.skipped,
        "failures": bench.failures,
        "ratios": ratios(bench.records) | bench.peers,
    }
    summary["verdicts"] = verdicts(summary["ratios"])
    for claim, verdict in summary["verdicts"].items():
        print(f"{claim}: {verdict}")
    if args.output:
        text = json.dumps(summary, indent=1) + "\n"
        (args.output / "summary.json").write_text(text, encoding="utf-8")
        print(f"records: {args.output}")
    print(json.dumps({"ratios": summary["ratios"]}))
    return 0 if passed and not bench.failures else 1


if __name__ == "__main__":
    sys.exit(main())
