"""The table and the summary of a tune, also of runs with odd numbers."""

import pytest

from fly.decoding.records import Counts, RunStats
from fly.tuning import output
from fly.tuning.fidelity import recoveries
from fly.tuning.live import Outcome
from fly.tuning.search import Prediction
from fly.tuning.tune import Run, Tuning
from tests.unit.test_tune_fidelity import scored
from tests.unit.test_tune_search import BASE

SCORES = scored(t={"em,strict": [1, 1, 0, 0], "em,loose": [1, 1, 1, 1], "f1": [0, 0, 0, 0]})


def outcome(measured=SCORES, emitted=0):
    stats = RunStats(requests=4, counts=Counts(rounds=emitted // 2, emitted=emitted, bonus=emitted))
    stats.seconds |= {"verify": emitted / 10}
    return Outcome(stats.as_dict(), measured)


def ran(measured=SCORES, emitted=0, predicted=True):
    prediction = Prediction(BASE, Counts(rounds=2, emitted=4), 1.0, 1.0, 0.0)
    found = recoveries(SCORES, measured, 0.9)
    return Run(
        BASE, prediction if predicted else None, outcome(measured, emitted), 1.0, False, found
    )


def tuning(*runs):
    return Tuning(BASE, outcome(emitted=40), False, None, {}, [], len(runs), list(runs))


@pytest.mark.parametrize("predicted", [True, False])
def test_a_run_that_decoded_nothing_is_a_row_like_others(capsys, predicted):
    """tau and speed are None then: a TypeError after all runs, and no record."""
    found = tuning(ran(predicted=predicted), ran(emitted=40))
    output.print_table(found, 0.9)
    printed = capsys.readouterr().out
    assert ("2.00 / -" if predicted else "- / -") in printed
    assert found.best(0.9) is found.runs[1]
    assert tuning(found.runs[0]).best(0.9) is None  # no speed is no fastest
    line = output.summary(found, 0.9)[0]
    assert (line["measured_tau"], line["measured_decode_tok_s"]) == (None, 0.0)


def test_the_table_names_every_judged_metric(capsys):
    worse = scored(t={"em,strict": [1, 0, 0, 0], "em,loose": [1, 1, 1, 1], "f1": [0, 0, 0, 0]})
    output.print_table(tuning(ran(worse, emitted=40)), 0.9)
    printed = capsys.readouterr().out
    assert "t em,strict" in printed
    assert "t em,loose" in printed
    assert "f1" not in printed
    assert "no" in printed.split("the target alone")[0].split()


def test_a_run_that_is_not_judged_yet_has_not_held(capsys):
    run = Run(BASE, None, outcome(emitted=40), 1.0, True)
    output.print_table(tuning(run), 0.9)
    assert output.summary(tuning(run), 0.9)[0]["held"] is False
