"""Progress of a fetch: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Reporter:
    """Silent; the base of the two that speak."""

    def say(self, text: str) -> None:
        pass

    def start(self, label: str, total: int) -> None:
        """A download of `total` bytes begins."""

    def advance(self, size: int) -> None:
        """`size` more bytes are there. Called from several threads."""


class PlainReporter(Reporter):
    """A line at every tenth of a download."""

    def __init__(self) -> None:
        self._label, self._total, self._done, self._shown = "", 1, 0, 0
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def start(self, label: str, total: int) -> None:
        self._label, self._total, self._done, self._shown = label, total, 0, 0

    def advance(self, size: int) -> None:
        with self._lock:
            self._done += size
            tenth = 10 * self._done // self._total
            if tenth > self._shown:
                self._shown = tenth
                self.say(f"{self._label}: {self._done / 1e6:.0f} of {self._total / 1e6:.0f} MB")


class BarReporter(Reporter):
    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._task: Any = None

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def start(self, label: str, total: int) -> None:
        self._task = self._bar.add_task(label, total=total)

    def advance(self, size: int) -> None:
        self._bar.advance(self._task, size)


@contextmanager
def reporter(enabled: bool) -> Iterator[Reporter]:
    if not enabled:
        yield Reporter()
    elif not sys.stderr.isatty():
        yield PlainReporter()
    else:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TransferSpeedColumn,
        )

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as bar:
            yield BarReporter(bar)
