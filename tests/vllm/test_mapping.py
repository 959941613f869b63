"""The mapped keys against the SpeculativeConfig of a vLLM that has FLy (.ci/vllm.sh brings it)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fly import config as fly_config
from fly.harness.vllm_config import Installed, speculative_config
from tests import tiny

WITH_FLY = Path(sys.prefix, "fly-in-vllm")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not WITH_FLY.is_dir(), reason=f"{WITH_FLY} is not there: .ci/vllm.sh"),
]
# One line per case: the values that vLLM takes the keys to mean, or why it refuses them.
PROGRAM = """
import dataclasses, json, sys
from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
asked = json.load(sys.stdin)
print(json.dumps([field.name for field in dataclasses.fields(SpeculativeConfig)]))
for case in asked["cases"]:
    arguments = EngineArgs(model=asked["target"], dtype="float32", max_model_len=256,
                           speculative_config=dict(case))
    try:
        found = arguments.create_engine_config().speculative_config
        print(json.dumps({key: getattr(found, key) for key in case}))
    except ValueError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    target = tiny.model(seed=1, vocab=tiny.TOKENIZER_VOCAB, hidden_size=128)
    for name in ("target", "draft"):
        target.save_pretrained(root / name)
        tiny.byte_tokenizer().save_pretrained(root / name)

    def ask(cases):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            input=json.dumps({"target": str(root / "target"), "cases": cases}),
            env={**os.environ, "PYTHONPATH": str(WITH_FLY), "VLLM_LOGGING_LEVEL": "ERROR"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [line for line in done.stdout.splitlines() if line.startswith(("[", "{", '"'))]
        fields, *answers = map(json.loads, lines)
        return fields, answers

    ask.root = root
    return ask


def mapped(ask, fields=("fly_window_size", "use_heterogeneous_vocab"), **keys):
    pair = {"target_model_path": "t", "spd_k": 8, "win_len": 5}
    config = fly_config.build({**pair, "draft_model_path": "d", **keys}, "test")
    draft = str(ask.root / "draft")
    return speculative_config(config, draft, Installed("0.33.0", fields))


def test_vllm_takes_every_mapped_key_as_it_is_meant(ask):
    cases = [
        mapped(ask),
        mapped(ask, win_len=1, entropy_thre=None),
        mapped(ask, enable_fly=False),
        mapped(ask, enable_fly=False, dual_tok=True),
        mapped(ask, drafter="ngram"),
        mapped(ask, drafter="ngram", enable_fly=False),
    ]
    fields, answers = ask(cases)
    assert "fly_window_size" in fields
    assert answers == cases
    assert mapped(ask, fields) == cases[0]


def test_what_fly_refuses_vllm_would_not_take(ask):
    fly = mapped(ask)
    _, (answer,) = ask([{**fly, "fly_window_size": fly["num_speculative_tokens"]}])
    assert "fly_window_size to be smaller than num_speculative_tokens" in answer
