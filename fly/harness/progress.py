"""The live line during generation: requests done, tokens per second, tau."""

from __future__ import annotations

import logging
import sys
import time

from tqdm import tqdm

from fly.runs.records import RequestRecord, RoundRecord

logger = logging.getLogger(__name__)


class Progress:
    """An observer of the engine. `log` also writes one line per round (config key `verbose`).

    done: requests that an earlier process of the run has finished.
    """

    def __init__(self, total: int, *, enabled: bool, log: bool = False, done: int = 0) -> None:
        quiet_interval = 1.0 if sys.stderr.isatty() else 30.0
        self._bar = tqdm(
            total=total,
            initial=done,
            desc="fly",
            unit="req",
            disable=not enabled,
            mininterval=quiet_interval,
        )
        self._interval = quiet_interval
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
        if time.perf_counter() - self._shown >= self._interval:
            self._show()

    def on_request(self, record: RequestRecord) -> None:
        self._bar.update(1)
        if not self._sees_rounds:
            self._rounds += record.counts.rounds
            self._emitted += record.counts.emitted
        self._show()

    def _show(self) -> None:
        self._shown = time.perf_counter()
        speed = self._emitted / (self._shown - self._started)
        tau = f", tau {self._emitted / self._rounds:.2f}" if self._rounds else ""
        self._bar.set_postfix_str(f"{speed:.1f} tok/s{tau}")

    def close(self) -> None:
        self._bar.close()
