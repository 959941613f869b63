"""Manifests, arguments and records of runs that go on: what is kept, compared and refused."""

import argparse
import json
import os
import re

import pytest

from fly.errors import FlyError
from fly.harness.arguments import merge_config
from fly.models import fingerprint
from fly.models.sources import ModelSource
from fly.runs import finished_requests, manifest, resume
from fly.runs.context import RunContext
from fly.runs.manifest import Manifest
from fly.runs.records import Counts, RequestRecord
from tests import written_runs

ASKED = {
    "task": "t", "doc_id": 3, "idx": 0, "repeat": 0, "doc_hash": "d", "prompt_hash": "p",
    "prompt_tokens": 5, "decoding": {"budget": 8, "stops": ["x"], "temperature": 0.0},
}  # fmt: skip


def record(**changes):
    counts = Counts(rounds=2, drafted=6, native_accepted=4, bonus=1, corrections=1, emitted=6)
    seconds = {"prefill": 0.5, "draft": 1.0, "verify": 2.0, "other": 0.25, "compile": 0.0}
    answered = RequestRecord(None, [1] * 6, "eos", 5, 2, counts, seconds)
    return {**ASKED, **answered.as_dict(), "text": "é\n", **changes}


def write(folder, *records, tail="", name="fly_requests_s.jsonl"):
    text = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in records)
    (folder / name).write_text(text + tail)


def create(folder):
    return Manifest.create(folder, {"output_path": str(folder)})


def test_records_give_their_texts_and_sums(tmp_path):
    write(tmp_path, record(), record(repeat=1, text="b"))
    found = finished_requests.FinishedRequests(tmp_path, "s")
    assert found.text(ASKED) == "é\n"
    assert found.text({**ASKED, "repeat": 1}) == "b"
    assert found.text({**ASKED, "doc_id": 4}) is None
    assert (found.stats.requests, found.stats.counts.emitted, found.stats.prompt_tokens) == (
        2,
        12,
        10,
    )
    assert found.stats.seconds["verify"] == 4.0
    assert found.stats.as_dict()["tau"] == 3.0


@pytest.mark.parametrize("whole_but_without_its_end", [True, False])
def test_a_torn_last_line_is_cut_off_the_file(tmp_path, caplog, whole_but_without_its_end):
    """A kept torn line would be glued to the next record; one that only looks whole, too."""
    line = json.dumps(record(doc_id=4))
    write(tmp_path, record(), tail=line if whole_but_without_its_end else line[:30])
    found = finished_requests.FinishedRequests(tmp_path, "s")
    assert len(found) == 1
    assert "a torn last line" in caplog.text
    text = (tmp_path / "fly_requests_s.jsonl").read_text()
    assert text == json.dumps(record(), ensure_ascii=False) + "\n"


def test_a_line_broken_in_the_middle_of_the_file_is_an_error(tmp_path):
    write(tmp_path, record(), tail='{"task"\n' + json.dumps(record(doc_id=1)) + "\n")
    with pytest.raises(FlyError, match="line 2: not valid JSON"):
        finished_requests.FinishedRequests(tmp_path, "s")


def test_two_records_of_one_request_are_refused(tmp_path):
    write(tmp_path, record(), record())
    with pytest.raises(FlyError, match="two records of task t, doc 3"):
        finished_requests.FinishedRequests(tmp_path, "s")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_hash": "q"}, 'task t, doc 3: prompt_hash was "p", is now "q"'),
        ({"doc_hash": "e"}, 'doc_hash was "d", is now "e"'),
        ({"prompt_tokens": 6}, "prompt_tokens was 5, is now 6"),
        ({"decoding": {**ASKED["decoding"], "budget": 9}}, "decoding.budget was 8, is now 9"),
        (
            {"decoding": {"budget": 8, "stops": ["x"]}},
            "temperature was 0.0, is now absent",
        ),
    ],
)
def test_a_record_of_another_question_is_no_answer(tmp_path, change, message):
    write(tmp_path, record())
    with pytest.raises(FlyError) as caught:
        finished_requests.FinishedRequests(tmp_path, "s").text({**ASKED, **change})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_records_that_nobody_asks_for_are_refused(tmp_path):
    """Also of a task that is asked for nothing any more: its counts were kept in the statistics."""
    write(tmp_path, record())
    found = finished_requests.FinishedRequests(tmp_path, "s")
    found.note_asked([{**ASKED, "task": "other"}])  # lm-eval may ask again
    found.note_asked([ASKED, {**ASKED, "doc_id": 5}])
    found.check_all_asked()
    refused = pytest.raises(FlyError, match="task t, doc 3 is no longer asked for")
    with refused:
        finished_requests.FinishedRequests(tmp_path, "s").note_asked([{**ASKED, "doc_id": 5}])
    found = finished_requests.FinishedRequests(tmp_path, "s")
    found.note_asked([{**ASKED, "task": "other"}])
    with refused:
        found.check_all_asked()


@pytest.mark.parametrize("text", [None, 3, ["a"], "\ud800"])
def test_what_is_no_text_is_no_answer(tmp_path, text):
    """null became the answer "None", and half of a surrogate pair ended in lm-eval's traceback."""
    written_runs.write_lines(tmp_path / "fly_requests_s.jsonl", [record(text=text)])
    with pytest.raises(FlyError, match=re.escape(f"text={text!r} ({tmp_path}")):
        finished_requests.FinishedRequests(tmp_path, "s")


def test_only_finished_requests_stay_in_the_trace(tmp_path):
    """A traced request whose record was not written is decoded, and traced, again."""
    write(tmp_path, record())
    kept = {"task_name": "t", "doc_id": 3, "idx": 0, "repeat": 0, "request": 4, "finish": "eos"}
    lost = {**kept, "repeat": 1, "request": 9}
    write(tmp_path, kept, lost, tail='{"task_na', name="fly_trace_s.jsonl")
    found = finished_requests.FinishedRequests(tmp_path, "s")
    assert found.traced_requests == 5
    found.drop_unfinished_rounds()
    path = tmp_path / "fly_trace_s.jsonl"
    assert path.read_text() == json.dumps(kept) + "\n"
    path.write_text(path.read_text() + json.dumps(lost) + "\n")
    found.drop_unfinished_rounds()  # once only: what has joined since stays
    assert len(path.read_text().splitlines()) == 2


def test_without_files_nothing_is_finished(tmp_path):
    found = finished_requests.FinishedRequests(tmp_path, "s")
    assert (len(found), found.traced_requests, found.stats.requests) == (0, 0, 0)


def test_every_run_has_a_manifest_of_its_own(tmp_path):
    """Two runs started in one second would share a file of records."""
    first = create(tmp_path)
    second = create(tmp_path)
    assert first.path != second.path
    assert manifest.find(str(tmp_path)).started == second.started
    second.finish(tmp_path / "results_x.json")
    assert manifest.find(str(tmp_path)).started == first.started
    assert manifest.find(str(first.path)).started == first.started
    assert manifest.find(str(tmp_path / "out.json")).started == first.started
    first.finish(tmp_path / "results_y.json")
    assert manifest.find(str(tmp_path)).results == tmp_path / "results_x.json"
    for one in (first, second):
        one.release()
    assert sorted(path.name for path in tmp_path.iterdir()) == [first.path.name, second.path.name]


def test_of_runs_that_share_a_folder_the_named_one_goes_on(tmp_path):
    """`--resume a.json` went on with b.json's run, the newer one."""
    named = [tmp_path / "a.json", tmp_path / "b.json"]
    runs = [Manifest.create(tmp_path, {"output_path": str(path)}) for path in named]
    assert [manifest.find(str(path)).path for path in named] == [run.path for run in runs]
    assert manifest.find(str(tmp_path)).path == runs[1].path
    with pytest.raises(FlyError, match=r"c\.json: holds no fly_run"):
        manifest.find(str(tmp_path / "c.json"))


def test_one_process_at_a_time(tmp_path):
    first = create(tmp_path)
    other = Manifest.read(first.path)
    assert not other.hold()
    first.release()
    assert other.hold()
    other.release()


def test_a_lock_whose_process_was_killed_before_its_manifest_was_written_is_removed(tmp_path):
    orphan, held = (Manifest(tmp_path / f"fly_run_{name}.json", {}) for name in ("a", "b"))
    for run in (orphan, held):
        assert run.hold()
    orphan.lock.release()  # as the system does for a killed process: the file stays
    assert len([*tmp_path.glob(".fly_run_*.lock")]) == 2
    create(tmp_path)
    assert not (tmp_path / ".fly_run_a.lock").exists()
    assert (tmp_path / ".fly_run_b.lock").exists()


def test_facts_are_noted_once_and_then_compared(tmp_path):
    first = create(tmp_path)
    first.agree("facts", {"target": {"files": {"a.json": "1"}}, "many": (1, 2)})
    again = Manifest.read(first.path)
    again.agree("facts", {"target": {"files": {"a.json": "1"}}, "many": (1, 2)})
    with pytest.raises(FlyError, match=r'facts\.target\.files\.a\.json was "1", is now "2": '):
        again.agree("facts", {"target": {"files": {"a.json": "2"}}, "many": (1, 2)})
    with pytest.raises(FlyError, match=r"facts\.new was absent, is now 3"):
        again.agree("facts", {"target": {"files": {"a.json": "1"}}, "many": (1, 2), "new": 3})
    # a configuration key that an earlier fly did not have yet, at its default
    again.agree("facts", {"target": {"files": {"a.json": "1"}}, "many": (1, 2), "new": None})
    first.release()


def test_a_kill_while_saving_leaves_the_old_manifest(tmp_path, monkeypatch):
    found = create(tmp_path)

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    found.data["x"] = 1
    with pytest.raises(KeyboardInterrupt):
        found.save()
    monkeypatch.undo()
    assert "x" not in manifest.find(str(tmp_path)).data
    found.release()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "holds no fly_run_"),
        ("{", "not valid JSON"),
        ('{"format": 99}', "not a run's manifest of this version"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "fly_run_x.json").write_text(text)
    with pytest.raises(FlyError, match=message):
        manifest.find(str(tmp_path))
    with pytest.raises(FlyError, match="no such folder"):
        manifest.find(str(tmp_path / "nowhere"))


WHOLE = {
    "format": 1, "started": "x", "finished": False, "results": None, "resumed": [],
    "working_directory": ".", "below": False, "arguments": {"output_path": "x"},
}  # fmt: skip
MANIFESTS = [
    ({"models": 5}, "models=5 ({}, a run's manifest): input should be a valid dictionary"),
    ({"models": {"target": 5}}, "models.target=5 ({}"),
    ({"models": {"target": {"commit": "c"}}}, "models.target.path is missing ({}"),
    ({"models": {"peft": {"path": "p", "files": 5}}}, "models.peft.files=5 ({}"),
    ({"arguments": {"output_path": "x", "model_args": "a=1"}}, "arguments.model_args='a=1' ({}"),
    ({"arguments": {"output_path": "x", "frobnicate": 1}}, "{}: arguments.frobnicate: `fly run`"),
    ({"arguments": {"output_path": "x", "limits": 1}}, "no such flag: did you mean 'limit'?"),
    ({"arguments": {"output_path": "x", "func": "f"}}, "{}: arguments.func: `fly run` has no such"),
    ({"finished": True}, "{}: finished=true, and the folder holds no results file None: "),
    ({"finished": True, "results": "gone.json"}, "{}: finished=true, and the folder holds no res"),
]


@pytest.mark.parametrize(("change", "message"), MANIFESTS)
def test_a_damaged_manifest_is_refused_in_one_line(tmp_path, change, message):
    path = tmp_path / "fly_run_x.json"
    path.write_text(json.dumps({**WHOLE, **change}))
    with pytest.raises(FlyError, match=re.escape(message.format(path))):
        resume.reopen(argparse.Namespace(resume=str(tmp_path)), {}, {})


def test_a_finished_run_without_all_its_records_has_not_ended(tmp_path):
    """It was said to have ended, with status 0."""
    folder = written_runs.write(tmp_path / "run", "fly", [1, 0])
    (results,) = folder.glob("results_*")
    seconds = {"prefill": 1, "draft": 1, "verify": 1, "other": 1}
    stats = {"requests": 2, "emitted": 9, "rounds": 3, "tau": 3.0, "seconds": seconds}
    value = json.loads(results.read_text())
    value["config"]["fly"]["stats"] = stats
    results.write_text(json.dumps(value))
    data = {**WHOLE, "started": written_runs.STARTED, "finished": True, "results": results.name}
    path = folder / f"fly_run_{written_runs.STARTED}.json"
    path.write_text(json.dumps(data))
    given = argparse.Namespace(resume=str(folder))
    assert resume.reopen(given, {}, {}).finished
    records = folder / f"fly_requests_{written_runs.STARTED}.jsonl"
    records.write_text(records.read_text().splitlines()[0] + "\n")
    words = re.escape(f"{path}: finished=true, and the folder holds 1 of 2 records")
    with pytest.raises(FlyError, match=words):
        resume.reopen(given, {}, {})


def test_a_folder_in_place_of_records_is_named(tmp_path):
    (tmp_path / "fly_requests_s.jsonl").mkdir()
    with pytest.raises(FlyError, match=r"fly_requests_s\.jsonl: cannot be read: Is a directory"):
        finished_requests.FinishedRequests(tmp_path, "s")


@pytest.mark.parametrize(
    ("rounds", "tokens", "message"),
    [
        (2, [7, 8, 9], None),
        (0, [7, 8, 9], "fly_trace_s.jsonl: holds 0 of 2 rounds of task t, doc 3"),
        (1, [7, 8, 9], "fly_trace_s.jsonl: holds 1 of 2 rounds of task t, doc 3"),
        (2, [7, 9], "fly_vocabulary_s.jsonl: holds no token 8"),
        (2, [], "fly_vocabulary_s.jsonl: holds no token 7"),
    ],
)
def test_a_run_with_a_trace_goes_on_with_the_whole_trace(tmp_path, rounds, tokens, message):
    """Without its file, the finished requests were left out of it."""
    write(tmp_path, record())
    line = {"task_name": "t", "doc_id": 3, "idx": 0, "repeat": 0, "request": 4}
    lines = [{**line, "draft": [7], "choice": [8, 9]}] * rounds
    write(tmp_path, *lines, name="fly_trace_s.jsonl")
    write(tmp_path, *({"id": token} for token in tokens), name="fly_vocabulary_s.jsonl")
    assert len(finished_requests.FinishedRequests(tmp_path, "s")) == 1  # a run without a trace
    if message is None:
        finished_requests.FinishedRequests(tmp_path, "s", is_traced=True)
        return
    with pytest.raises(FlyError, match=re.escape(f"{tmp_path}/{message}")):
        finished_requests.FinishedRequests(tmp_path, "s", is_traced=True)


def test_arguments_are_what_lm_eval_sees_without_secrets(tmp_path):
    """Values of --config lie under the command line's; a token must not reach the disk."""
    (tmp_path / "run.yaml").write_text(
        "tasks: [a]\nlimit: 9\nmodel_args: x=1\ngen_kwargs: max_gen_toks=3\n"
        "wandb_args: project=p,api_key=s\nlog_samples: false\n"
    )
    args = argparse.Namespace(
        command="run", func=print, config=str(tmp_path / "run.yaml"), resume=None, tasks=None,
        limit=0.0, model_args={"dtype": "float32", "token": "s"}, seed=[0, None],
        hf_hub_log_args={"token": "s", "org": "o"},
    )  # fmt: skip
    merged = merge_config(args)
    assert merged == {"tasks", "gen_kwargs", "wandb_args", "log_samples"}
    assert resume.split_secrets(args)[0] == {
        "tasks": ["a"], "limit": 0.0, "model_args": {"dtype": "float32"}, "seed": [0, None],
        "gen_kwargs": {"max_gen_toks": 3}, "hf_hub_log_args": {"org": "o"},
        "wandb_args": {"project": "p"}, "log_samples": False,
    }  # fmt: skip


def test_the_namespace_becomes_the_run_s(tmp_path, monkeypatch):
    """Paths are the run's wherever it lies now; a token is passed on, and never noted."""
    folder = tmp_path / "out" / "m"
    folder.mkdir(parents=True)
    noted = {
        "output_path": "gone/out", "limit": 2.0, "hf_hub_log_args": {"org": "o"},
        "model_args": {"dtype": "float32"},
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)
    run = Manifest.create(folder, noted)
    run.release()
    monkeypatch.chdir(folder)
    args = argparse.Namespace(
        resume=str(tmp_path / "out"), config="x", hf_hub_log_args={"token": "s"}, limit=None,
        model_args={"token": "t"}, trackio_args="project=p,HF_TOKEN=u",  # of --config's file
    )  # fmt: skip
    _, secrets = resume.split_secrets(args)
    found = resume.reopen(args, {"output_path": "..", "hf_hub_log_args": {}, "limit": 2.0}, secrets)
    assert found.path == run.path
    assert (args.config, args.limit, args.output_path) == (None, 2.0, str(tmp_path / "out"))
    assert args.hf_hub_log_args == {"org": "o", "token": "s"}
    assert args.model_args == {"dtype": "float32", "token": "t"}
    assert args.trackio_args == {"HF_TOKEN": "u"}
    assert os.getcwd() == str(tmp_path)
    with pytest.raises(FlyError, match=r'--output_path was "gone/out", is now "else"'):
        resume.reopen(args, {"output_path": "else"}, {})


def test_a_model_is_known_by_its_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1")
    (tmp_path / "README.md").write_text("words")
    first = fingerprint.hash_model(ModelSource(str(tmp_path)))
    (tmp_path / "README.md").write_text("other words")
    assert fingerprint.hash_model(ModelSource(str(tmp_path))) == first
    (tmp_path / "model.safetensors").write_bytes(b"2")
    assert fingerprint.hash_model(ModelSource(str(tmp_path))) != first
    (tmp_path / "x.gguf").write_bytes(b"")
    os.truncate(tmp_path / "x.gguf", 2**24 + 1)
    one = fingerprint.hash_model(ModelSource(str(tmp_path), "x.gguf"))
    os.utime(tmp_path / "x.gguf", (0, 0))  # a copy of the same file is the same model
    assert fingerprint.hash_model(ModelSource(str(tmp_path), "x.gguf")) == one
    os.truncate(tmp_path / "x.gguf", 2**24)
    with open(tmp_path / "x.gguf", "ab") as file:
        file.write(b"1")
    assert fingerprint.hash_model(ModelSource(str(tmp_path), "x.gguf")) != one
    assert fingerprint.hash_model(ModelSource("no-org/no-model")) == {
        "path": "no-org/no-model",
        "commit": None,
    }


def test_a_torn_vocabulary_is_mended_and_not_written_twice(tmp_path):
    path = tmp_path / "fly_vocabulary_x.jsonl"
    path.write_text('{"id": 5, "text": "a"}\n{"id": 7, "te')
    found = finished_requests.FinishedRequests(tmp_path, "x")
    assert found.traced_tokens == {5}
    assert path.read_text() == '{"id": 5, "text": "a"}\n'


def test_a_lock_is_let_go_before_its_file_goes(tmp_path, monkeypatch):
    """While held, the next to come would lock a second file; and Windows removes no open one."""
    run = create(tmp_path)
    lock = run.lock
    held = []
    unlink = type(tmp_path).unlink
    monkeypatch.setattr(
        type(tmp_path), "unlink", lambda self, **k: held.append(lock.is_locked) or unlink(self, **k)
    )
    run.finish(tmp_path / "results.json")
    run.release()
    assert held == [False]
    assert not list(tmp_path.glob(".*"))


def test_a_run_has_ended_only_when_all_that_it_leaves_is_there(tmp_path):
    """Results that could not be saved (lm-eval only warns) and records that somebody removed ended
    with status 0, as a finished run."""
    folder = written_runs.write(tmp_path / "run", "fly", [1, 0])
    (results,) = folder.glob("results_*")
    (samples,) = folder.glob("samples_*")
    records = folder / f"fly_requests_{written_runs.STARTED}.jsonl"
    facts = {"started": written_runs.STARTED, "finished": False}
    noted = Manifest(folder / f"fly_run_{written_runs.STARTED}.json", facts)
    entry = {"stats": {"requests": 2}}
    run = RunContext(folder, started=written_runs.STARTED, results_entry=lambda: entry)

    def refused(path, message):
        whole = path.read_text()
        path.unlink()
        with pytest.raises(FlyError, match=message):
            resume._finish(run, noted, {"log_samples": True})
        assert not noted.finished
        path.write_text(whole)

    refused(results, "run: the results could not be saved")
    refused(samples, "samples_.* is not beside it")
    refused(records, r"run: holds 0 of 2 records: files were removed while the run went on")
    run.finished_requests = finished_requests.FinishedRequests(tmp_path, "s")
    resume._finish(run, noted, {"log_samples": True})
    assert noted.finished
    write(tmp_path, record())
    run.finished_requests = finished_requests.FinishedRequests(tmp_path, "s")
    with pytest.raises(FlyError, match="task t, doc 3 is no longer asked for"):
        resume._finish(run, noted, {})
