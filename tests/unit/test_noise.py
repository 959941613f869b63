"""What rounding alone changes, and whether a run changes more."""

import json

import numpy as np
import pytest

from fly.analysis import compare, noise
from tests.unit.test_compare import fly, load
from tests.written_runs import write

SCORES = [1, 1, 1, 1, 0, 0]


def texts(*changed):
    return [f"{i} {'other' if i in changed else 'text'}" for i in range(len(SCORES))]


@pytest.fixture
def runs(tmp_path):
    """Rounding changes document 0's score and two texts; the run four scores and five texts."""
    wide = {"batch_size": 8}
    return [
        write(tmp_path / "a", "target-only", SCORES, responses=texts()),
        "noise=" + str(write(tmp_path / "b", "target-only", [0, *SCORES[1:]],
                             responses=texts(0, 4), machine=wide)),
        write(tmp_path / "c", "fly", [0, 0, 0, 0, 0, 0], responses=texts(0, 1, 2, 3, 5)),
    ]  # fmt: skip


def test_by_hand(runs, tmp_path, capsys):
    assert fly("compare", *runs, "--noise-floor", "--json", tmp_path / "j") == 0
    (row,) = json.loads((tmp_path / "j").read_text())["noise_floor"]
    # changed by the run only: documents 1, 2 and 3; by rounding only: none. (1/2)^3
    assert row["scores"] == {"documents": 6, "by_rounding": 1, "by_run": 4, "p": 0.125}
    # texts: 1, 2, 3 and 5 against 4: P(4 or more of 5) = 6/32
    assert row["texts"] == {"documents": 6, "by_rounding": 2, "by_run": 5, "p": 0.1875}
    printed = capsys.readouterr().out
    assert "noise floor" in printed
    assert "0.125" in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert fly("compare", *runs) == 0  # without the flag it is a run as any other
    assert "noise floor" not in capsys.readouterr().out


def test_what_is_no_noise_run_is_refused(runs, tmp_path, capsys):
    assert fly("compare", runs[0], runs[2], "--noise-floor") == 2
    assert "no run is called noise" in capsys.readouterr().err
    same = write(tmp_path / "d", "target-only", SCORES)
    assert fly("compare", runs[0], f"noise={same}", runs[2], "--noise-floor") == 2
    assert "both have batch size 1" in capsys.readouterr().err
    other = write(tmp_path / "e", "exact", SCORES, machine={"batch_size": 8})
    assert fly("compare", runs[0], f"noise={other}", runs[2], "--noise-floor") == 2
    assert "has the mode exact, target-only target-only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"gen_kwargs": {"temperature": 1}}, "decoded otherwise (gen_kwargs: {}, now"),
     ({"target": "org/other"}, "another target (name: model, now org/other)"),
     ({"machine": {"capability": "AVX512"}}, "made elsewhere (CPU capability: AVX2 and AVX512)"),
     ({"entry": {"config_hash": "b"}}, "its settings differ"),
     ({"mode": None}, "it has the mode hf")],
)  # fmt: skip
def test_another_decoding_is_no_noise_run(tmp_path, capsys, changes, message):
    """Each was taken for rounding: the floor was too high, and losses looked like noise."""
    base = write(tmp_path / "a", "target-only", SCORES, entry={"config_hash": "a"})
    keys = {"mode": "target-only", "entry": {"config_hash": "a"}, **changes}
    keys["machine"] = {"batch_size": 8, **keys.get("machine", {})} if keys["mode"] else None
    noisy = write(tmp_path / "b", scores=SCORES, **keys)
    other = write(tmp_path / "c", "fly", SCORES)
    assert fly("compare", base, f"noise={noisy}", other, "--noise-floor") == 2
    assert message in capsys.readouterr().err


def test_the_noise_run_is_paired_by_document_as_the_others_are(tmp_path):
    """It kept its own prompts, which were not those of a run that was named first."""
    chat = write(tmp_path / "a", "server", SCORES, prompt="messages of")
    base = write(tmp_path / "b", "target-only", SCORES, prompt="text of")
    noisy = write(
        tmp_path / "c", "target-only", SCORES, prompt="text of", machine={"batch_size": 8}
    )
    words = (chat, base, f"noise={noisy}", "--noise-floor", "--pair-by", "document")
    assert fly("compare", *words) == 0


def test_a_noise_run_that_read_a_cache_is_refused(runs, tmp_path, capsys):
    """It has the baseline's own texts, so that rounding seemed to change none."""
    noisy = write(tmp_path / "d", "target-only", SCORES, machine={"batch_size": 8})
    (records,) = noisy.glob("fly_requests_*")
    records.write_text("".join(records.read_text().splitlines(keepends=True)[2:]))
    assert fly("compare", runs[0], f"noise={noisy}", runs[2], "--noise-floor") == 2
    assert "noise decoded 2 of 6 documents of sums not itself" in capsys.readouterr().err


def test_rounding_is_not_told_from_rounding_more_often_than_chance_says():
    """Baseline, noise and run are draws of one kind: documents near a tie fall either way."""
    generator = np.random.default_rng(0)
    near_a_tie = generator.random(300) < 0.2
    found = []
    for _ in range(400):
        draws = [near_a_tie & (generator.random(300) < 0.5) for _ in range(3)]
        found.append(noise._changed(*(dict(enumerate(draw)) for draw in draws)).p)
    assert np.mean(np.array(found) <= 0.05) <= 0.08
    worse = draws[0] ^ (generator.random(300) < 0.2)
    assert noise._changed(*(dict(enumerate(d)) for d in (*draws[:2], worse))).p < 0.05


def test_tasks_that_write_no_texts_have_none_to_differ(tmp_path):
    """The log-likelihoods of choices differ by rounding in every document."""
    wide = {"batch_size": 8}
    how = {"output_type": "multiple_choice"}
    base = load(write(tmp_path / "a", "target-only", SCORES, responses=texts(), **how))
    changed = {"responses": texts(0, 1, 2, 3, 4, 5), "machine": wide, **how}
    again = load(write(tmp_path / "b", "target-only", SCORES, **changed), "noise")
    run = load(write(tmp_path / "c", "fly", SCORES, responses=texts(), **how))
    (row,) = compare.compare(base, [run], noise=again).noise
    assert row.scores.by_rounding == 0
    assert row.texts is None
