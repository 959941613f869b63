"""Tasks without scores, documents by category, and answers that were cut off."""

import json

import pytest

from fly.analysis import categories, compare, compare_table, scores
from fly.analysis.html import comparison
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


def test_categories_are_scored_by_the_metric_of_the_whole_task(tmp_path):
    """Where the baseline solves nothing of a category by the first metric, it was another's."""
    strict, flexible = [0.0, 1.0] * 10, [1.0] * 20
    runs = [
        write(tmp_path / mode, mode, tasks={"sums": {"strict": strict, "flexible": values}},
              docs=LEVELS)
        for mode, values in (("target-only", flexible), ("fly", [0.0] * 20))
    ]  # fmt: skip
    base, other = (scores.measure(reader.load(run), by="level") for run in runs)
    found = categories.rows(base, [other])
    assert {row["metric"] for row in found} == {"strict"}
    assert [row["score"] for row in found] == [0.0, 0.0, 1.0, 1.0]
    found = categories.rows(base, [other], metrics=["flexible"])
    assert [(row["metric"], row["score"]) for row in found] == [("flexible", s) for s in (1, 0)] * 2


def test_a_metric_that_only_one_task_has(tmp_path, capsys):
    """--by ended with "no such metric", after all decoding; and the other task has scores."""
    how = {"tasks": {"a": {"acc": [1.0] * 4}, "b": {"exact_match": [1.0] * 4}}, "docs": LEVELS[:4]}
    runs = [write(tmp_path / mode, mode, **how) for mode in ("target-only", "fly")]
    out = tmp_path / "found.json"
    assert fly("compare", *runs, "--metric", "acc", "--by", "level", "--json", out) == 0
    assert "has no score" not in capsys.readouterr().out
    rows = json.loads(out.read_text())["categories"]
    assert {(row["task"], row["metric"], row["score"]) for row in rows} == {
        ("a", "acc", 1.0), ("b", None, None),
    }  # fmt: skip


def test_a_run_by_itself_has_scores_by_category(scored):
    (own,) = (scores.measure(reader.load(path), by="kind") for path in scored[1:])
    *_, found = comparison.against_first([own], "kind")
    assert [(row["category"], row["metric"], row["score"]) for row in found] == [
        ("a", "exact_match", 1.0), ("b", "exact_match", 0.5),
    ]  # fmt: skip


def test_categories_that_are_numbers_stand_by_size(tmp_path):
    docs = [{"level": level} for level in (10, 9, 2, "two", [1, "\u00e9"])]
    run = write(tmp_path / "run", "fly", [1.0] * 5, docs=docs)
    found = categories.rows(scores.measure(reader.load(run), by="level"), [])
    assert [row["category"] for row in found] == ["2", "9", "10", '[1, "\u00e9"]', "two"]


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
    junit, comment = tmp_path / "j.xml", tmp_path / "c.md"
    assert fly("compare", base, other, "--junit", junit) == 3
    assert 'tests="1" failures="1"' in junit.read_text()  # a test fails where the status does
    gate = ("--min-time-x", "5", "--markdown", comment)
    assert fly("compare", base, other, *gate) == 3
    assert "time x at least 5: **not enough" in comment.read_text().partition("<details>")[0]
    assert fly("report", base, other, "--output", tmp_path / "r.html") == 0
    runs = [scores.measure(reader.load(run)) for run in (base, other)]
    compare_table.print_short(compare.compare(runs[0], runs[1:]))
    ((entry,), *_) = comparison.against_first(runs)
    assert (entry["main"], entry["speeds"][0]["decode"]["value"]) == (None, 2.0)
    printed = " ".join(capsys.readouterr().out.split())
    assert "free target-only - 1 1 4.00 fly - 2.00 [2.00, 2.00] 2.00 [2.00, 2.00] 4.00" in printed


def test_a_task_without_scores_beside_one_that_has_them(tmp_path, capsys):
    tasks = {"sums": {"acc": [1.0] * 4}, "free": {"bypass": [None] * 4}}
    runs = []
    for mode, seconds in (("target-only", 2.0), ("fly", 1.0)):
        folder = write(tmp_path / mode, mode, tasks=tasks, seconds=seconds)
        path = next(folder.glob("results_*"))
        results = json.loads(path.read_text())
        results["results"]["free"]["bypass,none"] = 999
        path.write_text(json.dumps(results))
        runs.append(scores.measure(reader.load(folder)))
    compare_table.print_short(compare.compare(runs[0], runs[1:]))
    assert "free target-only - 1 1 4.00 fly - 2.00" in " ".join(capsys.readouterr().out.split())


def test_answers_that_were_cut_off_are_told(tmp_path, capsys):
    ends = ["length", "eos", "stop", "length"]
    base = write(tmp_path / "base", "target-only", [1] * 4, ends=["eos"] * 4)
    other = write(tmp_path / "fly", "fly", [1] * 4, ends=ends)
    assert fly("compare", base, other) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "fly: 2 of 4 answers (50%) ended at the length limit" in printed
    assert "fly: 2 of 4 answers (50%) never closed their thoughts" in printed
    assert "target-only: 0 of" not in printed
    assert fly("report", base, other, "--output", tmp_path / "r.html") == 0
    assert "ended at the length limit" in (tmp_path / "r.html").read_text()
