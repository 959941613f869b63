"""README and docs: links lead somewhere, commands parse, and those that need no download run."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from fly.cli.main import FlyCLI
from tests.integration.test_cli import run

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [
    *DOCS,
    *(
        ROOT / name
        for name in ("CONTRIBUTING.md", "benchmarks/NOTES.md", "lm_eval_tasks/README.md")
    ),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text("utf-8")), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors_lead_somewhere(page):
    broken = []
    for link in LINK.findall(without_code(page.read_text("utf-8"))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if path.startswith(("http://", "https://")):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def commands(page: Path) -> list[str]:
    """The command lines of fly's in a page's code, with their continuations."""
    text = re.sub(r"\\\n\s*", "", page.read_text("utf-8"))
    lines = re.findall(r"^(?:    |\$ )(.*(?:\bfly |-m fly ).+)$", text, re.MULTILINE)
    found = []
    for line in lines:
        line = line.partition(" #")[0].partition("&& rm")[0].rstrip()
        line = re.split(r"(?:^|&& |; )(?:.*-m )?(?=fly )", line)[-1]
        if line.startswith("fly ") and "..." not in line and "$" not in line:
            found.append(line)
    return found


ALL = [(page.name, line) for page in DOCS for line in commands(page)]
ALL += [
    ("start.sh", line)
    for line in re.findall(r"^      (fly .+)$", (ROOT / "start.sh").read_text(), re.M)
]


def words(line: str) -> list[str]:
    line = line.replace("$pair", "qwen2.5-coder.json").replace("$out", "out")
    line = line.replace("$task", "--tasks humaneval")
    return shlex.split(re.sub(r"<[^>]*>", "x", line))


def test_there_are_commands_to_check():
    assert len(ALL) > 25


@pytest.mark.parametrize(("page", "line"), ALL)
def test_commands_parse(page, line, monkeypatch):
    monkeypatch.setattr(sys, "argv", words(line))
    FlyCLI().parse_args()


@pytest.mark.parametrize(
    "line", sorted({line for _, line in ALL if line.startswith(("fly config", "fly completion"))})
)
def test_commands_without_models_run(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    models = {f"{role}_model_path": f"some/{role}" for role in ("target", "draft")}
    (tmp_path / "llama.json").write_text(json.dumps(models))
    line = line.replace("FILE", "qwen2.5-coder.json")
    assert run(*words(line)[1:]) == 0, capsys.readouterr().err


def test_the_front_door_stays_small():
    assert len(DOCS[0].read_text("utf-8").splitlines()) <= 130
    assert len(DOCS) - 1 <= 16
    assert sum(len(page.read_text("utf-8").splitlines()) for page in DOCS[1:]) <= 1700


@pytest.mark.slow  # a thousand tokens of a tiny pair for each of twelve answers
def test_the_notebook_runs_and_shows_the_report(saved_pair, tmp_path, monkeypatch):
    """Its own cells, on the tiny pair."""
    monkeypatch.chdir(tmp_path)
    models = {f"{role}_model_path": str(saved_pair / role) for role in ("draft", "target")}
    (tmp_path / "pair.json").write_text(json.dumps({**models, "spd_k": 4, "win_len": 1}))
    cells = json.loads((ROOT / "docs/notebook.ipynb").read_text())["cells"]
    first, *others, last = [
        "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"
    ]
    space: dict = {}
    for cell in (first.replace("qwen2.5-coder.json", "pair.json"), *others):
        exec(cell, space)
    assert space["result"].others[0].rows[0].scores.documents == 4
    assert eval(last, space)._repr_html_().startswith("<iframe srcdoc=")
