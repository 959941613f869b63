"""Outputs of earlier runs: kept as ids, found by task and prompt, never under another
tokenizer's ids."""

import base64
import json
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fly.errors import FlyError
from fly.models.fingerprint import as_one
from fly.runs import output_ids, reader, shapes
from fly.runs.earlier_outputs import EarlierOutputs, Matcher, target_of
from tests import tiny, written_runs

PROMPT = written_runs.digest("p")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.byte_tokenizer()


def record(doc_id=0, ids=None, tokenizer="", text="text", prompt=PROMPT, **more):
    output = {} if ids is None else {"output": {"ids": output_ids.encode(ids)}}
    if output:
        output["output"]["tokenizer"] = tokenizer
    return {"task": "t", "doc_id": doc_id, "prompt_hash": prompt, "text": text, **output, **more}


def write(folder, *records, started="2026-01-01T00-00-00", manifest=None):
    folder.mkdir(parents=True, exist_ok=True)
    written_runs.write_lines(folder / f"fly_requests_{started}.jsonl", records)
    if manifest is not None:
        whole = {
            "format": 1, "started": started, "finished": False, "results": None, "resumed": [],
            "working_directory": ".", "below": False, "arguments": {"output_path": "x"},
        }  # fmt: skip
        (folder / f"fly_run_{started}.json").write_text(json.dumps({**whole, **manifest}))
    return folder


def find(tokenizer, *paths, doc_id=0, prompt=PROMPT, own=None, budget=64):
    matcher = Matcher(EarlierOutputs.read(map(str, paths), own), tokenizer)
    return matcher.outputs("t", doc_id, prompt, budget), matcher.counts


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_are_what_was_encoded(ids):
    assert output_ids.decode(output_ids.encode(ids)) == tuple(ids)


def test_ids_take_few_bytes():
    """docs/compare.md says how many; evenly drawn ids compress worst."""
    drawn = random.Random(0)
    ids = [drawn.randrange(150_000) for _ in range(400)]
    assert len(output_ids.encode(ids)) < 4.5 * len(ids)


@pytest.mark.parametrize("text", ["", "no base64!", "AAAA", "\u00e9"])
def test_damaged_ids_are_refused_with_file_and_line(tmp_path, tokenizer, text):
    bad = record(1)
    bad["output"] = {"ids": text, "tokenizer": "x"}
    folder = write(tmp_path / "run", record(), bad)
    with pytest.raises(FlyError, match=r"output\.ids=.* \(.*fly_requests_.*jsonl, line 2\)"):
        EarlierOutputs.read([str(folder)])


def test_ids_that_decompress_to_gigabytes_are_refused():
    """They took minutes, and the memory."""
    stream = zlib.compressobj(9)
    data = b"".join(stream.compress(bytes(1 << 20)) for _ in range(8)) + stream.flush()
    whole = base64.b64encode(data).decode()
    assert len(whole) < 12_000
    with pytest.raises(ValueError, match="more than 1048576 token ids"):
        output_ids.decode(whole)


def test_no_more_of_an_output_is_encoded_than_a_request_can_use(tmp_path, tokenizer):
    """A text of 10 MB took half a minute."""
    own = output_ids.tokenizer_hash(tokenizer)
    encoded = []

    class Noting:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def encode(self, text, **kwargs):
            encoded.append(text)
            return tokenizer.encode(text, **kwargs)

    folder = write(tmp_path / "run", record(text="ab" * 500))
    found, counts = find(Noting(), folder, budget=7)
    assert (found, counts["matched"]) == ((tuple(tokenizer.encode("abababa")),), 1)
    assert [len(text) for text in encoded] == [7 * len("<pad>")]
    folder = write(tmp_path / "run", record(ids=[*range(40)], tokenizer=own))
    assert find(tokenizer, folder, budget=7)[0] == (tuple(range(7)),)


def test_half_of_a_surrogate_pair_is_named(tmp_path, tokenizer):
    """The tokenizer ended in a traceback."""
    folder = write(tmp_path / "run", record(text="\ud800"))
    with pytest.raises(FlyError, match=r"text='\\ud800' \(.*fly_requests_.*jsonl, line 1\)"):
        find(tokenizer, folder)
    folder = written_runs.write(tmp_path / "hf", None, [1], responses=["\ud800"])
    with pytest.raises(FlyError, match=r"response='\\ud800' \(.*results_.*json, document 0\)"):
        find(tokenizer, folder)


def test_a_tokenizer_is_known_by_vocabulary_and_special_tokens(tokenizer):
    other = tiny.byte_tokenizer()
    assert output_ids.tokenizer_hash(other) == output_ids.tokenizer_hash(tokenizer)
    other.add_tokens(["new"])
    assert output_ids.tokenizer_hash(other) != output_ids.tokenizer_hash(tokenizer)
    special = tiny.byte_tokenizer()
    special.add_special_tokens({"additional_special_tokens": ["a"]})
    assert output_ids.tokenizer_hash(special) != output_ids.tokenizer_hash(tokenizer)


def test_ids_of_this_tokenizer_are_used_as_they_are(tmp_path, tokenizer):
    """In the order of the repeats, though these end in any order, and each output once."""
    own = output_ids.tokenizer_hash(tokenizer)
    repeats = [([7, 257], 2), ([5, 6], 0), ([7, 257], 1)]
    records = [record(ids=ids, tokenizer=own, repeat=repeat) for ids, repeat in repeats]
    found, counts = find(tokenizer, write(tmp_path / "run", *records))
    assert found == ((5, 6), (7, 257))
    assert counts == {"matched": 1}


def test_ids_of_another_tokenizer_are_not_used(tmp_path, tokenizer):
    """The mutant without the check of the hash drafts [1, 2, 3] here."""
    folder = write(tmp_path / "run", record(ids=[1, 2, 3], tokenizer="another", text="ab"))
    found, counts = find(tokenizer, folder)
    assert found == (tuple(tokenizer.encode("ab")),)
    assert counts["matched"] == 1


def test_texts_without_ids_are_used_if_encoding_keeps_them(tmp_path, tokenizer):
    folder = write(tmp_path / "run", record(text="an \u00e9"))
    assert find(tokenizer, folder)[0] == (tuple(tokenizer.encode("an \u00e9")),)

    class Lossy:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def decode(self, ids, **kwargs):
            return tokenizer.decode(ids, **kwargs).replace("\u00e9", "e")

    found, counts = find(Lossy(), folder)
    assert (found, counts) == ((), {"untokenized": 1})


def test_ids_outside_of_the_vocabulary_never_come_through(tmp_path, tokenizer):
    own = output_ids.tokenizer_hash(tokenizer)
    for ids, matched in (([258], 1), ([259], 0), ([3, 2**32 - 1], 0)):
        folder = write(tmp_path / "run", record(ids=ids, tokenizer=own))
        found, counts = find(tokenizer, folder)
        assert (len(found), counts["untokenized"]) == (matched, 1 - matched)


def test_another_prompt_and_another_document_are_left_out_and_counted(tmp_path, tokenizer):
    """The mutant that looks documents up without their prompt drafts the old prompt's output."""
    folder = write(tmp_path / "run", record(0), record(1))
    assert find(tokenizer, folder, prompt="f" * 64) == ((), {"changed": 1})
    assert find(tokenizer, folder, doc_id=2, prompt="f" * 64) == (
        (),
        {"missing": 1},
    )
    newer = write(tmp_path / "newer", record(0, text="b", prompt="f" * 64))
    assert find(tokenizer, folder, newer)[0] == (tuple(tokenizer.encode("text")),)


def test_documents_that_are_numbered_anew_are_known_by_their_prompts(tmp_path, tokenizer):
    """With --samples, lm-eval numbers the documents that it picks from 0."""
    folder = write(tmp_path / "run", record(7))
    found, counts = find(tokenizer, folder, doc_id=0)
    assert found == (tuple(tokenizer.encode("text")),)
    assert counts == {"matched": 1}


def test_the_newest_run_of_a_folder_is_read_finished_or_not(tmp_path, tokenizer):
    write(tmp_path / "out/draft", record(text="old"), started="2026-01-01T00-00-00")
    newer = write(tmp_path / "out/draft", record(text="new"), started="2026-01-02T00-00-00")
    with (newer / "fly_requests_2026-01-02T00-00-00.jsonl").open("a") as file:
        file.write('{"task": "t", "doc_')  # a kill left half of a line
    assert find(tokenizer, tmp_path / "out")[0] == (tuple(tokenizer.encode("new")),)
    own = newer, "2026-01-02T00-00-00"  # a resumed run does not draft from itself
    assert find(tokenizer, tmp_path / "out", own=own)[0] == (tuple(tokenizer.encode("old")),)


def test_a_line_that_was_torn_inside_a_character_is_dropped(tmp_path):
    """A kill may end the file between the bytes of one: the whole file could not be read."""
    path = tmp_path / "fly_requests_2026-01-01T00-00-00.jsonl"
    record = {"task": "t", "doc_id": 0, "prompt_hash": "0" * 64, "text": "caf\u00e9"}
    whole = json.dumps(record, ensure_ascii=False).encode()
    path.write_bytes(whole + b"\n" + whole[:-3])
    assert path.read_bytes()[-1] == 0xC3
    assert len(reader.read_lines(path, shapes.OutputLine)) == 1
    path.write_bytes(whole[:-3] + b"\n" + whole + b"\n")  # in the middle it is no tear
    with pytest.raises(FlyError, match="not UTF-8"):
        reader.read_lines(path, shapes.OutputLine)


def test_a_finished_run_goes_before_a_newer_one_that_was_cut_short(tmp_path, tokenizer):
    """Tonight's run must not draft from the three records that last night's got to."""
    out, first = tmp_path / "out", "2026-01-01T00-00-00"
    write(out, record(text="old"), started=first)
    results = {"config": {"fly": {"started": first}}}
    (out / "results_2026-01-01T00-10-00.json").write_text(json.dumps(results))
    write(out, record(text="new"), started="2026-01-02T00-00-00")
    assert find(tokenizer, out)[0] == (tuple(tokenizer.encode("old")),)


def test_all_processes_records_are_read(tmp_path, tokenizer):
    folder = write(tmp_path / "run", record(0))
    written_runs.write_lines(folder / "fly_requests_2026-01-01T00-00-00_rank1.jsonl", [record(1)])
    assert find(tokenizer, folder, doc_id=1)[1]["matched"] == 1


def test_runs_of_lm_evals_hf_are_read_from_their_samples(tmp_path, tokenizer):
    folder = written_runs.write(tmp_path / "hf", None, [1, 0], repeats=2)
    earlier = EarlierOutputs.read([str(folder)])
    matcher = Matcher(earlier, tokenizer)
    found = matcher.outputs("sums", 1, written_runs.digest("question 1"), 64)
    assert found == (tuple(tokenizer.encode("text")),)
    assert earlier.same_target("whole-x") is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("nothing", None, "no such run: give a run's folder"),
        ("empty", "", "holds no results_.*: name a run's folder"),
        ("file.json", "{}", "not a results file of lm-eval"),
        ("file.json", "x", "not valid JSON"),
        ("base.json", '{"format": 1, "target": {}, "tasks": {}}', "the baseline holds no outputs"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, name, text, message):
    path = tmp_path / name
    if text:
        path.write_text(text)
    elif text is not None:
        path.mkdir()
    with pytest.raises(FlyError, match=message) as caught:
        EarlierOutputs.read([str(path)])
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_whose_outputs_they_are_is_known_by_the_target_s_files(tmp_path):
    """Of the moment when the run was made: what lies at the target's path now says nothing."""
    models = {"target": {"path": "m", "files": {"a.safetensors": "1 bytes"}}}
    folder = write(tmp_path / "run", record(), manifest={"models": models})
    earlier = EarlierOutputs.read([str(folder)])
    assert target_of(models) == as_one(models["target"]["files"])
    assert earlier.same_target(target_of(models)) is True
    changed = {"target": {"path": "m", "files": {"a.safetensors": "2 bytes"}}}
    assert earlier.same_target(target_of(changed)) is False
    tuned = {**models, "peft": {"path": "p", "files": {"b.safetensors": "3 bytes"}}}
    assert earlier.same_target(target_of(tuned)) is False
    assert earlier.same_target(None) is None
    unknown = EarlierOutputs.read([str(folder), str(write(tmp_path / "other", record()))])
    assert unknown.same_target(target_of(models)) is None
    assert target_of({"target": {"path": "org/m", "commit": "abc"}}) == "org/m@abc"
    assert target_of({"target": {"path": "org/m", "commit": None}}) is None


def test_the_digest_is_of_the_outputs(tmp_path):
    first = write(tmp_path / "a", record(0), record(1))
    same = write(tmp_path / "b", record(1), record(0), started="2026-01-03T00-00-00")
    other = write(tmp_path / "c", record(0), record(1, text="b"))
    digests = [EarlierOutputs.read([str(path)]).digest() for path in (first, same, other)]
    assert digests[0] == digests[1] != digests[2]
