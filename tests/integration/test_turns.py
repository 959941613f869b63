"""Tasks of several turns: every further turn is a request with the answers before it."""

# ruff: noqa: F811  fixtures by their names

import json

import pytest
from lm_eval.api.instance import Instance

from fly.errors import FlyError
from fly.harness import task_data, turns
from fly.harness.hf import FlyLM
from fly.runs import reader
from tests.fault_server import FaultServer
from tests.integration.test_cli import config_file, run  # noqa: F401  fixtures
from tests.integration.test_lm import fly_lm

ROWS = [
    {"question_id": 1, "category": "writing", "turns": ["say a ", "say b "]},
    {"question_id": 2, "category": "qa", "turns": ["say c "]},
    {"question_id": 3, "category": "writing", "turns": ["say d ", "say e ", "say f "]},
]


@pytest.fixture
def questions(tmp_path, monkeypatch):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "spec_bench.jsonl").write_text(lines, encoding="utf-8-sig")  # as some editors do
    monkeypatch.setenv("FLY_DATA_DIR", str(tmp_path))


def command(saved_pair, config_file, out, *more):
    pair = f"pretrained={saved_pair / 'draft'},config_path={config_file},dtype=float32"
    return [
        "--model", "hf", "--model_args", pair, "--tasks", "spec_bench", "--device", "cpu",
        "--gen_kwargs", "max_gen_toks=6", "--output_path", out, "--log_samples", *more,
    ]  # fmt: skip


def test_every_turn_follows_the_answers_before_it(
    saved_pair, config_file, questions, tmp_path, capfd
):
    """Records of six requests, three responses; a batch changes nothing; compared by category."""
    found = []
    for batch in ("1", "3"):
        out = tmp_path / f"out{batch}"
        assert run(*command(saved_pair, config_file, out, "--batch_size", batch)) == 0
        loaded = reader.load(out)
        by_turn = {(r["doc_id"], r["idx"]): r for r in loaded.outputs}
        assert set(by_turn) == {(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)}
        (task,) = loaded.tasks.values()
        texts = [task.samples[i].responses[0] for i in range(3)]
        lines = [json.loads(line) for line in next(out.rglob("fly_requests*")).open()]
        for doc_id, text in enumerate(texts):
            own = sorted((r for r in lines if r["doc_id"] == doc_id), key=lambda r: r["idx"])
            assert text == "\n\n".join(r["text"] for r in own)
            grows = [r["prompt_tokens"] for r in own]
            assert grows == sorted(set(grows))
        found.append(texts)
    assert found[0] == found[1]
    capfd.readouterr()
    assert run("compare", tmp_path / "out1", tmp_path / "out3", "--by", "category") == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert "spec_bench has no score to compare: 3 of 3 texts equal" in printed
    assert "spec_bench: writing (2)" in printed


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_server_is_asked_for_further_turns_by_the_chat_template(
    saved_pair, questions, tmp_path, api
):
    with FaultServer("plain") as server:
        arguments = f"base_url={server.url},tokenizer={saved_pair / 'target'},api={api}"
        assert run(
            "--model", "server", "--model_args", arguments, "--tasks", "spec_bench",
            "--gen_kwargs", "max_gen_toks=6", "--apply_chat_template", "--output_path", tmp_path,
            "--log_samples",
        ) == 0  # fmt: skip
        asked = [body.get("messages", body.get("prompt")) for body in server.bodies]
    (last,) = [each for each in asked if "say e " in str(each) and "say f " in str(each)]
    roles = ["user", "assistant"] * 2 + ["user"]
    if api == "chat":
        assert [message["role"] for message in last] == roles
    else:
        assert all(f"[{role}]" in last for role in roles)
        assert last.startswith("[user]say d [assistant]")


def test_a_run_that_was_cut_off_between_turns_goes_on(saved_pair, config_file, questions, tmp_path):
    """Records of second turns are no requests of another run."""
    out = tmp_path / "out"
    assert run(*command(saved_pair, config_file, out)) == 0
    (task,) = reader.load(out).tasks.values()
    whole = [task.samples[i].responses[0] for i in range(3)]
    for path in (*out.rglob("results_*"), *out.rglob("samples_*")):
        path.unlink()
    (records,), (manifest,) = out.rglob("fly_requests_*"), out.rglob("fly_run_*")
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:4]))
    facts = json.loads(manifest.read_text()) | {"finished": False, "results": None}
    manifest.write_text(json.dumps(facts))
    assert run("--resume", out) == 0
    loaded = reader.load(out)
    (task,) = loaded.tasks.values()
    assert [task.samples[i].responses[0] for i in range(3)] == whole
    assert len(loaded.requests) == 6


def test_contexts_with_and_without_a_chat_template():
    doc = {"turns": ["a", "b", "c"], turns.FIELD: ["b", "c"]}
    instance = Instance("generate_until", doc, ("a", {}), 0, metadata=("t", 7, 1))
    seen = []

    def generate(asked):
        seen.extend((each.doc_id, each.idx, each.args[0]) for each in asked)
        return [f"<{each.args[0]}>" for each in asked]

    assert turns.answer_all([instance], generate, lambda *_: None, 1) == ["<a>\n\n<a<a>\n\nb\n\n>"]
    assert seen == [(7, 0, "a"), (7, 1, "a<a>\n\nb\n\n")]
    seen.clear()

    def render(first, messages):
        assert first == "a"
        return " ".join(f"{m['role'][0]}:{m['content']}" for m in messages)

    turns.answer_all([instance], lambda asked: generate(asked), render, 2)
    assert [context for *_, context in seen][1:] == [
        "u:a a:<a> u:b", "u:a a:<a> u:b a:<u:a a:<a> u:b> u:c",
    ]  # fmt: skip


def in_turns(*prompts, **kwargs):
    """Requests of one document, whose second turn says "say b "."""
    doc = {"turns": ["say a ", "say b "], turns.FIELD: ["say b "]}
    gen = {"max_gen_toks": 4, **kwargs}
    return [Instance("generate_until", doc, (p, gen), 0, metadata=("t", 0, 1)) for p in prompts]


@pytest.fixture
def asked(monkeypatch):
    """The prompts that fly's model encodes."""
    found, own = [], FlyLM.encode_prompt

    def encode(self, text, room):
        found.append(text)
        return own(self, text, room)

    monkeypatch.setattr(FlyLM, "encode_prompt", encode)
    return found


def test_further_turns_stand_behind_their_own_system_message(saved_pair, asked):
    """lm-eval renders all tasks' prompts before it asks; the next evaluation's, too, before fly
    knows of it."""
    lm = fly_lm(saved_pair)
    user = [{"role": "user", "content": "say a "}]
    plain = lm.apply_chat_template(user)
    graded = lm.apply_chat_template([{"role": "system", "content": "Grade."}, *user])
    for _ in range(2):
        lm.generate_until(in_turns(plain))
        lm.generate_until(in_turns(graded))
        lm.results_entry()
    ends = [text for text in asked if text.endswith("[user]say b ")]
    assert len(ends) == 4
    assert all(text.startswith("[user]say a [assistant]") for text in ends[::2])
    assert all(text.startswith("[system]Grade.[user]say a [assistant]") for text in ends[1::2])


def test_samples_of_one_document_are_told_apart_in_all_turns(saved_pair, monkeypatch):
    """Their second prompts differ, so that both were the first of their kind: two records of one
    name, which --resume refuses."""
    lm = fly_lm(saved_pair)
    kept, own = [], lm.build_requests

    def build(instances):
        kept.append(own(instances))
        return kept[-1]

    monkeypatch.setattr(lm, "build_requests", build)
    texts = lm.generate_until(in_turns("say a ", "say a ", do_sample=True, temperature=3.0))
    assert texts[0] != texts[1]
    assert [[(r.tag.idx, r.repeat) for r in of_turn] for of_turn in kept] == [
        [(0, 0), (0, 1)],
        [(1, 0), (1, 1)],
    ]


@pytest.mark.parametrize("given", [None, "say a ", []], ids=str)
def test_a_document_needs_its_first_turn(saved_pair, given):
    (request,) = in_turns("say a ")
    request.doc["turns"] = given
    with pytest.raises(FlyError, match="t, document 0: its field further_turns needs a field turn"):
        fly_lm(saved_pair).generate_until([request])


def test_data_that_is_not_there_is_one_line(monkeypatch, tmp_path):
    monkeypatch.delenv("FLY_DATA_DIR", raising=False)
    with pytest.raises(FlyError, match=r"spec_bench\.jsonl is not on the hub: set FLY_DATA_DIR"):
        task_data.turns(("spec_bench.jsonl",))


@pytest.mark.parametrize("given", ["say a", [], ["say a", 3]])
def test_turns_are_a_list_of_texts(given, tmp_path, monkeypatch):
    """A text in place of the list was asked letter by letter."""
    (tmp_path / "spec_bench.jsonl").write_text(json.dumps({"category": "qa", "turns": given}))
    monkeypatch.setenv("FLY_DATA_DIR", str(tmp_path))
    with pytest.raises(FlyError, match=r"turns.*=.* \(spec_bench\.jsonl, row 1\): "):
        task_data.turns(("spec_bench.jsonl",))


@pytest.fixture
def kept_prompts(tmp_path, monkeypatch):
    """The folder where lm-eval keeps prompts for --cache_requests."""
    monkeypatch.setattr("lm_eval.caching.cache.PATH", str(tmp_path / "prompts"))


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        (("--use_cache", "{}/cache"), "--use_cache: it would give a document's first answer"),
        (
            ("--apply_chat_template", "--cache_requests", "true"),
            "--cache_requests: further turns need the chat",
        ),
    ],
)
def test_caches_are_refused(
    saved_pair, config_file, questions, kept_prompts, tmp_path, capfd, flag, words
):
    more = [word.format(tmp_path) for word in flag]
    assert run(*command(saved_pair, config_file, tmp_path / "out", *more)) == 2
    assert words in capfd.readouterr().err


@pytest.mark.slow
def test_kept_prompts_are_of_one_api(saved_pair, questions, kept_prompts, tmp_path):
    """The text that completions is asked for was sent to chat as the user's message."""
    (tmp_path / "spec_bench.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    with FaultServer("plain") as server:
        for api in ("completions", "chat"):
            arguments = f"base_url={server.url},tokenizer={saved_pair / 'target'},api={api}"
            assert run(
                "--model", "server", "--model_args", arguments, "--tasks", "spec_bench",
                "--gen_kwargs", "max_gen_toks=6", "--apply_chat_template", "--cache_requests",
                "true", "--log_samples", "--output_path", tmp_path / api,
            ) == 0  # fmt: skip
        (asked,) = [
            body["messages"] for body in server.bodies if "say c" in str(body.get("messages"))
        ]
    assert asked == [{"role": "user", "content": "say c "}]
