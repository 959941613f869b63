"""How fly's processes end: in order on a signal, and together with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from fly.harness.progress import PIPE

_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
_LIFELINE = "FLY_LIFELINE"  # the reading end of a pipe, which ends when the parent does


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Make SIGTERM and SIGHUP unwind the process as Ctrl-C does, so that finished work is kept.

    Further ones are ignored while it unwinds; a second Ctrl-C ends it at once. A signal that is
    already ignored (nohup) or handled is left alone.
    """
    own = os.getpid()

    def end(number: int, frame: Any) -> None:
        if os.getpid() != own:  # a fork has nothing of its own to keep
            os._exit(128 + number)
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL if each == signal.SIGINT else signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    as_started = (signal.SIG_DFL, signal.default_int_handler)
    ours = [each for each in _SIGNALS if is_main and signal.getsignal(each) in as_started]
    before = {each: signal.signal(each, end) for each in ours}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def run_children(
    commands: Sequence[Sequence[str]],
    log: IO[str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> list[int]:
    """Run commands of fly's, all at once, and return their exit statuses.

    The children end in order whenever this process ends, SIGKILL included (on Windows: only on
    Ctrl-C). A child must call `end_with_parent`. log: takes their output. on_line: is called with
    each line of `fly.harness.progress.tell`.
    """
    begun: list[subprocess.Popen[bytes]] = []
    output: dict[str, Any] = {"stdout": log, "stderr": log} if log else {}
    if os.name == "nt":
        begun += [subprocess.Popen(each, **output) for each in commands]
        return [process.wait() for process in begun]
    reading, writing = os.pipe()
    progress, told = os.pipe()
    environment = {**os.environ, _LIFELINE: str(reading)}
    environment |= {PIPE: str(told)} if on_line else {}
    pipes = [reading, told]

    def listen() -> None:
        with open(progress, errors="replace") as lines:
            for line in lines:
                if on_line:
                    on_line(line.rstrip())

    threading.Thread(target=listen, daemon=True).start()
    try:
        try:
            for command in commands:
                begun.append(subprocess.Popen(command, pass_fds=pipes, env=environment, **output))
        finally:
            os.close(told)  # the listener's end comes with the last child's
        return [process.wait() for process in begun]
    finally:
        os.close(writing)
        os.close(reading)
        for process in begun:
            process.wait()


def end_with_parent() -> None:
    """In a child of `run_children`: send SIGTERM to this process when its parent ends."""
    reading = os.environ.pop(_LIFELINE, None)
    if reading is None:
        return

    def watch() -> None:
        os.read(int(reading), 1)  # nobody ever writes
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
