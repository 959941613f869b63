"""Passes of fixed shapes, captured once as CUDA graphs and replayed.

On a GPU a small model's decoding pass is bound by launching kernels, not by memory. A graph
launches a whole pass at once; `chain` puts K draft steps, each feeding the next on the device, into
one. Graphs are captured at the first use of a shape. Where capture fails (data-dependent control
flow, for one) decoding goes on with eager passes and one log line says why.

Shapes: B rows (padded to a bucket), Q new tokens per row, T readable tokens, K draft tokens.
"""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fly.errors import reason_of
from fly.execution.argmax import greedy, mask_nonfinite
from fly.execution.kv_cache import SlotCache
from fly.execution.oom import is_out_of_memory

logger = logging.getLogger(__name__)

_SHORTEST_READ = 256
_SHORTEST_FEED, _LONGEST_FEED = 16, 1024  # longer ones keep a GPU busy without a graph


class PassOutput(NamedTuple):
    """logits: [B, Q, V]. hidden: [B, Q, F], the states of the layers asked for side by side; None
    without any. Of passes whose rows are tokens [T, V] and [T, F]."""

    logits: Tensor
    hidden: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> PassOutput:
        return PassOutput(change(self.logits), None if self.hidden is None else change(self.hidden))


class Drafted(NamedTuple):
    """tokens: [B, K], -1 for logits that are not finite. q: what they were drawn from, [B, K, V];
    None if they were not drawn. Of one step [B] and [B, V]."""

    tokens: Tensor
    q: Tensor | None = None

    @classmethod
    def together(cls, steps: list[Drafted]) -> Drafted:
        q = [step.q for step in steps if step.q is not None]
        return cls(torch.stack([s.tokens for s in steps], 1), torch.stack(q, 1) if q else None)


class Chooser:
    """Takes the tokens of a draft from its logits, on the device; this one the likeliest.

    inputs: tensors [B, K], whose values change from chain to chain. key: choosers with equal keys
    do the same with theirs, so that they may share a graph; None for one that cannot be captured.
    """

    key: Hashable | None = "likeliest"
    inputs: tuple[Tensor, ...] = ()

    def __call__(self, logits_BV: Tensor, step: int, *inputs: Tensor) -> Drafted:
        return Drafted(mask_nonfinite(greedy(logits_BV), logits_BV))


LIKELIEST = Chooser()


class CapturedPass(NamedTuple):
    """Static inputs and output of one shape, and what computes the output from the inputs."""

    inputs: tuple[Tensor, ...]
    output: Any
    replay: Callable[[], None]


class Runner(Protocol):
    """Whose passes these are: fly.execution.model_runner.ModelRunner."""

    cache: SlotCache
    lengths: list[int]
    device: torch.device
    model: PreTrainedModel

    @property
    def slots(self) -> int: ...

    @property
    def hidden_layers(self) -> tuple[int, ...]: ...

    def reserve(self, tokens: int) -> None: ...

    def static_pass(
        self, ids_BQ: Tensor, lengths_B: Tensor, read_length: int, slot_1: Tensor | None = None
    ) -> PassOutput: ...

    def token_pass(
        self,
        ids_T: Tensor,
        slots_T: Tensor,
        positions_T: Tensor,
        read_length: int,
        *,
        with_logits: bool,
    ) -> PassOutput: ...

    def own_ids(self, token_B: Tensor) -> Tensor: ...


class CapturedPasses:
    """Passes of a runner, of fixed shapes by key, captured as CUDA graphs at a key's first use.

    capture: False computes the same static passes without a graph (any device; for tests).
    failure: why capturing failed, if it did; passes are eager from then on. on_failure is told.
    `all_seconds`: time spent capturing by every instance, which is compile time, never decode time.
    """

    all_seconds = 0.0

    def __init__(
        self,
        runner: Runner,
        *,
        capture: bool,
        on_failure: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._runner_of = weakref.ref(runner)  # no cycle: the K/V are freed with the runner
        self._capture = capture
        self._captured: dict[tuple[Any, ...], CapturedPass] = {}
        self._pool: Any = None
        self._stream: Any = None
        self.failure: str | None = None
        self._on_failure = on_failure

    @property
    def _runner(self) -> Runner:
        runner = self._runner_of()
        assert runner is not None
        return runner

    def clear(self) -> None:
        """Drop all graphs: the tensors that they read were replaced."""
        self._captured.clear()
        self._pool = None

    def get(
        self,
        key: tuple[Any, ...],
        inputs: Callable[[], tuple[Tensor, ...]],
        compute: Callable[..., Any],
    ) -> CapturedPass | None:
        """The pass of this key; None if it has to be run eagerly.

        inputs: makes the tensors that `compute` is called with, whose values trial passes take.
        """
        if self.failure is not None:
            return None
        if key not in self._captured:
            start = time.perf_counter()
            try:
                self._captured[key] = self._make(inputs(), compute)
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                if is_out_of_memory(error):
                    raise
                self.failure = reason_of(error)
                self.clear()
                logger.warning("compile=auto: eager passes from here on: %s", self.failure)
                self._on_failure(self.failure)
                return None
            finally:
                CapturedPasses.all_seconds += time.perf_counter() - start
        return self._captured[key]

    def _make(self, inputs: tuple[Tensor, ...], compute: Callable[..., Any]) -> CapturedPass:
        if self._capture:
            return self._record(inputs, compute)
        output = compute(*inputs)

        def run() -> None:  # into the same tensors, as a graph does
            for fixed, new in zip(output, compute(*inputs)):
                if fixed is not None:
                    fixed.copy_(new)

        return CapturedPass(inputs, output, run)

    def _record(self, inputs: tuple[Tensor, ...], compute: Callable[..., Any]) -> CapturedPass:
        device = inputs[0].device
        with torch.cuda.device(device):  # lm-eval leaves the current device at the first one
            # one stream for all: memory of a pool is shared by captures of the same stream
            side = self._stream = self._stream or torch.cuda.Stream(device=device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                compute(*inputs)  # libraries allocate and tune at their first calls
                with _no_host_sync():
                    compute(*inputs)
            torch.cuda.current_stream(device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._pool, stream=side):
                output = compute(*inputs)

        def replay() -> None:
            with torch.cuda.device(device):
                graph.replay()

        return CapturedPass(inputs, output, replay)


@contextmanager
def _no_host_sync() -> Iterator[None]:
    """Raises where the host waits for the device. Graphs cannot hold that, and PyTorch does not
    recover from a capture that fails in the middle."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class CudaGraphRunner(CapturedPasses):
    """Passes and draft chains of one runner, padded to a few shapes.

    compiles: passes are compiled by PyTorch's inductor first, unless they give hidden states.
    usual: the draft tokens of most rounds, which are not padded.
    """

    usual = 0

    def __init__(self, runner: Runner, *, compiles: bool = False, **how: Any) -> None:
        super().__init__(runner, **how)
        self._compiles = compiles
        self._fed: set[tuple[Any, ...]] = set()  # keys that have come up
        if compiles:  # every shape is a compilation of its own
            for limit in ("recompile_limit", "accumulated_recompile_limit"):
                setattr(torch._dynamo.config, limit, 4096)

    def extend(self, ids_BQ: Tensor) -> PassOutput | None:
        """One pass; None if it has to be run eagerly."""
        rows, width = ids_BQ.shape
        padded = self._width_bucket(width)
        captured = self._pass("extend", rows, padded, self._longest(rows) + padded)
        if captured is None:
            return None
        self._fill(captured, ids_BQ)
        captured.replay()
        output: PassOutput = captured.output
        return output.map(lambda padded: padded[:rows, :width])

    def chain(
        self, ids_BQ: Tensor, counts_B: Tensor, steps: int, choose: Chooser
    ) -> Drafted | None:
        """K tokens per row, after feeding row b its first `counts_B[b]` ids; None if they have to
        be drafted eagerly."""
        rows, width = ids_BQ.shape
        read = self._longest(rows) + self.reach(width, steps)
        width, bucket = self._width_bucket(width), self._bucket(steps)
        captured = self._pass("chain", rows, width, read, bucket, choose)
        if captured is None:
            return None
        self._fill(captured, ids_BQ)
        captured.inputs[2][:rows] = counts_B
        for fixed, given in zip(captured.inputs[3:], choose.inputs):
            fixed[:rows, :steps] = given
        captured.replay()
        found: Drafted = captured.output
        q = found.q if found.q is None else found.q[:rows, :steps]
        return Drafted(found.tokens[:rows, :steps], q)

    def feed(self, slot: int, ids_1Q: Tensor) -> PassOutput | None:
        """One pass over a part of a prompt, to any slot and without logits, as a copy; None if it
        has to be run eagerly, as a shape's first one is: capturing takes as long as three."""
        count, start = ids_1Q.shape[1], self._runner.lengths[slot]
        width = max(1 << (count - 1).bit_length(), _SHORTEST_FEED)
        capacity, device = self._runner.cache.capacity, self._runner.device
        is_allocated = self._runner.cache.is_allocated
        if not is_allocated or count > _LONGEST_FEED or start + width > capacity:
            return None
        read = self._read_bucket(start + width)

        def inputs() -> tuple[Tensor, ...]:
            ids = torch.zeros(1, width, dtype=torch.long, device=device)
            # trial passes write past what the slot holds
            return ids, ids.new_full((1,), start), ids.new_full((1,), slot)

        def compute(ids: Tensor, length: Tensor, at: Tensor) -> PassOutput:
            return self._runner.static_pass(ids, length, read, at)

        key = ("feed", width, read)
        captured = self.get(key, inputs, compute) if key in self._fed else None
        self._fed.add(key)
        if captured is None:
            return None
        self._fill(captured, ids_1Q, slot)
        captured.inputs[2].copy_(torch.tensor([slot]), non_blocking=True)
        captured.replay()
        output: PassOutput = captured.output
        return output.map(lambda part: part[:, :count].clone())

    def reach(self, width: int, steps: int) -> int:
        """How far past the longest row such a pass, or chain of passes, may read."""
        return self._width_bucket(width) + (self._bucket(steps) if steps else 0)

    def _bucket(self, count: int) -> int:
        """Two sizes per power of two, and the usual: ends of budgets cost no capture each."""
        power = 1 << (count - 1).bit_length()
        return min(size for size in (power * 3 // 4, power, self.usual) if size >= count)

    def _read_bucket(self, read: int) -> int:
        """At most the capacity, which has been reserved."""
        read = max(_SHORTEST_READ, 1 << (read - 1).bit_length())
        return min(read, self._runner.cache.capacity)

    def _width_bucket(self, width: int) -> int:
        """1, or a bucket of drafted tokens and the one before them."""
        return 1 if width == 1 else 1 + self._bucket(width - 1)

    def _longest(self, rows: int) -> int:
        return max(self._runner.lengths[: self._rows_bucket(rows)])

    def _rows_bucket(self, rows: int) -> int:
        """Graphs exist for powers of two: finished rows do not cost a capture each."""
        return min(self._runner.slots, 1 << (rows - 1).bit_length())

    def _fill(self, captured: CapturedPass, ids_BQ: Tensor, first_slot: int = 0) -> None:
        rows, width = ids_BQ.shape
        ids, lengths_B = captured.inputs[:2]
        ids[:rows, :width] = ids_BQ
        lengths = self._runner.lengths[first_slot : first_slot + ids.shape[0]]
        lengths_B.copy_(torch.tensor(lengths), non_blocking=True)

    def _pass(
        self,
        kind: str,
        rows: int,
        width: int,
        read: int,
        steps: int = 0,
        choose: Chooser = LIKELIEST,
    ) -> CapturedPass | None:
        is_possible = choose.key is not None and self._runner.cache.is_allocated
        if self.failure is not None or not is_possible:
            return None
        bucket = self._rows_bucket(rows)
        self._runner.reserve(read)
        read = self._read_bucket(read)
        device = self._runner.device

        def inputs() -> tuple[Tensor, ...]:
            ids = torch.zeros(bucket, width, dtype=torch.long, device=device)
            # trial passes write past what any of these rows holds
            lengths = torch.full((bucket,), read - width - steps, device=device)
            counts = torch.ones(bucket, dtype=torch.long, device=device)
            return ids, lengths, counts, *(g.new_zeros(bucket, steps) for g in choose.inputs)

        def static_pass(ids: Tensor, lengths: Tensor) -> PassOutput:
            return self._runner.static_pass(ids, lengths, read)

        if self._compiles and not self._runner.hidden_layers:
            static_pass = torch.compile(static_pass, fullgraph=True, dynamic=False)

        def compute(ids: Tensor, lengths: Tensor, counts: Tensor, *chosen_by: Tensor) -> Any:
            first = static_pass(ids, lengths)
            if kind == "extend":
                return first
            rows_B = torch.arange(bucket, device=device)
            logits_BV, at_B = first.logits[rows_B, (counts - 1).clamp(min=0)], lengths + counts
            drafted = [choose(logits_BV, 0, *chosen_by)]
            for step in range(1, steps):  # each is fed the token of the one before
                fed_B1 = self._runner.own_ids(drafted[-1].tokens)[:, None]
                logits_BV = static_pass(fed_B1, at_B).logits[:, 0]
                drafted.append(choose(logits_BV, step, *chosen_by))
                at_B = at_B + 1
            return Drafted.together(drafted)

        return self.get((kind, bucket, width, read, steps, choose.key), inputs, compute)
