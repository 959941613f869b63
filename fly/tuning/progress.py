"""What is being done, how far it is, and how long the whole will still take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO


class Plan:
    """Stages in order, with seconds that each is expected to take (None: not known yet).

    A stage's line is printed when it starts; `step` adds lines, or on a terminal renews one.
    """

    def __init__(
        self,
        stages: list[str],
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stages = stages
        self._expected: dict[str, float | None] = dict.fromkeys(stages)
        self._took: dict[str, float] = {}
        self._stream = stream or sys.stderr
        self._clock = clock
        self._current: str | None = None
        self._started = self._shown = self._begun = clock()
        self._interval = 1.0 if self._stream.isatty() else 20.0

    def expect(self, stage: str, seconds: float) -> None:
        """A stage's expected length; what a stage really took is not forgotten for it."""
        if stage in self._expected and stage not in self._took:
            self._expected[stage] = seconds

    def skip(self, stage: str) -> None:
        """The stage is not needed after all."""
        self._took[stage] = 0.0

    def start(self, stage: str) -> None:
        self.end()
        self._current = stage
        self._begun = self._shown = self._clock()
        number = self._stages.index(stage) + 1
        self._write(f"[{number}/{len(self._stages)}] {stage}{self._left(self._expected[stage])}")

    def end(self) -> None:
        """The current stage is over."""
        if self._current is not None:
            self._took[self._current] = self._clock() - self._begun
            self._current = None

    def step(self, done: int, total: int) -> None:
        """So much of the current stage is done."""
        now = self._clock()
        if now - self._shown < self._interval or self._current is None:
            return
        self._shown = now
        rest = (now - self._begun) / max(1, done) * (total - done)
        own = f", {_duration(rest)} left of it" if done else ""
        end = "\r" if self._stream.isatty() else "\n"
        self._stream.write(f"    {done} of {total}{own}{self._left(rest)}   {end}")
        self._stream.flush()

    def _left(self, of_current: float | None) -> str:
        """Time left in all, as far as it is known."""
        later = [
            seconds
            for stage, seconds in self._expected.items()
            if stage not in self._took and stage != self._current
        ]
        known = [seconds for seconds in (of_current, *later) if seconds is not None]
        if len(known) < len(later) + 1:
            return ""
        return f"; about {_duration(sum(known))} left in all"

    def _write(self, line: str) -> None:
        passed = _duration(self._clock() - self._started)
        self._stream.write(f"{line} ({passed} passed)\n")
        self._stream.flush()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
