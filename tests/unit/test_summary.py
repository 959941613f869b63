"""The speed table below a run: what was drafted, and from what."""

from dataclasses import fields

import pytest

from fly import config as fly_config
from fly.harness.summary import in_words, print_summary
from fly.runs.records import PHASES, Counts, RunStats
from tests.written_runs import drafted

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
    return shown(capsys)


def shown(capsys):
    rows, name = {}, ""
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("\u2502"):
            start, value = (part.strip() for part in line.strip("\u2502").split("\u2502"))
            name = start or name  # a long value goes on in the next line
            rows[name] = f"{rows.get(name, '')} {value}".strip()
    return rows


def line(task, doc_id, rounds):
    record = {item.name: 0 for item in fields(Counts)} | drafted(rounds)
    seconds = dict.fromkeys(PHASES, 0.0)
    return {
        **record, "task": task, "doc_id": doc_id, "seconds": seconds,
        "prompt_tokens": 1, "prompt_tokens_reused": 0,
    }  # fmt: skip


def test_mean_lengths_say_of_what_and_positions_are_shares_of_drafts(capsys):
    stats = RunStats()
    stats.merge(RunStats.of_line(line("long", 0, [(4, 1)] * 8)))
    stats.merge(RunStats.of_line(line("short", 0, [(4, 4), (2, 2), (0, 0)])))
    entry = {"mode": "exact", "drafter": "model", "config": CONFIG, "stats": stats.as_dict()}
    print_summary({**entry, "resumed": None})
    rows = shown(capsys)
    assert rows["emitted tokens / rounds = tau"] == "25 / 11 = 2.27 (mean over documents 2.50)"
    assert rows["1 + accepted / drafts = AL"] == "1 + 14 / 10 = 2.40 (mean over documents 3.00)"
    assert rows["long"].startswith("tau 2.00 (mean over documents 2.00), AL 2.00")
    assert rows["short"].startswith("tau 3.00 (mean over documents 3.00), AL 4.00")
    assert rows["accepted by position"] == "1.00 0.20 0.10 0.10 of all drafts"
    assert rows["if all before was"] == "1.00 0.20 1.00 1.00 of those that reached it"


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


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "theta=0.3, W=6"),
        ({"entropy_thre": None, "win_len": 0}, "theta off, W=0"),
        ({"abla_no_window": True}, "theta=0.3, W=0"),
        (
            {"margin_thre": 0.1, "defer_across_rounds": True, "exact_first_tokens": 4,
             "exact_pattern": ["numbers", "a/b"]},
            "theta=0.3, W=6, margin=0.1, across rounds, first exact=4, exact in numbers, a/b",
        ),
        ({"entropy_kind": "full", "window_rule": "reference"},
         "theta=0.3, W=6, entropy=full, window_rule=reference"),
        ({"verification": "typical"}, "epsilon=0.09, delta=0.3"),
        ({"verification": "exact"}, ""),
    ],
)  # fmt: skip
def test_a_run_says_how_it_verified(values, words):
    """Runs under different rules must not look alike, and what is off is not said."""
    given = {"target_model_path": "t", "draft_model_path": "d", **values}
    found = fly_config.build(given, "a test")
    shown = in_words(found.mode, found.drafter_name, found.model_dump())
    start = f"{found.mode}, drafter {found.drafter_name}, K={found.spd_k}"
    assert shown == ", ".join(filter(None, [start, words]))
