"""What a terminal shows while a comparison makes its runs: a line per step. Details: in a file."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import IO

WANTED = "FLY_SCREEN"  # 1: also where the output is no terminal (start.sh)
BEFORE = "FLY_STEPS_BEFORE"  # steps of a script that has shown them itself
_IN_WORDS = {
    "target-only": "the target alone", "exact": "with exact drafting", "fly": "with FLy",
    "hf": "lm-eval's own backend", "noise": "the target alone, rounded otherwise",
}  # fmt: skip
_TAIL = 15  # lines of the log that a failure shows


def is_wanted() -> bool:
    return sys.stdout.isatty() or bool(os.environ.get(WANTED))


class Screen:
    """One step at a time. log: what the runs print."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.log: IO[str] = open(path, "a", encoding="utf-8")  # noqa: SIM115  # as long as the command
        self._step = ""
        self._started = time.monotonic()
        self._tenth = ""

    def begin(self, number: int, count: int, name: str) -> None:
        before = int(os.environ.get(BEFORE) or 0)
        self._step = f"{number + before}/{count + before}  {_IN_WORDS.get(name, name):<22}"
        self._started, self._tenth = time.monotonic(), ""
        self.show("starting")

    def show(self, text: str) -> None:
        """How far the step is: a terminal's line is replaced, a file gets one per ten percent."""
        if sys.stdout.isatty():
            self._print(text, end="")
            return
        done, _, rest = text.partition(" of ")
        total = rest.partition(" ")[0]
        counted = done.isdecimal() and total.isdecimal()
        tenth = str(10 * int(done) // int(total)) if counted else text
        if tenth != self._tenth:
            self._tenth = tenth
            self._print(text)

    def end(self, text: str = "done") -> None:
        self._print(text)

    def fail(self) -> None:
        """Show why, as far as the run said it."""
        self.end("failed")
        self.log.flush()
        print(*self._path.read_text(errors="replace").splitlines()[-_TAIL:], sep="\n")
        print(f"all of it: {self._path}")

    def _print(self, text: str, end: str = "\n") -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        line = f"{self._step} {minutes}:{seconds:02}  {text}"
        if sys.stdout.isatty():
            line = f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}"
        print(line, end=end, flush=True)
