"""benchmarks/rules_table.py: its settings are there, and its table is of both tasks together."""

import argparse
import json
import shutil

import pytest

from fly import config
from fly.cli import main as cli
from fly.runs.resume import parse_pairs
from tests import benchmark_scripts
from tests.written_runs import write


@pytest.fixture(scope="module")
def script():
    return benchmark_scripts.load("rules_table")


def test_every_setting_is_a_configuration(script):
    base = {"target_model_path": "x", "draft_model_path": "y", "spd_k": 8}
    hashes = {
        config.build({**base, **parse_pairs(keys, name)}, name).hash()
        for modes in (script.GREEDY, script.SAMPLED)
        for name, keys in modes.items()
    }
    assert len(hashes) == len({*script.GREEDY.values(), *script.SAMPLED.values()})


def test_the_table(script, tmp_path, capsys):
    """Holm over both tasks; the frontier by predicted time x and mean recovery."""
    runs = {"target-only": ([1] * 20, 240, 0), "good": ([1] * 20, 80, 240),
            "bad": ([0] * 8 + [1] * 12, 100, 240)}  # fmt: skip
    for task in script.TASKS:
        paths = []
        for name, (scores, rounds, drafted) in runs.items():
            seconds = dict.fromkeys(("prefill", "draft", "verify", "other", "compile"), 1.0)
            stats = {"requests": 20, "emitted": 240, "tau": 1.0, "seconds": seconds}
            stats |= {"rounds": rounds, "drafted": drafted}
            entry = {"stats": stats, "drafter": "model"}
            mode = "target-only" if name == "target-only" else "fly"
            entry = entry if mode == "fly" else {**entry, "drafter": None}
            folder = tmp_path / task / name
            settings = {"win_len": len(paths)}
            write(folder, mode, tasks={task: scores}, entry=entry, settings=settings)
            paths.append(f"{name}={folder}")
        cli.main(["compare", *paths, "--matrix", "--json", str(tmp_path / f"{task}.json")])
    script.write_records(tmp_path, list(runs))
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [record["run"] for record in records] == [*runs] * 2
    assert sum(document["score"] for document in records[-1]["documents"]) == 12
    for task in script.TASKS:  # the report is of the three files alone
        shutil.rmtree(tmp_path / task)
    capsys.readouterr()
    rows = script.collect(argparse.Namespace(output=tmp_path, passes=(10.0, 12.0, 1.0)))
    assert [(row["run"], row["on_frontier"]) for row in rows] == [("good", True), ("bad", False)]
    assert rows[0]["time_x"] == pytest.approx(2400 / 1200)
    assert rows[1]["recovery"] == pytest.approx(0.6)
    lost = rows[1]["gsm8k_cot"]
    assert lost["p"] == pytest.approx(4 * lost["p_uncorrected"])  # of four cells the least
    script.print_table(rows)
    assert "| good * | 2.00 | 1.000 |" in capsys.readouterr().out
