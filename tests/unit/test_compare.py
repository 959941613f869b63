"""Runs are paired or refused; verdicts become tables, files and exit statuses."""

import csv
import json
import math
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from lm_eval.utils import hash_string

from fly.analysis import alignment, compare, compare_files, compare_table, scores
from fly.analysis.html import summary
from fly.analysis.statistics import Demand
from fly.cli import main as cli
from fly.errors import FlyError
from fly.runs import output_ids, reader
from fly.runs.earlier_outputs import EarlierOutputs
from tests.written_runs import digest, write, write_lines

SOLVED = [1] * 210 + [0] * 90
LENIENT = Demand(min_recovery=0.98)  # what so many documents show without a loss


def corrupted(scores, every=10):
    """The planted regression: one of ten answers is wrong."""
    return [0 if index % every == 0 else score for index, score in enumerate(scores)]


def fly(*args):
    with pytest.raises(SystemExit) as caught:
        cli.main([str(arg) for arg in args])
        raise SystemExit(0)
    return caught.value.code


def load(folder, name=None):
    return scores.measure(reader.load(folder, name))


@pytest.fixture
def folders(tmp_path):
    """target-only, a run equal to it, and one with a tenth of its answers corrupted."""
    return (
        write(tmp_path / "base", "target-only", SOLVED, round_tokens=1, seconds=2.0),
        write(tmp_path / "same", "fly", SOLVED),
        write(tmp_path / "bad", "fly", corrupted(SOLVED)),
    )


def test_exit_statuses(folders, tmp_path, capsys):
    base, same, bad = folders
    gate = ("--min-recovery", "0.99", "--confidence", "0.95")
    assert fly("compare", base, same, *gate) == 0
    assert fly("compare", base, bad, *gate) == 1
    assert "fell" in capsys.readouterr().out
    few = write(tmp_path / "few", "fly", [0, *SOLVED[1:]])
    assert fly("compare", base, few, *gate) == 3
    assert fly("compare", base, few, *gate, "--allow-inconclusive") == 0
    assert fly("compare", base, bad, *gate, "--allow-inconclusive") == 1
    assert fly("compare", base, same, bad, few, *gate) == 1  # the worst counts
    assert fly("compare", base, bad) == 0  # without a demand it is a look
    assert fly("compare", base, bad, "--min-recovery", "1.5") == 2
    assert "min_recovery=1.5 (fly compare)" in capsys.readouterr().err


def test_the_table_fits_100_columns_and_says_all(folders, capsys):
    assert fly("compare", *folders) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    for expected in ("0.7", "1.000 [0.982, 1.018]", "0 / 0", "21 / 0", "<0.001", "held",
                     "fell", "300 documents",
                     "2.00 [2.00, 2.00]", "4.00", "75%",
                     "Time x, against target-only"):  # fmt: skip
        assert expected in printed, expected
    assert "fly-2" in printed  # two runs of one mode have names of their own


def test_a_long_task_name_folds_and_no_interval(tmp_path, capsys):
    tasks = {"humaneval_64_instruct_with_suffix": SOLVED}
    base = write(tmp_path / "base", "target-only", tasks=tasks, seconds=2.0)
    assert fly("compare", base, write(tmp_path / "other", "fly", tasks=tasks)) == 0
    printed = capsys.readouterr().out
    assert printed.count("2.00 [2.00, 2.00]") == 2
    assert max(map(len, printed.splitlines())) <= 100


def test_without_drafts_there_is_no_time_x(tmp_path):
    """Two runs of the target alone differ by what else the machine did: 1.10 [1.10, 1.10]."""
    base = load(write(tmp_path / "a", "target-only", SOLVED, round_tokens=1, seconds=1.1))
    again = load(write(tmp_path / "b", "fly", SOLVED, round_tokens=1))
    for drafted in (0, 7, None):  # None: it is not known
        run = again.model_copy(update={"drafted": drafted})
        (other,) = compare.compare(base, [run]).others
        told = "no time x of fly, sums: nothing was drafted: any difference is the machine's"
        assert (told in other.notes) is (drafted == 0)
        assert (other.speeds[0].decode is None) is (drafted == 0)


def test_junit_fails_where_the_exit_status_does(tmp_path):
    """A baseline that scores nothing decides nothing: status 3, and all of its tests skipped."""
    base = write(tmp_path / "a", "target-only", [0] * 8)
    junit = tmp_path / "junit.xml"
    for flags, status, failures in (((), 3, "1"), (("--allow-inconclusive",), 0, "0")):
        other = write(tmp_path / f"b{status}", "fly", [0] * 8)
        assert fly("compare", base, other, "--junit", junit, *flags) == status
        assert ElementTree.parse(junit).getroot().find("testsuite").get("failures") == failures


def test_few_documents_that_score_the_same_are_unchanged(tmp_path, capsys):
    """They were called held, and allow a loss of 31 %; a job still passes."""
    base = write(tmp_path / "base", "target-only", SOLVED[:8])
    same = write(tmp_path / "same", "fly", SOLVED[:8])
    assert fly("compare", base, same, "--min-recovery", "0.99") == 0
    printed = capsys.readouterr().out
    assert "unchanged" in printed
    assert "every document scored the same" in printed
    assert "this rules out a loss above" in printed
    assert "31.2%" in printed
    junit = tmp_path / "junit.xml"
    fly("compare", base, same, "--junit", junit)
    assert ElementTree.parse(junit).getroot().find("testsuite").get("failures") == "0"
    # nothing fell, but only one of the two is shown to hold
    found = [load(write(tmp_path / n, m, s)) for n, m, s in [
        ("b", "target-only", SOLVED), ("c", "fly", SOLVED)]]  # fmt: skip
    held = compare.compare(*found[:1], found[1:], LENIENT).verdict
    assert held == "held"
    assert compare.weakest(["held", "unchanged"]) == "unchanged"
    assert compare.weakest(["unchanged", "not enough evidence"]) == "not enough evidence"
    assert compare.weakest([]) == "not enough evidence"


def test_the_baseline_is_target_only_or_named(folders):
    base, same, bad = (load(folder, name) for folder, name in zip(folders, "xyz"))
    assert compare.choose_baseline([same, base]).name == "x"
    assert compare.choose_baseline([same, bad]).name == "y"
    assert compare.choose_baseline([same, base], "y").name == "y"
    with pytest.raises(FlyError, match="--baseline-run w: no such run: choose one of y, x"):
        compare.choose_baseline([same, base], "w")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"scores": SOLVED[:-1]},
            "sums has 300 and 299 documents; document 299 is only in one of them",
        ),
        ({"prompt": "other"}, "sums, document 0: the prompt differs"),
        ({"versions": {"sums": 2}}, "sums has version 1 and 2"),
        ({"fewshot": 5}, "sums has num_fewshot 0 and 5"),
        ({"tasks": {"products": SOLVED}}, "task products is only in one of them"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(folders, tmp_path, capsys, change, message):
    other = write(tmp_path / "other", "fly", **{"scores": SOLVED, **change})
    assert fly("compare", folders[0], other) == 2
    assert capsys.readouterr().err == (
        f"fly: error: target-only and fly cannot be compared: {message}"
        + (": use the same --limit or --samples\n" if "documents;" in message else "\n")
    )


@pytest.mark.parametrize(("field", "word"), [("doc_hash", "content"), ("target_hash", "target")])
def test_changed_data_is_refused(folders, field, word):
    base, same, _ = folders
    path = next(same.glob("samples_*"))
    lines = [json.loads(line) for line in path.open()]
    lines[7][field] = "0" * 64
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(FlyError, match=f"document 7: the {word} differs"):
        compare.compare(load(base), [load(same)])


def test_documents_pair_by_id_not_by_order(folders):
    """lm-eval may write samples in any order."""
    base, same, _ = folders
    path = next(same.glob("samples_*"))
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    (row,) = compare.compare(load(base), [load(same)]).others[0].rows
    assert (row.scores.lost, row.scores.won) == (0, 0)


def test_several_tasks_metrics_and_directions(tmp_path):
    tasks = {
        "a": {"acc": SOLVED, "f": [s / 2 for s in SOLVED]},
        "b": {"acc": SOLVED[::-1]},
    }
    worse = {
        "a": {"acc": corrupted(SOLVED), "f": [s / 2 for s in SOLVED]},
        "b": {"acc": SOLVED[::-1]},
    }
    base = load(write(tmp_path / "a", "target-only", tasks=tasks))
    other = load(write(tmp_path / "b", tasks=worse))
    result = compare.compare(base, [other], LENIENT)
    (found,) = result.others
    assert [(r.label, r.primary, r.scores.verdict) for r in found.rows] == [
        ("a acc", True, "fell"), ("a f", False, "held"), ("b acc", True, "held"),
    ]  # fmt: skip
    assert found.overall.scores.recovery == pytest.approx((0.7 * 0.9 + 0.7) / 1.4)
    assert (found.overall.scores.documents, found.overall.scores.lost) == (600, 21)
    assert result.verdict == "fell"
    for name in ("f", "f,none"):  # the latter is lm-eval's key in the results file
        only = compare.compare(base, [other], metrics=[name])
        assert [row.label for row in only.others[0].rows] == ["a f"]
    with pytest.raises(FlyError, match="--metric g: no such metric: choose from acc, f"):
        compare.compare(base, [other], metrics=["g"])
    with pytest.raises(FlyError, match="--metric f,strict: no such metric"):
        compare.compare(base, [other], metrics=["f,strict"])
    assert [speed.task for speed in found.speeds] == ["a", "b", "overall"]


@pytest.mark.slow
def test_many_tasks_do_not_fail_a_job_by_chance(tmp_path):
    """Rows of all tasks and runs share the doubt; one row alone has it for itself."""
    dropped = SOLVED.copy()
    for index in [i for i, solved in enumerate(SOLVED) if solved][:6]:
        dropped[index] = 0
    many = {f"t{i}": {"acc": SOLVED} for i in range(12)}
    base = load(write(tmp_path / "a", "target-only", tasks=many))
    other = load(write(tmp_path / "b", tasks={**many, "t0": {"acc": dropped}}))
    assert compare.compare(base, [other]).verdict == "not enough evidence"
    one = [load(write(tmp_path / n, tasks={"t0": {"acc": s}})) for n, s in [
        ("c", SOLVED), ("d", dropped)]]  # fmt: skip
    assert compare.compare(one[0], one[1:]).verdict == "fell"


def test_a_metric_by_which_the_baseline_scores_nothing_decides_nothing(tmp_path):
    """gsm8k's strict filter finds nothing in some models' answers: that must neither fail each
    job nor stand for the task."""
    tasks = {"t": {"strict": [0] * 300, "acc": SOLVED}, "u": {"acc": SOLVED}}
    base = load(write(tmp_path / "a", "target-only", tasks=tasks))
    other = load(write(tmp_path / "b", "fly", tasks=tasks))
    result = compare.compare(base, [other], LENIENT)
    assert result.verdict == "held"
    assert [row.primary for row in result.others[0].rows] == [False, True, True]
    assert result.others[0].overall.scores.baseline == pytest.approx(0.7)
    assert "decides nothing" in compare_table.markdown(result)
    junit = ElementTree.fromstring(compare_files.as_junit(result, allow_inconclusive=False))
    assert junit.find("testsuite").get("failures") == "0"
    alone = compare.compare(base, [other], metrics=["strict"])
    assert alone.verdict == "not enough evidence"


def test_an_error_rate_that_rises_fell(tmp_path):
    errors = [1] * 30 + [0] * 270
    base = load(write(tmp_path / "a", "target-only", errors, higher_is_better=False))
    more = load(write(tmp_path / "b", "fly", [1] * 60 + [0] * 240, higher_is_better=False))
    assert compare.compare(base, [more]).verdict == "fell"
    assert compare.compare(more, [base]).verdict == "held"


def test_metrics_that_are_no_means_are_left_out_and_named(tmp_path):
    """A perplexity's documents hold log likelihoods: their mean is another thing."""
    aggregated = {"ppl,none": 4.5}
    scores = {"acc": SOLVED, "ppl": [-1.5] * 300}
    base = load(write(tmp_path / "a", tasks={"t": scores}, aggregated=aggregated))
    result = compare.compare(base, [base])
    assert [row.metric for row in result.others[0].rows] == ["acc"]
    assert result.notes == ["fly: t ppl: is no mean over documents; left out"]
    alone = load(write(tmp_path / "b", tasks={"t": {"ppl": [-1.5]}}, aggregated=aggregated))
    (note,) = [note for note in compare.compare(alone, [alone]).notes if "no score" in note]
    assert note == "fly: t has no score to compare: 1 of 1 texts equal fly's"


def test_documents_may_have_metrics_of_their_own(tmp_path):
    """RULER's metrics are called by their documents' lengths. Only the first document's were read:
    a collapse of the others was held, without a note."""
    solved = {"4096": [1.0] * 300 + [None] * 300, "8192": [None] * 300 + [1.0] * 300}
    collapsed = {**solved, "8192": [None] * 300 + [0.0] * 300}
    base = load(write(tmp_path / "a", "target-only", tasks={"ruler": solved}))
    run = load(write(tmp_path / "b", "fly", tasks={"ruler": collapsed}))
    result = compare.compare(base, [run], LENIENT)
    assert [(row.metric, row.verdict) for row in result.others[0].rows] == [
        ("4096", "held"), ("8192", "fell")]  # fmt: skip
    assert [row.scores.documents for row in result.others[0].rows] == [300, 300]
    # the same metric of other documents is no pair
    moved = {**solved, "8192": [None] * 301 + [1.0] * 299}
    result = compare.compare(base, [load(write(tmp_path / "c", "fly", tasks={"ruler": moved}))])
    assert result.others[0].rows[1].scores.reason == (
        "only one of the runs has it for document 300"
    )


def test_a_number_that_stands_for_none_decides_nothing(tmp_path):
    """RULER's score of a length that no document has is -1: it was the task's first metric, and
    kept every comparison without a verdict."""
    tasks = {"ruler": {"4096": [-1.0] * 300, "8192": SOLVED}}
    base, same = (load(write(tmp_path / name, tasks=tasks)) for name in "ab")
    result = compare.compare(base, [same], LENIENT)
    assert [(row.verdict, row.primary) for row in result.others[0].rows] == [
        ("decides nothing", False), ("held", True)]  # fmt: skip
    assert result.verdict == "held"
    # scores that cancel out are no such number
    mixed = {"t": {"acc": [1.0, -1.0] * 150}}
    base, same = (load(write(tmp_path / name, tasks=mixed)) for name in "cd")
    assert compare.compare(base, [same]).others[0].rows[0].verdict == "not enough evidence"


def test_a_task_of_which_nothing_is_scored_leaves_a_mean(tmp_path):
    """Its primary metric was the first, -1 throughout: the mean had scores below zero."""
    tasks = {"a": {"acc": SOLVED}, "b": {"4096": [-1.0] * 300, "8192": [0.0] * 300}}
    base, same = (load(write(tmp_path / name, tasks=tasks)) for name in "ab")
    (found,) = compare.compare(base, [same], LENIENT).others
    assert [(row.metric, row.primary) for row in found.rows] == [
        ("acc", True), ("4096", False), ("8192", True)]  # fmt: skip
    assert found.overall.scores.recovery == 1
    assert found.verdict == "held"


def test_a_baseline_without_some_numbers_hides_no_collapse(tmp_path):
    """One NaN of the baseline's left the metric out for every run, and the rest was held."""
    good = {"t": {"acc": [math.nan] + [1.0] * 299, "em": SOLVED}}
    bad = {"t": {"acc": [0.0] * 300, "em": SOLVED}}
    base = load(write(tmp_path / "a", "target-only", tasks=good))
    result = compare.compare(base, [load(write(tmp_path / "b", "fly", tasks=bad))], LENIENT)
    assert [row.verdict for row in result.others[0].rows] == ["not enough evidence", "held"]
    assert result.others[0].rows[0].scores.reason == (
        "in the baseline 1 of 300 documents have no number"
    )
    assert result.verdict == "not enough evidence"
    assert "target-only: t acc: 1 of 300 documents have no number; no verdict" in result.notes


def test_scores_beyond_all_measure_are_no_numbers(tmp_path):
    """1e308 for a few documents ended in a traceback: sums and squares were infinite."""
    for name, most in (("no", 1e308), ("large", scores.LARGEST)):
        tasks = {"t": {"f": [most, -most, *SOLVED[2:]], "em": SOLVED}}
        base = load(write(tmp_path / name / "a", "target-only", tasks=tasks))
        other = {"t": {"f": SOLVED, "em": SOLVED}}
        result = compare.compare(base, [load(write(tmp_path / name / "b", "fly", tasks=other))])
        assert result.others[0].rows[0].verdict == "not enough evidence"
        assert ("2 of 300 documents have no number" in str(result.notes)) == (name == "no")


def test_a_metric_that_the_baseline_lacks_is_named(tmp_path):
    base = load(write(tmp_path / "a", "target-only", tasks={"t": {"acc": SOLVED}}))
    more = load(write(tmp_path / "b", "fly", tasks={"t": {"acc": SOLVED, "f": SOLVED}}))
    assert compare.compare(base, [more]).notes == [
        "fly: t f: target-only has no such metric; left out"
    ]


def test_records_of_another_run_in_the_folder_are_not_its_own(tmp_path):
    """A run without records that started in the same second was measured by the other's."""
    run = reader.load(write(tmp_path / "a", tasks={"t": {"acc": SOLVED[:3]}}))
    assert len(run.requests) == 3
    settings = {"enable_statistics": False}
    run = reader.load(write(tmp_path / "b", tasks={"t": {"acc": SOLVED[:3]}}, settings=settings))
    assert run.requests == []


def test_rows_are_counted_as_they_are(tmp_path):
    """A mean over tasks of two directions does not exist, and was counted as a verdict."""
    runs = []
    for name in "ab":
        folder = write(tmp_path / name, tasks={"t": {"acc": SOLVED}, "u": {"wer": SOLVED}})
        path = next(folder.glob("results_*"))
        whole = json.loads(path.read_text())
        whole["higher_is_better"]["u"]["wer"] = False
        path.write_text(json.dumps(whole))
        runs.append(load(folder))
    result = compare.compare(runs[0], runs[1:])
    assert (result.verdicts, result.others[0].overall) == (2, None)


def test_a_metric_that_a_run_breaks_does_not_vanish(tmp_path, capsys):
    """Null for some documents left the whole metric out, and the verdict was held on the rest."""
    good = {"t": {"f": [0.5] * 300, "acc": SOLVED}, "u": {"acc": SOLVED}}
    torn = {"t": {"f": [float("nan")] * 200 + [0.5] * 100, "acc": SOLVED}, "u": {"acc": SOLVED}}
    gone = {"t": {"acc": SOLVED}, "u": {"acc": SOLVED}}
    folders = [write(tmp_path / n, m, tasks=t) for n, m, t in [
        ("a", "target-only", good), ("b", "exact", good), ("c", "fly", torn),
        ("d", "top_k", gone)]]  # fmt: skip
    base, *others = map(load, folders)
    result = compare.compare(base, others, LENIENT)
    labels = [[row.label for row in other.all_rows] for other in result.others]
    assert labels == 3 * [["t f", "t acc", "u acc", "overall mean of 2 tasks"]]
    whole, broken, missing = result.others
    assert whole.verdict == "held"
    assert (broken.verdict, missing.verdict) == ("not enough evidence",) * 2
    assert broken.rows[0].scores.reason == "200 of 300 documents have no number"
    assert missing.rows[0].scores.reason == "the run has no such metric"
    # it stands for its task: the mean of the other tasks must not hide it
    assert broken.overall.scores.reason == "t f: 200 of 300 documents have no number"
    assert fly("compare", *folders, "--min-recovery", "0.9") == 3
    printed = capsys.readouterr().out
    assert "200 of 300 documents have no" in printed
    junit = ElementTree.fromstring(compare_files.as_junit(result, allow_inconclusive=False))
    assert [suite.get("failures") for suite in junit] == ["0", "2", "2"]
    assert "NaN" not in compare_files.as_json(result)


def test_a_run_that_talks_more_is_not_faster(tmp_path):
    """1.4 times as long with twice the tokens was shown as 1.43 times as fast."""
    base = load(write(tmp_path / "a", "target-only", SOLVED, round_tokens=1))
    other = load(write(tmp_path / "b", "fly", SOLVED, tokens=24, seconds=1.4))
    (speed,) = compare.compare(base, [other]).others[0].speeds
    assert speed.decode.value == speed.end_to_end.value == pytest.approx(1 / 1.4)
    assert speed.tokens.value == pytest.approx(2)


@pytest.mark.parametrize(
    ("machine", "shown", "note"),
    [
        ({"name": "another CPU"}, False, "ran on different machines (device: a CPU and another"),
        ({"capability": "AVX512"}, False, "(CPU capability: AVX2 and AVX512)"),
        ({"threads": 16}, False, "(threads: 2 and 16)"),
        ({"batch_size": 16}, True, "is not of decoding alone: they differ in batch size: 1 and 16"),
    ],
)
def test_times_of_different_machines_do_not_compare(tmp_path, machine, shown, note):
    """An H100's seconds over a CPU's were printed as 2.0 [2.0, 2.0]."""
    base = load(write(tmp_path / "a", "target-only", SOLVED))
    other = load(write(tmp_path / "b", "fly", SOLVED, seconds=0.5, machine=machine))
    result = compare.compare(base, [other])
    (speed,) = result.others[0].speeds
    assert (speed.decode is not None, speed.end_to_end is not None) == (shown, shown)
    assert (speed.withheld == "") is shown
    (line,) = result.notes
    assert note in line
    # a stored baseline of an earlier fly does not say what it ran on
    unknown = base.model_copy(update={"machine": {}})
    assert "it is not known" in compare.compare(unknown, [other]).notes[0]


def test_speed_sums_repeats_and_is_silent_without_records(tmp_path):
    base = load(write(tmp_path / "a", "target-only", SOLVED, repeats=3, round_tokens=1, seconds=2))
    other = load(write(tmp_path / "b", "fly", SOLVED, repeats=3, round_tokens=3, seconds=0.5))
    plain = load(write(tmp_path / "c", None, SOLVED))
    (speed,) = compare.compare(base, [other]).others[0].speeds
    assert speed.decode.value == pytest.approx(4)
    assert speed.end_to_end.value == pytest.approx(4)
    assert (speed.pace.tokens, speed.pace.rounds) == (300 * 3 * 12, 300 * 3 * 4)
    assert (speed.pace.tau, speed.pace.saved) == (3, pytest.approx(2 / 3))
    assert speed.pace.decode_tok_s == pytest.approx(24)
    (against_hf,) = compare.compare(plain, [other]).others
    assert against_hf.speeds[0].decode is None
    assert compare.compare(base, [plain]).others[0].speeds == []


def test_records_of_a_part_have_no_time_x_and_say_so(tmp_path, capsys):
    """Documents that were answered from --use_cache leave no records."""
    folders = [write(tmp_path / mode, mode, [1, 0, 1]) for mode in ("target-only", "fly")]
    (records,) = folders[1].glob("fly_requests_*")
    records.write_text(records.read_text().splitlines(keepends=True)[0])
    assert fly("compare", *folders) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "no time x of sums: target-only and fly have records of different documents" in printed
    assert "(3 and 1 of 3;" in printed


def test_lengths_say_what_they_are_means_of(tmp_path, capsys):
    """A long output of many short rounds hides what the other documents have; by hand."""
    alone = write(tmp_path / "t", "target-only", [1, 0])
    drafts = [[(4, 1)] * 8, [(4, 4), (2, 2), (0, 0)]]
    other = write(tmp_path / "f", "exact", [1, 0], drafts=drafts)
    (speed,) = compare.compare(load(alone), [load(other)]).others[0].speeds
    pace = speed.pace
    assert (pace.tau, pace.tau_document_mean) == (round((16 + 9) / 11, 4), (2 + 3) / 2)
    assert (pace.al, pace.al_document_mean) == (1 + 14 / 10, (2 + 4) / 2)
    assert pace.positions.drafted == [10, 10, 9, 9]
    assert pace.positions.accepted == [10, 2, 1, 1]
    assert fly("compare", alone, other) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "exact 2.27 2.50 2.40 3.00 1.00 0.20 0.10 0.10" in printed
    assert "target-only 4.00 4.00 - - -" in printed


def test_a_baseline_keeps_lengths_and_positions(tmp_path):
    drafts = [[(4, 1)] * 8, [(4, 4), (2, 2), (0, 0)]]
    run = load(write(tmp_path / "f", "exact", [1, 0], drafts=drafts))
    own = scores.Drafts(sources=["own_text"], from_earlier_runs=False, same_target=None)
    run = run.model_copy(update={"drafts": own})
    scores.save(run, tmp_path / "base.json")
    without_texts = {n: t.model_copy(update={"texts": {}}) for n, t in run.tasks.items()}
    assert scores.read(tmp_path / "base.json").tasks == without_texts


def drafted(folder, same_target, matched=3):
    """The run, as one that drafted from an earlier run's outputs."""
    path = next(folder.glob("results_*.json"))
    results = json.loads(path.read_text())
    counts = {"matched": matched, "changed": 0, "missing": 0, "untokenized": 0}
    sources = {"earlier_run": {"drafted": 9, "accepted": 8}} if matched else {}
    seconds = {"prefill": 1.0, "draft": 1.0, "verify": 1.0, "other": 1.0}
    results["config"]["fly"] |= {
        "draft_runs": {"runs": ["old"], **counts, "same_target": same_target},
        "stats": {
            "requests": 1, "emitted": 9, "rounds": 3, "tau": 3.0, "seconds": seconds,
            "sources": {**sources, "own_text": {"drafted": 2, "accepted": 1}},
        },
    }  # fmt: skip
    path.write_text(json.dumps(results))
    return folder


@pytest.mark.parametrize("lossy", [SOLVED, corrupted(SOLVED)])
@pytest.mark.parametrize("same_target", [False, None])
def test_a_lossy_run_that_drafted_from_another_model_s_outputs_is_no_evidence(
    tmp_path, capsys, lossy, same_target
):
    """Neither held nor fell, nor a number of documents that would decide: its texts are not the
    changed model's own. The mutant that judges the scores says held, or fell, here."""
    base = write(tmp_path / "a", "target-only", SOLVED, tasks={"s": SOLVED, "u": SOLVED})
    other = write(tmp_path / "b", "fly", lossy, tasks={"s": lossy, "u": lossy})
    files = {kind: tmp_path / kind for kind in ("json", "markdown", "junit")}
    given = [part for kind, path in files.items() for part in (f"--{kind}", path)]
    command = ("compare", base, drafted(other, same_target), "--min-recovery", "0.9", *given)
    assert fly(*command) == 3
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert "no evidence about a" in printed
    assert "documents would" not in printed
    assert "rules out" not in printed
    (found,) = json.loads(files["json"].read_text())["others"]
    rows = [*found["rows"], found["overall"]]
    assert {row["scores"]["verdict"] for row in rows} == {"not enough evidence"}
    assert {row["scores"]["decides"] for row in rows} == {None}
    assert all(row["scores"]["withheld"] for row in rows)
    assert "lean towards" in found["notes"][0]
    reason = "drafted from an earlier run under a lossy rule"
    assert files["markdown"].read_text().count(reason) == len(rows)
    failures = ElementTree.parse(files["junit"]).getroot().iter("failure")
    assert [reason in each.get("message") for each in failures] == [True] * len(rows)


def test_drafts_of_the_same_model_and_exact_runs_are_judged(tmp_path):
    """A note says that a lossy run's texts lean; an exact run's do not."""
    base = load(write(tmp_path / "a", "target-only", SOLVED))
    same = load(drafted(write(tmp_path / "b", "fly", SOLVED), True), "same")
    exact = load(drafted(write(tmp_path / "c", "exact", SOLVED), False), "lossless")
    unmatched = load(drafted(write(tmp_path / "d", "fly", SOLVED), None, matched=0), "unmatched")
    result = compare.compare(base, [same, exact, unmatched], LENIENT)
    assert [other.verdict for other in result.others] == ["held"] * 3
    leaning = [note for note in result.notes if "lean" in note]
    assert leaning == [
        "same drafted from an earlier run (of the same model) under a lossy rule: its texts lean "
        "towards that run's"
    ]
    # a leaning run is no measure for others either
    bad = load(drafted(write(tmp_path / "e", "fly", SOLVED), False), "bad")
    (against_it,) = compare.compare(bad, [base]).others
    assert against_it.rows[0].scores.reason.startswith("bad was drafted from an earlier run")


def test_a_speed_with_earlier_outputs_is_never_the_mode_s_own(tmp_path, capsys):
    """In tables, in words and in the report's names."""
    folders = [
        write(tmp_path / "target", "target-only", SOLVED),
        write(tmp_path / "alone", "exact", SOLVED),
        drafted(write(tmp_path / "drafted", "exact", SOLVED, seconds=0.2), True),
    ]
    assert fly("compare", *folders) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "exact-2 + earlier runs 5.00" in printed
    assert "exact 1.00" in printed
    assert "exact-2: its seconds are with drafts from earlier outputs (drafted from: earlier run, "
    assert "own text), not the speed of exact by itself" in printed
    names = summary.distinct_names([reader.load(folder) for folder in folders])
    assert names == ["target-only", "exact", "exact + earlier runs"]


def test_no_two_runs_of_a_report_share_a_name(monkeypatch):
    monkeypatch.setattr(summary.run_settings, "labels", lambda runs: [""] * len(runs))
    runs = [SimpleNamespace(name=name, draft_runs=[]) for name in ("fly", "fly", "fly #2")]
    assert summary.distinct_names(runs) == ["fly", "fly #3", "fly #2"]


def outputs_in(folder, ids):
    """Writes records with these ids; by document, one per repeat."""
    lines = [
        {
            "task": "sums", "doc_id": doc_id, "emitted": 1, "rounds": 1, "text": "x",
            "repeat": repeat, "prompt_hash": digest(f"question {doc_id}"),
            "seconds": dict.fromkeys(("prefill", "draft", "verify", "other"), 1.0),
            "output": {"ids": output_ids.encode(each), "tokenizer": "abc"},
        }
        for doc_id, of_document in ids.items()
        for repeat, each in reversed([*enumerate(of_document)])
    ]  # fmt: skip
    write_lines(next(folder.glob("fly_requests_*")), lines)


def test_a_baseline_with_outputs_is_drafted_from(tmp_path, capsys):
    folder = write(tmp_path / "run", "target-only", [1, 0])
    outputs_in(folder, {0: [[1, 2], [3]], 1: [[4]]})
    file, plain = tmp_path / "with.json", tmp_path / "without.json"
    assert fly("compare", folder, "--save-baseline", plain) == 0
    assert "outputs" not in plain.read_text()
    assert "drafts" not in plain.read_text()
    with pytest.raises(FlyError, match="the baseline holds no outputs: store it with"):
        EarlierOutputs.read([str(plain)])
    assert fly("compare", folder, "--save-baseline", file, "--with-outputs") == 0
    (run,) = EarlierOutputs.read([str(file)]).runs
    by_prompt = run.outputs["sums", 0]
    assert by_prompt.keys() == {digest("question 0")[:16]}
    outputs = [(each.ids, each.tokenizer) for each in by_prompt[digest("question 0")[:16]]]
    assert outputs == [((1, 2), "abc"), ((3,), "abc")]
    capsys.readouterr()
    assert fly("compare", folder, "--with-outputs") == 2
    assert "--with-outputs: says what a stored baseline holds: add" in capsys.readouterr().err
    outputs_in(folder, {0: [[1]]})
    assert fly("compare", folder, "--save-baseline", file, "--with-outputs") == 2
    assert "has no token ids of sums, document 1: fly's own records" in capsys.readouterr().err
    stored = json.loads(file.read_text())
    stored["tasks"]["sums"]["outputs"]["ids"]["1"] = ["?"]
    file.write_text(json.dumps(stored))
    with pytest.raises(FlyError, match=r"tasks\.sums\.outputs\.ids\.1\.0=.* \(.*with\.json"):
        EarlierOutputs.read([str(file)])


def test_a_stored_baseline_is_the_run(folders, tmp_path, capsys):
    base, same, bad = folders
    file = tmp_path / "stored" / "baseline.json"
    assert fly("compare", base, "--save-baseline", file) == 0
    gate = ("--baseline", file, "--min-recovery", "0.99")
    assert fly("compare", same, *gate) == 0
    assert fly("compare", bad, *gate) == 1
    stored, direct = (compare.compare(b, [load(bad)]) for b in (scores.read(file), load(base)))
    assert stored.others[0].rows == direct.others[0].rows
    assert stored.others[0].speeds == direct.others[0].speeds
    assert file.stat().st_size < 200 * 300


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "model-2"}, "another target (name: model, now model-2)"),
        ({"dtype": "torch.bfloat16"}, "another target (dtype: torch.float32, now torch.bfloat16)"),
        ({"gen_kwargs": {"max_gen_toks": 5}}, "decoded otherwise (gen_kwargs: {}, now"),
    ],
)
def test_a_stored_baseline_of_something_else_is_refused(folders, tmp_path, capsys, change, message):
    file = tmp_path / "baseline.json"
    fly("compare", folders[0], "--save-baseline", file)
    other = write(tmp_path / "other", "fly", SOLVED, **change)
    assert fly("compare", other, "--baseline", file) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{file}: cannot be reused: {message}" in error
    assert error.endswith("store a new one with --save-baseline")


def test_documents_of_one_passage_are_one_with_cluster(tmp_path, capsys):
    """Thirty passages of ten questions each; in six of them all answers are lost, which were taken
    as sixty independent losses."""
    folders = [
        write(tmp_path / "base", "target-only", [1] * 300),
        write(tmp_path / "bad", "fly", [0] * 60 + [1] * 240),
    ]
    for folder in folders:
        [path] = folder.glob("samples_*.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line["doc"] = {"passage": f"{line['doc_id'] // 10} " + "words " * 20, "q": "?"}
        write_lines(path, lines)
    assert fly("compare", *folders) == 0
    assert "several documents share one passage, and are taken as" in capsys.readouterr().out
    output = tmp_path / "compare.json"
    assert fly("compare", *folders, "--cluster", "passage", "--json", output) == 0
    printed = capsys.readouterr().out
    assert "300 documents in 30 clusters" in printed
    assert "taken as independent" not in printed
    [row] = json.loads(output.read_text())["others"][0]["rows"]
    assert (row["scores"]["clusters"], row["scores"]["lost"]) == (30, 60)
    assert row["scores"]["p"] == pytest.approx(2 * 0.5**6)
    # a stored baseline holds no documents: the run's own do
    stored = tmp_path / "base.json"
    assert fly("compare", folders[0], "--save-baseline", stored) == 0
    assert "cluster" not in stored.read_text()
    args = ("compare", folders[1], "--baseline", stored, "--cluster", "passage", "--json", output)
    assert fly(*args) == 0
    assert json.loads(output.read_text())["others"][0]["rows"] == [row]
    capsys.readouterr()
    assert fly("compare", *folders, "--cluster", "page") == 2
    assert capsys.readouterr().err == (
        "fly: error: --cluster page: sums, document 0 has no such field: choose from passage, q\n"
    )


def test_what_is_no_baseline_is_refused(folders, tmp_path, capsys):
    file = tmp_path / "baseline.json"
    assert fly("compare", folders[1], "--save-baseline", file) == 2
    assert "a run of mode fly is no baseline to be stored" in capsys.readouterr().err
    assert not file.exists()
    assert fly("compare", folders[1], "--baseline", file) == 2
    assert "cannot be read" in capsys.readouterr().err
    file.write_text('{"format": 2}')
    assert fly("compare", folders[1], "--baseline", file) == 2
    assert "not a baseline file" in capsys.readouterr().err


def test_a_retrained_model_in_the_same_folder_is_noticed(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    weights = model / "model.safetensors"
    weights.write_bytes(b"\0" * 3_000_000)
    before = scores.fingerprint(str(model))
    assert before == scores.fingerprint(str(model))
    weights.write_bytes(b"\0" * 2_999_999 + b"\1")
    assert scores.fingerprint(str(model)) != before
    assert scores.fingerprint("some/hub-id") is None


def test_files(folders, tmp_path):
    """JSON holds every number, Markdown the tables, JUnit one test per task and metric."""
    base, same, bad = folders
    out = {name: tmp_path / "out" / f"result.{name}" for name in ("json", "markdown", "junit")}
    flags = [part for name, path in out.items() for part in (f"--{name}", path)]
    few = write(tmp_path / "few", "fly", [0, *SOLVED[1:]])
    names = (f"ok={same}", f"bad={bad}", f"few={few}")
    assert fly("compare", base, *names, "--min-recovery", "0.98", *flags) == 1
    found = json.loads(out["json"].read_text())
    assert (found["verdict"], found["baseline"]["name"]) == ("fell", "target-only")
    assert [other["verdict"] for other in found["others"]] == [
        "held",
        "fell",
        "not enough evidence",
    ]
    assert found["others"][1]["rows"][0]["scores"]["lost"] == 21
    assert [other["rows"][0]["verdict"] for other in found["others"]] == [
        other["verdict"] for other in found["others"]
    ]
    text = out["markdown"].read_text()
    assert text.count("\n|---") == 4
    assert "| bad |" in text
    suites = ElementTree.parse(out["junit"]).getroot().findall("testsuite")
    assert [suite.get("name").split()[0] for suite in suites] == ["ok", "bad", "few"]
    assert [suite.get("failures") for suite in suites] == ["0", "1", "1"]
    (case,) = suites[1].findall("testcase")
    assert (case.get("classname"), case.get("name")) == ("bad.sums", "exact_match")
    assert case.find("failure").get("type") == "fell"
    fly("compare", base, *names, "--allow-inconclusive", *flags)
    suites = ElementTree.parse(out["junit"]).getroot().findall("testsuite")
    assert suites[2].get("skipped") == "1"
    assert suites[2].find("testcase/skipped") is not None


def test_bad_usage(folders, tmp_path, capsys):
    base, same, _ = folders
    for args, message in [
        ((base,), "give at least two runs, or --baseline FILE"),
        ((), "fly compare needs --tasks"),
        ((base, same, "--tasks", "x"), "--tasks: finished runs are compared as they are"),
        ((base, tmp_path / "nowhere"), "no such run"),
        ((base, same, "--baseline-run", "x"), "--baseline-run x: no such run"),
        ((base, same, "--json", tmp_path), "is a folder: give a file"),
        ((base, same, "--limit", "1"), "--limit: finished runs are compared as they are"),
        ((base, same, "--matrix", "--gen_kwargs=a=1"), "--gen_kwargs: finished runs are compared"),
        ((base, f"noise={same}", "--noise-floor"),
         "--noise-floor: nothing to compare target-only with: name one more run"),
        ((base, "--save-baseline", tmp_path / "b", "--json", tmp_path / "j"),
         "--json: nothing to compare target-only with"),
        ((base, "--save-baseline", tmp_path / "b", "--min-recovery", "0.9"),
         "--min-recovery: nothing to compare target-only with"),
    ]:  # fmt: skip
        assert fly("compare", *args) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
    for mode in ("exact", "fly"):
        (tmp_path / "out" / mode).mkdir(parents=True)
        (tmp_path / "out" / mode / "fly_compare.json").touch()
    assert fly("compare", base, tmp_path / "out") == 2
    words = "out: is a comparison's folder: name that of a run in it: exact, fly"
    assert words in capsys.readouterr().err
    assert fly("compare", base, same, "--nonsense") == 2
    shorter = write(tmp_path / "shorter", "fly", [1, 0])
    assert fly("compare", base, shorter, "--save-baseline", tmp_path / "b") == 2
    assert not (tmp_path / "b").exists()


def test_control_characters_reach_no_terminal_and_no_file(tmp_path, capsys):
    """A name of \x1b made JUnit's XML invalid; names of metrics and tasks come from files."""
    red = "\x1b[31mred\x07"
    for name in ("base", "other"):
        write(tmp_path / name, "target-only" if name == "base" else "fly", [1, 0], metric=red)
    outputs = [tmp_path / "r.xml", tmp_path / "r.md"]
    flags = ("--junit", outputs[0], "--markdown", outputs[1])
    assert fly("compare", tmp_path / "base", tmp_path / "other", *flags) == 0
    ElementTree.parse(outputs[0])
    texts = [capsys.readouterr().out, *(path.read_text() for path in outputs)]
    assert not any(control in text for control in "\x1b\x07" for text in texts)
    assert all("\ufffd[31mred\ufffd" in text.replace("\n", "") for text in texts)
    assert fly("compare", f"a{red}={tmp_path / 'base'}", tmp_path / "other") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "its name holds control characters: give one without" in error
    assert "\x1b" not in error


def test_samples_that_were_cut_short_are_no_run(tmp_path):
    """A kill while lm-eval writes them leaves the first ones; the rest was silently missing."""
    folder = write(tmp_path / "run", "fly", [1, 0, 1])
    (results,) = folder.glob("results_*")
    (samples,) = folder.glob("samples_*")
    lines = samples.read_text().splitlines(keepends=True)
    hashes = [json.loads(line)[f"{k}_hash"] for line in lines for k in ("doc", "prompt", "target")]
    whole = {
        **json.loads(results.read_text()),
        "task_hashes": {"sums": hash_string("".join(hashes))},
    }
    results.write_text(json.dumps(whole))
    assert load(folder)
    samples.write_text("".join(lines[:2]))
    with pytest.raises(FlyError, match="not the samples that were scored: their writing was cut"):
        load(folder)


def test_a_run_with_a_comma_in_its_name_stays_one_column_of_the_csv():
    curve = [compare.CurvePoint("fly, K=4", 16, 120.5, 9.25, "held")]
    result = compare.Result("target-only", [], [], Demand(0.99, 0.95), curve=curve)
    head, row = csv.reader(compare_table.curve_csv(result).splitlines())
    assert dict(zip(head, row)) == {
        "run": "fly, K=4", "concurrency": "16", "tok_s": "120.5", "tok_s_per_user": "9.25",
        "verdict": "held",
    }  # fmt: skip


def test_prompts_of_another_form_are_paired_by_document(tmp_path, capsys):
    """A text and the messages of a chat endpoint ask the same of one document."""
    text = write(tmp_path / "a", "target-only", SOLVED, prompt="text of")
    chat = write(tmp_path / "b", "server", SOLVED, prompt="messages of")
    assert fly("compare", text, chat) == 2
    assert "the prompt differs" in capsys.readouterr().err
    assert fly("compare", text, chat, "--pair-by", "document") == 0
    printed = " ".join(capsys.readouterr().out.split())
    count = len(SOLVED)
    assert f"paired by document: {count} of {count} prompts are not those of target-only" in printed
    short = write(tmp_path / "c", "server", SOLVED[:20], prompt="messages of")
    assert fly("compare", text, short, "--pair-by", "document") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{count - 20} documents that not all runs have are left out" in printed
    assert "20 documents" in printed


def test_documents_are_paired_by_what_they_hold_not_by_their_numbers(tmp_path):
    runs = [load(write(tmp_path / n, "fly", [0, 1, 1])) for n in ("a", "b")]
    task = runs[1].tasks["sums"]
    turned = {2: task.documents[0], 0: task.documents[1], 1: task.documents[2]}
    scores = [m.model_copy(update={"scores": {2: 0.0, 0: 1.0, 1: 1.0}}) for m in task.metrics]
    task = task.model_copy(update={"documents": turned, "metrics": scores, "work": {}})
    runs[1] = runs[1].model_copy(update={"name": "b", "tasks": {"sums": task}})
    first, second = alignment.pair_by_document(runs)
    assert second.tasks["sums"].metrics[0].scores == {0: 0.0, 1: 1.0, 2: 1.0}
    assert compare.compare(first, [second]).others[0].rows[0].scores.lost == 0
