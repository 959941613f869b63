"""`fly plot` on written runs: the numbers, what is left out and why, and what the figures hold."""

import csv
import html
import json
import re
import sys
from xml.etree import ElementTree

import pytest

from fly.analysis import plotting
from fly.analysis.plotting.data import collect, pareto
from fly.errors import FlyError
from fly.runs import reader, settings
from fly.runs.manifest import Manifest
from tests.integration.test_cli import run
from tests.runs_to_plot import write_run
from tests.written_runs import write_lines

SOLVED = [1.0] * 9 + [0.0]
ONE_LOST = [0.0] + [1.0] * 8 + [0.0]
SVG = "{http://www.w3.org/2000/svg}"


def by_label(data):
    return {point.label: point for point in data.points}


@pytest.fixture
def folder(tmp_path):
    """Target-only at 10 tok/s, exact at 20 and FLy at 30 with one of nine answers lost."""
    write_run(tmp_path / "base", {"a": SOLVED}, use_sd=False, seconds=10.0)
    write_run(tmp_path, {"a": SOLVED}, enable_fly=False, spd_k=8, rounds=25, seconds=5.0)
    for k, rounds in ((4, 40), (8, 20)):
        write_run(
            tmp_path / "x" / "y", {"a": ONE_LOST},
            spd_k=k, win_len=2, rounds=rounds, seconds=100 / (28 + k / 4),
        )  # fmt: skip
    return tmp_path


def test_a_run_that_was_killed_after_its_results_were_saved_is_one_run(tmp_path, caplog):
    """Its first results were counted beside those of the same run resumed, or of the same command
    run again; half of a results file ended the command."""
    lost = write_run(tmp_path / "m", {"a": SOLVED}, spd_k=8)
    run = Manifest.create(tmp_path / "m", {"output_path": "m"})
    run.release()
    entry = json.loads(lost.read_text())
    entry["config"]["fly"]["started"] = run.started
    lost.write_text(json.dumps(entry))
    other = write_run(tmp_path / "m", {"a": SOLVED}, use_sd=False)
    assert [found.path for found in reader.load_all(tmp_path)] == [other]
    assert f"{lost}: its run has not ended: left out" in caplog.text
    ended = write_run(tmp_path / "m", {"a": SOLVED}, spd_k=8)
    entry = json.loads(ended.read_text())
    entry["config"]["fly"]["started"] = run.started
    ended.write_text(json.dumps(entry))
    run.finish(ended)
    half = tmp_path / "m/results_2026-01-01T09-00-00.000000.json"
    half.write_text(ended.read_text()[:100])
    assert [found.path for found in reader.load_all(tmp_path)] == [other, ended]
    assert f"{half}: not valid JSON" in caplog.text
    with pytest.raises(FlyError, match="not valid JSON"):
        reader.load_all(half)


def test_a_run_without_samples_does_not_hide_the_others(tmp_path, caplog):
    kept = write_run(tmp_path / "a", {"a": SOLVED}, use_sd=False)
    bare = write_run(tmp_path / "b", {"a": SOLVED}, spd_k=8)
    for samples in bare.parent.glob("samples_*"):
        samples.unlink()
    assert [found.path for found in reader.load_all(tmp_path)] == [kept]
    assert "is not beside it: run with --log_samples: left out" in caplog.text
    with pytest.raises(FlyError, match="is not beside it"):
        reader.load_all(tmp_path / "b")


def test_points_are_the_runs_over_the_target_only_run(folder):
    data = collect(reader.load_all(folder))
    points = by_label(data)
    assert set(points) == {"target-only", "exact, K=8", "FLy, K=4", "FLy, K=8"}
    point = points["FLy, K=8"]
    assert (point.tau, point.k, point.series) == (5.0, 8, "FLy")
    assert point.speedup == pytest.approx(3.0)
    assert point.recovery == pytest.approx(8 / 9)
    assert point.recovery_interval.low < 8 / 9 < point.recovery_interval.high <= 1
    assert points["exact, K=8"].recovery == points["target-only"].speedup == 1
    assert [p.label for p in pareto(data.points)] == ["exact, K=8", "FLy, K=8"]
    assert data.notes == []


def test_labels_hold_what_differs_and_what_is_in_force(tmp_path):
    """W and theta say nothing of an exact run; equal settings are not repeated."""
    for more in ({"entropy_thre": 0.1}, {"entropy_thre": None}, {"enable_fly": False}):
        write_run(tmp_path, {"a": SOLVED}, spd_k=8, **more)
    write_run(tmp_path, {"a": SOLVED}, spd_k=8, entropy_thre=0.1, abla_no_window=True)
    assert settings.labels(reader.load_all(tmp_path)) == [
        "FLy, theta=0.1, W=6", "FLy, theta off, W=6", "exact", "FLy, theta=0.1, W=0",
    ]  # fmt: skip
    write_run(tmp_path / "same", {"a": SOLVED}, spd_k=8)
    write_run(tmp_path / "same", {"a": SOLVED}, spd_k=9)
    assert settings.labels(reader.load_all(tmp_path / "same")) == ["K=8", "K=9"]
    assert settings.labels(reader.load_all(tmp_path / "same")[:1]) == ["FLy"]


def test_labels_tell_texts_and_batch_invariance_apart(tmp_path):
    """Runs that differed in nothing else had one label."""
    for more in ({}, {"draft_sources": ["runs", "own"]}, {"batch_invariant": "auto"}):
        keys = {"drafter": "ngram", "enable_fly": False, "batch_invariant": False, **more}
        written = write_run(tmp_path, {"a": SOLVED}, **keys)
    results = json.loads(written.read_text())
    results["config"]["fly"]["preparation"] = {"batch_invariant": True}  # what auto came to
    written.write_text(json.dumps(results))
    assert settings.labels(reader.load_all(tmp_path)) == [
        "texts=all, not batch invariant",
        "texts runs, own, not batch invariant",
        "texts=all, batch invariant",
    ]


def test_a_run_with_drafts_from_earlier_outputs_is_always_told_apart(tmp_path):
    """Alone, beside target-only and beside the same mode: its speed is not the mode's own."""
    target = write_run(tmp_path, {"a": SOLVED}, use_sd=False)
    alone = write_run(tmp_path, {"a": SOLVED}, enable_fly=False, use_ngram=True)
    drafted = write_run(tmp_path, {"a": SOLVED}, draft_runs=["runs/old/"])
    results = json.loads(drafted.read_text())
    counts = {"matched": 0, "changed": 3, "missing": 0, "untokenized": 0}
    results["config"]["fly"]["draft_runs"] = {"runs": ["x"], **counts, "same_target": None}
    for matched, label in ((0, "exact"), (2, "exact, earlier runs old")):
        results["config"]["fly"]["draft_runs"]["matched"] = matched
        drafted.write_text(json.dumps(results))
        runs = [reader.load(path) for path in (drafted, target, alone)]
        assert settings.labels(runs[:1]) == [label]
        assert settings.labels(runs[:2])[0].startswith(label)
    labels = [point.label for point in collect(runs).points if not point.is_baseline]
    assert len(set(labels)) == 2
    assert any("earlier runs old" in label for label in labels)


def test_a_setting_that_is_a_list_of_numbers(tmp_path):
    """It ended plot, report and matrix in a TypeError."""
    for more in ({}, {"head_layer_ids": [2, 18, 33]}):
        write_run(tmp_path, {"a": SOLVED}, drafter="eagle3", enable_fly=False, **more)
    labels = settings.labels(reader.load_all(tmp_path))
    assert labels == ["head_layer_ids off", "head_layer_ids 2, 18, 33"]


def test_one_batch_size_however_it_was_given(tmp_path):
    """lm-eval has --batch_size 1 as a text and the default as a number: two sizes, it seemed."""
    write_run(tmp_path, {"a": SOLVED}, use_sd=False, batch_size="1")
    write_run(tmp_path, {"a": SOLVED}, enable_fly=False, batch_size=1)
    data = collect(reader.load_all(tmp_path))
    assert [point.label for point in data.points] == ["target-only", "exact"]
    assert all(point.is_placed for point in data.points)


def test_a_run_is_related_to_its_own_engines_target(tmp_path):
    """vLLM's exact verification was divided by fly's target-only run, the newer one."""
    write_run(tmp_path, {"a": SOLVED}, use_sd=False, backend="vllm", seconds=20)
    write_run(tmp_path, {"a": SOLVED}, enable_fly=False, backend="vllm", seconds=10)
    write_run(tmp_path, {"a": SOLVED}, use_sd=False, seconds=5)
    (exact,) = [p for p in collect(reader.load_all(tmp_path)).points if not p.is_baseline]
    assert exact.speedup == pytest.approx(2)


def test_the_newest_target_only_run_counts_whatever_the_order(tmp_path, capsys):
    old = write_run(tmp_path / "old", {"a": SOLVED}, use_sd=False, seconds=100)
    new = write_run(tmp_path / "new", {"a": SOLVED}, use_sd=False, seconds=10)
    exact = write_run(tmp_path / "exact", {"a": SOLVED}, enable_fly=False, seconds=5)
    for order in ((old, new), (new, old)):
        assert run("plot", *order, exact, "--output", tmp_path / "out") == 0
        rows = csv.DictReader((tmp_path / "out" / "points.csv").open())
        speedups = [row["speedup"] for row in rows if row["label"] == "exact"]
        assert [float(x) for x in speedups] == [pytest.approx(2)]


def test_targets_have_curves_of_their_own(tmp_path):
    """Two targets at two batch sizes each were one zigzag line."""
    for target in "AB":
        for size in (1, 4):
            write_run(tmp_path, {"a": SOLVED}, use_sd=False, target_model_path=target,
                      batch_size=size, wall_seconds=1.0)  # fmt: skip
    curves = {(p.curve, p.batch_size) for p in collect(reader.load_all(tmp_path)).points}
    names = [f"target-only, target_model_path={target}" for target in "AB"]
    assert curves == {(name, size) for name in names for size in "14"}


def test_a_label_with_dollars_is_drawn_as_it_is(tmp_path):
    """matplotlib read what stands between them as mathematics, and failed or garbled it."""
    write_run(tmp_path, {"a": SOLVED}, use_sd=False)
    for pattern in (r"^\d+$|^####.*$", "^a$"):
        write_run(tmp_path, {"a": SOLVED}, exact_pattern=[pattern])
    assert run("plot", tmp_path, "--output", tmp_path / "out") == 0
    drawn = html.unescape((tmp_path / "out" / "frontier.svg").read_text(encoding="utf-8"))
    assert r"exact in ^\d+$|^####.*$" in drawn


@pytest.mark.parametrize(
    ("different", "reason"),
    [
        ({"batch_size": 4}, "its batch_size is 4, the target-only run's 1"),
        ({"prompts": "other"}, "cannot be compared: a, document 0: the prompt differs"),
        ({"target_model_path": "/other"}, "its target_model_path is /other, the target-only"),
    ],
)
def test_what_cannot_be_compared_is_left_out_with_the_reason(tmp_path, different, reason):
    write_run(tmp_path, {"a": SOLVED}, use_sd=False)
    write_run(tmp_path, {"a": SOLVED}, **different)
    data = collect(reader.load_all(tmp_path))
    (point,) = [p for p in data.points if not p.is_baseline]
    assert not point.is_placed
    assert reason in data.notes[0]


def test_without_a_target_only_run_the_rest_is_drawn(tmp_path, capsys):
    write_run(tmp_path, {"a": SOLVED}, spd_k=8)
    assert run("plot", tmp_path, "--output", tmp_path / "figures") == 0
    printed = capsys.readouterr().out
    assert "there is no target-only run: add one (use_sd=false)" in printed
    assert "no frontier: it needs a target-only run" in printed
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {"by_k.png", "by_k.svg", "points.csv"}


def test_a_baseline_that_solves_nothing_has_no_recovery(tmp_path):
    write_run(tmp_path, {"a": [0.0, 0.0]}, use_sd=False)
    write_run(tmp_path, {"a": [0.0, 1.0]})
    data = collect(reader.load_all(tmp_path))
    assert not any(point.is_placed for point in data.points)
    assert any("recovery is undefined" in note for note in data.notes)


@pytest.mark.parametrize("of_corpus", [False, True])
def test_recovery_below_one_is_worse_whatever_the_metrics_direction(tmp_path, of_corpus):
    """An error rate that rose from 0.2 to 0.25 kept 0.8; by document and of the whole corpus."""
    kind = {"metric": "wer", "higher_is_better": False, "of_corpus": of_corpus}
    write_run(tmp_path, {"a": [0.1, 0.3]}, use_sd=False, **kind)
    write_run(tmp_path, {"a": [0.2, 0.3]}, enable_fly=False, spd_k=8, **kind)
    write_run(tmp_path, {"a": [0.1, 0.06]}, enable_fly=False, spd_k=4, **kind)
    write_run(tmp_path, {"a": [0.0, 0.0]}, enable_fly=False, spd_k=2, **kind)
    data = collect(reader.load_all(tmp_path))
    points = by_label(data)
    assert points["target-only"].recovery == 1
    assert points["K=8"].recovery == pytest.approx(0.8)
    assert points["K=4"].recovery == pytest.approx(2.5)
    assert points["K=2"].recovery is None
    (note,) = (note for note in data.notes if "K=2: not in the frontier: " in note)
    assert "recovery is undefined" in note


def test_the_score_is_the_first_that_the_target_scores_by(tmp_path):
    """GSM8K's strict filter finds nothing in a chat model's answers, FLy's stray hit or not."""
    for scores, own in (([1.0, 1.0], {"use_sd": False}), ([1.0, 0.0], {})):
        path = write_run(tmp_path, {"a": scores}, **own)
        (file,) = tmp_path.glob(path.name.replace("results_", "samples_a_") + "l")
        lines = reader.read_lines(file, dict)
        stray = 0.0 if own else 0.5
        strict = [{**line, "filter": "strict", "exact_match": stray} for line in lines]
        write_lines(file, [*strict, *lines])
        results = json.loads(path.read_text())
        results["results"]["a"]["exact_match,strict"] = stray
        path.write_text(json.dumps(results))
    found = reader.load_all(tmp_path)
    assert [point.filter for point in collect(found).points] == ["none", "none"]
    assert [point.recovery for point in collect(found).points] == [1.0, 0.5]
    assert [p.filter for p in collect(found, "exact_match,strict").points] == ["strict", "strict"]


def test_speeds_are_of_the_task_alone_and_need_records(tmp_path):
    """A slow task must not slow the others' points."""
    scores = {"a": SOLVED, "b": SOLVED[:1]}
    for folder, with_records in (("all", True), ("none", False), ("some", False)):
        write_run(tmp_path / folder, scores, use_sd=False, with_records=with_records)
        write_run(tmp_path / folder, scores, seconds=5.0, with_records=folder != "none")
    for folder in ("all", "some"):
        slow_down(tmp_path / folder)
    found = {name: collect(reader.load_all(tmp_path / name)) for name in ("all", "some")}
    assert [p.speedup for p in found["all"].points] == pytest.approx([1, 1, 2, 0.5])
    assert [p.speedup for p in found["some"].points] == [None, None]
    assert "target-only recorded no speed: left out" in found["some"].notes[0]
    with pytest.raises(FlyError, match="nothing to draw"):
        collect(reader.load_all(tmp_path / "none"))
    assert found["all"].tasks == ["a", "b"]


def slow_down(folder):
    """The last run's second task takes four times as long."""
    file = max(folder.glob("fly_requests_*.jsonl"))
    records = reader.read_lines(file, dict)
    for record in records:
        if record["task"] == "b":
            record["seconds"] = {phase: 4 * value for phase, value in record["seconds"].items()}
    write_lines(file, records)


def test_runs_of_lm_evals_hf_are_named_and_left_out(folder):
    write_run(folder, {"a": SOLVED}, backend="hf")
    data = collect(reader.load_all(folder))
    assert "hf recorded no speed" in data.notes[0]
    assert len(data.points) == 4
    write_run(folder / "hf", {"a": SOLVED}, backend="hf")
    with pytest.raises(FlyError, match="nothing to draw: no task of a run that fly's"):
        collect(reader.load_all(folder / "hf"))
    with pytest.raises(FlyError, match="no task with the metric 'f1'"):
        collect(reader.load_all(folder), "f1")


def trace(drafts):
    """One request; (accepted, drafted) per round, each ending in the target's own token."""
    lines, length = [], 0
    for number, (accepted, drafted) in enumerate(drafts, 1):
        start, length = length, length + accepted + 1
        lines.append({
            "task_name": "a", "doc_id": 0, "request": 0, "round": number, "start": start,
            "draft": [5] * drafted, "by": "d" * drafted,
            "native": "1" * accepted + "0" * (drafted - accepted), "choice": [6] * (drafted + 1),
            "deferred": [], "rolled_back": None, "open": None, "length": length,
            "finish": "length" if number == len(drafts) else None,
        })  # fmt: skip
    return lines


def texts(path):
    return ["".join(node.itertext()) for node in ElementTree.parse(path).iter(f"{SVG}text")]


def ids(path):
    return [node.get("id", "") for node in ElementTree.parse(path).iter(f"{SVG}g")]


def test_the_figures_hold_every_point_line_and_label(folder, capsys):
    write_run(
        folder / "t", {"a": SOLVED}, spd_k=3, win_len=2, trace=trace([(3, 3), (1, 3), (0, 1)])
    )
    out = folder / "figures"
    assert run("plot", folder, "--output", out) == 0
    printed = capsys.readouterr().out
    assert "5 runs, 1 tasks" in printed
    assert "note" not in printed
    for name in ("frontier", "by_k", "acceptance"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    shown = texts(out / "frontier.svg")
    for label in ("exact, K=8", "FLy, K=4", "FLy, K=8", "FLy, K=3", "target-only", "Pareto front"):
        assert label in shown
    assert "time x over target-only, end to end" in shown
    points = [name for name in ids(out / "frontier.svg") if name.startswith("point-")]
    assert sorted(points) == [
        "point-exact-0", "point-fly-0", "point-fly-1", "point-fly-2", "point-target-only-0",
    ]  # fmt: skip
    lines = [name for name in ids(out / "by_k.svg") if name.startswith("line-")]
    assert lines == ["line-0", "line-1"] * 2  # exact and FLy, above and below
    assert "\u03c4 (tokens per target pass)" in texts(out / "by_k.svg")
    assert "position in the draft" in texts(out / "acceptance.svg")
    rows = list(csv.DictReader((out / "points.csv").open()))
    assert len(rows) == 5
    assert {row["label"]: float(row["tau"]) for row in rows}["FLy, K=8"] == 5.0


def test_throughput_against_interactivity_at_several_batch_sizes(tmp_path, capsys):
    """100 tokens per document. A user waits for the passes of others, which the shares of passes
    do not say; seconds of processes add up, GPUs of one copy do not."""
    for size, seconds, wall in ((1, 10.0, 9.0), (4, 4.0, 14.0)):
        write_run(tmp_path, {"a": SOLVED}, use_sd=False, batch_size=size, seconds=seconds,
                  wall_seconds=wall)  # fmt: skip
        write_run(tmp_path, {"a": SOLVED}, enable_fly=False, batch_size=size,
                  seconds=seconds / 2, wall_seconds=wall / 2, devices=2)  # fmt: skip
    data = collect(reader.load_all(tmp_path))
    found = {(p.curve, p.batch_size): (p.tok_s_user, p.tok_s_gpu) for p in data.points}
    assert found == {
        ("target-only", "1"): pytest.approx((100 / 9, 10)),
        ("target-only", "4"): pytest.approx((100 / 14, 25)),
        ("exact", "1"): pytest.approx((200 / 9, 10)),
        ("exact", "4"): pytest.approx((200 / 14, 25)),
    }
    (axes,) = plotting.draw(data)["throughput"].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines["exact"] == [pytest.approx([200 / 14, 25]), pytest.approx([200 / 9, 10])]
    assert [text.get_text() for text in axes.texts] == ["4", "1"] * 2
    write_run(tmp_path, {"a": SOLVED}, backend="vllm", enable_fly=False, batch_size=4)
    data = collect(reader.load_all(tmp_path))
    assert {p.curve for p in data.points} == {"target-only, fly", "exact, fly", "exact, vLLM"}
    out = tmp_path / "figures"
    assert run("plot", tmp_path, "--output", out) == 0
    assert "not in throughput: its records have no wall_seconds" in capsys.readouterr().out
    assert [name for name in ids(out / "throughput.svg") if "curve-" in name] == [
        "curve-0", "curve-1",
    ]  # fmt: skip
    rows = list(csv.DictReader((out / "points.csv").open()))
    rates = [float(row["tok_s_gpu"] or 0) for row in rows if row["batch_size"] == "4"]
    assert rates == pytest.approx([25, 25, 0])


def test_acceptance_by_position_of_earlier_runs_is_counted_from_traces(tmp_path):
    write_run(tmp_path, {"a": SOLVED}, trace=trace([(3, 3), (1, 3), (0, 1)]))
    (positions,) = collect(reader.load_all(tmp_path)).positions
    assert (positions.counts.accepted, positions.counts.drafted) == ([2, 1, 1], [3, 2, 2])


def test_acceptance_by_position_is_of_the_records(tmp_path):
    write_run(tmp_path, {"a": SOLVED}, drafts=[(3, 3), (1, 0), (3, 0), (0, 0)])
    data = collect(reader.load_all(tmp_path))
    (axes,) = plotting.draw(data)["acceptance"].axes
    (line,) = axes.lines
    assert [*line.get_ydata()] == [1 / 3] * 3
    assert [*line.get_xdata()] == [1, 2, 3]


def test_every_setting_is_its_number_and_the_legend_says_which(tmp_path):
    write_run(tmp_path, {"a": SOLVED}, use_sd=False)
    for k in range(2, 12):
        write_run(tmp_path, {"a": SOLVED}, enable_fly=False, spd_k=k, seconds=4 + k % 3 / 50)
    data = collect(reader.load_all(tmp_path))
    figure = plotting.draw(data)["frontier"]
    (axes,) = figure.axes
    markers = [line.get_marker() for line in axes.lines if (line.get_gid() or "")[:6] == "point-"]
    assert sorted(markers) == sorted(["o", *(f"${number}$" for number in range(1, 11))])
    (legend,) = figure.legends
    shown = zip(legend.get_texts(), legend.legend_handles)
    names = {text.get_text(): handle.get_marker() for text, handle in shown}
    assert [names[f"K={k}"] for k in range(2, 12)] == [f"${k - 1}$" for k in range(2, 12)]
    assert data.notes == ["no acceptance by draft position: no run drafted, or counted it"]


def test_the_same_runs_give_the_same_files(folder):
    for name in ("one", "two"):
        assert run("plot", folder / "base", folder / "x", "--output", folder / name) == 0
    for path in (folder / "one").glob("*.svg"):
        assert path.read_bytes() == (folder / "two" / path.name).read_bytes()


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    assert run("plot", tmp_path / "nowhere", "--output", tmp_path / "out") == 2
    assert "no such run" in capsys.readouterr().err
    assert run("plot", tmp_path, "--output", tmp_path / "out") == 2
    assert "holds no results_*.json" in capsys.readouterr().err
    write_run(tmp_path / "runs", {"a": SOLVED})
    assert run("plot", tmp_path / "runs", "--metric", "f1", "--output", tmp_path / "out") == 2
    assert not (tmp_path / "out").exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    capsys.readouterr()
    assert run("plot", tmp_path / "runs", "--output", tmp_path / "out") == 2
    assert re.fullmatch(
        r"fly: error: fly plot needs matplotlib: pip install matplotlib\n",
        capsys.readouterr().err,
    )


def test_all_runs_of_a_folder_are_read_oldest_first(folder):
    found = reader.load_all(folder)
    dates = [found_run.path.name for found_run in found]
    assert dates == sorted(dates)
    assert len(dates) == 4
    assert [r.path for r in reader.load_all(found[1].path)] == [found[1].path]
