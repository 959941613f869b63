"""What is tried, on which documents, and who goes on."""

import pytest

from fly import config
from fly.runs.records import Counts, zero_seconds
from fly.tuning.candidates import candidates, changes, kind
from fly.tuning.fidelity import recoveries
from fly.tuning.real_runs import RunResult, join
from fly.tuning.tune import RealRun, growing_sets, survivors
from tests.unit.test_tune_fidelity import scored

BASE = config.build(
    {
        "target_model_path": "t", "draft_model_path": "d", "spd_k": 8, "win_len": 4,
        "draft_policy": "fixed",
    },
    "test",
)  # fmt: skip
GOOD, BAD = scored(t={"em": [1, 1, 0, 0]}), scored(t={"em": [1, 0, 0, 0]})


def test_the_list_holds_every_rule_gate_and_exact_place():
    found = candidates(BASE)
    assert {kind(c) for c in found} == {"exact", "fly within a round", "fly across rounds"}
    assert {c.spd_k for c in found if c.rule == "exact"} >= {4, 12}
    assert {(c.entropy_thre, c.draft_ratio_thre) for c in found} >= {(0.3, None), (None, 0.15)}
    assert {c.exact_first_tokens for c in found} == {0, 16, 64}
    assert any(c.exact_pattern for c in found)
    assert len({c.hash() for c in found}) == len(found)


def test_the_shipped_guarded_setting_is_expressed():
    """The grid of earlier versions had no exact places."""
    guarded = config.load("qwen2.5-coder-guarded.json", log=False)
    plain = config.load("qwen2.5-coder.json", log=False)
    wanted = changes(plain, guarded) | {"draft_policy": "fixed"}
    assert any(changes(plain, found) == wanted for found in candidates(plain))


def test_the_given_configuration_is_not_tried_twice():
    (first, *_) = candidates(BASE)
    assert first not in candidates(first)
    assert changes(BASE, first) == {"spd_k": 4, "enable_fly": False}


def test_what_is_no_key_of_the_list_stays_as_given():
    given = BASE.model_copy(update={"use_ngram": True, "num_ngram_pred_tokens": 9})
    assert all(c.use_ngram and c.num_ngram_pred_tokens == 9 for c in candidates(given))


@pytest.mark.parametrize(
    ("limit", "ends"), [(8, [1, 2, 4, 8]), (20, [3, 5, 10, 20]), (3, [2, 3]), (1, [1])]
)
def test_sets_of_documents_double_and_end_with_the_limit(limit, ends):
    sets = growing_sets({"t": 100}, limit)
    assert [each["t"][-1] + 1 for each in sets] == ends
    assert [i for each in sets for i in each["t"]] == [*range(limit)]


def test_every_set_has_documents_of_every_task():
    """Without any of a task lm-eval would run all of its documents."""
    sets = growing_sets({"long": 100, "short": 3}, 8)
    assert all(each["long"] and each["short"] for each in sets)
    assert [i for each in sets for i in each["long"]] == [*range(8)]
    assert [i for each in sets for i in each["short"]] == [*range(3)]


def run(seconds, measured=GOOD, *, emitted=10, is_given=False, **keys):
    found = BASE.model_copy(update=keys)
    result = RunResult(
        counts=Counts(emitted=emitted, rounds=5),
        seconds=zero_seconds() | {"verify": seconds},
        requests=4,
        measured=measured,
    )
    return RealRun(found, is_given, [result], recoveries(GOOD, measured, 0.9))


def test_the_fastest_that_kept_the_scores_go_on():
    given = run(9.0, is_given=True)
    fast, slow, slowest, lossy = run(1.0), run(3.0), run(5.0), run(0.5, BAD)
    empty, exact = run(0.0, emitted=0), run(4.0, enable_fly=False)
    runs = [slowest, given, lossy, slow, empty, fast, exact]
    assert survivors(runs, 2) == [given, slow, fast, exact]
    assert survivors(runs, 1) == [given, fast, exact]
    assert survivors(runs, 5) == [slowest, given, slow, empty, fast, exact]
    assert lossy in survivors(runs, 6)


def test_runs_on_further_documents_are_one_run():
    one, two = run(1.0).result, run(2.0, BAD).result
    other = two.measured.tasks["t"]
    shifted = other.model_copy(
        update={
            "documents": {i + 4: hashes for i, hashes in other.documents.items()},
            "metrics": [
                metric.model_copy(update={"scores": {i + 4: s for i, s in metric.scores.items()}})
                for metric in other.metrics
            ],
        }
    )
    two.measured = two.measured.model_copy(update={"tasks": {"t": shifted}})
    joined = join([one, two])
    assert joined.scores == {"t em": dict(enumerate([1, 1, 0, 0, 1, 0, 0, 0]))}
    assert joined.measured.tasks["t"].documents.keys() == {*range(8)}
    assert (joined.seconds_of_decoding, joined.requests, joined.counts.emitted) == (3.0, 8, 20)
    without = two.measured.tasks["t"].model_copy(update={"metrics": []})
    two.measured = two.measured.model_copy(update={"tasks": {"t": without}})
    (metric,) = join([one, two]).measured.tasks["t"].metrics
    assert metric.left_out
