"""Which sequence runs in which slot: continuous batching.

A finished sequence's slot goes to the next waiting one at once; running sequences always fill the
slots 0..n-1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from fly.speculation.sequence import Sequence


class Scheduler:
    """running: sequence b sits in slot b of every cache; finished ones stay until `fill`."""

    def __init__(self, waiting: Iterable[Sequence]) -> None:
        self._waiting = deque(waiting)
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or any(sequence.is_open for sequence in self.running)

    def fill(
        self,
        slots: int,
        admit: Callable[[int, Sequence, int], None],
        move: Callable[[int, int, Sequence], None],
    ) -> None:
        """Give the slots of finished sequences, then free ones, to waiting ones; close other gaps.

        admit(slot, sequence, running): a sequence starts in a slot; so many will then run.
        move(source, destination, sequence): a running sequence changes its slot.
        """
        for slot in range(slots):
            if not self._waiting or (slot < len(self.running) and self.running[slot].is_open):
                continue
            still_open = sum(sequence.is_open for sequence in self.running)
            admit(slot, self._waiting[0], min(slots, len(self._waiting) + still_open))
            self.running[slot : slot + 1] = [self._waiting.popleft()]
        for slot in reversed(range(len(self.running))):
            if self.running[slot].is_open:
                continue
            end, last = len(self.running) - 1, self.running[-1]
            if slot < end:
                move(end, slot, last)  # may run out of memory: `running` is whole until then
                self.running[slot] = last
            self.running.pop()

    def finished(self) -> Iterator[Sequence]:
        """Sequences that have ended since the last call."""
        for sequence in self.running:
            if not sequence.is_open and not sequence.is_reported:
                sequence.is_reported = True
                yield sequence

    def interrupt(self) -> None:
        """All running sequences wait again, first in the queue, and go on from where they were."""
        self._waiting.extendleft(s for s in reversed(self.running) if s.is_open)
        self.running.clear()
