"""Histories: lines that are written and read back, series, trends, and the command's answers."""

import csv
import json
import time

import numpy as np
import pytest

from fly.analysis import history
from fly.analysis.history import Line, OfTask
from fly.analysis.statistics import Demand
from fly.errors import FlyError
from tests import written_runs
from tests.benchmark_scripts import load
from tests.integration.test_cli import run


def line(night, scores, **more):
    task = {"metric": "acc", "higher_is_better": True, "documents": "d", "tau": 3.0, "time_x": 1.5}
    return Line(
        **{"date": f"2026-01-{night + 1:02}T03-00-00", "name": "fly", "mode": "fly",
           "target": "m/target", "draft": "m/draft", "revision": f"r{night}",
           "commit": f"{night:x}" * 8, "settings": {"spd_k": "6"}, "machine": {}}
        | more,
        tasks={"sums": OfTask(scores=scores, **task)},
    )  # fmt: skip


def nights(count, lost_a_night, documents=40):
    """One more document lost every night, from the second on."""
    return [line(n, "0" * (n * lost_a_night) + "1" * (documents - n * lost_a_night))
            for n in range(count)]  # fmt: skip


def test_a_decline_is_told_with_the_document_that_it_began_with():
    (series,) = history.group(nights(20, 1))
    assert series.trend.verdict == "fell"
    assert series.trend.first_lost == (0, 1)
    words = history.trend_in_words(series)
    assert "it began with document 0 in the run of 2026-01-02T03-00-00, commit 11111111" in words


def test_what_changes_once_counts_once():
    """Two documents of 40 lost for 18 nights are no more than two: one in four histories of such
    documents would look so."""
    series = history.group([line(n, "11" + "1" * 38 if n < 2 else "00" + "1" * 38)
                            for n in range(20)])  # fmt: skip
    assert series[0].trend.verdict == "not enough evidence"
    assert series[0].trend.p >= 0.25


def test_equal_nights_are_unchanged_and_many_documents_hold():
    assert history.group(nights(10, 0))[0].trend.verdict == "unchanged"
    rng = np.random.default_rng(0)
    scores = (rng.random((30, 5000)) < 0.001) ^ (rng.random(5000) < 0.6)
    assert history.find_trend(scores.astype(float)).verdict == "held"
    assert history.find_trend(scores[:, :40].astype(float), Demand(0.99)).verdict != "fell"


def test_lower_may_be_better():
    lines = nights(20, 1)
    for each in lines:
        object.__setattr__(each.tasks["sums"], "higher_is_better", False)
    assert history.group(lines)[0].trend.verdict == "held"
    lines = [line(19 - n, each.tasks["sums"].scores) for n, each in enumerate(nights(20, 1))]
    for each in lines:
        object.__setattr__(each.tasks["sums"], "higher_is_better", False)
    assert history.group(lines)[0].trend.verdict == "fell"


def test_series_are_of_one_pair_settings_and_documents():
    """What the nights change (revision, commit, machine) sets no series apart; the rest does."""
    others = [line(9, "1" * 40, settings={"spd_k": "8"}), line(9, "1" * 40, draft="another"),
              line(9, "1" * 40, mode="exact")]  # fmt: skip
    found = history.group([*others, *reversed(nights(5, 1))])
    assert sorted(len(each.lines) for each in found) == [1, 1, 1, 5]
    longest = max(found, key=lambda each: len(each.lines))
    assert [each.date for each in longest.lines] == sorted(each.date for each in longest.lines)
    twice = history.group([*nights(5, 1), *nights(5, 1)])
    assert len(twice[0].lines) == 5  # a merge kept both sides


def test_a_run_with_a_name_of_its_own_belongs_to_that_name():
    """A model that is trained every night lies in another folder every night."""
    lines = [each.model_copy(update={"name": "tonight", "target": f"models/{n}"})
             for n, each in enumerate(nights(20, 1))]  # fmt: skip
    (series,) = history.group(lines)
    assert (len(series.lines), series.trend.verdict) == (20, "fell")
    assert series.title == "sums acc: tonight, fly"
    again = [each.model_copy(update={"name": f"fly-{n + 2}"}) for n, each in enumerate(lines)]
    assert len(history.group(again)) == 20


def test_trends_begin_with_the_good_run():
    lines = nights(20, 1)
    for name in ("2026-01-18", "r17", "1111111111"[:8].replace("1", "h")):
        if name.startswith("h"):
            with pytest.raises(FlyError, match="--good hhhhhhhh: no run has such a name"):
                history.group(lines, name)
        else:
            (series,) = history.group(lines, name)
            assert (series.good, series.trend.verdict) == (17, "not enough evidence")


def test_levels_spend_no_more_than_the_doubt():
    """Four looks per doubling, as docs/history.md says."""
    spent = sum(4 * history.level_at(2**j, 0.95) for j in range(2, 200))
    assert 0.049 < spent <= 0.05


@pytest.mark.parametrize("changes", ["flips", "flips and churn"])
def test_simulated_series(changes):
    """benchmarks/histories.py at a smaller scale: false alarms in at most 5 % of the series, and a
    drift of 0.2 % a night is seen."""
    simulate = load("histories").simulate
    none = simulate("none", changes, 60, seed=1)
    assert none["reported"] <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 60)
    if changes == "flips":  # churn of the same size hides it from 200 documents
        assert simulate("0.2 % a night", changes, 20, seed=1)["reported"] >= 0.8


def test_ten_thousand_lines_are_read_and_tested_in_seconds(tmp_path):
    path = tmp_path / "history.jsonl"
    rng = np.random.default_rng(0)
    text = [
        line(0, "".join("01"[int(x)] for x in rng.random(200) < 0.6), date=f"2026-{n:06}")
        .model_dump_json()
        for n in range(10_000)
    ]  # fmt: skip
    path.write_text("\n".join(text) + "\n")
    started = time.process_time()
    (series,) = history.group([*history.read(path)])
    assert len(series.lines) == 10_000
    assert time.process_time() - started < 5


@pytest.fixture
def folders(tmp_path):
    """Six finished nights, each of a target-only run and one that loses one more document."""
    found = []
    for night in range(6):
        pair = []
        for mode, lost in (("target-only", 0), ("fly", night)):
            scores = [0.0] * lost + [1.0] * (12 - lost)
            folder = written_runs.write(tmp_path / f"{mode}{night}", mode, scores, seconds=0.5)
            for file in folder.iterdir():
                file.rename(folder / file.name.replace("2026-01-01", f"2026-01-0{night + 1}"))
            (results,) = folder.glob("results_*")
            text = results.read_text().replace("2026-01-01", f"2026-01-0{night + 1}")
            results.write_text(text)
            pair.append(folder)
        found.append(pair)
    return found


def test_compare_appends_and_history_reads(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GITHUB_SHA", "abc123")
    file, page, table = (tmp_path / name for name in ("h.jsonl", "h.html", "h.csv"))
    for base, own in folders:
        assert run("compare", base, own, "--history", file) == 0
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    assert [each["mode"] for each in lines] == ["target-only", "fly"] * 6
    assert lines[1]["commit"] == "abc123"
    assert lines[3]["tasks"]["sums"]["scores"] == "0" + "1" * 11
    assert lines[3]["tasks"]["sums"]["recovery"] == pytest.approx(11 / 12)
    assert lines[3]["tasks"]["sums"]["time_x"] == pytest.approx(1.0)
    assert run("history", file, "--output", page, "--csv", table) == 0
    told = capsys.readouterr().out
    assert "sums exact_match: model, target-only, 6 runs: unchanged" in told
    assert "sums exact_match: model, fly, 6 runs: not enough evidence" in told
    with table.open(newline="") as opened:
        rows = [row for row in csv.DictReader(opened) if row["title"].endswith("fly")]
    assert [float(row["score"]) for row in rows] == pytest.approx([1 - n / 12 for n in range(6)])
    assert rows[2]["recovery"] == str(10 / 12)
    assert page.read_bytes().startswith(b"<!doctype html>")
    assert run("history", file, "--output", page, "--min-recovery", "0.9") == 3
    assert run("history", file, "--output", page, "--allow-inconclusive") == 0


def test_folders_are_read_as_they_are(folders, tmp_path, capsys):
    own = [folder for _, folder in folders]
    assert run("history", *own, "--output", tmp_path / "h.html") == 0
    assert "fly, 6 runs" in capsys.readouterr().out


def test_a_decline_ends_with_status_1(tmp_path):
    file = tmp_path / "h.jsonl"
    history.append(file, nights(20, 1))
    assert run("history", file, "--output", tmp_path / "h.html", "--confidence", "0.95") == 1
    assert run("history", file, "--output", tmp_path / "h.html") == 0  # only reports


def test_lines_stay_whole_behind_a_file_without_a_line_break(tmp_path):
    file = tmp_path / "h.jsonl"
    history.append(file, nights(1, 0))
    file.write_text(file.read_text().rstrip("\n"))
    history.append(file, nights(2, 0)[1:])
    assert len([*history.read(file)]) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "date is missing"), ("[1]", "not of fly compare --history"), ("{", "not valid JSON")],
)
def test_what_is_no_history_is_refused_in_one_line(tmp_path, capsys, text, message):
    file = tmp_path / "h.jsonl"
    file.write_text(text + "\n")
    assert run("history", file, "--output", tmp_path / "h.html") == 2
    (error,) = capsys.readouterr().err.splitlines()[-1:]
    assert message in error
    assert "h.jsonl, line 1" in error


def test_scores_that_are_not_of_their_documents(tmp_path, capsys):
    file = tmp_path / "h.jsonl"
    history.append(file, [line(0, "111"), line(1, "11")])
    assert run("history", file, "--output", tmp_path / "h.html") == 2
    assert "sums has 2 scores, and 3 in 2026-01-01" in capsys.readouterr().err
    file.write_text(line(0, "111").model_dump_json().replace('"111"', '"1x1"'))
    assert run("history", file, "--output", tmp_path / "h.html") == 2


def test_a_history_is_not_appended_to_another_file(folders, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine\n")
    assert run("compare", *folders[0], "--history", file) == 2
    assert file.read_text() == "mine\n"
