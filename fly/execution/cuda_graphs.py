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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fly.errors import reason_of
from fly.execution.kv_cache import SlotCache
from fly.execution.oom import is_out_of_memory

logger = logging.getLogger(__name__)

_SHORTEST_READ = 256


class PassOutput(NamedTuple):
    """logits: [B, Q, V]. hidden: [B, Q, F], the states of the layers asked for side by side; None
    without any. Of passes whose rows are tokens [T, V] and [T, F]."""

    logits: Tensor
    hidden: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> PassOutput:
        return PassOutput(change(self.logits), None if self.hidden is None else change(self.hidden))


@dataclass
class CapturedPass:
    """Static inputs and output of one shape, and what computes the output from the inputs."""

    inputs: tuple[Tensor, ...]
    output: PassOutput
    replay: Callable[[], None]


class Runner(Protocol):
    """Whose passes these are: fly.execution.model_runner.ModelRunner."""

    cache: SlotCache
    lengths: list[int]
    device: torch.device

    @property
    def slots(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def reserve(self, tokens: int) -> None: ...

    def static_pass(self, ids_BQ: Tensor, lengths_B: Tensor, read_length: int) -> PassOutput: ...

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
    failure: why capturing failed, if it did; passes are eager from then on.
    `all_seconds`: time spent capturing by every instance, which is compile time, never decode time.
    """

    all_seconds = 0.0

    def __init__(self, runner: Runner, *, capture: bool) -> None:
        self._runner_of = weakref.ref(runner)  # no cycle: the K/V are freed with the runner
        self._capture = capture
        self._captured: dict[tuple[Any, ...], CapturedPass] = {}
        self._pool: Any = None
        self._stream: Any = None
        self.failure: str | None = None

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
        compute: Callable[..., PassOutput],
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
                return None
            finally:
                CapturedPasses.all_seconds += time.perf_counter() - start
        return self._captured[key]

    def _make(self, inputs: tuple[Tensor, ...], compute: Callable[..., PassOutput]) -> CapturedPass:
        captured = CapturedPass(inputs, PassOutput(torch.empty(0)), lambda: None)
        if self._capture:
            self._record(captured, compute)
            return captured

        captured.output = compute(*inputs)

        def run() -> None:  # into the same tensors, as a graph does
            fixed, new = captured.output, compute(*inputs)
            fixed.logits.copy_(new.logits)
            if fixed.hidden is not None and new.hidden is not None:
                fixed.hidden.copy_(new.hidden)

        captured.replay = run
        return captured

    def _record(self, captured: CapturedPass, compute: Callable[..., PassOutput]) -> None:
        device = captured.inputs[0].device
        with torch.cuda.device(device):  # lm-eval leaves the current device at the first one
            # one stream for all: memory of a pool is shared by captures of the same stream
            side = self._stream = self._stream or torch.cuda.Stream(device=device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                compute(*captured.inputs)  # libraries allocate and tune at their first calls
                with _no_host_sync():
                    compute(*captured.inputs)
            torch.cuda.current_stream(device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._pool, stream=side):
                captured.output = compute(*captured.inputs)

        def replay() -> None:
            with torch.cuda.device(device):
                graph.replay()

        captured.replay = replay


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
    """Passes and draft chains of one runner, padded to a few shapes."""

    def extend(self, ids_BQ: Tensor) -> PassOutput | None:
        """One pass; None if it has to be run eagerly."""
        rows, width = ids_BQ.shape
        padded = _width_bucket(width)
        captured = self._pass("extend", rows, padded, self._longest(rows) + padded)
        if captured is None:
            return None
        self._fill(captured, ids_BQ)
        captured.replay()
        return captured.output.map(lambda padded: padded[:rows, :width])

    def chain(self, ids_BQ: Tensor, counts_B: Tensor, steps: int) -> Tensor | None:
        """K greedy tokens per row, [B, K], after feeding row b its first `counts_B[b]` ids."""
        rows, width = ids_BQ.shape
        read = self._longest(rows) + self.reach(width, steps)
        width, bucket = _width_bucket(width), 1 << (steps - 1).bit_length()
        captured = self._pass("chain", rows, width, read, bucket)
        if captured is None:
            return None
        self._fill(captured, ids_BQ)
        captured.inputs[2][:rows] = counts_B
        captured.replay()
        return captured.output.logits[:rows, :steps]

    @staticmethod
    def reach(width: int, steps: int = 0) -> int:
        """How far past the longest row such a pass, or chain of passes, may read."""
        return _width_bucket(width) + (1 << (steps - 1).bit_length() if steps else 0)

    def _longest(self, rows: int) -> int:
        return max(self._runner.lengths[: self._rows_bucket(rows)])

    def _rows_bucket(self, rows: int) -> int:
        """Graphs exist for powers of two: finished rows do not cost a capture each."""
        return min(self._runner.slots, 1 << (rows - 1).bit_length())

    def _fill(self, captured: CapturedPass, ids_BQ: Tensor) -> None:
        rows, width = ids_BQ.shape
        ids, lengths_B = captured.inputs[:2]
        ids[:rows, :width] = ids_BQ
        lengths = self._runner.lengths[: ids.shape[0]]
        lengths_B.copy_(torch.tensor(lengths), non_blocking=True)

    def _pass(
        self, kind: str, rows: int, width: int, read: int, steps: int = 0
    ) -> CapturedPass | None:
        if self.failure is not None or not self._runner.cache.is_allocated:
            return None
        bucket = self._rows_bucket(rows)
        self._runner.reserve(read)
        read = max(_SHORTEST_READ, 1 << (read - 1).bit_length())
        read = min(read, self._runner.cache.capacity)
        device = self._runner.device

        def inputs() -> tuple[Tensor, ...]:
            ids = torch.zeros(bucket, width, dtype=torch.long, device=device)
            # trial passes write past what any of these rows holds
            lengths = torch.full((bucket,), read - width - steps, device=device)
            return ids, lengths, torch.ones(bucket, dtype=torch.long, device=device)

        def compute(ids: Tensor, lengths: Tensor, counts: Tensor) -> PassOutput:
            if kind == "extend":
                return self._runner.static_pass(ids, lengths, read)
            return PassOutput(self._draft(ids, lengths, counts, read, steps))

        return self.get((kind, bucket, width, read, steps), inputs, compute)

    def _draft(self, ids: Tensor, lengths: Tensor, counts: Tensor, read: int, steps: int) -> Tensor:
        """The draft loop on the device: step i + 1 is fed step i's token."""
        runner = self._runner
        logits_BQV = runner.static_pass(ids, lengths, read).logits
        rows_B = torch.arange(ids.shape[0], device=ids.device)
        token_B = logits_BQV[rows_B, (counts - 1).clamp(min=0)].float().argmax(dim=-1)
        drafted = [token_B]
        at_B = lengths + counts
        for _ in range(steps - 1):
            fed_B1 = runner.own_ids(token_B)[:, None]
            logits_BQV = runner.static_pass(fed_B1, at_B, read).logits
            token_B = logits_BQV[:, 0].float().argmax(dim=-1)
            drafted.append(token_B)
            at_B = at_B + 1
        return torch.stack(drafted, dim=1)


def _width_bucket(width: int) -> int:
    """1, 2, 3, 5, 9, 17, ...: a pass over 2^n drafted tokens and the one before them fits."""
    return 1 if width == 1 else 1 + (1 << (width - 2).bit_length())
