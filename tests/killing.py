"""Runs of fly in processes that a test may kill.

A fork server imports torch and lm-eval once; every run is a fork of it, a real process with a real
`fly` command line, started in a moment.
"""

import functools
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lm_eval.evaluator
import lm_eval.tasks
import torch

import fly.lm  # noqa: F401
from fly import cli

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


def _fly(arguments, log, folder):
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    torch.set_num_threads(1)
    main([str(argument) for argument in arguments])


def main(arguments=None):
    """`fly`, with the test's own tasks only: listing all of lm-eval's takes longer than a run."""
    own = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    lm_eval.tasks.TaskManager = own
    cli.main(arguments)


class Run:
    """`fly` with these arguments, started in `folder`; its output goes to a file there."""

    def __init__(self, arguments, folder: Path):
        self._log = folder / "output.txt"
        self.process = _processes.Process(target=_fly, args=(arguments, self._log, folder))
        self.process.start()

    def end(self) -> tuple[int, str]:
        """Exit status and output, once it has ended by itself."""
        self.process.join(120)
        assert self.process.exitcode is not None
        return self.process.exitcode, self._log.read_text(errors="replace")

    def kill_when(self, reached, wait: float = 0.0) -> bool:
        """SIGKILL it `wait` seconds after `reached()`; False if it ended before."""
        kill_when(self.process.pid, reached, wait, self.process.is_alive)
        self.process.join(120)
        return self.process.exitcode == -signal.SIGKILL


def kill_when(pid, reached, wait, is_alive) -> None:
    deadline = time.monotonic() + 120
    while not reached() and is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(wait)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def lines(folder: Path, name: str) -> list[dict]:
    """The whole lines of the only file of that name in or below the folder."""
    files = list(folder.rglob(name))
    assert len(files) <= 1
    text = files[0].read_text() if files else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


if __name__ == "__main__":
    main()
