"""Which runs of `fly tune` kept the target's scores."""

import pytest

from fly.analysis.scores import DocumentHashes, Measured, Metric, Task
from fly.errors import FlyError
from fly.tuning.fidelity import check_judgeable, held, recoveries

LEAST = 0.9
LOWER = ("wer",)


def scored(prompt="p", **tasks):
    """A run. tasks: by name; lists of scores by "metric" or "metric,filter"."""
    return Measured(
        name="run",
        mode="fly",
        target={"name": "m", "files": None, "revision": None, "dtype": None},
        decoding={},
        tasks={name: _task(by_metric, prompt) for name, by_metric in tasks.items()},
    )


def _task(by_metric, prompt):
    metrics = []
    for label, values in by_metric.items():
        name, _, of_filter = label.partition(",")
        metrics.append(
            Metric(
                name=name, filter=of_filter or "none", higher_is_better=name not in LOWER,
                scores=dict(enumerate(values)),
            )
        )  # fmt: skip
    documents = {i: DocumentHashes(doc=str(i), prompt=prompt, target="t") for i in range(4)}
    return Task(
        version="1", num_fewshot=0, generation={}, documents=documents, metrics=metrics, work={}
    )


def verdict(baseline, other):
    return held(recoveries(baseline, other, LEAST))


def test_every_metric_and_filter_must_hold():
    """Judged by the first, or by the target's best, a loss under another filter was written."""
    before = scored(t={"em,strict": [1, 1, 0, 0], "em,loose": [1, 1, 1, 1], "acc": [1, 1, 1, 1]})
    fine = {"em,strict": [1, 1, 0, 0], "em,loose": [1, 1, 1, 1], "acc": [1, 1, 1, 1]}
    assert verdict(before, scored(t=fine))
    for label in fine:
        worse = scored(t={**fine, label: [1, 0, 0, 0]})
        found = {r.metric: r for r in recoveries(before, worse, LEAST)}
        assert found[label].scores.lost == (1 if label == "em,strict" else 3)
        assert found[label].scores.recovery == pytest.approx(0.5 if label == "em,strict" else 0.25)
        assert not verdict(before, worse)


def test_every_task_must_hold():
    before = scored(t={"em": [1, 1, 1, 1]}, u={"em": [1, 1, 1, 1]})
    assert verdict(before, before)
    assert not verdict(before, scored(t={"em": [1, 1, 1, 1]}, u={"em": [1, 1, 1, 0]}))


def test_where_lower_is_better_a_rise_is_a_loss():
    before = scored(t={"wer": [0.2, 0.2, 0.2, 0.2]})
    (found,) = recoveries(before, scored(t={"wer": [0.4, 0.4, 0.4, 0.4]}), LEAST)
    assert found.scores.recovery == pytest.approx(0.5)
    assert not found.is_held
    assert verdict(before, scored(t={"wer": [0.1, 0.2, 0.2, 0.2]}))
    assert verdict(before, scored(t={"wer": [0, 0, 0, 0]}))  # no recovery, and nothing lost


def test_a_recovery_that_is_undefined_is_not_held():
    """None was taken for nothing to lose."""
    before = scored(t={"em": [1, 1, 1, 1]})
    (found,) = recoveries(before, scored(t={"em": [1, -1, 1, 1]}), LEAST)
    assert found.scores.recovery is None
    assert "below zero" in found.scores.reason
    assert not verdict(before, scored(t={"em": [1, -1, 1, 1]}))


def test_nothing_judged_is_not_held():
    zero = scored(t={"em": [0, 0, 0, 0]})
    assert not verdict(zero, zero)
    assert not verdict(zero, scored(t={"em": [1, 1, 1, 1]}))
    assert not held([])


def test_a_metric_that_the_run_lacks_is_not_held():
    """A KeyError, after real runs; or it was passed over."""
    before = scored(t={"em": [1, 1, 1, 1], "f1": [1, 1, 1, 1]})
    only, missing = recoveries(before, scored(t={"em": [1, 1, 1, 1]}), LEAST)
    assert only.is_held
    assert (missing.metric, missing.scores.recovery, missing.scores.other) == ("f1", None, None)
    assert not verdict(before, scored(t={"em": [1, 1, 1, 1]}))
    assert not verdict(before, scored(t={}))


def test_a_metric_without_some_of_the_targets_numbers_decides_nothing():
    """One NaN of the target's, and no configuration held: nothing could be written."""
    metrics = {"acc": [1, 1, 1, 1], "rouge": [1, 1, 1]}
    before = scored(t=metrics)
    why = "1 of 4 documents have no number"
    task = before.tasks["t"]
    partly = task.metrics[1].model_copy(update={"left_out": why})
    task = task.model_copy(update={"metrics": [task.metrics[0], partly]})
    before = before.model_copy(update={"tasks": {"t": task}, "notes": [f"run: t rouge: {why}"]})
    assert verdict(before, before)
    assert check_judgeable(before, LEAST) == before.notes
    assert not verdict(before, scored(t={**metrics, "acc": [1, 1, 0, 0]}))


def test_a_metric_that_the_target_fails_by_decides_nothing_unless_it_worsens():
    """gsm8k's strict filter may find nothing at all; it must not forbid every configuration."""
    before = scored(t={"em,strict": [0, 0, 0, 0], "em,loose": [1, 1, 1, 1], "wer": [0, 0, 0, 0]})
    assert verdict(before, before)
    better = {"em,strict": [1, 0, 0, 0], "em,loose": [1, 1, 1, 1], "wer": [0, 0, 0, 0]}
    assert verdict(before, scored(t=better))
    assert not verdict(before, scored(t={**better, "wer": [0, 0.5, 0, 0]}))
    notes = check_judgeable(before, LEAST)
    assert [note.split(":")[0] for note in notes] == ["t em,strict", "t wer"]


@pytest.mark.parametrize(
    ("metrics", "what"),
    [({"em": [0, 0, 0, 0]}, "em 0; 4 documents"), ({}, "no metric is a mean over documents")],
)
def test_a_task_by_which_nothing_can_be_judged_is_refused(metrics, what):
    good = {"em": [1, 1, 1, 0]}
    assert check_judgeable(scored(t=good), LEAST) == []
    with pytest.raises(FlyError, match=f"task u: .*{what}.*raise --limit, or choose other --tasks"):
        check_judgeable(scored(t=good, u=metrics), LEAST)


def test_runs_of_other_documents_are_refused():
    before = scored(t={"em": [1, 1, 1, 1]})
    with pytest.raises(FlyError, match="the prompt differs"):
        recoveries(before, scored("other", t={"em": [1, 1, 1, 1]}), LEAST)
