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
    """devices: accelerators whose work belongs to the phase that queued it.

    Verification ends with the round's one wait of the host. Events on the devices tell how much of
    it was the draft's work, so that the host does not wait in between.

    clock: seconds of all passes so far; recording and capturing graphs are left out.
    """

    def __init__(self, devices: list[torch.device]) -> None:
        self.clock = 0.0
        self._devices = devices
        self._within = 0.0  # seconds of the timed blocks within the one that runs
        self._captured_within = 0.0
        self._drafted: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # since a verification
        self._queued = 0.0  # seconds that the host took for queueing this work

    @contextmanager
    def timed(self, phase: str, sequences: list[Sequence]) -> Iterator[None]:
        """Share the block's seconds, without those of timed blocks within, among sequences.
        Capturing graphs counts as compile time."""
        start, captured_before = time.perf_counter(), CapturedPasses.all_seconds
        outer, self._within = self._within, 0.0
        outer_captured, self._captured_within = self._captured_within, 0.0
        begun = self._record() if phase == "draft" else []
        try:
            yield
            for device in self._devices if phase == "prefill" else ():
                torch.cuda.synchronize(device)  # else the next phase waits for this one's work
        finally:  # a pass that fails has taken its time, too
            whole = time.perf_counter() - start
            all_captured = CapturedPasses.all_seconds - captured_before
            captured = all_captured - self._captured_within
            elapsed = whole - self._within - captured
            self._within, self._captured_within = outer + whole, outer_captured + all_captured
            self.clock += elapsed if phase in TIMED else 0.0
            if phase == "draft":
                self._drafted, self._queued = [*zip(begun, self._record())], whole
            late = min(elapsed, self._drafted_late()) if phase == "verify" else 0.0
            for sequence in sequences:
                sequence.seconds[phase] += (elapsed - late) / len(sequences)
                sequence.seconds["draft"] += late / len(sequences)
                sequence.seconds["compile"] += captured / len(sequences)

    def _record(self) -> list[torch.cuda.Event]:
        """An event behind what each device has been given."""
        events = []
        for device in self._devices:
            with torch.cuda.device(device):
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                events.append(event)
        return events

    def _drafted_late(self) -> float:
        """Seconds that devices drafted after the host had queued it all; 0 if they have not ended,
        as after a pass that failed."""
        drafted, self._drafted = self._drafted, []
        if not drafted or not all(end.query() for _, end in drafted):
            return 0.0
        worked = max(start.elapsed_time(end) for start, end in drafted) / 1000
        return max(0.0, worked - self._queued)
