"""How processes end: told to, or with the one that started them; what they did is kept."""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fly.cli import processes
from fly.runs import reader
from tests import killing, tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def place(saved_pair, tmp_path_factory):
    return killing.make_place(tmp_path_factory.mktemp("ending"), saved_pair)


def wait_for(reached, seconds=120):
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def python(code, **how):
    """Signals as a terminal leaves them: a shell's & has SIGINT ignored, nohup SIGHUP."""
    heard = "from signal import *\nsignal(SIGINT, default_int_handler); signal(SIGHUP, SIG_DFL)\n"
    return subprocess.Popen([sys.executable, "-c", heard + textwrap.dedent(code)], cwd=ROOT, **how)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *map(tiny.slow, (signal.SIGHUP, signal.SIGINT))]
)
def test_without_an_output_path_a_signal_keeps_the_records(place, tmp_path, monkeypatch, number):
    """SIGTERM lost everything where Ctrl-C kept it."""
    home = tmp_path / "home"
    (place / "long.json").write_text((place / "pair.json").read_text().replace("true", "false"))
    command = killing.arguments("unused", "--gen_kwargs", "max_gen_toks=300")
    command = [
        word.replace("pair.json", "long.json")
        for word in command
        if word not in ("--output_path", "unused", "--log_samples")
    ]
    run = killing.Run(command, place, EnvironmentOf(home))
    wait_for(
        lambda: re.search(rb"[1-9]\d* of 36 requests", run.output()) or not run.process.is_alive()
    )
    run.kill(number, group=False)
    status, output = run.end()
    assert status == 128 + number, output[-2000:]
    assert "responses are kept in" in output
    assert killing.count(home) >= 1
    assert len(killing.records(home)) == killing.count(home)


class EnvironmentOf:
    """FLY_HOME of a process."""

    def __init__(self, home):
        self.home = home

    def __call__(self):
        os.environ["FLY_HOME"] = str(self.home)


def test_an_ignored_signal_stays_ignored():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with processes.ending_in_order():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_second_signal_does_not_disturb_the_keeping():
    process = python("""
        import time
        from fly.cli import processes
        with processes.ending_in_order():
            try:
                print("ready", flush=True)
                time.sleep(60)
            finally:
                print("keeping", flush=True)
                time.sleep(0.5)
                print("kept", flush=True)
    """, stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.stdout.readline() == "keeping\n"
    process.terminate()
    assert process.stdout.readline() == "kept\n"
    assert process.wait() == 143


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_child_ends_with_its_parent(tmp_path, number):
    """A killed `fly compare` left the run of its mode decoding for hours."""
    child = textwrap.dedent("""
        import os, time, pathlib
        from fly.cli import processes
        with processes.ending_in_order():
            processes.end_with_parent()
            assert "FLY_LIFELINE" not in os.environ
            try:
                pathlib.Path("child").write_text(str(os.getpid()))
                time.sleep(60)
            finally:
                pathlib.Path("kept").write_text("")
    """)
    parent = python(f"""
        import os, sys
        from fly.cli import processes
        os.chdir({str(tmp_path)!r})
        with processes.ending_in_order():
            processes.run_children([[sys.executable, "-c", {child!r}]])
    """, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True)  # fmt: skip
    wait_for((tmp_path / "child").exists)
    parent.send_signal(number)
    wait_for((tmp_path / "kept").exists, 10)
    parent.wait(10)
    assert parent.returncode in (-signal.SIGKILL, 128 + number, -signal.SIGINT, 1)


def test_the_childs_own_status_is_the_status():
    assert processes.run_children([[sys.executable, "-c", "raise SystemExit(7)"]]) == [7]
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert processes.run_children([[sys.executable, "-c", killed]]) == [-9]


def test_a_folder_removed_in_the_middle_is_no_success(place):
    """It ended with status 0, its records gone."""
    out = place / "removed"
    run = killing.Run(killing.arguments(out.name), place)
    wait_for(lambda: killing.count(out) >= 5)
    # Away at once: a folder emptied file by file is written to meanwhile.
    shutil.rmtree(out.rename(place / "taken away"))
    status, output = run.end()
    assert status == 2, output[-2000:]
    last = output.splitlines()[-1]
    assert last.startswith("fly: error: output_path=removed")
    assert "is put back there; `fly --resume" in last
    kept = killing.count(out)
    assert kept >= 5
    status, output = killing.Run(["--resume", out], place).end()
    assert status == 0, output[-2000:]
    assert len(killing.records(out)) == killing.REQUESTS
    assert reader.load(out).entry["resumed"]["requests"] == kept
