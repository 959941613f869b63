"""--model server against a server that plays faults: nothing is lost, and nothing is doubled."""

import asyncio
import json
import queue
import random
import re
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import lm_eval.evaluator
import lm_eval.tasks
import pytest
from lm_eval.api.instance import Instance

pytest.importorskip("openai", reason="--model server needs the extra `server`")

from fly.cli import main as cli
from fly.harness import server as fly_server
from fly.harness import server_client
from fly.harness.server import ServerLM
from fly.harness.server_client import SharedClock, Told
from tests import killing, tiny
from tests.fault_server import PASSING, FaultServer, answer_of, score_of
from tests.integration.test_cli import write_task

DOCUMENTS = 24
TEXTS = {i: "".join(answer_of(f"q{i} ", 12)) for i in range(DOCUMENTS)}
UNEQUAL = (*killing.UNEQUAL, "server")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("server")
    tiny.byte_tokenizer().save_pretrained(root / "tokenizer")
    tiny.model(seed=1, vocab=tiny.TOKENIZER_VOCAB).config.save_pretrained(root / "tokenizer")
    write_task(root / "tasks", DOCUMENTS)
    (root / "tasks" / "choice.yaml").write_text(killing.CHOICE)
    return root


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
    monkeypatch.setattr(server_client, "_LONGEST_PAUSE", 0.02)


def arguments(place, server, out, more="", *flags, tasks="tiny_task"):
    return [
        *("--model", "server", "--tasks", tasks, "--include_path", str(place / "tasks")),
        *("--output_path", str(out), "--log_samples", "--model_args"),
        f"base_url={server.url},tokenizer={place / 'tokenizer'},timeout=1.5{more}",
        *flags,
    ]


def fly(*args):
    with pytest.raises(SystemExit) as caught:
        cli.main([str(arg) for arg in args])
        raise SystemExit(0)
    return caught.value.code


def records(folder):
    (path,) = folder.rglob("fly_requests_*.jsonl")
    return [json.loads(line) for line in path.open()]


def entry(folder):
    (path,) = folder.rglob("results_*.json")
    return json.loads(path.read_text())["config"]["fly"]


def texts(folder):
    found = records(folder)
    assert len(found) == len({line["doc_id"] for line in found})  # none doubled
    return {line["doc_id"]: line["text"] for line in found}


def test_every_passing_fault_is_overcome(place, tmp_path):
    rng = random.Random(5)
    faults = [fault for fault in PASSING for _ in range(2)] + [None] * 4
    rng.shuffle(faults)
    with FaultServer(faults=faults, delay=0.002) as server:
        assert fly(*arguments(place, server, tmp_path, ",num_concurrent=5")) == 0
        assert texts(tmp_path) == TEXTS
        assert {fault for fault in server.played if fault} == set(PASSING)
        assert server.answered.total() == DOCUMENTS  # answered: all, lost 0, doubled 0
        assert max(server.answered.values()) == 1
        assert server.asked.total() == DOCUMENTS + 2 * len(PASSING)
        assert 1 < server.most_under_way <= 5
    attempts = [line["server"]["attempts"] for line in records(tmp_path)]
    assert sum(attempts) == DOCUMENTS + 2 * len(PASSING)


def test_retry_after_is_obeyed(place, tmp_path):
    with FaultServer(faults=["429-later"] * 3) as server:
        assert fly(*arguments(place, server, tmp_path, ",num_concurrent=1")) == 0
    assert records(tmp_path)[0]["server"]["seconds"] > 0.9


@pytest.mark.parametrize(
    ("settings", "more", "said"),
    [
        ({"faults": [None, "cut"]}, "", "cut the answer at 2 tokens; the task allows 12"),
        ({"faults": [None, "filter"]}, "", "ended its answer with 'content_filter'"),
        ({"faults": [None, "400"]}, "", "refuses it: 400: played"),
        ({"faults": ["500"] * 99}, ",retries=3", "in 4 attempts; the last: 500: played"),
        (
            {"at_request": lambda server: setattr(server, "echoes", False)},
            "",
            "answered by the model another, the first by tiny",
        ),
        ({"context": 14}, "", "leaves no room for its output in the server's context of 14"),
        ({}, ",model=other", "model=other: not served at .*: give one of tiny"),
        ({"refused": {"stop"}}, "", "probe, .* Unrecognized request argument: stop"),
        ({"refused": {"top_k"}}, ",temperature=1,top_k=7", "Unrecognized request argument: top_k"),
        ({}, ",spd_k=4", "spd_k: how it decodes is up to the server"),
        ({}, ",api_key=abc", "a key would be written down: give api_key_env=NAME"),
        ({}, ",num_conc=4", "unknown model_args key 'num_conc' .*num_concurrent"),
        ({}, ",api_key_env=NO_SUCH", "api_key_env=NO_SUCH: no such environment variable"),
    ],
)
def test_other_faults_end_in_one_line(place, tmp_path, capfd, settings, more, said):
    flags = ["--gen_kwargs", "do_sample=True"] if "temperature" in more else []
    with FaultServer(**settings) as server:
        assert fly(*arguments(place, server, tmp_path, f",num_concurrent=1{more}", *flags)) == 2
        if "probe" in said or "room" in said:
            assert not server.asked  # refused before the first request
    line = [line for line in capfd.readouterr().err.splitlines() if line.startswith("fly: error")]
    assert len(line) == 1
    assert re.search(said, line[0])


def test_no_server(place, tmp_path, capfd):
    with FaultServer() as server:
        pass
    assert fly(*arguments(place, server, tmp_path)) == 2
    assert "is the server up" in capfd.readouterr().err


def test_an_error_loses_no_answer_and_resume_goes_on(place, tmp_path):
    with FaultServer(faults=[None] * 9 + ["400"]) as server:
        assert fly(*arguments(place, server, tmp_path, ",num_concurrent=1")) == 2
        assert len(records(tmp_path)) == 9
        assert fly("--resume", tmp_path) == 0
        assert texts(tmp_path) == TEXTS
        assert max(server.answered.values()) == 1


def test_a_server_with_another_model_is_noticed(place, tmp_path, capfd):
    def restart(server):
        if len(server.played) == 6:
            server.context += 1

    with FaultServer(at_request=restart) as server:  # at the end
        assert fly(*arguments(place, server, tmp_path, ",num_concurrent=1")) == 2
        assert "was restarted as another one: its context was 512, is now 513" in (
            capfd.readouterr().err
        )
        assert len(records(tmp_path)) == DOCUMENTS
        assert fly("--resume", tmp_path) == 2  # nor is a run of both finished
        assert "server.context was 512, is now 513" in capfd.readouterr().err
    with FaultServer(at_request=restart, faults=[None] * 5 + ["drop"]) as server:  # at once
        out = tmp_path / "dropped"
        assert fly(*arguments(place, server, out, ",num_concurrent=1")) == 2
        assert len(records(out)) == 5


@pytest.mark.parametrize("kind", ["llama.cpp", "vllm", *map(tiny.slow, ("sglang", "plain"))])
def test_acceptance_is_what_the_server_tells(place, tmp_path, capfd, kind):
    with FaultServer(kind) as server:
        assert fly(*arguments(place, server, tmp_path, ",num_concurrent=3")) == 0
    found = entry(tmp_path)
    stats, printed = found["stats"], capfd.readouterr().out
    rounds = sum(len(answer_of(f"q{i} ", 12)) // 3 for i in range(DOCUMENTS))
    emitted = sum(len(answer_of(f"q{i} ", 12)) for i in range(DOCUMENTS))
    assert found["mode"] == "server"
    assert found["server"]["kind"] in (kind, "vLLM", "SGLang", "server")
    assert stats["emitted"] == emitted
    told = kind != "plain"
    assert stats["drafted"] == 3 * rounds * told
    assert stats["native_accepted"] == 2 * rounds * told
    assert stats["tau"] == (round(emitted / rounds, 4) if kind == "sglang" else None)
    assert stats["al"] == (3.0 if kind in ("vllm", "sglang") else None)
    assert ("tau not told by the server" in " ".join(printed.replace("│", " ").split())) == (
        kind != "sglang"
    )
    if kind in ("vllm", "llama.cpp"):
        counters = found["server"]["counters"]
        assert counters["num_drafts"] >= rounds  # the probe's among them
        assert f"AL 1 + {counters['num_accepted_tokens']:.0f} / " in printed
    if kind == "llama.cpp":
        assert records(tmp_path)[0]["server"]["timings"]["prompt_ms"] == 1.5


def test_without_speculation_llama_cpp_tells_every_pass(place, tmp_path):
    with FaultServer(drafts=False) as server:
        assert fly(*arguments(place, server, tmp_path)) == 0
    stats = entry(tmp_path)["stats"]
    assert stats["drafted"] == 0
    assert stats["rounds"] == stats["emitted"]  # the prompt's pass gives the first
    assert stats["tau"] == 1


def test_what_is_sent(place, tmp_path):
    with FaultServer() as server:
        assert fly(*arguments(place, server, tmp_path / "a", ",seed=3")) == 0
        bodies = {body["prompt"]: body for body in server.bodies}
        assert fly(*arguments(place, server, tmp_path / "b", ",seed=3")) == 0
        assert {body["prompt"]: body["seed"] for body in server.bodies[DOCUMENTS:]} == {
            prompt: body["seed"] for prompt, body in bodies.items()
        }
    body = bodies["q0 "]
    assert body["stop"] == ["zzz"]
    assert (body["max_tokens"], body["temperature"], body["top_p"], body["top_k"]) == (12, 0, 1, -1)
    assert len({body["seed"] for body in bodies.values()}) == DOCUMENTS


def test_a_server_that_takes_openais_parameters_only(place, tmp_path):
    with FaultServer("plain", refused={"top_k", "min_p"}) as server:
        assert fly(*arguments(place, server, tmp_path)) == 0
        assert not {"top_k", "min_p"} & server.bodies[0].keys()
    assert texts(tmp_path) == TEXTS


def test_a_server_that_takes_four_stop_strings(place, tmp_path):
    """As vLLM 0.32 and OpenAI. The texts are cut at the fifth; an answer that went on to the limit
    behind it ended there all the same."""
    more = ("--gen_kwargs", '{"until": ["w", "x", "y", "z", "a"], "max_gen_toks": 5}')
    with FaultServer("plain", most_stops=4) as server:
        assert fly(*arguments(place, server, tmp_path, "", *more)) == 0
        assert server.bodies[0]["stop"] == ["w", "x", "y", "z"]
    whole = {i: answer_of(f"q{i} ") for i in range(DOCUMENTS)}
    given = {i: "".join(tokens[:5]) for i, tokens in whole.items()}
    assert texts(tmp_path) == {i: text.partition("a")[0] for i, text in given.items()}
    at_limit = {i for i, tokens in whole.items() if len(tokens) > 5}
    stopped = {i for i, text in given.items() if "a" in text}
    assert at_limit & stopped
    found = {r["doc_id"] for r in records(tmp_path) if r["finish_reason"] == "length"}
    assert found == at_limit - stopped


@pytest.mark.parametrize("kind", ["llama.cpp", "vllm"])
def test_decoding_begins_with_the_first_text(place, tmp_path, kind):
    """vLLM sends an empty text first."""
    with FaultServer(kind, delay=0.02) as server:
        assert fly(*arguments(place, server, tmp_path)) == 0
    for record in records(tmp_path):
        told, tokens = record["server"], len(TEXTS[record["doc_id"]].split())
        assert told["seconds"] - told["first_token_seconds"] > 0.01 * (tokens - 2)


def test_prompts_go_as_ids_where_the_server_adds_tokens_to_texts(place, tmp_path):
    with FaultServer(extra_tokens=1) as server:
        assert fly(*arguments(place, server, tmp_path)) == 0
        assert isinstance(server.bodies[0]["prompt"], list)
    assert entry(tmp_path)["server"]["prompts"] == "ids"


def test_chat(place, tmp_path):
    with FaultServer() as server:
        flags = ("--apply_chat_template",)
        assert fly(*arguments(place, server, tmp_path / "a", ",api=chat", *flags)) == 0
        assert server.bodies[0]["messages"][0]["role"] == "user"
        assert fly(*arguments(place, server, tmp_path / "b", "", *flags)) == 0
        assert server.bodies[-1]["prompt"].startswith("[user]q")
        assert fly(*arguments(place, server, tmp_path / "c", ",api=chat")) == 0
        assert server.bodies[-1]["messages"][0]["content"].startswith("q")


def test_keys_are_written_nowhere(place, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("THE_KEY", "sk-12345")
    monkeypatch.setenv("WRONG_KEY", "sk-98765")
    with FaultServer(key="sk-12345") as server:
        assert fly(*arguments(place, server, tmp_path, ",api_key_env=THE_KEY")) == 0
        assert fly(*arguments(place, server, tmp_path / "x", ",api_key_env=WRONG_KEY")) == 2
    printed = "".join(capfd.readouterr())
    assert "401: Incorrect API key: Bearer ***" in printed
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for key in ("sk-12345", "sk-98765"):
        assert key not in printed
        assert key.encode() not in written


def scored_from(ids, start):
    return sum(score_of(ids, number) for number in range(start, len(ids)))


def test_loglikelihoods(place, tmp_path):
    tokenizer = tiny.byte_tokenizer()
    with FaultServer() as server:
        lm = ServerLM(base_url=server.url, tokenizer=str(place / "tokenizer"))
        lm.max_length = 20
        pairs = [("q1", " a b"), *(("q2", letter) for letter in "cdefghij")]
        found = lm.loglikelihood(
            [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
        )
        for (context, continuation), (score, is_greedy) in zip(pairs, found):
            ids, start = tokenizer.encode(context + continuation), len(tokenizer.encode(context))
            assert score == pytest.approx(scored_from(ids, start))
            assert is_greedy == all(score_of(ids, i) == -0.1 for i in range(start, len(ids)))
        assert len({is_greedy for _, is_greedy in found}) == 2
        # a long text goes in windows, in which every token is scored once
        asked, text = [], "a text of some forty bytes, in windows."
        own = lm._loglikelihood_tokens
        lm._loglikelihood_tokens = lambda windows, *_: asked.extend(windows) or own(windows)
        (whole,) = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
        assert [token for *_, scored in asked for token in scored] == tokenizer.encode(text)
        assert all(len(start) + len(scored) < lm.max_length for _, start, scored in asked)
        parts = [scored_from([*start, *end], len(start)) for _, start, end in asked]
        assert whole == pytest.approx(sum(parts))
        assert fly(*arguments(place, server, tmp_path, tasks="tiny_choice")) == 0


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        (None, "gives no log-probabilities of a prompt's tokens"),
        (lambda ids, number: -1.0 * (len(ids) - number), "more or less when more text follows"),
    ],
)
def test_loglikelihoods_that_cannot_be_trusted(place, tmp_path, capfd, scores, said):
    with FaultServer(scores=scores) as server:
        assert fly(*arguments(place, server, tmp_path, tasks="tiny_choice")) == 2
    assert said in capfd.readouterr().err


def test_an_interruption_before_the_first_request_ends_all(monkeypatch):
    """The requests' loop was not there to be cancelled yet: all were asked, and thrown away."""
    asked, run = [], asyncio.run

    class Interrupted(queue.SimpleQueue):
        def get(self, *args):
            raise KeyboardInterrupt

    def start_late(coroutine):
        time.sleep(0.05)
        return run(coroutine)

    async def nothing(client):
        pass

    async def answer(client, item):
        asked.append(item)
        await asyncio.sleep(0.02)

    monkeypatch.setattr(fly_server, "SimpleQueue", Interrupted)
    monkeypatch.setattr(asyncio, "run", start_late)
    client = SimpleNamespace(open=lambda: nullcontext(), check_same=lambda: None)
    lm = SimpleNamespace(server=client, num_concurrent=2)
    with pytest.raises(KeyboardInterrupt):
        list(fly_server.ServerLM._ask_all(lm, range(20), nothing, answer))
    assert len(asked) <= 2


@pytest.mark.slow
def test_killed_at_random_and_resumed(place, tmp_path):
    rng, kills = random.Random(2), 0
    with FaultServer(delay=0.01) as server:
        out = tmp_path / "run"
        command = arguments(place, server, out, ",num_concurrent=3")
        for _ in range(4):
            wanted = rng.randrange(1, 6) + killing.count(out)
            run = killing.Run(command, tmp_path)
            kills += run.kill_when(lambda: killing.count(out) >= wanted, rng.random() * 0.02)  # noqa: B023
            command = ["--resume", str(out)]
        status, output = killing.Run(command, tmp_path).end()
        assert status == 0, output[-2000:]
        assert texts(out) == TEXTS
        assert kills == 4
        # an answer that was under way at a kill is asked for again, and no other
        assert server.asked.total() <= DOCUMENTS + 3 * kills + 3
    with FaultServer() as server:
        assert fly(*arguments(place, server, tmp_path / "unbroken")) == 0
    kept, unbroken = (
        [
            {key: value for key, value in line.items() if key not in UNEQUAL}
            for line in sorted(records(folder), key=lambda line: line["doc_id"])
        ]
        for folder in (out, tmp_path / "unbroken")
    )
    assert kept == unbroken


def test_shares_add_up_to_the_time_that_passed():
    clock = SharedClock()
    started = time.perf_counter()
    joined = [clock.read(1), None]
    time.sleep(0.02)
    joined[1] = clock.read(1)
    time.sleep(0.02)
    shares = clock.read(-1) - joined[0], clock.read(-1) - joined[1]
    assert sum(shares) == pytest.approx(time.perf_counter() - started, abs=2e-3)
    assert shares[0] > shares[1]


def test_drafts_of_several_lengths_have_no_positions():
    details = {
        "spec_verify_ct": 3,
        "spec_num_proposed_drafts": 5,
        "spec_num_correct_drafts": 4,
        "spec_correct_drafts_histogram": [0, 2, 1],
    }
    told = Told.of({"sglext": {"spec_tokens_details": details}}, "SGLang")
    assert (told.rounds, told.drafted, told.accepted) == (3, 5, 4)
    assert told.positions.drafts == 0


@pytest.mark.parametrize(
    "extras", [{"metrics": {"speculative_decoding": {"num_draft_tokens": 5}}}, {"timings": 3}]
)
def test_what_is_told_in_part_is_taken_in_part(extras):
    told = Told.of(extras, "vLLM")
    assert told.drafted == (5 if "metrics" in extras else None)
    assert told.positions.drafts == 0


def test_batch_sizes_are_refused(place, tmp_path, capfd):
    with FaultServer() as server:
        assert fly(*arguments(place, server, tmp_path, "", "--batch_size", "4")) == 2
    assert "give num_concurrent instead" in capfd.readouterr().err


@pytest.mark.slow
def test_without_the_extra():
    code = "import sys; sys.modules['openai'] = None; from fly.cli import main; main.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--model", "server", "--model_args", "base_url=http://a/v1",
         "--tasks", "humaneval", "--confirm_run_unsafe_code"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "pip install 'fly-eval[server]'" in done.stderr


def compare(place, out, *flags):
    command = ["compare", "--model", "server", "--tasks", "tiny_task", "--output_path", str(out)]
    command += ["--include_path", str(place / "tasks"), *flags]
    status, output = killing.Run(command, place).end()
    return status, " ".join(output.split())


@pytest.mark.slow
def test_compare_asks_one_server_after_the_other(place, tmp_path):
    given = ["--model_args", f"tokenizer={place / 'tokenizer'}"]
    with FaultServer(drafts=False) as alone, FaultServer() as drafting:
        modes = ["--mode", f"target-only={alone.url}", "--mode", f"fly={drafting.url}"]
        flags = [*given, *modes, "--min-recovery", "0.97", "--allow-inconclusive", "--noise-floor"]
        status, output = compare(place, tmp_path, *flags)
        assert status == 0, output[-3000:]
        assert alone.answered.total() == 2 * DOCUMENTS
        assert drafting.answered.total() == DOCUMENTS
        assert "fly: the server accepted" in output
        assert "tau and AL: not told by the server" in output
        assert "target-only: drafts nothing, or the server does not tell" in output
        assert "24 documents" in output
        status, output = compare(place, tmp_path, *flags)
        assert "fly: finished before" in output
        assert drafting.answered.total() == DOCUMENTS
    status, output = compare(place, tmp_path / "x", *given, "--modes", "exact", "fly")
    assert status == 2
    assert "a server decodes as it was started: --mode NAME=URL" in output


def test_compare_asks_all_servers_at_once(place, tmp_path):
    met, meeting = [], threading.Barrier(2)

    def meet(server):
        server.at_request = None
        meeting.wait(60)  # broken if the other server is asked only when this one is done
        met.append(server)

    with FaultServer(at_request=meet) as one, FaultServer(at_request=meet) as other:
        modes = ["--mode", f"a={one.url}", "--mode", f"b={other.url}", "--parallel"]
        given = ["--model_args", f"tokenizer={place / 'tokenizer'}", *modes]
        status, output = compare(place, tmp_path / "out", *given, "--metric", "exact_match")
        assert status == 0, output[-3000:]
        assert {*met} == {one, other}
        assert one.answered == other.answered
        assert one.answered.total() == DOCUMENTS


def test_runs_of_lm_evals_own_client_compare_by_score(place, tmp_path):
    pytest.importorskip("tenacity", reason="lm-eval's API models need lm-eval[api]")
    with FaultServer() as server:
        assert fly(*arguments(place, server, tmp_path / "fly")) == 0
        theirs = (
            f"model=tiny,base_url={server.url}/completions,tokenizer={place / 'tokenizer'},"
            "tokenizer_backend=huggingface,tokenized_requests=False"
        )
        given = ["--tasks", "tiny_task", "--include_path", place / "tasks", "--log_samples"]
        given += ["--output_path", tmp_path / "lm", "--model_args", theirs]
        assert fly("--model", "local-completions", *given) == 0
    out = tmp_path / "compared.json"
    assert fly("compare", f"lm={tmp_path / 'lm'}", f"fly={tmp_path / 'fly'}", "--json", out) == 0
    (row,) = json.loads(out.read_text())["others"][0]["rows"]
    assert row["scores"]["documents"] == DOCUMENTS
    assert row["scores"]["lost"] == row["scores"]["won"] == 0


@pytest.mark.slow
def test_throughput_against_interactivity(place, tmp_path):
    given = ["--model_args", f"tokenizer={place / 'tokenizer'}", "--concurrency", "1", "6"]
    with FaultServer(delay=0.01) as one, FaultServer(delay=0.005) as other:
        modes = ["--mode", f"a={one.url}", "--mode", f"b={other.url}"]
        flags = [*given, *modes, "--csv", str(tmp_path / "curve.csv"), "--metric", "exact_match"]
        status, output = compare(place, tmp_path / "runs", *flags)
        assert status == 0, output[-3000:]
        assert one.most_under_way <= 6
    assert "Throughput against interactivity" in output
    head, *rows = [line.split(",") for line in (tmp_path / "curve.csv").read_text().splitlines()]
    assert head == ["run", "concurrency", "tok_s", "tok_s_per_user", "verdict"]
    assert [row[0] for row in rows] == ["a@1", "a@6", "b@1", "b@6"]
    found = {row[0]: (float(row[2]), float(row[3])) for row in rows}
    assert found["a@1"][0] == pytest.approx(found["a@1"][1], rel=0.1)  # one user has all there is
    assert found["a@6"][0] > 2 * found["a@1"][0]
    assert rows[0][4] == "" != rows[1][4]
