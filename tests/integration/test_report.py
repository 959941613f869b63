"""`fly report`: the file's content, for one run, two and several, with and without traces."""

import csv
import json
import re

import pytest

from fly.analysis.html import page, summary, write
from fly.runs import reader as runs
from tests import traced_runs, written_runs
from tests.integration.test_cli import config_file, evaluate, run, task_dir  # noqa: F401  fixtures

EVIL = "</script><script>alert(1)</script><!--<script> <img src=x onerror=alert(2)> \u2028 &amp;"


@pytest.fixture
def written(tmp_path):
    """Writes runs and returns their report's data by block, and the file's text."""

    def make(*folders, **kwargs):
        text = write.page([runs.load(folder) for folder in folders], **kwargs).decode()
        return blocks(text), text

    return make


def blocks(text):
    found = re.findall(r'<script type="application/json" id="data-(\w+)">(.*?)</script>', text)
    return {name: json.loads(value) for name, value in found}


def test_a_real_run_from_the_command_line(saved_pair, config_file, task_dir, tmp_path, capsys):  # noqa: F811
    """Counts in the page are the engine's own, and token texts join to the response."""
    out, file = tmp_path / "out", tmp_path / "deep" / "page.html"
    extra = ("--log_samples", "--output_path", out)
    assert evaluate(saved_pair, config_file, task_dir, *extra, more_args=",trace=true") == 0
    assert run("report", out, "--output", file) == 0
    assert f"report: {file} (" in capsys.readouterr().out
    data = blocks(file.read_text())
    finished = runs.load(out)
    stats = finished.entry["stats"]
    (own,) = data["summary"]["runs"]
    assert own["stats"] == stats
    assert own["settings"]["spd_k"] == "4"
    assert sum(own["blocks"]) == stats["rounds"]
    positions = own["positions"]
    assert {name: positions[name] for name in stats["positions"]} == stats["positions"]
    assert sum(positions["deferred"]) == stats["deferred_accepted"]
    assert sum(positions["accepted"]) == stats["native_accepted"] + stats["deferred_accepted"]
    assert data["summary"]["comparisons"] == []
    (point,) = data["summary"]["points"]
    assert (point["tau"], point["k"]) == (stats["tau"], 4)
    assert point["tok_s_user"] > 0
    for number, row in enumerate(data["documents"]):
        trace = data["traces"]["documents"][str(number)]["0"][0]
        stands = [i for i, letter in enumerate(trace["source"]) if letter != "x"]
        text = "".join(data["traces"]["texts"][trace["text"][i]] for i in stands)
        (response,) = data["texts"][number]["runs"][0]["responses"]
        assert text.removesuffix("</s>") == response
        assert row["runs"][0]["tokens"] == len(stands)


def test_two_runs(written, tmp_path):
    """The target-only run is the baseline wherever it stands; each document says what changed."""
    fly = traced_runs.write(tmp_path / "a", "fly", (1, 0, 1), seconds=0.5, traced=[1])
    base = traced_runs.write(
        tmp_path / "b", "target-only", (1, 1, 0), ["fly says 0", "b", "c"], seconds=1.0
    )
    data, _ = written(fly, base)
    assert [own["name"] for own in data["summary"]["runs"]] == ["target-only", "fly"]
    cells = [row["runs"][1] for row in data["documents"]]
    assert [cell["change"] for cell in cells] == ["lost", "won", "same"]  # the first first
    assert [cell["same"] for cell in cells] == [False, False, True]
    assert [cell["parts"] for cell in cells] == [0, 0, None]
    (compared,) = data["summary"]["comparisons"]
    main = compared["rows"][compared["main"]]["scores"]
    assert (main["lost"], main["won"]) == (1, 1)
    assert compared["verdict"] == "not enough evidence"
    assert compared["speeds"][-1]["end_to_end"]["value"] == pytest.approx(2.0)
    (entry,) = data["summary"]["scores"]
    low, high = (entry["runs"][0]["interval"][key] for key in ("low", "high"))
    assert (low, high) == pytest.approx((0.2077, 0.9385), abs=1e-4)  # Wilson, 2 of 3
    assert list(data["traces"]["documents"]) == ["0"]


def test_what_was_drafted_from_texts(written, tmp_path):
    """Catches sources that the page has no letter for, and a run of before they were counted."""
    counts = {"earlier_run": {"drafted": 12, "accepted": 10}}
    base = traced_runs.write(tmp_path / "a", "target-only")
    rounds = traced_runs.FROM_TEXTS
    run = traced_runs.write(tmp_path / "b", sources=counts, traced=[0], rounds=rounds)
    data, _ = written(base, run)
    assert [own["sources"] for own in data["summary"]["runs"]] == [
        {},
        {"earlier run": {"drafted": 12, "accepted": 10}},
    ]
    trace = data["traces"]["documents"]["0"]["1"][0]
    assert trace["source"] == "eswodrdxxrnb"
    assert trace["by"] == "esdodtdddtnt"


def test_several_runs_of_one_mode_are_told_apart(written, tmp_path):
    folders = [traced_runs.write(tmp_path / name) for name in "abc"]
    changed = next(folders[1].glob("results_*"))
    results = json.loads(changed.read_text())
    results["config"]["fly"]["config"]["win_len"] = 4
    changed.write_text(json.dumps(results))
    data, _ = written(*folders)
    names = [own["name"] for own in data["summary"]["runs"]]
    assert names == ["fly (W=2)", "fly (W=4)", "fly (W=2) #2"]
    assert len(data["summary"]["comparisons"]) == 2


def test_runs_of_other_documents_are_shown_but_not_compared(written, tmp_path):
    """The page says why instead of comparing what does not belong together."""
    one = traced_runs.write(tmp_path / "a", "target-only")
    data, _ = written(one, traced_runs.write(tmp_path / "b", prompt="Why"))
    (compared,) = data["summary"]["comparisons"]
    assert "document 0: the prompt differs" in compared["refused"]


def test_documents_of_one_number_are_told_apart(written, tmp_path):
    """--samples numbers them anew: an answer stood beside another document's prompt."""
    folders = [written_runs.write(tmp_path / mode, mode, [1, 0]) for mode in ("target-only", "fly")]
    (samples,) = folders[1].glob("samples_*")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    lines[0] |= {"doc_hash": "other", "prompt_hash": "other"}
    lines[0]["arguments"]["gen_args_0"]["arg_0"] = "another question"
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found, _ = written(*folders)
    cells = [row["runs"] for row in found["documents"]]
    assert [[cell is not None for cell in row] for row in cells] == [
        [True, False], [False, True], [True, True],
    ]  # fmt: skip
    assert [texts["prompt"] for texts in found["texts"]] == [
        "question 0", "another question", "question 1",
    ]  # fmt: skip


def test_several_runs_are_judged_together_as_fly_compare_judges_them(written, tmp_path):
    """With 5 of 60 lost a single run fell; as one of two it is not certain enough. A run that
    cannot be compared counts for nothing, and takes nobody's place."""
    base = written_runs.write(tmp_path / "base", "target-only", [1.0] * 60)
    worse = [0.0] * 5 + [1.0] * 55
    one, two = (written_runs.write(tmp_path / name, "fly", worse) for name in ("one", "two"))
    alien = written_runs.write(tmp_path / "alien", "fly", worse, prompt="another question")
    data, _ = written(base, alien, one)
    alien_entry, alone = data["summary"]["comparisons"]
    assert "prompt differs" in alien_entry["refused"]
    assert alone["verdict"] == "fell"
    data, _ = written(base, one, alien, two)
    together = data["summary"]["comparisons"]
    assert [entry.get("verdict") for entry in together] == [
        "not enough evidence",
        None,
        "not enough evidence",
    ]
    assert [entry["name"] for entry in together] == ["fly", "fly #2", "fly #3"]


def test_a_run_of_another_backend_has_scores_and_no_times(written, tmp_path):
    data, _ = written(traced_runs.write(tmp_path / "a", "hf"), traced_runs.write(tmp_path / "b"))
    hf = data["summary"]["runs"][0]
    assert (hf["mode"], hf["stats"], hf["blocks"]) == ("hf", None, None)
    assert hf["positions"]["drafted"] == []
    assert data["summary"]["comparisons"][0]["speeds"][-1]["end_to_end"] is None
    assert "tokens" not in data["documents"][0]["runs"][0]


def test_a_document_shows_the_metric_by_which_the_baseline_scores(written, tmp_path):
    """gsm8k's strict filter comes first and finds nothing: every right answer looked wrong."""
    tasks = {"t": {"strict": [0, 0], "acc": [1, 0]}}
    runs = [
        written_runs.write(tmp_path / mode, mode, tasks=tasks) for mode in ("target-only", "fly")
    ]
    data, _ = written(*runs)
    assert [[cell["score"] for cell in row["runs"]] for row in data["documents"]] == [
        [1, 1],
        [0, 0],
    ]
    rows = data["summary"]["comparisons"][0]["rows"]
    assert [row["verdict"] for row in rows] == ["decides nothing", "unchanged"]


def test_a_score_that_neither_run_has_is_no_change(written, tmp_path):
    """NaN differs from NaN: such documents were marked as lost."""
    tasks = {"t": {"rouge": [float("nan"), 0.5], "acc": [1, 1]}}
    runs = [
        written_runs.write(tmp_path / mode, mode, tasks=tasks) for mode in ("target-only", "fly")
    ]
    data, _ = written(*runs)
    assert [row["runs"][1]["change"] for row in data["documents"]] == ["same", "same"]


def test_the_page_says_what_compare_says(written, tmp_path):
    """What was left out, and how little unchanged scores show, was in the table alone."""
    tasks = {"t": {"acc": [1] * 8}}
    base = written_runs.write(tmp_path / "a", "target-only", tasks=tasks)
    more = {"t": {"acc": [1] * 8, "f": [1] * 8}}
    data, _ = written(base, written_runs.write(tmp_path / "b", "fly", tasks=more, target="other"))
    (compared,) = data["summary"]["comparisons"]
    assert compared["reason"] == (
        "every document scored the same; this rules out a loss above 31.2% of the score; "
        "299 documents would show 0.99"
    )
    assert data["summary"]["notes"] == [
        "fly against target-only: another target (name: model, now other)",
        "fly: t f: target-only has no such metric; left out",
    ]


def test_traces_may_be_limited_while_the_charts_use_all(written, tmp_path):
    folder = traced_runs.write(tmp_path / "a", traced=[0, 1])
    whole, cut = (written(folder, max_traces=count)[0] for count in (200, 1))
    assert len(whole["traces"]["documents"]) == 2
    assert list(cut["traces"]["documents"]) == ["0"]
    assert cut["summary"]["traced"] == {"shown": [0], "all": 2}
    assert cut["summary"]["runs"] == whole["summary"]["runs"]
    assert sum(cut["summary"]["runs"][0]["blocks"]) == 6


def test_traces_of_what_changed_come_first(written, tmp_path):
    """Of thousands of documents, the traces that are in the page are of those that one opens."""
    base = traced_runs.write(tmp_path / "a", "target-only", [1] * 6)
    own = traced_runs.write(tmp_path / "b", "fly", [1, 1, 1, 0, 1, 0], traced=range(6))
    data, _ = written(base, own, max_traces=2)
    assert [row["doc"] for row in data["documents"]] == [3, 5, 0, 1, 2, 4]
    assert data["summary"]["traced"] == {"shown": [0, 1], "all": 6}
    assert sorted(data["traces"]["documents"]) == ["0", "1"]
    assert data["traces"]["documents"]["0"].keys() == {"1"}


def test_model_texts_cannot_leave_their_block(written, tmp_path):
    """Catches a `</script>` or `<!--` of a model that ends the data and starts code."""
    folder = traced_runs.write(tmp_path / "a", "fly", (1, 0), [EVIL, "ok"], traced=[0])
    data, text = written(folder)
    assert data["texts"][0]["runs"][0]["responses"] == [EVIL]
    assert text.count(EVIL) == 0
    assert (
        "pwned>" in data["traces"]["texts"][data["traces"]["documents"]["0"]["0"][0]["target"][2]]
    )
    for found in re.findall(r'<script type="application/json".*?>(.*?)</script>', text):
        assert "<" not in found
    assert len(re.findall("<script", text)) == 5  # four blocks and the page's own


def test_nothing_is_loaded_from_elsewhere(written, tmp_path):
    _, text = written(traced_runs.write(tmp_path / "a"))
    addresses = set(re.findall(r"https?://[^\s\"']+", text))
    assert addresses <= {"http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"}
    assert not re.search(r"<link|<img|src=|@import|url\((?!#)", text)
    assert "default-src 'none'" in text
    assert "innerHTML" not in text


def test_values_that_json_has_no_word_for():
    assert page.as_json({"a": [float("nan"), float("inf"), 1.5]}) == '{"a":[null,null,1.5]}'


def test_half_a_surrogate_pair_does_not_stop_the_report(tmp_path, capsys):
    folder = traced_runs.write(tmp_path / "a", "fly", (1,), ["\ud83d"])
    assert run("report", folder, "--output", tmp_path / "r.html") == 0
    assert blocks((tmp_path / "r.html").read_text())["texts"][0]["runs"][0]["responses"] == ["?"]


def test_the_documents_as_csv(tmp_path):
    """A line per document and run, in the table's order; it is replaced by the same flag alone."""
    base = traced_runs.write(tmp_path / "a", "target-only", (1, 1))
    own = traced_runs.write(tmp_path / "b", "fly", (1, 0))
    table, page = tmp_path / "t.csv", tmp_path / "r.html"
    for _ in range(2):
        assert run("report", base, own, "--output", page, "--csv", table) == 0
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["document"], row["run"], row["change"]) for row in rows] == [
        ("1", "target-only", "same"), ("1", "fly", "lost"),
        ("0", "target-only", "same"), ("0", "fly", "same"),
    ]  # fmt: skip
    assert rows[1]["score"] == "0.0"
    table.write_text("mine")
    assert run("report", base, own, "--output", page, "--csv", table) == 2


def test_the_page_is_opened(tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or False)
    folder, page = traced_runs.write(tmp_path / "a"), tmp_path / "r.html"
    assert run("report", folder, "--output", page, "--open") == 0
    assert opened == [page.as_uri()]
    assert "no browser was found" in capsys.readouterr().out


def test_names_on_the_command_line(tmp_path):
    folder = traced_runs.write(tmp_path / "a")
    assert run("report", f"mine={folder}", "--output", tmp_path / "r.html") == 0
    assert "<title>fly report: mine</title>" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such run"),
        (["{run}", "--output", "{tmp}"], "is a folder: give a file"),
        (["{run}", "--output", "{run}/results_2026-01-01T00-00-00.000000.json/x"], "be written"),
        (["{run}", "--traces", "-1"], "--traces -1: must be at least 0"),
        (["--watch", "~nobody-here/x"], "~nobody-here/x: no such user"),
    ],
)
def test_bad_usage_is_one_line_and_leaves_nothing(tmp_path, capsys, arguments, message):
    folder = traced_runs.write(tmp_path / "a")
    before = sorted(tmp_path.rglob("*"))
    assert run("report", *(a.format(run=folder, tmp=tmp_path) for a in arguments)) == 2
    error = capsys.readouterr().err.splitlines()
    assert message in error[-1]
    assert error[-1].startswith("fly: error: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_trace_with_a_missing_line_is_refused(tmp_path, written):
    folder = traced_runs.write(tmp_path / "a", traced=[0])
    (trace,) = folder.glob("fly_trace_*")
    first, _, last = trace.read_text().splitlines()
    trace.write_text(f"{first}\n{last}\n")
    with pytest.raises(Exception, match=r"its trace cannot be replayed .*round 3 does not follow"):
        written(folder)


def test_the_intervals_of_other_metrics_come_from_lm_eval(tmp_path):
    folder = traced_runs.write(tmp_path / "a", scores=(0.5, 0.25))
    results = next(folder.glob("results_*"))
    whole = json.loads(results.read_text())
    whole["results"][traced_runs.TASK]["exact_match_stderr,none"] = 0.1
    results.write_text(json.dumps(whole))
    ((found,),) = (entry["runs"] for entry in summary.scores([runs.load(folder)]))
    assert (found["value"], found["interval"]["low"], found["interval"]["high"]) == pytest.approx(
        (0.375, 0.375 - 0.196, 0.375 + 0.196), abs=1e-3
    )
