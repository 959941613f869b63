"""The terminal's rows: every source told apart, UTF-8 whole, nothing printed too early."""

import io
import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from fly.analysis.terminal.rows import Layout, draw_coloured, draw_lettered
from fly.analysis.terminal.styles import STYLES, legend
from fly.runs.replay import Token


def tokens(*pairs):
    """(texts or bytes, source) -> tokens and the vocabulary they need."""
    made, vocabulary = [], {}
    for number, (piece, source) in enumerate(pairs):
        vocabulary[number] = piece if isinstance(piece, bytes) else piece.encode()
        made.append(Token(number, source, number, 1, number, True))
    return made, vocabulary


def lay_out(pairs, width=40, encoding="utf-8"):
    made, vocabulary = tokens(*pairs)
    layout = Layout(vocabulary.__getitem__, width, encoding)
    return [*layout.add(made), *layout.finish()]


def text(row):
    return "".join(cell.text for cell in row)


def test_letters_stand_below_the_first_column_of_each_token():
    (row,) = lay_out([("def", "draft"), (" f", "ngram"), ("(", "recovered"), (")", "bonus")])
    assert draw_lettered(row).plain == "def f()\nd..n.rb"


def test_wide_characters_keep_the_two_lines_in_step():
    (row,) = lay_out([("\u4e2d\u6587", "draft"), ("e\u0301", "bonus"), ("!", "ngram")])
    above, below = draw_lettered(row).plain.split("\n")
    assert cell_len(above) == cell_len(below)
    assert below == "d...bn"


def test_a_character_of_several_tokens_waits_for_the_last():
    """Half of a character must not be seen, and must not be lost either."""
    first, second = "\u00e9".encode()[:1], "\u00e9".encode()[1:]
    made, vocabulary = tokens((first, "draft"), (second, "ngram"), (first, "bonus"))
    layout = Layout(vocabulary.__getitem__, 40)
    assert list(layout.add(made[:1])) == []
    assert layout.rest == []
    list(layout.add(made[1:2]))
    assert [(cell.text, cell.source) for cell in layout.rest] == [("\u00e9", "ngram")]
    list(layout.add(made[2:]))
    assert text(layout.rest) == "\u00e9"
    (row,) = layout.finish()
    assert text(row) == "\u00e9\ufffd"


def test_what_fell_does_not_disturb_the_text_after_it():
    """A dropped half of a character belongs to no character of the text."""
    first, second = "\u00e9".encode()[:1], "\u00e9".encode()[1:]
    (row,) = lay_out([(first, "draft"), (second, "rolled_back"), (b"x", "rolled_back"),
                      (second, "recovered"), ("y", "draft")])  # fmt: skip
    assert [(c.text, c.source) for c in row] == [
        ("\u00e9", "rolled_back"),
        ("x", "rolled_back"),
        ("\u00e9", "recovered"),
        ("y", "draft"),
    ]


def test_laying_out_ahead_changes_nothing():
    made, vocabulary = tokens(("\u00e9".encode()[:1], "draft"), ("\u00e9".encode()[1:], "draft"))
    layout = Layout(vocabulary.__getitem__, 40)
    list(layout.add(made[:1]))
    ahead = layout.ahead()
    list(ahead.add(made[1:]))
    assert (text(ahead.rest), text(layout.rest)) == ("\u00e9", "")
    list(layout.add(made[1:]))
    assert text(layout.rest) == "\u00e9"


@pytest.mark.parametrize("width", [1, 2, 7, 40])
def test_rows_fit_and_lose_nothing(width):
    pairs = [("one two", "draft"), (" three\n", "bonus"), ("\u4e2d" * 9, "ngram"), ("x", "draft")]
    rows = lay_out(pairs, width)
    assert "".join(map(text, rows)).replace("\u21b5", "\n") == "".join(p for p, _ in pairs)
    assert all(cell_len(text(row)) <= max(width, 2) for row in rows)
    assert all(rows)


@pytest.mark.parametrize("character", ["\x1b", "\r", "\x07", "\u202e", "\u200b", "\u2028"])
def test_the_model_cannot_control_the_terminal(character):
    (row,) = lay_out([(f"a{character}b", "draft")])
    assert character not in text(row)
    assert text(row) == f"a\\x{ord(character):02x}b"


def test_an_ascii_terminal_gets_ascii():
    rows = lay_out([("\u00e9\u4e2d\n", "draft")], encoding="ascii")
    assert [text(row) for row in rows] == ["??$"]


def test_every_source_looks_different_with_and_without_colours():
    assert len({style.letter for style in STYLES.values()}) == len(STYLES)
    assert len({style.style for style in STYLES.values()}) == len(STYLES)
    (row,) = lay_out([("ab", source) for source in STYLES])
    styles = [str(span.style) for span in draw_coloured(row).spans][::2]
    assert styles == [style.style for style in STYLES.values()]


def test_no_two_sources_differ_by_red_against_green_alone():
    """Many readers cannot tell these two apart."""
    seen = {
        re.sub(r"(bright_)?(red|green)", "one colour", style.style) for style in STYLES.values()
    }
    assert len(seen) == len(STYLES)


def test_provisional_tokens_look_different():
    (row,) = lay_out([("ab", "draft")])
    waiting = [replace(cell, provisional=True) for cell in row]
    assert "underline" in str(draw_coloured(waiting).spans[0].style)
    assert draw_lettered(waiting).plain == "ab\nd?"


@pytest.mark.parametrize("width", [20, 100])
def test_the_legend_names_what_is_shown(width):
    for colours, drops in ((True, False), (False, True), (False, False)):
        console = Console(file=io.StringIO(), width=width)
        console.print(legend(colours=colours, lasting_drops=drops))
        printed = console.file.getvalue()
        assert all(len(line) <= width for line in printed.splitlines())
        assert ("rolled back" in printed) == (colours or drops)
        for name in ("n-gram", "draft", "recovered token", "bonus", "deferred and stood"):
            assert name in printed


def test_the_legend_leaves_out_what_cannot_occur():
    """Most runs have no earlier outputs and no siblings: names that mean nothing there confuse."""
    for colours in (True, False):
        console = Console(file=io.StringIO(), width=100)
        console.print(legend(colours=colours, lasting_drops=True, absent={"earlier", "other"}))
        printed = console.file.getvalue()
        assert "earlier run" not in printed
        assert "other document" not in printed
        assert "sibling" in printed
