"""What sets finished runs apart, in words."""

import json

from fly.runs import run_settings
from tests.configured_runs import load_all, write_run

SOLVED = [1.0] * 9 + [0.0]


def test_labels_hold_what_differs_and_what_is_in_force(tmp_path):
    """W and theta say nothing of an exact run; equal settings are not repeated."""
    for more in ({"entropy_thre": 0.1}, {"entropy_thre": None}, {"enable_fly": False}):
        write_run(tmp_path, {"a": SOLVED}, spd_k=8, **more)
    write_run(tmp_path, {"a": SOLVED}, spd_k=8, entropy_thre=0.1, abla_no_window=True)
    assert run_settings.labels(load_all(tmp_path)) == [
        "FLy, theta=0.1, W=6", "FLy, theta off, W=6", "exact", "FLy, theta=0.1, W=0",
    ]  # fmt: skip
    write_run(tmp_path / "same", {"a": SOLVED}, spd_k=8)
    write_run(tmp_path / "same", {"a": SOLVED}, spd_k=9)
    assert run_settings.labels(load_all(tmp_path / "same")) == ["K=8", "K=9"]
    assert run_settings.labels(load_all(tmp_path / "same")[:1]) == ["FLy"]


def test_labels_tell_texts_and_batch_invariance_apart(tmp_path):
    """Runs that differed in nothing else had one label."""
    for more in ({}, {"draft_sources": ["runs", "own"]}, {"batch_invariant": "auto"}):
        keys = {"drafter": "ngram", "enable_fly": False, "batch_invariant": False, **more}
        written = write_run(tmp_path, {"a": SOLVED}, **keys)
    results = json.loads(written.read_text())
    results["config"]["fly"]["preparation"] = {"batch_invariant": True}  # what auto came to
    written.write_text(json.dumps(results))
    assert run_settings.labels(load_all(tmp_path)) == [
        "texts=all, not batch invariant",
        "texts runs, own, not batch invariant",
        "texts=all, batch invariant",
    ]


def test_a_setting_that_is_a_list_of_numbers(tmp_path):
    """It ended report and matrix in a TypeError."""
    for more in ({}, {"head_layer_ids": [2, 18, 33]}):
        write_run(tmp_path, {"a": SOLVED}, drafter="eagle3", enable_fly=False, **more)
    labels = run_settings.labels(load_all(tmp_path))
    assert labels == ["head_layer_ids off", "head_layer_ids 2, 18, 33"]
