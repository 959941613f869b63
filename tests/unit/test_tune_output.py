"""The table and the summary of a tune, also of runs with odd numbers."""

import json
from dataclasses import replace

import pytest

from fly import config
from fly.analysis.statistics import Interval, Ratio
from fly.runs.records import Counts, zero_seconds
from fly.tuning import output
from fly.tuning.confirm import Confirmation
from fly.tuning.fidelity import recoveries
from fly.tuning.real_runs import RunResult
from fly.tuning.tune import RealRun, Tuning
from tests.unit.test_tune_candidates import BASE
from tests.unit.test_tune_fidelity import scored

SCORES = scored(t={"em,strict": [1, 1, 0, 0], "em,loose": [1, 1, 1, 1], "f1": [0, 0, 0, 0]})


def result(measured=SCORES, emitted=0):
    counts = Counts(rounds=emitted // 2, emitted=emitted, bonus=emitted)
    seconds = zero_seconds() | {"verify": emitted / 10}
    return RunResult(counts=counts, seconds=seconds, requests=4, measured=measured)


def ran(measured=SCORES, emitted=0):
    found = recoveries(SCORES, measured, 0.9)
    return RealRun(BASE, False, [result(measured, emitted)], found)


def tuning(*runs):
    return Tuning(BASE, [result(emitted=40)], list(runs))


def test_a_run_that_decoded_nothing_is_a_row_like_others(capsys):
    """tau and speed are None then: a TypeError after all runs, and no record."""
    found = tuning(ran(), ran(emitted=40))
    output.print_table(found, 0.9)
    row = next(line for line in capsys.readouterr().out.splitlines() if "0.0%" in line)
    assert row.count(" - ") >= 3
    assert found.fastest(0.9) is found.runs[1]
    assert tuning(found.runs[0]).fastest(0.9) is None  # no speed is no fastest
    line = output.summary(found, 0.9)[0]
    assert (line["tau"], line["decode_tok_s"]) == (None, 0.0)


def test_what_was_dropped_early_is_not_chosen_and_is_in_the_record(capsys):
    """It may be the fastest per document, and was judged by few."""
    found = tuning(ran(emitted=40), ran(emitted=10), RealRun(BASE, False))
    found.target *= 2
    found.runs[0].parts *= 2
    assert found.fastest(0.9) is found.runs[0]
    assert len(output.summary(found, 0.9)) == 2
    output.print_table(found, 0.9)
    assert "1 more configurations were dropped" in capsys.readouterr().out


def test_the_table_names_every_judged_metric(capsys):
    worse = scored(t={"em,strict": [1, 0, 0, 0], "em,loose": [1, 1, 1, 1], "f1": [0, 0, 0, 0]})
    output.print_table(tuning(ran(worse, emitted=40)), 0.9)
    printed = capsys.readouterr().out
    assert "t em,strict" in printed
    assert "t em,loose" in printed
    assert "f1" not in printed
    assert "no" in printed.split("the target alone")[0].split()


def test_a_run_that_is_not_judged_yet_has_not_held(capsys):
    run = RealRun(BASE, True, [result(emitted=40)])
    output.print_table(tuning(run), 0.9)
    assert output.summary(tuning(run), 0.9)[0]["held"] is False


def test_a_pair_that_drafts_from_runs_keeps_them_and_its_rule(tmp_path, monkeypatch):
    """Such a pair is tuned without them; by default FLy would be exact verification again."""
    monkeypatch.setattr(output, "_evidence", lambda *_: {})
    given = {"target_model_path": "t", "draft_model_path": "d", "spd_k": 8, "draft_runs": ["runs"]}
    (tmp_path / "given.json").write_text(json.dumps(given))
    before = config.build(given, "test")
    assert before.rule == "exact"
    for rule in ("fly", "exact"):
        best = before.model_copy(update={"draft_runs": None, "enable_fly": rule == "fly"})
        assert best.rule == rule
        run = replace(ran(), config=best)
        path = tmp_path / f"{rule}.json"
        output.write_config(path, str(tmp_path / "given.json"), run, None, None, None, path)
        written = config.load(str(path), {}, log=False)
        assert (written.draft_runs, written.rule) == (["runs"], rule)


# What is chosen


def confirmation(low, *, held=True, given_held=True, value=1.3):
    good, bad = recoveries(SCORES, SCORES, 0.9), recoveries(SCORES, WORSE, 0.9)
    ratio = Ratio(value, Interval(low, 2 * value - low))
    return Confirmation(
        {"t": [4, 5]}, True, ratio, ratio, ratio, good if held else bad, good if given_held else bad
    )


WORSE = scored(t={"em,strict": [0, 0, 0, 0], "em,loose": [1, 1, 1, 1], "f1": [0, 0, 0, 0]})


def searched(found, given_scores=SCORES):
    """The given configuration, and another that took less time in the search."""
    given = replace(ran(given_scores, emitted=40), is_given=True)
    other = ran(emitted=30)
    result = tuning(given, other)
    result.confirmation = found
    return result, given, other


@pytest.mark.parametrize(
    ("found", "given_scores", "expected", "why"),
    [
        (confirmation(1.05), SCORES, "other", "it is faster than the given one"),
        (confirmation(0.97), SCORES, "given", "no other is faster beyond the noise"),
        (confirmation(1.05, held=False), SCORES, "given", "did not keep the scores where that"),
        (confirmation(0.97, given_held=False), SCORES, "other", "the given one lost scores"),
        (confirmation(0.97), WORSE, "given", "no other is faster beyond the noise"),
        (
            confirmation(1.05, held=False, given_held=False),
            SCORES,
            None,
            "no configuration is left",
        ),
    ],
)
def test_noise_and_luck_change_no_configuration(found, given_scores, expected, why):
    """The luckiest of equal configurations was written, with a claim of its luck."""
    result, given, other = searched(found, given_scores)
    chosen, reason = result.choice(0.9)
    assert chosen is {"given": given, "other": other, None: None}[expected]
    assert why in reason


def test_a_given_configuration_that_is_fastest_stays_without_more_runs():
    given = replace(ran(emitted=20), is_given=True)
    result = tuning(given, ran(emitted=30))
    assert result.choice(0.9) == (
        given, "the given configuration stays: no other was faster and kept the scores"
    )  # fmt: skip


def test_less_time_is_better_than_more_tokens_per_second():
    """A configuration that rambles makes more tokens per second, and takes longer."""
    rambling = ran(emitted=60)
    rambling.parts[0].seconds["verify"] = 5.0  # 12 tokens per second, against 10
    short = ran(emitted=40)
    assert rambling.result.tok_s > 0
    assert tuning(rambling, short).fastest(0.9) is short


def test_what_the_confirmation_found_is_printed(capsys):
    result, _, _ = searched(confirmation(0.97))
    output.print_table(result, 0.9)
    printed = capsys.readouterr().out
    assert "on 2 documents that the search had not used" in printed
    assert "time x 1.30 [0.97, 1.63] over the given one" in printed
    assert "recovery of the given one: t em,strict 1.000 (-0 +0)" in printed
