"""What a run shows while it goes on: requests done, tokens per second, tau."""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress

from tqdm import tqdm

from fly.runs.records import RequestRecord, RoundRecord

logger = logging.getLogger(__name__)

PIPE = "FLY_PROGRESS"  # a pipe's number: a comparison reads there how far its run is


def tell(text: str) -> None:
    """Say what begins, or how far it is, to a comparison that made this run; else in the log."""
    if pipe := os.environ.get(PIPE):
        with suppress(OSError):  # whoever read it has ended
            os.write(int(pipe), f"{text}\n".encode())
    else:
        logger.info("%s", text)


class Progress:
    """An observer of the engine. `log` also writes one line per round (config key `verbose`).

    A terminal has a line that moves, a file a line per tenth. done: requests that an earlier
    process of the run has finished.
    """

    def __init__(self, total: int, *, enabled: bool, log: bool = False, done: int = 0) -> None:
        moves = sys.stderr.isatty() and PIPE not in os.environ
        self._bar = tqdm(
            total=total, initial=done, desc="fly", unit="req", disable=not (enabled and moves)
        )
        self._tells = enabled and not moves
        self._total, self._done = total, done
        self._log = log
        self._started = self._shown = time.perf_counter()
        self._rounds = self._emitted = 0
        self._sees_rounds = False

    def on_round(self, record: RoundRecord) -> None:
        self._sees_rounds = True  # not of every engine
        self._rounds += record.counts.rounds
        self._emitted += record.counts.emitted
        if self._log:
            logger.info("round %d: %s", self._rounds, record.counts.as_dict())
        if time.perf_counter() - self._shown >= 1.0:
            self._shown = time.perf_counter()
            self._bar.set_postfix_str(self._speed())

    def on_request(self, record: RequestRecord) -> None:
        if not self._sees_rounds:
            self._rounds += record.counts.rounds
            self._emitted += record.counts.emitted
        self._bar.set_postfix_str(self._speed(), refresh=False)
        self._bar.update(1)
        tenth = 10 * self._done // self._total
        self._done += 1
        if self._tells and (10 * self._done // self._total > tenth or PIPE in os.environ):
            tell(f"{self._done} of {self._total} requests, {self._speed()}")

    def _speed(self) -> str:
        speed = self._emitted / (time.perf_counter() - self._started)
        tau = f", tau {self._emitted / self._rounds:.2f}" if self._rounds else ""
        return f"{speed:.1f} tok/s{tau}"

    def close(self) -> None:
        self._bar.close()
