"""Runs of fly in processes that a test may kill.

A fork server imports torch and lm-eval once; every run is a fork of it, a real process with a real
`fly` command line, started in a moment.
"""

import contextlib
import faulthandler
import functools
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
import traceback
import types
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lm_eval.evaluator
import lm_eval.tasks
import psutil
import torch

import fly.harness.hf  # noqa: F401
from fly.cli import main as cli
from fly.cli import processes

TASK = """task: {name}
custom_dataset: !function tiny_utils.load
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
repeats: {repeats}
generation_kwargs: {{until: ["zzz"], max_gen_toks: {tokens}, {sampling}}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
UTILS = """import datasets
def load(**kwargs):
    rows = [{"question": f"q{i * 37} ", "answer": "a"} for i in range(12)]
    return {"test": datasets.Dataset.from_list(rows)}
"""
CHOICE = """task: tiny_choice
custom_dataset: !function tiny_utils.load
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: ["a", "b"]
doc_to_target: 0
"""
PATIENCE = 240  # seconds
REQUESTS = 12 + 2 * 12  # of the greedy task, and of the sampling one, twice each
# What follows from the clock and from what else the process decoded, not from the request.
UNEQUAL = ("seconds", "wall_seconds", "decode_tok_s", "end_to_end_tok_s", "prompt_tokens_reused")

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


def _fly(arguments, log, folder, prepare):
    os.setpgid(0, 0)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    _default_signals()  # whatever started the tests (nohup, a shell's &) may ignore them
    faulthandler.register(signal.SIGUSR1)  # for one that does not end
    os.chdir(folder)
    torch.set_num_threads(1)
    processes.subprocess = types.SimpleNamespace(Popen=_Fork)
    if prepare is not None:
        prepare()
    main([str(argument) for argument in arguments])


def _default_signals():
    """As a program finds them that a terminal starts."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _Fork:
    """Popen of `python -m fly ...`, without the seconds that imports take."""

    def __init__(self, command, pass_fds, env):
        assert command[1:3] == ["-m", "fly"]
        self._status = None
        self._pid = os.fork()
        if self._pid:
            return
        _default_signals()
        kept = {0, 1, 2, *pass_fds}
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in kept:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        os.environ.update(env)
        status = 1
        try:
            main(command[3:])
            status = 0
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def wait(self):
        if self._status is None:
            _, status = os.waitpid(self._pid, 0)
            self._status = os.waitstatus_to_exitcode(status)
        return self._status


def main(arguments=None):
    """`fly` without what takes longer than a run: asking pip and others about the machine for the
    results file."""
    lm_eval.evaluator.add_env_info = lambda results: None
    cli.main(arguments)


class Run:
    """`fly` with these arguments, started in `folder`, the first of a process group of its own; its
    output goes to the file `log` there. prepare: called in its process first."""

    def __init__(self, arguments, folder: Path, prepare=None, log="output.txt"):
        self._log = folder / log
        self._log.unlink(missing_ok=True)
        self.process = _processes.Process(target=_fly, args=(arguments, self._log, folder, prepare))
        self.process.start()

    def kill(self, number, group: bool) -> None:
        """Send a signal to the process, or to all of its group."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.process.pid, number)

    def group(self) -> list[int]:
        """Who of its process group is still alive."""
        return [pid for pid in psutil.pids() if self._is_of_group(pid)]

    def _is_of_group(self, pid: int) -> bool:
        try:
            of_group = os.getpgid(pid) == self.process.pid
            return of_group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False

    def output(self) -> bytes:
        return self._log.read_bytes() if self._log.exists() else b""

    def end(self) -> tuple[int, str]:
        """Exit status and output, once it has ended by itself."""
        self.process.join(PATIENCE)
        if self.process.exitcode is None:
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(1)
            raise AssertionError(f"it does not end:\n{self.output().decode(errors='replace')}")
        return self.process.exitcode, self.output().decode(errors="replace")

    def kill_when(self, reached, wait: float = 0.0) -> bool:
        """SIGKILL it `wait` seconds after `reached()`; False if it ended before."""
        kill_when(self.process.pid, reached, wait, self.process.is_alive)
        self.process.join(120)
        return self.process.exitcode == -signal.SIGKILL


class Launched:
    """`fly` in several processes of one run, launched as torchrun does: if one fails, the others
    are told to end. prepare: called in all of them first."""

    def __init__(self, arguments, folder: Path, prepare=None, count=2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.runs = [
            Run(
                arguments,
                folder,
                functools.partial(_become_rank, rank, count, port, prepare),
                f"output{rank}.txt",
            )
            for rank in range(count)
        ]

    def end(self) -> tuple[list[int], str]:
        """All exit statuses and all output, once all have ended."""
        processes = [run.process for run in self.runs]
        deadline = time.monotonic() + PATIENCE
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.terminate()
            time.sleep(0.05)
        ended = [run.end() for run in self.runs]
        return [status for status, _ in ended], "".join(output for _, output in ended)


def _become_rank(rank, count, port, prepare):
    facts = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    facts |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
    os.environ.update({name: str(value) for name, value in facts.items()})
    cli._LAUNCHER_SECONDS = 1.0
    if prepare is not None:
        prepare()


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


def make_place(folder: Path, pair: Path) -> Path:
    """Two generating tasks, a choosing one, and a pair's configuration, in the folder."""
    (folder / "tasks").mkdir()
    greedy = TASK.format(name="tiny_greedy", repeats=1, tokens=24, sampling="do_sample: false")
    (folder / "tasks" / "greedy.yaml").write_text(greedy)
    sampled = "do_sample: true, temperature: 0.8"
    sampled = TASK.format(name="tiny_sampled", repeats=2, tokens=16, sampling=sampled)
    (folder / "tasks" / "sampled.yaml").write_text(sampled)
    (folder / "tasks" / "choice.yaml").write_text(CHOICE)
    (folder / "tasks" / "tiny_utils.py").write_text(UTILS)
    shutil.copytree(pair, folder / "pair")
    values = {"target_model_path": "pair/target", "spd_k": 4, "win_len": 1, "entropy_thre": 0.0}
    values["draft_policy"] = "fixed"
    (folder / "pair.json").write_text(json.dumps({**values, "trace": True}))
    return folder


def arguments(out, *more, tasks="tiny_greedy,tiny_sampled,tiny_choice"):
    """Of `fly run` in such a place."""
    model_args = "pretrained=pair/draft,config_path=pair.json,dtype=float32"
    return [
        "--model", "hf", "--model_args", model_args, "--tasks", tasks, "--include_path", "tasks",
        "--device", "cpu", "--batch_size", "3", "--output_path", out, "--log_samples", *more,
    ]  # fmt: skip


def records(folder):
    """By request: the record without what differs between two runs of the same."""
    found = lines(folder, "fly_requests_*.jsonl")
    keys = [(r["task"], r["doc_id"], r["idx"], r["repeat"]) for r in found]
    assert len(set(keys)) == len(keys), "a request was answered twice"
    return {
        key: {name: value for name, value in record.items() if name not in UNEQUAL}
        for key, record in zip(keys, found)
    }


def count(out):
    """Whole records so far; reading may meet a line half written."""
    return sum(file.read_bytes().count(b"\n") for file in out.rglob("fly_requests_*.jsonl"))


def lines(folder: Path, name: str) -> list[dict]:
    """The whole lines of the files of that name in or below the folder, one for each process."""
    files = sorted(folder.rglob(name))
    assert len({file.stem.partition("_rank")[0] for file in files}) <= 1
    return [json.loads(line) for file in files for line in file.read_text().split("\n")[:-1]]


if __name__ == "__main__":
    main()
