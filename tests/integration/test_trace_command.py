"""`fly trace` on the tiny pair: what is printed is what was decoded, and where it came from."""

import io
import json
import re

import pyte
import pytest
from rich.console import Console

from fly.analysis.terminal.display import Display
from fly.analysis.terminal.rows import Layout
from fly.analysis.terminal.summary import print_deferrals
from fly.models.token_bytes import reader
from tests.integration.test_cli import run, task_dir  # noqa: F401  fixture
from tests.integration.test_lm import fly_lm, instances

RELAXED = {
    "enable_fly": True, "entropy_thre": 0.0, "win_len": 3, "spd_k": 4, "drafter": "cascade",
    "defer_across_rounds": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def lm(saved_pair):
    return fly_lm(saved_pair, **RELAXED)


@pytest.fixture
def pair_file(saved_pair, tmp_path):
    path = tmp_path / "pair.json"
    models = {f"{name}_model_path": str(saved_pair / name) for name in ("target", "draft")}
    path.write_text(json.dumps({**models, **RELAXED}))
    return path


def decode(lm, *, terminal=False, keep_dropped=False, colours=None, width=60, budget=80):
    """The console and the display after decoding one request."""
    console = Console(file=io.StringIO(), width=width, height=40, force_terminal=terminal)
    display = Display(
        console,
        reader(lm.tokenizer),
        colours=terminal if colours is None else colours,
        keep_dropped=keep_dropped,
    )
    lm.observers[:] = [display.on_round]
    with display:
        lm.generate_until(instances({"max_gen_toks": budget}, ["def add(a, b):"]))
    lm.observers.clear()
    return console, display


def expected(display, lm, width, keep_dropped):
    """The whole text laid out at once, when all is known."""
    (generation,) = display.generations
    layout = Layout(reader(lm.tokenizer), width, "utf-8")
    rows = list(layout.add(t for t in generation.shown if t.stands or keep_dropped))
    return ["".join(cell.text for cell in row) for row in [*rows, *layout.finish()]]


@pytest.mark.parametrize("keep_dropped", [False, True])
@pytest.mark.parametrize("across", [False, True])
def test_lines_printed_round_by_round_are_the_final_text(lm, saved_pair, across, keep_dropped):
    """Catches provisional tokens that are printed for good, and tokens lost at a rollback."""
    lm = lm if across else fly_lm(saved_pair, **{**RELAXED, "defer_across_rounds": False})
    console, display = decode(lm, keep_dropped=keep_dropped)
    lines = console.file.getvalue().split("\n")
    assert lines[0:-1:2] == expected(display, lm, 60, keep_dropped)
    (generation,) = display.generations
    counts = generation.counts
    assert counts.deferred_rolled_back > 0
    assert counts.deferred_accepted > 0
    assert (counts.discarded > 0) == across
    standing = [token.id for token in generation.shown if token.stands]
    assert len(standing) == counts.emitted
    (text,) = lm.generate_until(instances({"max_gen_toks": 80}, ["def add(a, b):"]))
    assert lm.tokenizer.decode(standing, skip_special_tokens=True) == text
    letters = "".join(lines[1::2])
    assert ("x" in letters) == keep_dropped
    assert "?" not in letters  # provisional


def updates(console, width):
    """The terminal's screen after each update of the live part."""
    screen = pyte.HistoryScreen(width, 40, history=1000)
    stream = pyte.Stream(screen)
    for part in re.split("(?=\x1b\\[1A)", console.file.getvalue().replace("\n", "\r\n")):
        stream.feed(part)
        yield screen


@pytest.mark.parametrize("width", [12, 60])
def test_a_terminal_shows_provisional_and_struck_tokens_and_ends_with_the_text(lm, width):
    console, display = decode(lm, terminal=True, width=width)
    underlined = struck = 0
    for screen in updates(console, width):
        cells = [cell for line in screen.buffer.values() for cell in line.values()]
        underlined += any(cell.underscore for cell in cells)
        struck += any(cell.strikethrough for cell in cells)
    assert underlined > 0
    assert struck > 0
    assert not any(cell.strikethrough or cell.underscore for cell in cells)
    top = ["".join(line[c].data for c in range(width)) for line in screen.history.top]
    shown = [line.rstrip() for line in [*top, *screen.display]]
    while shown and not shown[-1]:
        shown.pop()
    assert shown == [line.rstrip() for line in expected(display, lm, width, False)]


def test_kept_drops_stay_struck(lm):
    console, display = decode(lm, terminal=True, keep_dropped=True)
    *_, screen = updates(console, 60)
    struck = "".join(
        cell.data
        for row in sorted(screen.buffer)
        for _, cell in sorted(screen.buffer[row].items())
        if cell.strikethrough
    )
    layout = Layout(reader(lm.tokenizer), 10_000)
    fallen = [token for token in display.generations[0].shown if not token.stands]
    assert len(fallen) > 5
    (row,) = [*layout.add(fallen), *layout.finish()]
    assert len(struck) >= len(row) - 5  # less where bytes of several tokens share a character


def test_counts_and_deferrals_are_the_engines(lm):
    _, display = decode(lm)
    (generation,) = display.generations
    counts = generation.counts
    console = Console(file=io.StringIO(), width=100)
    print_deferrals(console, generation, reader(lm.tokenizer), "top3")
    printed = console.file.getvalue()
    assert printed.startswith("ended by length\n")
    deferred = counts.deferred_accepted + counts.deferred_rolled_back
    assert f"{deferred} deferrals" in printed
    assert printed.count("stood ") == counts.deferred_accepted
    assert printed.count("\u2502 rolled back") == counts.deferred_rolled_back
    assert "\u2502 -" not in printed  # entropies were taken, although no trace was asked for


def test_watching_changes_nothing(lm):
    plain = lm.generate_until(instances({"max_gen_toks": 40}, ["x"]))
    seen = []
    lm.observers.append(seen.append)
    assert lm.generate_until(instances({"max_gen_toks": 40}, ["x"])) == plain
    lm.observers.clear()
    assert seen
    assert all(len(record.entropy) == len(record.target_tokens) for record in seen)


def test_a_prompt_on_the_command_line(pair_file, capsys):
    code = run(
        "trace", "def add(a, b):", "--model_args", f"config_path={pair_file},dtype=float32",
        "--max_gen_toks", "30", "--device", "cpu", "--no-apply_chat_template",
    )  # fmt: skip
    assert code == 0
    printed = capsys.readouterr().out
    assert "theta=0, W=3, across rounds, no chat template" in printed.replace("\n", " ")
    assert "\x1b" not in printed
    assert "w deferred and stood" in printed
    assert "earlier run" not in printed  # nor are there siblings: there is but this one request
    assert "sibling" not in printed
    assert re.search(r"tokens / rounds = tau +\u2502 30 / \d+", printed)
    assert "ended by length" in printed
    assert "score" not in printed


def test_a_document_of_a_task_is_lm_evals_and_is_scored(pair_file, task_dir, capsys):  # noqa: F811
    code = run(
        "trace", "--task", "tiny_task", "--doc", "2", "--include_path", task_dir,
        "--model_args", f"config_path={pair_file}", "dtype=float32", "--device", "cpu",
    )  # fmt: skip
    assert code == 0
    printed = capsys.readouterr().out
    assert "score of tiny_task, document 2: exact_match (none) 0.0" in printed
    assert re.search(r"tokens / rounds = tau +\u2502 12 / \d+", printed)  # the task's max_gen_toks


def test_a_document_drafted_from_an_earlier_run(pair_file, task_dir, tmp_path, capsys):  # noqa: F811
    """Catches a legend without the source that most tokens have."""
    shared = ("--include_path", task_dir, "--device", "cpu")
    model_args = f"config_path={pair_file},dtype=float32,draft_policy=fixed,verification=exact"
    code = run(
        "run", "--model", "hf", "--model_args", model_args, "--tasks", "tiny_task", *shared,
        "--output_path", tmp_path / "out", "--log_samples",
    )  # fmt: skip
    assert code == 0
    assert "drafts from earlier runs" not in capsys.readouterr().out
    code = run(
        "trace", "--task", "tiny_task", "--no-apply_chat_template", *shared,
        "--model_args", f"{model_args},drafter=ngram,draft_runs={tmp_path / 'out'}",
    )  # fmt: skip
    assert code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "K=4, drafts from earlier runs, no chat template" in printed
    assert "e earlier run" in printed
    assert "sibling" not in printed
    assert re.search(r"drafted from +\u2502 earlier run [1-9]", printed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a prompt"),
        (("x", "--task", "gsm8k"), "give a prompt"),
        (("x", "--doc", "1"), "--doc 1: of which task?"),
        (("x", "--max_gen_toks", "0"), "max_gen_toks=0"),
        (("x", "--model_args", "spd_k=3"), "names no pair: add config_path"),
        (("x", "--model_args", "config_path=a.json,batch_size=4"), "decodes one row"),
        (("x", "--model_args", "config_path=a.json,trace=true"), "writes no file"),
        (("x", "--model_args", "config_path=nowhere.json"), "config_path=nowhere.json: no such"),
        (("--task", "humaneval_instruc", "PAIR"), "did you mean 'humaneval_instruct'?"),
        (("--task", "humaneval", "PAIR"), "add --confirm_run_unsafe_code"),
        (("--task", "tiny_task", "--doc", "9", "PAIR"), "tiny_task has documents 0 to 3"),
        (("--task", "tiny_task", "--doc", "-1", "PAIR"), "--doc -1: tiny_task has documents"),
    ],
)
def test_bad_input_is_one_line_before_models_load(
    pair_file,
    task_dir,  # noqa: F811
    capsys,
    monkeypatch,
    arguments,
    message,
):
    monkeypatch.setattr(
        "fly.harness.hf.FlyLM._load_pair", lambda *args, **kwargs: pytest.fail("loaded")
    )
    pair = ("--model_args", f"config_path={pair_file}", "--include_path", task_dir)
    arguments = [part for a in arguments for part in (pair if a == "PAIR" else [a])]
    assert run("trace", *arguments) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
