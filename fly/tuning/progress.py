"""What is being done, how far it is, and how long the whole will still take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO


class Plan:
    """Stages in order. A stage's line is printed when it starts; `step` adds lines, or on a
    terminal renews one. The time left is told once every stage to come has an expectation.
    """

    def __init__(
        self,
        stages: list[str],
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stages = stages
        self._left: dict[str, float | None] = dict.fromkeys(stages)  # seconds; None: not known yet
        self._stream = stream or sys.stderr
        self._clock = clock
        self._current: str | None = None
        self._started = self._shown = self._begun = clock()
        self._interval = 1.0 if self._stream.isatty() else 20.0

    def expect(self, stage: str, seconds: float) -> None:
        """How long a stage will take; ignored once it is over."""
        if stage in self._left:
            self._left[stage] = seconds

    def skip(self, stage: str) -> None:
        """The stage is not needed after all."""
        self._left.pop(stage, None)

    def start(self, stage: str) -> None:
        self.end()
        self._current = stage
        self._begun = self._shown = self._clock()
        number = self._stages.index(stage) + 1
        passed = _duration(self._begun - self._started)
        line = f"[{number}/{len(self._stages)}] {stage}{self._in_all()} ({passed} passed)"
        print(line, file=self._stream, flush=True)

    def end(self) -> None:
        """The current stage is over."""
        if self._current is not None:
            self.skip(self._current)
            self._current = None

    def step(self, done: int, total: int) -> None:
        """So much of the current stage is done."""
        now = self._clock()
        if now - self._shown < self._interval or self._current is None:
            return
        self._shown = now
        rest = (now - self._begun) / max(1, done) * (total - done)
        self._left[self._current] = rest
        own = f", {_duration(rest)} left of it" if done else ""
        end = "\r" if self._stream.isatty() else "\n"
        line = f"    {done} of {total}{own}{self._in_all()}   "
        print(line, file=self._stream, end=end, flush=True)

    def _in_all(self) -> str:
        known = [seconds for seconds in self._left.values() if seconds is not None]
        if len(known) < len(self._left):
            return ""
        return f"; about {_duration(sum(known))} left in all"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
