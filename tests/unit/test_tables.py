"""One row of a comparison is the same in the terminal, in Markdown, JUnit, JSON and the page."""

import json
import re
from xml.etree import ElementTree

import pytest

from fly.analysis import compare, compare_files, compare_table, gates, scores
from fly.analysis.html import comparison
from fly.analysis.tables import Table, score_texts
from fly.runs import reader
from tests.written_runs import write


def load(folder):
    return scores.measure(reader.load(folder))


def test_a_row_is_the_same_everywhere(tmp_path, capsys):
    """JUnit had its own recovery, without an interval, and its own p."""
    base = load(write(tmp_path / "a", "target-only", [1] * 50 + [0] * 10))
    other = load(write(tmp_path / "b", "fly", [0] * 3 + [1] * 47 + [1] * 2 + [0] * 8))
    result = compare.compare(base, [other])
    (row,) = result.others[0].rows
    texts = score_texts(row.scores)
    assert (texts.score, texts.changed) == ("0.8167", "3 / 2")
    assert texts.recovery.startswith("0.980 [")
    compare_table.print_result(result)
    (printed,) = (line for line in capsys.readouterr().out.splitlines() if "0.8167" in line)
    (line,) = (line for line in compare_table.markdown(result).splitlines() if "0.8167" in line)
    case = ElementTree.fromstring(compare_files.as_junit(result, False)).find(".//testcase")
    for text in (texts.score, texts.recovery, texts.changed, texts.p):
        for shown in (printed, line, case.find("failure").text):
            assert text in shown
    (entry,), *_ = comparison.against_first([base, other])
    (stored,) = json.loads(compare_files.as_json(result))["others"]
    assert json.loads(json.dumps({key: entry[key] for key in stored})) == stored


def test_a_grouped_table_is_a_table_per_group():
    rows = [["t", "a", "1"], ["", "b", "2"], ["u", "a", "3"]]
    table = Table("scores", ("task", "run", "score"), rows, {"run": 9})
    assert table.groups() == [
        Table("t", ("run", "score"), [["a", "1"], ["b", "2"]], {"run": 9}),
        Table("u", ("run", "score"), [["a", "3"]], {"run": 9}),
    ]
    assert table.as_markdown().splitlines()[2:] == [
        "| task | run | score |", "|---|---|---|", "| t | a | 1 |", "|  | b | 2 |", "| u | a | 3 |",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [100, 80, 60])
@pytest.mark.parametrize("printer", [compare_table.print_short, compare_table.print_result])
def test_a_narrow_terminal_gets_whole_words(tmp_path, width, printer, capsys, monkeypatch):
    """Words and intervals were cut: `verdic`, `1.00 [1.00, 1.`."""
    won = [0] * 3 + [1] * 47 + [1] * 2 + [0] * 8
    tasks = {"humaneval_instruct": [1] * 50 + [0] * 10, "gsm8k_cot": [1] * 40 + [0] * 20}
    base = load(write(tmp_path / "a", "target-only", tasks=tasks))
    other = load(write(tmp_path / "b", "fly", tasks=dict.fromkeys(tasks, won)))
    needed = [gates.parse("tau", "2"), gates.parse("time x", "gsm8k_cot=1.2")]
    result = compare.compare(base, [other], gates=needed)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    def printed(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        printer(result)
        return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)

    wide, narrow = printed(300), printed(width)
    assert max(map(len, narrow.splitlines())) <= width
    words, of_wide = ({*re.sub("[:,─]", " ", text).split()} for text in (narrow, wide))
    assert words <= of_wide | {"left", "out", "at", "this", "width"}
    for interval in re.findall(r"\d[.]\d+ \[.*?\]", wide):
        assert interval in " ".join(narrow.split())
