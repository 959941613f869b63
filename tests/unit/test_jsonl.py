"""Records of a run reach the disk, whatever happens to it, to its folder or to the process."""

import errno
import json
import shutil

import pytest

from fly.errors import FlyError
from fly.runs.context import RunContext
from fly.runs.jsonl import JsonLines


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("FLY_HOME", str(tmp_path / "home"))
    (tmp_path / "out").mkdir()
    return RunContext(tmp_path / "out")


def numbers(path):
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_folder_taken_away_in_the_middle_ends_the_run_and_loses_nothing(run, tmp_path, how):
    """The records went to a file that had no name any more, and the run ended with status 0."""
    lines = JsonLines(run, "fly_requests", 0)
    lines.write({"n": 1})
    if how == "moved":
        (tmp_path / "out").rename(tmp_path / "moved")
    else:
        shutil.rmtree(tmp_path / "out")
    if how == "replaced":
        (tmp_path / "out").mkdir()
        lines.path.write_text("")
    with pytest.raises(FlyError, match="out: was removed or moved while the run wrote to it"):
        lines.write({"n": 2})
    lines.close()
    assert lines.path.parent == tmp_path / "out"
    assert numbers(lines.path) == [1, 2]


def test_what_cannot_be_put_back_is_kept_in_fly_home(run, tmp_path):
    lines = JsonLines(run, "fly_requests", 0)
    lines.write({"n": 1})
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").write_text("a file in its place")
    lines.close()
    assert lines.path.parent == tmp_path / "home" / "interrupted"
    assert numbers(lines.path) == [1]


def test_a_signal_in_the_middle_of_a_write_does_not_write_it_twice(run, monkeypatch):
    """Unwinding flushes: a record that was there twice made the run refuse to be resumed."""
    lines = JsonLines(run, "fly_requests", 0)
    lines.write({"n": 1})
    in_place = lines._is_in_place

    def interrupted(file):
        monkeypatch.setattr(lines, "_is_in_place", in_place)
        raise KeyboardInterrupt

    monkeypatch.setattr(lines, "_is_in_place", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lines.write({"n": 2})
    lines.flush()
    lines.close()
    assert numbers(lines.path) == [1, 2]


def test_lines_that_a_full_disk_cut_are_not_counted(run, monkeypatch):
    """15 responses were said to be kept where 14 were: a record was counted before it was written.
    What an earlier process wrote is not this one's."""
    (run.output_dir / f"fly_requests_{run.started}.jsonl").write_text('{"n": 0}\n')
    lines = JsonLines(run, "fly_requests", 0)
    assert lines.kept == 0
    lines.write({"n": 1})

    def full():
        with open(lines.path, "a") as file:
            file.write('{"n": ')
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lines._file, "flush", full)
    with pytest.raises(OSError, match="No space left"):
        lines.write({"n": 2})
    assert lines.kept == 1
    assert lines.path.read_text() == '{"n": 0}\n{"n": 1}\n{"n": '
