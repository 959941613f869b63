"""Whole files: nobody meets half of one, and nothing else is replaced."""

import os
import socket
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fly.paths import write_whole


def test_a_failed_write_leaves_the_old_text_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    path.write_text("old")

    def disk_full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", disk_full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "a.json", tmp_path / "a.json"
    real.write_text("old")
    link.symlink_to(real)
    write_whole(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    """--json /dev/stdout: a file put in its place would be found by nobody."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_whole(pipe, "text")
    reader.join(timeout=10)
    assert read == ["text"]
    assert pipe.is_fifo()


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    """Both wrote under one temporary name: one's text could end in the other's file."""
    path = tmp_path / "result.json"
    texts = [letter * 200_000 for letter in "abcd"]

    def write(text):
        for _ in range(10):
            write_whole(path, text)
            assert path.read_text() in texts

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, texts))
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Without it a machine's crash may leave an empty file under the new name."""
    done = []
    for name in ("fsync", "replace"):
        whole = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, n=name, f=whole: done.append(n) or f(*a))
    write_whole(tmp_path / "a.json", "text")
    assert done == ["fsync", "replace"]


def test_permissions_are_those_that_files_have(tmp_path):
    (tmp_path / "plain").write_text("")
    write_whole(tmp_path / "new", "text")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "plain").chmod(0o600)
    write_whole(tmp_path / "plain", "text")
    assert stat.S_IMODE((tmp_path / "plain").stat().st_mode) == 0o600


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    """Not what another process is writing, nor another machine's in a shared folder."""
    path = tmp_path / "result.json"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = socket.gethostname()
    names = [f".result.json.{host}-{pid}-1-1" for pid in (ended.pid, os.getppid())]
    for name in (*names, f".result.json.elsewhere-{ended.pid}-1-1", f".other.json.{host}-1-1-1"):
        (tmp_path / name).write_text("half")
    write_whole(path, "text")
    left = sorted(file.name for file in tmp_path.iterdir())
    assert left == sorted(
        [
            path.name,
            names[1],
            f".result.json.elsewhere-{ended.pid}-1-1",
            f".other.json.{host}-1-1-1",
        ]
    )
