"""Runs that users keep are still read: these were written by the version of November 2026."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fly.runs import reader
from fly.runs.run_settings import of_rule
from tests.integration.test_cli import run
from tests.integration.test_report import blocks

OLD = Path(__file__).parents[1] / "fixtures" / "runs_of_2026_11"
MODES = ("target-only", "exact", "fly")


def test_old_runs_are_compared(capsys):
    assert run("compare", *(OLD / mode for mode in MODES), "--min-recovery", "0.9") == 3
    printed = capsys.readouterr().out
    for expected in ("tiny_task: as_target", "6 documents", "0.333 [0.042, 1.266]", "4 / 0",
                     "0.55 [0.46, 0.78]", "62%", "3.43"):  # fmt: skip
        assert expected in printed, expected


def test_the_engine_of_old_runs_is_known():
    """They do not say it: there was one besides lm-eval's own backends."""
    assert [reader.load(OLD / mode).engine for mode in MODES] == ["fly"] * 3


def test_old_runs_are_a_matrix(capsys):
    assert run("compare", *(OLD / mode for mode in MODES), "--matrix") == 0
    printed = capsys.readouterr().out
    assert "over all 2 cells" in printed
    assert "4 / 0, p 0.250" in printed  # twice McNemar's


def test_an_old_baseline_is_compared_with(capsys):
    assert run("compare", OLD / "fly", "--baseline", OLD / "baseline.json") == 0
    printed = capsys.readouterr().out
    assert "0.333 [0.042, 1.266]" in printed
    assert "0.54 [0.29, 0.87]" in printed


def test_old_runs_are_reported(tmp_path):
    folders = [OLD / mode for mode in MODES]
    page = tmp_path / "report.html"
    assert run("report", *folders, "--output", page) == 0
    text = page.read_text()
    assert "tiny_task" in text
    summary = blocks(text)["summary"]
    assert [point["run"] for point in summary["points"]] == list(MODES)
    (panel,) = summary["frontier"]
    assert [point["run"] for point in panel["points"]] == list(MODES)


def test_a_run_with_what_is_gone_is_read(tmp_path, capsys):
    """Only new runs are refused it. A key that is gone was shown as a setting of the rule."""
    for mode in MODES:
        shutil.copytree(OLD / mode, tmp_path / mode)
    (file,) = (tmp_path / "fly").rglob("results_*.json")
    results = json.loads(file.read_text())
    entry = results["config"]["fly"]
    entry["config"] |= {"execution": "onednn", "draft_quantization": "int4"}
    entry["config"]["tp_plan"] = "auto"
    entry["preparation"] = {"target": "onednn", "draft": "onednn int4"}
    file.write_text(json.dumps(results))
    folders = [tmp_path / mode for mode in MODES]
    assert run("compare", *folders) == 0
    assert "0.333 [0.042, 1.266]" in capsys.readouterr().out
    assert run("report", *folders, "--output", tmp_path / "report.html") == 0
    assert "tp_plan" not in of_rule(reader.load(tmp_path / "fly"))


@pytest.mark.parametrize("mode", MODES)
def test_an_old_manifest_is_read(mode, capsys):
    assert run("run", "--resume", OLD / mode) == 0
    assert "has ended" in capsys.readouterr().out


def test_finished_runs_are_compared_without_torch():
    """Its import is most of what the command would take."""
    code = (
        "import sys\nfrom fly.cli import main as cli\n"
        "try: cli.main(sys.argv[1:])\nexcept SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    folders = [str(OLD / mode) for mode in MODES]
    subprocess.run([sys.executable, "-c", code, "compare", *folders], check=True, timeout=120)
