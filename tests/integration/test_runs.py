"""Runs read back from disk: what lm-eval and fly wrote is what compare and report see."""

import json

import pytest

from fly.errors import FlyError
from fly.runs import reader
from fly.runs.manifest import Manifest
from tests.integration.test_cli import config_file, evaluate, task_dir  # noqa: F401  fixtures


@pytest.fixture
def folder(saved_pair, config_file, task_dir, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    assert evaluate(saved_pair, config_file, task_dir, "--log_samples", "--output_path", out) == 0
    return out


def test_a_run_reads_back(folder):
    run = reader.load(folder)
    assert run.name == run.mode == "fly"
    (task,) = run.tasks.values()
    assert (task.name, task.filter) == ("tiny_task", "none")
    assert task.higher_is_better == {"exact_match": True}
    assert task.aggregated["exact_match"][0] == 0
    assert sorted(task.samples) == [0, 1, 2, 3]
    assert len(run.requests) == 4
    by_document = {record["doc_id"]: record for record in run.requests}
    for sample in task.samples.values():
        assert sample.prompt == f"q{sample.doc_id} "
        assert sample.target == "a"
        assert sample.scores == {"exact_match": 0.0}
        assert sample.responses == (by_document[sample.doc_id]["text"],)
    assert sum(r["emitted"] for r in run.requests) == run.entry["stats"]["emitted"]
    assert list(run.rounds) == []  # no trace was asked for
    assert run.entry["resumed"] is None


def test_the_newest_results_of_a_folder_are_read(folder):
    newest = reader.find_results(folder)
    older = newest.with_name("results_2020-01-01T00-00-00.000000.json")
    older.write_text(newest.read_text())
    assert reader.find_results(newest.parent) == newest
    assert reader.find_results(older) == older
    with pytest.raises(FlyError, match=r"samples_tiny_task_2020-.* is not beside it: .*--log_samp"):
        reader.load(older)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold one JSON object"),
        ('{"results": {}}', "not a results file"),
        ('{"results": {}, "config": {"model": "hf"}}', "configs is missing .*lm-eval's results"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, text, match):
    with pytest.raises(FlyError, match="no such run"):
        reader.load(tmp_path / "nowhere")
    with pytest.raises(FlyError, match="the run has not ended"):
        reader.load(tmp_path)
    path = tmp_path / "results_x.json"
    path.write_text(text)
    with pytest.raises(FlyError, match=match):
        reader.load(path)


def test_a_torn_last_line_is_dropped_and_no_other(tmp_path):
    path = tmp_path / "fly_requests_x.jsonl"
    whole = json.dumps({"doc_id": 0})
    path.write_text(whole + "\n" + '{"doc_id"')
    assert reader.read_lines(path, dict) == [{"doc_id": 0}]
    path.write_text(whole + "\n" + whole)
    assert len(reader.read_lines(path, dict)) == 2
    path.write_text('{"doc_id"\n' + whole + "\n")
    with pytest.raises(FlyError, match="line 1: not valid JSON"):
        reader.read_lines(path, dict)


def test_an_unfinished_newest_run_says_how_it_goes_on(tmp_path):
    """An older run's results, or its own half of them, are not what was asked for."""
    run = Manifest.create(tmp_path, {"output_path": str(tmp_path)})
    with pytest.raises(FlyError, match=r"has not ended: `fly --resume \S*` goes on with it$"):
        reader.load(tmp_path)
    old = tmp_path / "results_2020-01-01T00-00-00.000000.json"
    old.write_text("{}")
    with pytest.raises(FlyError, match=r"goes on with it \(or name an older run's results file\)"):
        reader.find_results(tmp_path)
    assert reader.find_results(old) == old
    own = tmp_path / "results_2999-01-01T00-00-00.000000.json"

    def results(entry):
        return json.dumps({"results": {}, "configs": {}, "config": entry})

    for text in ('{"config"', results({"fly": {"started": run.started}})):
        own.write_text(text)
        with pytest.raises(FlyError, match="has not ended"):
            reader.find_results(tmp_path)
    for other in ({"fly": {"started": "2998"}}, {}):  # a later run, of fly or of another backend
        own.write_text(results(other))
        assert reader.find_results(tmp_path) == own
    own.unlink()
    run.finish(old)
    assert reader.find_results(tmp_path) == old
    run.release()
