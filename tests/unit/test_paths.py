"""Whole files: nobody meets half of one, and nothing else is replaced."""

import os
import threading

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
