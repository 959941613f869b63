"""The speed table below a run: what was drafted, and from what."""

import pytest

from fly.harness.summary import in_words, print_summary
from fly.runs.records import RunStats

CONFIG = {"spd_k": 15}
EARLIER = {
    "runs": ["before/", "base.json"], "matched": 118, "changed": 2, "missing": 0,
    "untokenized": 1, "same_target": False,
}  # fmt: skip
OWN = {"own_text": {"drafted": 90, "accepted": 31}}
TWO_SOURCES = {**OWN, "earlier_run": {"drafted": 1310, "accepted": 1204}}


def printed(capsys, sources, earlier=None):
    """The table's rows by name."""
    stats = {**RunStats(requests=1).as_dict(), "drafted": 1400, "sources": sources}
    entry = {"mode": "exact", "drafter": "ngram", "config": CONFIG, "stats": stats}
    print_summary({**entry, "resumed": None, "draft_runs": earlier})
    rows, name = {}, ""
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("\u2502"):
            start, value = (part.strip() for part in line.strip("\u2502").split("\u2502"))
            name = start or name  # a long value goes on in the next line
            rows[name] = f"{rows.get(name, '')} {value}".strip()
    return rows


def test_sources_of_drafts_largest_first(capsys):
    rows = printed(capsys, TWO_SOURCES)
    assert rows["drafted from"] == "earlier run 1,204 of 1,310 accepted, own text 31 of 90"
    assert "earlier runs" not in rows


def test_one_source_of_the_run_itself_needs_no_row(capsys):
    """`drafted` says it already, and the title says from what."""
    assert "drafted from" not in printed(capsys, OWN)
    assert "drafted from" not in printed(capsys, {})


def test_earlier_runs_are_told_with_what_they_lack(capsys):
    """A reader must see how much of a speed can come from drafts of another run's outputs."""
    rows = printed(capsys, OWN, EARLIER)
    assert rows["drafted from"] == "own text 31 of 90 accepted"
    found = "118 of 121 requests found, 2 with another prompt, 1 without token ids"
    assert rows["earlier runs"] == f"2 (of another target): {found}"
    unknown = printed(capsys, {}, EARLIER | {"same_target": None})
    assert unknown["earlier runs"] == f"2: {found}"
    assert "drafted from" not in unknown


@pytest.mark.parametrize(
    ("drafter", "config", "is_named"),
    [
        ("ngram", {}, False),  # an earlier version's settings
        ("ngram", {"draft_runs": None, "draft_sources": None}, False),
        ("ngram", {"draft_runs": ["a"], "draft_sources": ["own"]}, False),
        (None, {"draft_runs": ["a"], "draft_sources": None}, False),
        ("ngram", {"draft_runs": ["a"], "draft_sources": None}, True),
        ("ngram", {"draft_runs": ["a"], "draft_sources": ["runs"]}, True),
    ],
)
def test_earlier_runs_are_named_only_if_they_are_drafted_from(drafter, config, is_named):
    """A run that draws on another run's texts must not look like one that does not."""
    words = in_words("exact", drafter, CONFIG | config)
    assert words.endswith(", drafts from earlier runs") == is_named
    assert ("earlier" in words) == is_named
