"""Tasks without scores, documents by category, and answers that were cut off."""

import json

import pytest

from fly.analysis import categories, compare, compare_table, scores
from fly.cli import main as cli
from fly.runs import reader
from tests.written_runs import write

LEVELS = [{"level": 1 + number % 2, "kind": "ab"[number % 2]} for number in range(20)]
DRAFTS = [[(4, 4), (4, 4)] if number % 2 else [(4, 1)] * 6 for number in range(20)]


def fly(*args):
    with pytest.raises(SystemExit) as caught:
        cli.main([str(arg) for arg in args])
        raise SystemExit(0)
    return caught.value.code


@pytest.fixture
def scored(tmp_path):
    """The second category loses half of its answers, and drafts better."""
    own = [0.0 if number % 4 == 1 else 1.0 for number in range(20)]
    base = write(tmp_path / "base", "target-only", [1.0] * 20, docs=LEVELS, round_tokens=1)
    return base, write(
        tmp_path / "fly", "fly", own, docs=LEVELS, drafts=DRAFTS,
        settings={"spd_k": 4}, entry={"drafter": "model"},
    )  # fmt: skip


def test_every_category_has_its_own_scores_and_lengths(scored):
    base, other = (scores.measure(reader.load(path), by="kind") for path in scored)
    found = {(row["category"], row["run"]): row for row in categories.rows(base, [other])}
    assert set(found) == {(kind, run) for kind in "ab" for run in ("target-only", "fly")}
    good, bad = found["a", "fly"], found["b", "fly"]
    assert (good["score"], good["recovery"], good["lost"], good["documents"]) == (1, 1, 0, 10)
    assert (bad["score"], bad["recovery"], bad["lost"], bad["documents"]) == (0.5, 0.5, 5, 10)
    assert (good["al"], bad["al"]) == (2.0, 5.0)  # 1 + accepted / drafts
    assert (bad["model"], bad["k"], found["b", "target-only"]["k"]) == ("model", 4, None)
    assert found["b", "target-only"]["score"] == 1


def test_the_command_and_its_files(scored, tmp_path, capsys):
    out = tmp_path / "found.json"
    assert (
        fly("compare", *scored, "--by", "level", "--json", out, "--markdown", tmp_path / "m") == 0
    )
    printed = capsys.readouterr().out
    assert "sums: 2 (10)" in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert "| sums: 2 (10) | target-only | 1 |" in (tmp_path / "m").read_text()
    rows = json.loads(out.read_text())["categories"]
    assert [row["category"] for row in rows] == ["1", "1", "2", "2"]
    assert fly("report", *scored, "--by", "level", "--output", tmp_path / "r.html") == 0
    page = (tmp_path / "r.html").read_text().replace(" ", "")
    assert '"categories":[{"task":"sums"' in page
    assert fly("compare", *scored, "--by", "color") == 2
    assert "--by color: sums, document 0 has no such field: choose from" in capsys.readouterr().err


def test_a_task_without_scores_is_compared_by_speed_and_texts(tmp_path, capsys):
    """It ended with "no metric to compare", after all its decoding."""
    tasks = {"free": {"bypass": [None] * 4}}
    how = {"tasks": tasks, "aggregated": {"bypass,none": 999}, "docs": LEVELS[:4]}
    texts = [["one"], ["two"], ["three"], ["four"]]
    base = write(tmp_path / "base", "target-only", seconds=2.0, responses=texts, **how)
    changed = [["one"], ["2"], ["three"], ["4"]]
    other = write(tmp_path / "fly", "fly", responses=changed, **how)
    assert fly("compare", base, other, "--by", "kind") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "2.00 [2.00, 2.00]" in printed
    assert "fly: free has no score to compare: 2 of 4 texts equal target-only's" in printed
    assert "Scores" not in printed
    assert fly("compare", base, other, "--matrix") == 2  # showed a legend and nothing else
    assert "--matrix: no task has a score to compare: leave it out" in capsys.readouterr().err
    assert fly("compare", base, other, "--min-recovery", "0.9") == 3
    assert fly("report", base, other, "--output", tmp_path / "r.html") == 0
    runs = [scores.measure(reader.load(run)) for run in (base, other)]
    compare_table.print_short(compare.compare(runs[0], runs[1:]))
    printed = " ".join(capsys.readouterr().out.split())
    assert "free target-only - 1 1 4.00 fly - 2.00 [2.00, 2.00] 2.00 [2.00, 2.00] 4.00" in printed


def test_answers_that_were_cut_off_are_told(tmp_path, capsys):
    ends = ["length", "eos", "stop", "length"]
    base = write(tmp_path / "base", "target-only", [1] * 4, ends=["eos"] * 4)
    other = write(tmp_path / "fly", "fly", [1] * 4, ends=ends)
    assert fly("compare", base, other) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "fly: 2 of 4 answers (50%) ended at the length limit" in printed
    assert "; 2 never closed their thoughts" in printed
    assert "target-only: 0 of" not in printed
    assert fly("report", base, other, "--output", tmp_path / "r.html") == 0
    assert "ended at the length limit" in (tmp_path / "r.html").read_text()
