"""What a comparison shows while it makes its runs, and its result on one screen."""

import sys

import pytest

from fly.analysis import compare, compare_table
from fly.cli import processes, screen
from fly.harness import progress
from tests.unit.test_tables import load
from tests.written_runs import write


def test_a_step_is_a_line_per_ten_percent_where_the_output_is_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(screen.BEFORE, "2")
    steps = screen.Screen(tmp_path / "log.txt")
    steps.begin(1, 3, "exact")
    for done in range(1, 101):
        steps.show(f"{done} of 100 requests")
    steps.end()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 11 + 1
    assert lines[0] == "3/5  with exact drafting    0:00  starting"
    assert lines[-1].endswith("done")


def test_a_failure_shows_what_the_run_said_last(tmp_path, capsys):
    steps = screen.Screen(tmp_path / "log.txt")
    steps.log.write("first\n" * 99 + "fly: error: the disk is full\n")
    steps.begin(1, 1, "fly")
    steps.fail()
    printed = capsys.readouterr().out
    assert "fly: error: the disk is full" in printed
    assert printed.count("first") < 20
    assert str(tmp_path / "log.txt") in printed


def test_a_run_tells_how_far_it_is_and_prints_into_the_log(tmp_path):
    told = []
    code = "from fly.harness import progress; progress.tell('1 of 2 requests'); print('words')"
    with open(tmp_path / "log.txt", "w") as log:
        assert processes.run_children([[sys.executable, "-c", code]], log, told.append) == [0]
    assert told == ["1 of 2 requests"]
    assert (tmp_path / "log.txt").read_text() == "words\n"


def test_without_a_terminal_progress_is_a_line_per_ten_percent(caplog):
    with caplog.at_level("INFO", logger="fly"):
        bar = progress.Progress(50, enabled=True)
        for _ in range(50):
            counts = type("Counts", (), {"rounds": 1, "emitted": 4})
            bar.on_request(type("Record", (), {"counts": counts}))
        bar.close()
    lines = [record.message for record in caplog.records]
    assert [line.partition(" requests")[0] for line in lines] == [
        f"{done} of 50" for done in range(5, 51, 5)
    ]
    assert lines[0].endswith("tau 4.00")


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([1] * 50 + [0] * 10, "fly: every score is the same. This rules out a loss above"),
        ([0] * 30 + [1] * 30, "fly: the score FELL (recovery"),
        ([0] * 3 + [1] * 49 + [0] * 8, "documents would decide."),
    ],
)
def test_a_result_is_a_small_table_and_a_verdict_in_words(tmp_path, scores, words, capsys):
    base = load(write(tmp_path / "a", "target-only", [1] * 50 + [0] * 10, seconds=2.0))
    compare_table.print_short(compare.compare(base, [load(write(tmp_path / "b", "fly", scores))]))
    printed = " ".join(capsys.readouterr().out.split())
    assert words in printed
    assert f"fly {sum(scores)} of 60 2.00 [2.00, 2.00] 2.00 [2.00, 2.00] 4.00" in printed
    assert "--details" in printed
