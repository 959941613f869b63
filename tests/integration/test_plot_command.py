"""`fly plot` on runs that fly itself made: what it writes is what the plots read."""

import csv
import json

from tests.integration.test_cli import config_file, evaluate, run, task_dir  # noqa: F401  fixtures


def test_runs_of_the_tiny_pair_are_drawn(saved_pair, config_file, task_dir, tmp_path, capsys):  # noqa: F811
    """Catches keys of results, records or traces that the plots read and the runs do not write."""
    out = tmp_path / "out"
    for number, more in enumerate((",use_sd=False", ",trace=True")):
        folder = ("--log_samples", "--output_path", out / str(number))
        assert evaluate(saved_pair, config_file, task_dir, *folder, more_args=more) == 0
    capsys.readouterr()
    assert run("plot", out, "--output", tmp_path / "figures") == 0
    printed = capsys.readouterr().out
    assert "2 runs, 1 tasks" in printed
    assert "tiny_task, FLy: not in the frontier: recovery is undefined" in printed  # scores of 0
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"by_k.png", "by_k.svg", "acceptance.svg", "points.csv"} <= drawn
    rows = {row["label"]: row for row in csv.DictReader((tmp_path / "figures/points.csv").open())}
    assert float(rows["target-only"]["tau"]) == 1
    (records,) = out.glob("1/*/fly_requests_*.jsonl")
    made = [json.loads(line) for line in records.read_text().splitlines()]
    tau = sum(record["emitted"] for record in made) / sum(record["rounds"] for record in made)
    assert float(rows["FLy"]["tau"]) == tau
    assert float(rows["FLy"]["speedup"]) > 0
