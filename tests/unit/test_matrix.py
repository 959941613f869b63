"""`fly compare --matrix`: every run in its place, against its own target, corrected together."""

import json

import pytest

from fly.analysis import matrix, scores, statistics
from fly.analysis.html import write as report
from fly.cli import main as cli
from fly.errors import FlyError
from fly.runs import reader
from tests.written_runs import write

SOLVED = [1.0] * 40 + [0.0] * 20


def lose(count):
    """So many of the solved documents are lost, none won: McNemar's p is 2 / 2^count."""
    return [0.0] * count + SOLVED[count:]


def runs_in(*folders):
    loaded = [reader.load(folder, folder.name) for folder in folders]
    return [(run, scores.measure(run)) for run in loaded]


def drafting(folder, solved=SOLVED, mode="exact", *, drafter="model", k=8, seconds=0.5, **kwargs):
    settings = {"spd_k": k, "draft_model_path": "org/small", **kwargs.pop("settings", {})}
    entry = {"drafter": drafter, **kwargs.pop("entry", {})}
    return write(folder, mode, solved, seconds=seconds, settings=settings, entry=entry, **kwargs)


@pytest.fixture
def family(tmp_path):
    """One target; K = 4 and 8 and n-grams, exact and FLy with two windows: 6, 8 and 0 lost."""
    return [
        write(tmp_path / "alone", "target-only", SOLVED, round_tokens=1),
        drafting(tmp_path / "exact4", k=4),
        drafting(tmp_path / "exact8"),
        drafting(tmp_path / "fly4", lose(6), "fly", k=4, settings={"win_len": 6}, seconds=0.25),
        drafting(tmp_path / "fly8", lose(8), "fly", settings={"win_len": 2}),
        drafting(tmp_path / "ngram", drafter="ngram"),
    ]


def fly(*args):
    with pytest.raises(SystemExit) as caught:
        cli.main([str(arg) for arg in args])
        raise SystemExit(0)
    return caught.value.code


def test_holm_by_hand():
    """0.01 * 4, 0.02 * 3, then 0.04 * 2 = 0.08, and 0.03 takes the place before it."""
    assert statistics.holm([0.04, 0.01, 0.9, 0.02]) == pytest.approx([0.08, 0.04, 0.9, 0.06])
    assert statistics.holm([0.5, 0.4]) == pytest.approx([0.8, 0.8])  # never below a smaller one's
    assert statistics.holm([0.6, 0.7]) == [1.0, 1.0]
    assert statistics.holm([]) == []


def test_every_run_has_its_place(family):
    found = matrix.build(runs_in(*family))
    assert {(cell.drafter, cell.rule): cell.run for cell in found.cells} == {
        ("model, org/small, K=4", "exact"): "exact4",
        ("model, org/small, K=8", "exact"): "exact8",
        ("model, org/small, K=4", "FLy, W=6"): "fly4",
        ("model, org/small, K=8", "FLy, W=2"): "fly8",
        ("ngram, K=8", "exact"): "ngram",
    }
    cell = next(cell for cell in found.cells if cell.run == "fly4")
    assert cell.baseline == "alone"
    assert cell.row.scores.recovery == pytest.approx(34 / 40)
    assert (cell.row.scores.lost, cell.row.scores.won) == (6, 0)
    assert cell.speed.end_to_end.value == pytest.approx(4)
    assert cell.speed.pace.tau == 4


def test_p_is_corrected_for_all_cells(family):
    """Five cells: McNemar's 2 / 2^8 five times, 2 / 2^6 four times, and equal scores. A matrix
    that shows single runs' p calls both losses proven."""
    found = matrix.build(runs_in(*family))
    p = {cell.run: cell.p for cell in found.cells}
    assert found.tests == 5
    assert p["fly8"] == pytest.approx(5 * 2 / 2**8)
    assert p["fly4"] == pytest.approx(4 * 2 / 2**6)
    assert p["fly4"] > 0.05 > next(c for c in found.cells if c.run == "fly4").row.scores.p
    assert (p["exact4"], p["exact8"], p["ngram"]) == (1, 1, 1)
    alone = matrix.build(runs_in(family[0], family[4]))
    assert (alone.tests, alone.cells[0].p) == (1, pytest.approx(2 / 2**8))


def test_every_target_is_its_own_baseline(tmp_path):
    """The second target loses a tenth of its own score, and is better than the first all the same;
    the correction is for both."""
    families = [
        write(tmp_path / "a", "target-only", lose(20), target="org/A"),
        drafting(tmp_path / "a-exact", lose(20), target="org/A"),
        write(tmp_path / "b", "target-only", SOLVED, target="org/B"),
        drafting(tmp_path / "b-exact", lose(4), target="org/B"),
    ]
    found = matrix.build(runs_in(*families))
    by_run = {cell.run: cell for cell in found.cells}
    assert [(by_run[run].target, by_run[run].baseline) for run in ("a-exact", "b-exact")] == [
        ("org/A", "a"),
        ("org/B", "b"),
    ]
    assert by_run["a-exact"].row.scores.recovery == 1
    assert by_run["b-exact"].row.scores.recovery == pytest.approx(0.9)
    assert by_run["b-exact"].p == pytest.approx(2 * 2 / 2**4)
    assert {cell.drafter for cell in found.cells} == {"model, org/small"}


def test_engines_and_batch_sizes_are_compared_with_their_own(tmp_path):
    vllm = {"engine": "vllm", "vllm": {"version": "1"}}
    folders = [
        write(tmp_path / "one", "target-only", SOLVED),
        write(tmp_path / "eight", "target-only", SOLVED, machine={"batch_size": 8}),
        write(tmp_path / "vllm", "target-only", SOLVED, entry=vllm),
        drafting(tmp_path / "exact", machine={"batch_size": 8}),
        drafting(tmp_path / "exact-vllm", entry=vllm),
    ]
    found = matrix.build(runs_in(*folders))
    assert [(cell.run, cell.baseline, cell.target) for cell in found.cells] == [
        ("exact", "eight", "model, fly, batch size=8"),
        ("exact-vllm", "vllm", "model, vLLM, batch size=1"),
    ]
    two = [write(tmp_path / "four", "target-only", SOLVED, machine={"batch_size": 4}), *folders[:1]]
    with pytest.raises(FlyError, match="exact: four and one could each be its target-only run"):
        matrix.build(runs_in(*two, folders[3]))
    (cell,) = matrix.build(runs_in(folders[0], folders[3])).cells  # compared, and said
    assert cell.drafter == "model, org/small"
    notes = matrix.build(runs_in(folders[0], folders[3])).notes
    assert any("batch size: 1 and 8" in note for note in notes)


def test_tasks_are_tables_of_one_family(tmp_path):
    """Two tasks and their mean are three cells of a run; a further metric only if it is named."""
    tasks = {"a": {"m": SOLVED, "n": SOLVED}, "b": SOLVED}
    alone = write(tmp_path / "alone", "target-only", tasks=tasks)
    run = drafting(tmp_path / "exact", tasks=tasks)
    found = matrix.build(runs_in(alone, run))
    assert list(found.tables) == [
        ("a", "m"), ("b", "exact_match"), ("overall", "mean of 2 tasks"),
    ]  # fmt: skip
    assert found.tests == 3
    named = matrix.build(runs_in(alone, run), ["m", "n"])
    assert list(named.tables) == [("a", "m"), ("a", "n")]


@pytest.mark.parametrize(
    ("left_out", "more", "message"),
    [
        ("alone", {}, "exact4: no target-only run of model (torch.float32, fly; sums)"),
        (None, {"mode": "target-only"}, "exact4: alone and more could each be its target-only run"),
        (None, {"mode": None}, "more: a matrix is of fly's runs, and this is one of hf: leave"),
        (
            None,
            {"mode": "exact", "entry": {"drafter": "ngram"}, "settings": {"spd_k": 8}},
            "ngram and more belong in one cell of the matrix (model; ngram, K=8; exact)",
        ),
        (None, {"mode": "exact", "target": "other"}, "more: no target-only run of other"),
    ],
)
def test_runs_without_a_place_are_refused_in_one_line(
    family, tmp_path, capsys, left_out, more, message
):
    folders = [folder for folder in family if folder.name != left_out]
    if more:
        folders.append(write(tmp_path / "more", scores=SOLVED, **more))
    assert fly("compare", *(f"{folder.name}={folder}" for folder in folders), "--matrix") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fly: error: {message}")
    assert error.count("\n") == 1


def test_the_command_prints_and_writes_the_matrix(family, tmp_path, capsys):
    files = {name: tmp_path / name for name in ("json", "markdown")}
    flags = [part for name, file in files.items() for part in (f"--{name}", file)]
    assert fly("compare", *family, "--matrix", *flags) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    for expected in ("FLy, W=6", "ngram, K=8", "0.850 [", "6 / 0, p 0.125", "x 4.00",
                     "tau 4.00", "over all 5 cells", "alone: 0.6667"):  # fmt: skip
        assert expected in printed, expected
    written = json.loads(files["json"].read_text())
    assert written["tests"] == len(written["cells"]) == 5
    cell = next(cell for cell in written["cells"] if cell["rule"] == "FLy, W=6")
    assert (cell["run"], cell["baseline"]) == (str(family[3]), str(family[0]))  # as given
    assert (cell["p"], cell["p_uncorrected"]) == pytest.approx((0.125, 2 / 2**6))
    assert cell["drafter"] == "model, org/small, K=4"
    assert cell["speed"]["end_to_end"]["value"] == pytest.approx(4)
    assert "| target, drafter | exact | FLy, W=6 | FLy, W=2 |" in files["markdown"].read_text()
    assert fly("compare", *family, "--matrix", "--min-recovery", "0.9") == 2
    assert "--matrix: leave --min-recovery out" in capsys.readouterr().err


def test_a_cell_without_a_loss_says_what_it_cannot_rule_out(tmp_path, capsys):
    """It claimed that no loss was possible: 1.000 [1.000, 1.000], from six documents."""
    folders = [write(tmp_path / "alone", "target-only", SOLVED), drafting(tmp_path / "a", SOLVED)]
    assert fly("compare", *folders, "--matrix", "--json", tmp_path / "j") == 0
    (cell,) = json.loads((tmp_path / "j").read_text())["cells"]
    # nothing lost of n documents, and a score of 2 / 3
    assert cell["bound"] == pytest.approx((1 - 0.05 ** (1 / len(SOLVED))) * 3 / 2)
    printed = capsys.readouterr().out
    assert f"loss <= {cell['bound']:.1%}" in printed
    assert "1.000 [" not in printed


def test_more_rules_than_fit_are_tables_below_each_other(tmp_path, capsys):
    folders = [write(tmp_path / "alone", "target-only", SOLVED)]
    folders += [
        drafting(tmp_path / str(w), SOLVED, "fly", settings={"win_len": w}) for w in range(5)
    ]
    assert fly("compare", *folders, "--matrix") == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert printed.count("sums: exact_match") == 2
    assert all(f"FLy, W={w}" in printed for w in range(5))


def test_labels_can_be_printed_everywhere(tmp_path, capsys):
    """A Greek letter ended the command with a traceback where the output had no such letter."""
    folders = [write(tmp_path / "alone", "target-only", SOLVED)]
    for theta in (0.1, 0.3):
        settings = {"entropy_thre": theta}
        folders.append(drafting(tmp_path / str(theta), mode="fly", settings=settings))
    assert fly("compare", *folders, "--matrix") == 0
    printed = capsys.readouterr().out
    assert "FLy, theta=0.1" in printed
    table = printed[: printed.index("Every run")]
    assert {character for character in table if ord(character) > 127} <= {"\u2500"}  # rich's own


def test_the_report_holds_the_matrix(family, tmp_path):
    def data(*folders):
        text = report.page([reader.load(folder, folder.name) for folder in folders]).decode()
        start = text.index('id="data-summary">') + len('id="data-summary">')
        return json.loads(text[start : text.index("</script>", start)])["matrix"]

    found = data(*family)
    assert {cell["run"]: cell["p"] for cell in found["cells"]} == {
        cell.run: cell.p for cell in matrix.build(runs_in(*family)).cells
    }
    assert data(*family[:2]) is None  # one run needs none
    assert "no target-only run" in data(*family[1:])["refused"]
    hf = write(tmp_path / "hf", None, SOLVED)
    assert len(data(*family, hf)["cells"]) == 5
