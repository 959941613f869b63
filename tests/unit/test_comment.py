"""The comment for a pull request: what stands first, what is folded, and what texts cannot do."""

import pytest

from fly.analysis import comment, compare, scores
from fly.analysis.gates import Gate
from fly.runs import reader
from tests import written_runs
from tests.integration.test_cli import run

EVIL = "a ```` b\n</details>\n```\n@everyone <img src=x>"


@pytest.fixture
def folders(tmp_path):
    texts = {"target-only": ["same"] * 40, "fly": ["changed"] * 3 + [EVIL] + ["same"] * 36}
    values = {"target-only": [1.0] * 39 + [0.0], "fly": [0.0] * 4 + [1.0] * 36}
    return [written_runs.write(tmp_path / mode, mode, values[mode], responses=texts[mode])
            for mode in texts]  # fmt: skip


def written(folders, link=None, **more):
    base, own = (scores.measure(reader.load(folder)) for folder in folders)
    return comment.markdown(compare.compare(base, [own], **more), [base, own], link)


def test_verdict_first_then_one_table_then_what_is_folded(folders):
    text = written(folders, "https://ci/report.html")
    lines = text.splitlines()
    assert lines[0] == "<!-- fly compare -->"
    assert lines[2].endswith("fly against target-only: not enough evidence")
    assert "[The report](https://ci/report.html)" in lines
    before, folded = text.split("<details>", 1)
    assert before.count("| task | run |") == 1
    assert "1 -> 0.9" not in before
    assert "0.975 → 0.9" in before
    assert "fly: 4 documents lost, 1 won" in folded
    assert "**lost**: [sums, document 0](https://ci/report.html#document/sums/0)" in folded
    assert "-same\n+changed" in folded
    assert folded.index("**lost**") < folded.index("**won**")
    assert "No texts that differ are known." in folded  # document 39 was won by the same text
    assert folded.index("All tables and notes") > folded.index("**won**")


def test_texts_do_not_leave_their_code_block(folders):
    """Catches a model's fence that ends the block, and what follows it as markup."""
    text = written(folders)
    start = text.index("`````diff")
    block = text[start : text.index("\n`````\n", start)]
    assert "+</details>" in block
    assert "+@everyone <img src=x>" in block
    assert text.count("@everyone") == 1
    assert text.count("</details>") == text.count("<details>") + 1


def test_names_are_no_markup(folders, tmp_path):
    base, own = (scores.measure(reader.load(folder)) for folder in folders)
    own = own.model_copy(update={"name": "@me <b>_x_"})
    text = comment.markdown(compare.compare(base, [own]), [base, own])
    head = text.splitlines()[2]
    assert "@me" not in head
    assert "<b>" not in head


def test_gates_that_did_not_hold_stand_at_the_top(folders):
    text = written(folders, gates=[Gate("tau", 9.0), Gate("tau", 1.0)])
    top = text.split("| task |")[0]
    assert "- tau at least 9: **fell**, 4.00" in top
    assert "at least 1" not in top


def test_thousands_of_changes_fit_into_a_comment(tmp_path):
    """GitHub refuses more than 65,536 characters. More texts are long than are ever shown."""
    folders = [
        written_runs.write(tmp_path / mode, mode, [value] * 3000,
                           responses=[f"{mode} {'word ' * 500}\n" * 100] * 40 + [mode] * 2960)
        for mode, value in (("target-only", 1.0), ("fly", 0.0))
    ]  # fmt: skip
    text = written(folders)
    assert len(text) < 60_000
    assert "more are not shown." in text


def test_the_command_replaces_its_own_comment_only(folders, tmp_path):
    file = tmp_path / "c.md"
    for _ in range(2):
        assert run("compare", *folders, "--markdown", file, "--link", "https://x/r.html") == 0
    file.write_text("my own notes")
    assert run("compare", *folders, "--markdown", file) == 2
