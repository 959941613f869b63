"""benchmarks/verification.py: resuming never mixes experiments nor loses a record."""

import json
from argparse import Namespace

import pytest

from fly.config import FlyConfig
from tests import benchmark_scripts

SETTINGS = {"target_only": {"use_sd": False}, "exact_k8": {"spd_k": 8, "enable_fly": False}}


@pytest.fixture(scope="module")
def bench():
    return benchmark_scripts.load("verification")


def record(setting, first, corrects, seconds=1.0, task="gsm8k_cot", rounds=10):
    documents = [
        {"doc_id": first + n, "correct": c, "text": f"{first + n}"} for n, c in enumerate(corrects)
    ]
    stats = {"emitted": 60, "rounds": rounds, "drafted": 80, "discarded": 6}
    stats["seconds"] = {"draft": seconds, "verify": 0.0, "other": 0.0}
    where = {"pair": "x.json", "max_gen_toks": 320, "batch_size": 8, "config": SETTINGS[setting]}
    return {"setting": setting, "task": task, "stats": stats, "documents": documents, **where}


def write(path, *records, torn=""):
    path.write_text("".join(json.dumps(r) + "\n" for r in records) + torn)


def args(tmp_path, **given):
    where = {"config": "x.json", "max_gen_toks": 320, "batch_size": 8, "output": tmp_path}
    return Namespace(**{**where, **given})


def test_a_torn_line_costs_itself_only(bench, tmp_path):
    path = tmp_path / "records.jsonl"
    write(path, record("target_only", 0, [1.0]), torn='{"setting": "targ')
    bench.check_same_experiment(path, args(tmp_path), SETTINGS)
    with open(path, "a") as file:
        file.write(json.dumps(record("target_only", 1, [0.0])) + "\n")
    assert bench.read(path)["target_only", "gsm8k_cot"].correct == {0: 1.0, 1: 0.0}


@pytest.mark.parametrize("changed", [{"config": "y.json"}, {"max_gen_toks": 99}, {"batch_size": 1}])
def test_records_of_another_experiment_are_refused(bench, tmp_path, changed):
    path = tmp_path / "records.jsonl"
    write(path, record("target_only", 0, [1.0]))
    with pytest.raises(SystemExit, match="choose another folder"):
        bench.check_same_experiment(path, args(tmp_path, **changed), SETTINGS)
    other = {"target_only": {"use_sd": False, "spd_k": 3}}
    with pytest.raises(SystemExit, match="holds target_only with config="):
        bench.check_same_experiment(path, args(tmp_path), other)


def test_a_line_of_the_table(bench, tmp_path):
    """McNemar over discordant pairs, time over chunks that both have."""
    path = tmp_path / "records.jsonl"
    write(
        path,
        record("target_only", 0, [1.0, 1.0, 0.0, 1.0]),
        record("exact_k8", 0, [0.0, 1.0, 1.0, 0.0], seconds=2.0, rounds=15),
        record("exact_k8", 4, [1.0], seconds=100.0),
    )
    row = bench.row(bench.read(path), "exact_k8", "gsm8k_cot", "target_only")
    assert (row["documents"], row["correct"], row["target_only_correct"]) == (4, 2.0, 3.0)
    assert (row["lost"], row["won"]) == (2, 1)
    assert row["mcnemar_p"] == pytest.approx(1.0)
    assert row["tau"] == pytest.approx(120 / 25)
    assert row["emitted_per_drafted"] == pytest.approx(0.75)
    assert row["recovery"] == pytest.approx(2 / 3)
    against_itself = bench.row(bench.read(path), "target_only", "gsm8k_cot", "target_only")
    assert against_itself["time_x_over_exact"] == pytest.approx(2.0)
    assert against_itself["mcnemar_p"] == 1.0
    without = bench.row(bench.read(path), "exact_k8", "gsm8k_cot", "never run")
    assert (without["documents"], without["recovery"], without["tau"]) == (0, None, row["tau"])
    at_one = bench.row(bench.read(path), "target_only", "gsm8k_cot", "target_only", [100.0, 10.0])
    assert at_one["predicted_x"] == pytest.approx((15 * 100 + 80 * 10) / (10 * 100 + 80 * 10))


def test_a_limit_leaves_out_what_lies_beyond(bench, tmp_path):
    """The table of the first 2 documents must not hold tau of others."""
    path = tmp_path / "records.jsonl"
    write(
        path, record("target_only", 0, [1.0, 1.0]), record("target_only", 2, [0.0], seconds=100.0)
    )
    tally = bench.read(path, limit=2)["target_only", "gsm8k_cot"]
    assert list(tally.correct) == [0, 1]
    assert tally.total("rounds") == 10
    assert bench.read(path)["target_only", "gsm8k_cot"].total("rounds") == 20


def test_documents_that_were_decoded_again_count_once(bench, tmp_path):
    path = tmp_path / "records.jsonl"
    write(path, record("target_only", 0, [1.0]), record("target_only", 0, [0.0, 1.0, 1.0]))
    tally = bench.read(path)["target_only", "gsm8k_cot"]
    assert tally.correct == {0: 0.0, 1: 1.0, 2: 1.0}
    assert tally.total("rounds") == 10


def test_only_what_is_left_of_a_chunk_is_decoded(bench, tmp_path, monkeypatch):
    """Documents that are done in chunks of another size would count twice."""
    path = tmp_path / "records.jsonl"
    write(path, record("target_only", 1, [1.0, 1.0]))
    seen = []

    def evaluate(lm, task, documents, **_):
        seen.append((task, documents))
        how = {"filter": "flexible-extract", "exact_match": 1.0, "resps": [["text"]]}
        return [{"doc_id": document, **how} for document in documents]

    fake = Namespace(fly_config=FlyConfig(target_model_path="x"), batch_size=0)
    monkeypatch.setattr("fly.harness.hf.FlyLM", lambda **_: fake)
    monkeypatch.setattr("fly.harness.evaluate.evaluate", evaluate)
    given = args(tmp_path, device="cpu", first=0, limit=5, chunk=4, tasks=["gsm8k_cot"])
    for _ in range(2):
        bench.run(given, {"target_only": SETTINGS["target_only"]}, path)
    assert seen == [("gsm8k_cot", [0, 3]), ("gsm8k_cot", [4])]
    assert len(bench.read(path)["target_only", "gsm8k_cot"].chunks) == 3


def test_every_setting_meets_every_document_once(bench):
    seen = [(s, t, d) for s, t, ds in bench.turns(0, 20, 8, list(SETTINGS)) for d in ds]
    assert len(seen) == len(set(seen)) == 2 * len(bench.TASKS) * 20
