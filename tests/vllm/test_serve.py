"""`vllm serve` with fly's rules, driven by lm-eval's client: the texts of `fly --model vllm`."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from fly.speculation.stop_strings import BROKEN
from tests.vllm.test_vllm_engine import ENVIRONMENT, fly, records

pytest.importorskip("vllm", reason="vLLM is not installed here: .ci/vllm.sh makes an environment")
pytest.importorskip("tenacity", reason="lm-eval's client needs it")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

KEYS = {"win_len": 1, "entropy_thre": 0.0, "exact_first_tokens": 3}


@pytest.fixture
def server(place):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculative = {"method": "draft_model", "model": str(place / "draft")}
    command = [
        *(Path(sys.executable).with_name("vllm"), "serve", place / "target"),
        *("--host", "127.0.0.1", "--port", port, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", 256),
        *("--speculative-config", json.dumps({**speculative, "num_speculative_tokens": 4})),
        *("--additional-config", json.dumps({"fly": KEYS})),
    ]
    with (place / "server.log").open("w") as log:
        process = subprocess.Popen([*map(str, command)], env=ENVIRONMENT, stdout=log, stderr=log)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                assert process.poll() is None, (place / "server.log").read_text()[-3000:]
                time.sleep(1)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def test_a_server_gives_the_texts_of_a_run(place, server):
    client = f"base_url=http://127.0.0.1:{server}/v1/completions,model={place / 'target'}"
    command = [
        *(Path(sys.executable).with_name("lm_eval"), "run", "--model", "local-completions"),
        *("--model_args", f"{client},tokenizer={place / 'target'},tokenized_requests=True"),
        *("--tasks", "tiny_task", "--include_path", place / "tasks", "--log_samples"),
        *("--output_path", place / "served", "--gen_kwargs", "max_gen_toks=60"),
    ]
    subprocess.run([*map(str, command)], env=ENVIRONMENT, capture_output=True, check=True)
    (samples,) = (place / "served").rglob("samples_*.jsonl")
    served = [json.loads(line)["resps"][0][0] for line in samples.open()]
    keys = "".join(f",{key}={value}" for key, value in KEYS.items())
    fly(place, "run", "--log_samples", "--output_path", str(place / "run"), more=keys,
        given="--gen_kwargs max_gen_toks=60")  # fmt: skip
    found = records(place / "run")
    # vLLM's stream ends before a character that is not whole
    texts = [line["text"].rstrip(BROKEN) for line in found.values()]
    assert texts == [text.rstrip(BROKEN) for text in served]
    assert sum(line["deferred_accepted"] for line in found.values()) > 0
