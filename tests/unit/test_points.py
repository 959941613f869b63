"""Figures over many runs: recovery over time x, tau by K, throughput."""

import json

import pytest

from fly.analysis import scores
from fly.analysis.html import comparison, points, summary
from fly.runs import reader
from tests.configured_runs import load_all, write_run
from tests.written_runs import write_lines

SOLVED = [1.0] * 9 + [0.0]
ONE_LOST = [0.0] + [1.0] * 8 + [0.0]


def collected(*runs):
    """(matrix, frontier, points by run and task) as the page has them."""
    named = zip(runs, summary.distinct_names(runs))
    found = [(run, scores.measure(run).model_copy(update={"name": name})) for run, name in named]
    matrix, cells = comparison.of_families(found)
    every = {(point["run"], point["task"]): point for point in points.of_runs(found, cells)}
    return matrix, points.frontier(cells), every


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


def placed(frontier):
    return {point["run"]: (point["time_x"], point["recovery"]) for point in frontier["points"]}


def test_points_are_the_runs_over_the_target_only_run(folder):
    matrix, (frontier,), every = collected(*load_all(folder))
    assert placed(frontier) == {
        "target-only": (1, 1),
        "exact": (pytest.approx(2), 1),
        "fly (K=4)": (pytest.approx(2.9), pytest.approx(8 / 9)),
        "fly (K=8)": (pytest.approx(3), pytest.approx(8 / 9)),
    }
    best = [point for point in frontier["points"] if point["is_best"]]
    assert [point["run"] for point in best] == ["exact", "fly (K=8)"]
    low, high = best[1]["recovery_interval"].values()
    assert low < 8 / 9 < high
    point = every["fly (K=8)", "a"]
    assert (point["tau"], point["k"], point["series"]) == (5.0, 8, "FLy")
    assert point["time_x"] == pytest.approx(3)
    assert matrix["notes"] == []


def test_only_what_no_other_surpasses_is_on_the_front():
    """Against every pair: a point is off the front if another has at least as much of both."""
    places = [(1, 1.0), (2, 1.0), (2, 0.9), (3, 0.5), (2.5, 0.6), (2.5, 0.4), (4, 0.1)]
    found = [points._point(str(at), kept, None, x, None) for at, (x, kept) in enumerate(places)]
    points._mark_best(found)
    for point, (x, kept) in zip(found, places):
        others = [place for place in places if place != (x, kept)]
        assert point["is_best"] == (not any(a >= x and b >= kept for a, b in others))


def test_one_run_that_drafts_has_no_figures_of_many(tmp_path):
    write_run(tmp_path, {"a": SOLVED}, use_sd=False)
    write_run(tmp_path, {"a": SOLVED})
    matrix, frontier, _ = collected(*load_all(tmp_path))
    assert (matrix, frontier) == (None, [])


def test_a_run_with_drafts_from_earlier_outputs_has_a_line_of_its_own(tmp_path):
    """Its speed is not the mode's own."""
    write_run(tmp_path, {"a": SOLVED}, use_sd=False)
    write_run(tmp_path, {"a": SOLVED}, enable_fly=False, use_ngram=True)
    drafted = write_run(tmp_path, {"a": SOLVED}, draft_runs=["runs/old/"])
    results = json.loads(drafted.read_text())
    counts = {"matched": 2, "changed": 3, "missing": 0, "untokenized": 0}
    results["config"]["fly"]["draft_runs"] = {"runs": ["x"], **counts, "same_target": None}
    drafted.write_text(json.dumps(results))
    _, _, every = collected(*load_all(tmp_path))
    curves = [point["curve"] for point in every.values()]
    assert len(set(curves)) == 3
    assert "earlier runs old" in curves[-1]


def test_one_batch_size_however_it_was_given(tmp_path):
    """lm-eval has --batch_size 1 as a text and the default as a number: two sizes, it seemed."""
    write_run(tmp_path, {"a": SOLVED}, use_sd=False, batch_size="1")
    for k in (4, 8):
        write_run(tmp_path, {"a": SOLVED}, enable_fly=False, spd_k=k, batch_size=1)
    _, (frontier,), every = collected(*load_all(tmp_path))
    assert {point["batch_size"] for point in every.values()} == {"1"}
    assert len(frontier["points"]) == 3


def test_a_run_is_related_to_its_own_engines_target(tmp_path):
    """vLLM's exact verification was divided by fly's target-only run, the newer one."""
    write_run(tmp_path, {"a": SOLVED}, use_sd=False, backend="vllm", seconds=20)
    for k in (4, 8):
        write_run(
            tmp_path, {"a": SOLVED}, enable_fly=False, backend="vllm", seconds=10, spd_k=k
        )  # fmt: skip
    write_run(tmp_path, {"a": SOLVED}, use_sd=False, seconds=5)
    _, (frontier,), _ = collected(*load_all(tmp_path))
    assert [x for x, _ in placed(frontier).values()] == [1, pytest.approx(2), pytest.approx(2)]


def test_a_run_is_related_to_the_target_at_its_own_batch_size(tmp_path):
    for size, seconds in ((1, 40), (4, 20)):
        write_run(tmp_path, {"a": SOLVED}, use_sd=False, batch_size=size, seconds=seconds)
        write_run(tmp_path, {"a": SOLVED}, enable_fly=False, batch_size=size, seconds=10)
    _, (frontier,), _ = collected(*load_all(tmp_path))
    speeds = {name: x for name, (x, _) in placed(frontier).items() if name.startswith("exact")}
    assert speeds == {
        "exact (batch size=1)": pytest.approx(4),
        "exact (batch size=4)": pytest.approx(2),
    }


def test_targets_have_curves_of_their_own(tmp_path):
    """Two targets at two batch sizes each were one zigzag line."""
    for target in "AB":
        for size in (1, 4):
            write_run(tmp_path, {"a": SOLVED}, use_sd=False, target_model_path=target,
                      batch_size=size, wall_seconds=1.0)  # fmt: skip
    _, _, every = collected(*load_all(tmp_path))
    curves = {(point["curve"], point["batch_size"]) for point in every.values()}
    assert curves == {(f"target_model_path={target}", size) for target in "AB" for size in "14"}


@pytest.mark.parametrize(
    ("different", "reason"),
    [
        ({"prompts": "other"}, "cannot be compared: a, document 0: the prompt differs"),
        ({"target_model_path": "/other"}, "no target-only run of /other"),
    ],
)
def test_what_cannot_be_compared_is_left_out_with_the_reason(tmp_path, different, reason):
    """One run of other documents took the matrix from all."""
    write_run(tmp_path, {"a": SOLVED}, use_sd=False)
    write_run(tmp_path, {"a": SOLVED}, enable_fly=False)
    write_run(tmp_path, {"a": SOLVED}, **different)
    matrix, (frontier,), every = collected(*load_all(tmp_path))
    assert list(placed(frontier)) == ["target-only", "exact"]
    assert matrix["notes"][0].startswith("left out: ")
    assert reason in matrix["notes"][0]
    assert every["fly", "a"]["time_x"] is None


def test_two_runs_of_equal_settings_have_points_but_no_matrix(tmp_path):
    write_run(tmp_path, {"a": SOLVED}, use_sd=False)
    for seconds in (5, 4):
        write_run(tmp_path, {"a": SOLVED}, enable_fly=False, seconds=seconds)
    matrix, (frontier,), _ = collected(*load_all(tmp_path))
    assert "belong in one cell" in matrix["refused"]
    assert list(placed(frontier)) == ["target-only", "exact", "exact #2"]


def test_without_a_target_only_run_the_rest_is_drawn(tmp_path):
    for k in (4, 8):
        write_run(tmp_path, {"a": SOLVED}, enable_fly=False, spd_k=k)
    matrix, frontier, every = collected(*load_all(tmp_path))
    assert "add one (use_sd=false)" in matrix["refused"]
    assert frontier == []
    assert [(point["k"], point["time_x"]) for point in every.values()] == [(4, None), (8, None)]


def test_a_baseline_that_solves_nothing_has_no_recovery(tmp_path):
    write_run(tmp_path, {"a": [0.0, 0.0]}, use_sd=False)
    for k in (4, 8):
        write_run(tmp_path, {"a": [0.0, 1.0]}, enable_fly=False, spd_k=k)
    _, frontier, every = collected(*load_all(tmp_path))
    assert frontier == []
    assert every["exact (K=4)", "a"]["time_x"] == pytest.approx(1)


def test_times_of_different_machines_have_no_place(tmp_path):
    write_run(tmp_path, {"a": SOLVED}, use_sd=False)
    for k in (4, 8):
        path = write_run(tmp_path, {"a": SOLVED}, enable_fly=False, spd_k=k)
    results = json.loads(path.read_text())
    results["config"]["fly"]["device"]["threads"] = 8
    path.write_text(json.dumps(results))
    matrix, (frontier,), every = collected(*load_all(tmp_path))
    assert [name for name in placed(frontier) if "K=8" in name] == []
    assert any("ran on different machines (threads: 2 and 8)" in note for note in matrix["notes"])
    assert [point["time_x"] is None for point in every.values()] == [True, False, True]


def test_recovery_below_one_is_worse_whatever_the_metrics_direction(tmp_path):
    """An error rate that rose from 0.2 to 0.25 kept 0.8."""
    kind = {"metric": "wer", "higher_is_better": False}
    write_run(tmp_path, {"a": [0.1, 0.3]}, use_sd=False, **kind)
    for k, rates in ((8, [0.2, 0.3]), (4, [0.1, 0.06]), (2, [0.0, 0.0])):
        write_run(tmp_path, {"a": rates}, enable_fly=False, spd_k=k, **kind)
    _, (frontier,), _ = collected(*load_all(tmp_path))
    assert {name: recovery for name, (_, recovery) in placed(frontier).items()} == {
        "target-only": 1, "exact (K=8)": pytest.approx(0.8), "exact (K=4)": pytest.approx(2.5),
    }  # fmt: skip


def test_the_score_is_the_first_that_the_target_scores_by(tmp_path):
    """GSM8K's strict filter finds nothing in a chat model's answers, FLy's stray hit or not."""
    for scored, k in (([1.0, 1.0], 0), ([1.0, 0.0], 4), ([1.0, 0.0], 8)):
        path = write_run(tmp_path, {"a": scored}, enable_fly=False, spd_k=k)
        (file,) = tmp_path.glob(path.name.replace("results_", "samples_a_") + "l")
        lines = reader.read_lines(file, dict)
        stray = 0.5 if k else 0.0
        write_lines(
            file, [*({**line, "filter": "strict", "exact_match": stray} for line in lines), *lines]
        )
        results = json.loads(path.read_text())
        results["results"]["a"]["exact_match,strict"] = stray
        path.write_text(json.dumps(results))
    _, (frontier,), _ = collected(*load_all(tmp_path))
    assert frontier["metric"] == "exact_match"
    assert [recovery for _, recovery in placed(frontier).values()] == [1, 0.5, 0.5]


def test_speeds_are_of_the_task_alone_and_need_records(tmp_path):
    """A slow task must not slow the others' points."""
    both = {"a": SOLVED, "b": SOLVED[:1]}
    write_run(tmp_path, both, use_sd=False)
    for k in (4, 8):
        path = write_run(tmp_path, both, enable_fly=False, seconds=5.0, spd_k=k)
        slow_down(path, "b")
    write_run(tmp_path, both, enable_fly=False, spd_k=2, with_records=False)
    _, (of_a, of_b, overall), every = collected(*load_all(tmp_path))
    assert [x for x, _ in placed(of_a).values()] == pytest.approx([1, 2, 2])
    assert [x for x, _ in placed(of_b).values()] == pytest.approx([1, 0.5, 0.5])
    assert overall["task"] == "overall"
    assert len(every) == 6  # none of the run without records


def slow_down(results, task):
    """This task takes four times as long."""
    (file,) = results.parent.glob(f"fly_requests_{results.stem[8:27]}*.jsonl")
    records = reader.read_lines(file, dict)
    for record in records:
        if record["task"] == task:
            record["seconds"] = {phase: 4 * value for phase, value in record["seconds"].items()}
    write_lines(file, records)


def test_runs_of_lm_evals_hf_have_no_points(folder):
    write_run(folder / "hf", {"a": SOLVED}, backend="hf")
    _, (frontier,), every = collected(*load_all(folder))
    assert len(frontier["points"]) == len(every) == 4


def test_throughput_against_interactivity_at_several_batch_sizes(tmp_path):
    """100 tokens per document. A user waits for the passes of others, which the shares of passes
    do not say; seconds of processes add up, GPUs of one copy do not."""
    for size, seconds, wall in ((1, 10.0, 9.0), (4, 4.0, 14.0)):
        write_run(tmp_path, {"a": SOLVED}, use_sd=False, batch_size=size, seconds=seconds,
                  wall_seconds=wall)  # fmt: skip
        write_run(tmp_path, {"a": SOLVED}, enable_fly=False, batch_size=size,
                  seconds=seconds / 2, wall_seconds=wall / 2, devices=2)  # fmt: skip
    _, _, every = collected(*load_all(tmp_path))
    found = {
        (point["curve"], point["batch_size"]): (point["tok_s_user"], point["tok_s_gpu"])
        for point in every.values()
    }
    assert found == {
        ("target-only", "1"): pytest.approx((100 / 9, 10)),
        ("target-only", "4"): pytest.approx((100 / 14, 25)),
        ("exact", "1"): pytest.approx((200 / 9, 10)),
        ("exact", "4"): pytest.approx((200 / 14, 25)),
    }
    write_run(tmp_path, {"a": SOLVED}, backend="vllm", enable_fly=False, batch_size=4)
    _, _, every = collected(*load_all(tmp_path))
    assert {point["curve"] for point in every.values()} == {
        "target-only, fly", "exact, fly", "exact, vLLM",
    }  # fmt: skip
    assert list(every.values())[-1]["tok_s_user"] is None  # its records have no wall_seconds
