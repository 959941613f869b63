"""The mapped keys against the SpeculativeConfig of a vLLM that has FLy (.ci/vllm.sh brings it)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fly import config as fly_config
from fly.harness.vllm_config import FIRST_WITH_ALL, Installed, speculative_config
from fly.models.heads.block import kind_of
from fly.models.heads.checkpoint import read_config
from fly.models.sources import ModelSource
from tests import block_heads, heads, tiny

WITH_FLY = Path(sys.prefix, "fly-in-vllm")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not WITH_FLY.is_dir(), reason=f"{WITH_FLY} is not there: .ci/vllm.sh"),
]
# One line per case: the values that vLLM takes the keys to mean, or why it refuses them.
PROGRAM = """
import dataclasses, json, sys
from typing import get_args
from vllm.config import SpeculativeConfig
from vllm.config.speculative import SpeculativeMethod
from vllm.engine.arg_utils import EngineArgs
asked = json.load(sys.stdin)
print(json.dumps([field.name for field in dataclasses.fields(SpeculativeConfig)]))
print(json.dumps(get_args(SpeculativeMethod)))
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
    shape = {"hidden_size": 128, "vocab_size": tiny.TOKENIZER_VOCAB, "head_dim": 32}
    heads.save(root / "eagle3", {**heads.SHAPE, **shape, "architectures": ["LlamaForCausalLM"]}, {})
    for kind in ("dflash", "dspark"):
        config = {**block_heads.config(kind, target), "model_type": "qwen3", "head_dim": 32}
        heads.save(root / kind, config, {})

    def ask(cases, **environment):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            input=json.dumps({"target": str(root / "target"), "cases": cases}),
            env={
                **os.environ,
                "PYTHONPATH": str(WITH_FLY),
                "VLLM_LOGGING_LEVEL": "ERROR",
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [line for line in done.stdout.splitlines() if line.startswith(("[", "{", '"'))]
        fields, methods, *answers = map(json.loads, lines)
        return Installed("0.33.0", fields, methods), answers

    ask.root = root
    return ask


def mapped(ask, installed=FIRST_WITH_ALL, draft="draft", **keys):
    pair = {"target_model_path": "t", "spd_k": 8, "win_len": 5, "vllm_verification": "vllm"}
    config = fly_config.build({**pair, "draft_model_path": "d", **keys}, "test")
    path = str(ask.root / draft)
    head = None
    if config.drafter == "block":
        head = kind_of(read_config(ModelSource(path), path, {}).config)
    return speculative_config(config, path, installed, head)


def test_vllm_takes_every_mapped_key_as_it_is_meant(ask):
    cases = [
        mapped(ask),
        mapped(ask, win_len=1, entropy_thre=None),
        mapped(ask, enable_fly=False),
        mapped(ask, enable_fly=False, dual_tok=True),
        mapped(ask, drafter="ngram"),
        mapped(ask, drafter="ngram", enable_fly=False),
        mapped(ask, drafter="eagle3", draft="eagle3"),
        mapped(ask, drafter="block", draft="dflash", spd_k=5, win_len=2),
    ]
    installed, answers = ask(cases)
    assert answers == cases
    assert [case["method"] for case in cases[-2:]] == ["eagle3", "dflash"]
    assert {*FIRST_WITH_ALL.fields} <= {*installed.fields}
    assert {*FIRST_WITH_ALL.methods} <= {*installed.methods}
    assert mapped(ask, installed) == cases[0]


@pytest.mark.slow
def test_dspark_is_taken_by_vllms_second_model_runner(ask):
    """The default on GPUs; the first, which a CPU has, knows no DSpark."""
    case = mapped(ask, drafter="block", draft="dspark", spd_k=5, win_len=2)
    assert case["method"] == "dspark"
    _, answers = ask([case], VLLM_USE_V2_MODEL_RUNNER="1")
    assert answers == [case]


@pytest.mark.slow
def test_what_fly_refuses_vllm_would_not_take(ask):
    fly = mapped(ask)
    _, (answer,) = ask([{**fly, "fly_window_size": fly["num_speculative_tokens"]}])
    assert "fly_window_size to be smaller than num_speculative_tokens" in answer
