"""What runs leave is read back as it was asked for: chosen documents, groups, caches, names."""

import textwrap

import pytest

from fly.analysis.html.write import page
from fly.runs import reader
from tests import killing
from tests.killing import TASK, arguments

CHOSEN = [3, 7, 9]
INLINE = TASK.format(name="tiny_(inline)", repeats=1, tokens=8, sampling="do_sample: false")
GROUP = f"""group: tiny_group
task:
  - tiny_greedy
  - {textwrap.indent(INLINE, "    ").strip()}
aggregate_metric_list: [{{metric: exact_match, aggregation: mean}}]
"""


@pytest.fixture(scope="module")
def place(saved_pair, tmp_path_factory):
    folder = killing.make_place(tmp_path_factory.mktemp("chosen"), saved_pair)
    (folder / "tasks" / "group.yaml").write_text(GROUP)
    return folder


def fly(place, *command):
    status, output = killing.Run(command, place).end()
    assert status == 0, output[-2000:]
    return output


@pytest.fixture(scope="module")
def whole(place):
    fly(place, *arguments("whole", tasks="tiny_sampled"))
    return reader.load(place / "whole")


def choosing(out, *more):
    return arguments(out, "--samples", '{"tiny_sampled": [9, 3, 7]}', *more, tasks="tiny_sampled")


@pytest.fixture(scope="module")
def chosen(place):
    fly(place, *choosing("chosen"))
    return reader.load(place / "chosen")


def by_request(lines):
    return {(line["doc_id"], line["repeat"]): line for line in lines}


def test_chosen_documents_keep_their_numbers(whole, chosen):
    """lm-eval counts the requests of chosen documents anew, and its samples not."""
    texts = {key: line["text"] for key, line in by_request(whole.requests).items()}
    kept = {key: line["text"] for key, line in by_request(chosen.requests).items()}
    assert kept == {(doc_id, n): texts[doc_id, n] for doc_id in CHOSEN for n in (0, 1)}
    (task,) = chosen.tasks.values()
    for doc_id, sample in task.samples.items():
        assert sample.responses == tuple(kept[doc_id, n] for n in (0, 1))
    rounds = {(line["doc_id"], line["repeat"]) for line in chosen.rounds}
    assert rounds == set(kept)


@pytest.mark.slow
def test_chosen_documents_can_be_stored_and_reported(place, chosen):
    """A stored baseline was refused for ever; the report showed other documents' traces."""
    fly(place, *choosing("alone", "--model_args", "use_sd=false"))
    stored = ("--save-baseline", "chosen.json", "--with-outputs", "--allow-inconclusive")
    fly(place, "compare", "alone", "chosen", *stored)
    output = fly(place, "compare", "chosen", "--baseline", "chosen.json", "--allow-inconclusive")
    assert "recovery" in output
    assert "no trace" not in page([chosen]).decode()


@pytest.mark.slow
def test_a_results_file_may_have_any_name(place):
    """All was decoded, then no results were found; --resume ended the same way."""
    output = fly(place, *arguments("named/mine.json", "--limit", "2", tasks="tiny_greedy"))
    assert "results: named" in output
    (results,) = (place / "named").glob("mine_*.json")
    assert reader.find_results(place / "named") == results
    assert len(reader.load(place / "named").requests) == 2
    assert "has ended: results: " in fly(place, "--resume", "named")


def test_what_fly_writes_itself_is_no_results_file(tmp_path):
    for name in ("fly_run_2026-01-01T00-00-00", "fly_tune_2026-01-01T00-00-00", "notes_2026"):
        (tmp_path / f"{name}.json").write_text("{}")
    assert reader.results_in(tmp_path) == []


@pytest.mark.slow
def test_tasks_within_a_group_are_read_back(place):
    """lm-eval calls them `group::task`, and names some of its own with brackets."""
    fly(place, *arguments("group", "--limit", "2", tasks="tiny_group"))
    names = {name for name, _ in reader.load(place / "group").tasks}
    assert names == {"tiny_greedy", "tiny_group::tiny_(inline)"}
    assert "tiny_group::tiny_(inline)" in fly(place, "compare", "group", "group")
    assert "tiny_group::tiny_(inline)" in page([reader.load(place / "group")]).decode()


def test_a_run_from_a_cache_compares_with_a_stored_baseline(place):
    """Its second run decoded nothing, and was taken for one that was decoded otherwise."""
    few = ("--limit", "2")
    fly(place, *arguments("plain", *few, "--model_args", "use_sd=false", tasks="tiny_greedy"))
    fly(place, "compare", "plain", "--save-baseline", "plain.json")
    for out in ("first", "second"):
        fly(place, *arguments(out, *few, "--use_cache", "answers", tasks="tiny_greedy"))
        fly(place, "compare", out, "--baseline", "plain.json")
    assert reader.load(place / "second").requests == []


def test_outputs_are_stored_beside_tasks_that_have_none(place):
    """A task of choices was told to make the run anew, before the comparison was printed."""
    tasks = "tiny_greedy,tiny_choice"
    few = ("--limit", "2", "--model_args", "use_sd=false")
    fly(place, *arguments("both", *few, tasks=tasks))
    fly(place, "compare", "both", "--save-baseline", "both.json", "--with-outputs")
    fly(place, *arguments("silent", *few, "--model_args", "enable_statistics=false", tasks=tasks))
    stored = ("--save-baseline", "silent.json", "--with-outputs")
    status, output = killing.Run(["compare", "silent", "both", *stored], place).end()
    assert status == 2
    assert "no token ids of tiny_greedy" in output
    assert "recovery" in output
