"""Gates on mean acceptance length and time x: three answers, shares of wrong ones, refusals."""

import json

import numpy as np
import pytest

from fly.analysis import compare, gates, scores
from fly.analysis.gates import Gate
from fly.analysis.scores import Work
from fly.errors import FlyError
from fly.runs import reader
from tests import written_runs
from tests.benchmark_scripts import load
from tests.integration.test_cli import run


def judged(gate, base, own, **more):
    told = {"withheld": "", "confidence": 0.95, "verdicts": 1} | more
    works = [
        {i: Work(tokens=t, rounds=r, decode=s, end_to_end=1.1 * s) for i, (t, r, s) in enumerate(w)}
        for w in (base, own)
    ]
    return gates.judge(gate, *works, **told)


BASE = [(100 + i % 7, 100 + i % 7, 2.0 + i % 3) for i in range(50)]
OWN = [(t, t // 4, s / 2) for t, _, s in BASE]


@pytest.mark.parametrize(
    ("gate", "verdict", "value"),
    [
        (Gate("tau", 3.9), "held", 103.2 / 25.4),
        (Gate("tau", 4.5), "fell", 103.2 / 25.4),
        (Gate("tau", 3.9, is_share=True), "held", 103.2 / 25.4),  # the target's own is 1
        (Gate("time x", 1.9), "held", 2.0),
        (Gate("decoding x", 2.1), "fell", 2.0),
    ],
)
def test_three_answers(gate, verdict, value):
    row = judged(gate, BASE, OWN)
    assert row.verdict == verdict
    assert row.value.value == pytest.approx(value, rel=0.01)


def test_where_documents_differ_too_much_there_is_not_enough_evidence():
    own = [(t, r, s / (1 if i % 2 else 4)) for i, (t, r, s) in enumerate(BASE)][:12]
    row = judged(Gate("time x", 1.6), BASE[:12], own)
    assert (row.verdict, row.reason) == ("not enough evidence", "the documents do not tell")


def test_few_documents_decide_nothing():
    """Two that are twice as fast by chance had an interval without width."""
    row = judged(Gate("time x", 3.0), BASE[:9], OWN[:9])
    assert row.verdict == "not enough evidence"
    assert row.reason == "9 of at least 10 documents with records"


def test_a_server_that_tells_no_rounds_has_no_tau():
    """It said that 300 documents were fewer than 10."""
    row = judged(Gate("tau", 3.0), BASE, [(tokens, 0, seconds) for tokens, _, seconds in OWN])
    assert (row.verdict, row.reason) == ("not enough evidence", "the records do not tell it")


def test_other_machines_withhold_times_and_not_tau():
    row = judged(Gate("time x", 1.1), BASE, OWN, withheld="device: a CPU and another")
    assert row.verdict == "not enough evidence"
    assert "withheld: device" in row.reason
    assert judged(Gate("tau", 3.9), BASE, OWN, withheld="device: a CPU").verdict == "held"


def test_many_gates_fall_with_more_certainty_only():
    own = [(t, r, s / 1.94 + (i % 5 - 2) * 0.2) for i, (t, r, s) in enumerate(BASE)]
    alone = judged(Gate("time x", 2.05), BASE, own)
    assert alone.verdict == "fell"
    assert judged(Gate("time x", 2.05), BASE, own, verdicts=50).verdict == "not enough evidence"


def test_wrong_falls_are_rare():
    """benchmarks/gates.py at a smaller scale: what just reaches its gate falls in at most 5 %."""
    script = load("gates")
    for kind in ("tau", "time x"):
        found = script.simulate(kind, documents=60, runs=300, seed=1)
        assert found["fell"] <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 300)
        assert found["held"] <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 300)


@pytest.mark.parametrize("text", ["x", "-1", "0", "nan", "task=", "inf"])
def test_no_number(text):
    with pytest.raises(FlyError, match=r"--min-tau .*: give a number above 0"):
        gates.parse("tau", text)


def test_only_tau_has_a_share():
    assert gates.parse("tau", "a=97%") == Gate("tau", 0.97, True, "a")
    with pytest.raises(FlyError, match="--min-time-x 97%"):
        gates.parse("time x", "97%")


@pytest.fixture
def folders(tmp_path):
    base = written_runs.write(tmp_path / "base", "target-only", [1.0] * 400)
    return base, written_runs.write(tmp_path / "fly", "fly", [1.0] * 400, seconds=0.5)


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        (["--min-time-x", "1.9"], 0),
        (["--min-time-x", "2.1"], 1),
        (["--min-tau", "3.9", "--min-decoding-x", "sums=1.9"], 0),
        (["--min-tau", "sums=4.1", "--min-time-x", "1.9"], 1),
        (["--min-tau", "nosuch=4"], 2),
    ],
)
def test_exit_status(folders, tmp_path, flags, status):
    files = ["--json", tmp_path / "c.json", "--junit", tmp_path / "c.xml"]
    assert run("compare", *folders, *flags, *files) == status
    if status < 2:
        (other,) = json.loads((tmp_path / "c.json").read_text())["others"]
        assert {row["verdict"] for row in other["gates"]} <= {"held", "fell"}
        assert other["verdict"] == ("held", "fell")[status]
        assert ("<failure" in (tmp_path / "c.xml").read_text()) == (status == 1)


def test_another_machine_is_no_evidence_and_says_so(tmp_path, capsys):
    base = written_runs.write(tmp_path / "base", "target-only", [1.0] * 400)
    other = written_runs.write(tmp_path / "fly", "fly", [1.0] * 400, machine={"name": "new"})
    assert run("compare", base, other, "--min-time-x", "1.5") == 3
    told = " ".join(capsys.readouterr().out.split())
    assert "withheld: device: a CPU and new" in told


def test_gates_count_among_the_verdicts(folders):
    base, own = (scores.measure(reader.load(folder)) for folder in folders)
    found = compare.compare(base, [own], gates=[Gate("tau", 3.0), Gate("time x", 1.0)])
    assert found.verdicts == 3
