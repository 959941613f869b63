"""Wall time by phase, shared among the sequences that it was spent on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fly.execution.cuda_graphs import CapturedPasses
from fly.runs.records import TIMED
from fly.speculation.sequence import Sequence


class PhaseTimer:
    """devices: accelerators whose work belongs to the phase that queued it. Verification ends with
    the round's one copy to the host, so that only the phases before it have to be waited for.

    clock: seconds of all passes so far; recording and capturing graphs are left out.
    """

    def __init__(self, devices: list[torch.device]) -> None:
        self.clock = 0.0
        self._devices = devices
        self._within = 0.0  # seconds of the timed blocks within the one that runs
        self._captured_within = 0.0

    @contextmanager
    def timed(self, phase: str, sequences: list[Sequence]) -> Iterator[None]:
        """Share the block's seconds, without those of timed blocks within, among sequences.
        Capturing graphs counts as compile time."""
        start, captured_before = time.perf_counter(), CapturedPasses.all_seconds
        outer, self._within = self._within, 0.0
        outer_captured, self._captured_within = self._captured_within, 0.0
        try:
            yield
            for device in self._devices if phase in ("prefill", "draft") else ():
                torch.cuda.synchronize(device)  # else the next phase waits for this one's work
        finally:  # a pass that fails has taken its time, too
            whole = time.perf_counter() - start
            all_captured = CapturedPasses.all_seconds - captured_before
            captured = all_captured - self._captured_within
            elapsed = whole - self._within - captured
            self._within, self._captured_within = outer + whole, outer_captured + all_captured
            self.clock += elapsed if phase in TIMED else 0.0
            for sequence in sequences:
                sequence.seconds[phase] += elapsed / len(sequences)
                sequence.seconds["compile"] += captured / len(sequences)
