"""Whole runs with a block head, from its folder to the results; eight sequences, killed, resumed.

Under FLy, greedily and sampled: the texts depend on every draft, and have to be the same again.
"""

import json

import pytest
from transformers import AutoModelForCausalLM

from fly.runs import reader
from tests import block_heads, killing
from tests.integration.test_cli import config_file, evaluate, task_dir  # noqa: F401
from tests.integration.test_resume import check_equal
from tests.integration.test_worked_examples import texts_and_entry


@pytest.fixture(scope="module")
def head(saved_pair, tmp_path_factory):
    target = AutoModelForCausalLM.from_pretrained(saved_pair / "target")
    checkpoint = block_heads.published("dspark", target)
    return block_heads.save(checkpoint, tmp_path_factory.mktemp("heads") / "dspark")


@pytest.fixture(scope="module")
def place(saved_pair, head, tmp_path_factory):
    place = killing.make_place(tmp_path_factory.mktemp("runs"), saved_pair)
    values = json.loads((place / "pair.json").read_text())
    (place / "pair.json").write_text(json.dumps({**values, "drafter": "block"}))
    return place


def arguments(head, out):
    replaced = {"3": "8"}  # the batch size
    given = killing.arguments(out)
    return [replaced.get(item, item.replace("pair/draft", str(head))) for item in given]


@pytest.mark.slow  # test_eagle3_runs kills and resumes as many
def test_eight_sequences_killed_and_resumed(place, head):
    status, output = killing.Run(arguments(head, "unbroken"), place).end()
    assert status == 0, output[-2000:]
    entry = reader.load(place / "unbroken").entry
    assert entry["drafter"] == "block"
    assert entry["stats"]["drafted"] > entry["stats"]["native_accepted"] > 0
    out = place / "killed"
    run = killing.Run(arguments(head, out.name), place)
    assert run.kill_when(lambda: killing.count(out) >= 7)
    status, output = killing.Run(["--resume", out], place).end()
    assert status == 0, output[-2000:]
    check_equal(out, place / "unbroken")
    assert reader.load(out).entry["resumed"]["requests"] >= 7


def test_exact_texts_are_the_targets(saved_pair, head, config_file, task_dir, tmp_path):  # noqa: F811
    block = f",pretrained={head},drafter=block"
    of_modes = {
        "alone": ",use_sd=false",
        "block": block,
        "adaptive": f"{block},draft_policy=auto,spd_k=5",
        "confident": f"{block},confidence_thre=0.5",
    }
    found = {}
    for name, args in of_modes.items():
        out = ("--output_path", tmp_path / name, "--log_samples")
        given = f"{args},verification=exact"
        assert evaluate(saved_pair, config_file, task_dir, *out, more_args=given) == 0
        found[name] = texts_and_entry(tmp_path / name)
    texts, _ = found.pop("alone")
    for name, (others, entry) in found.items():
        assert others == texts, name
        assert entry["draft_num_parameters"] > 0


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (",spd_k=6", "spd_k=6: this head drafts at most 5 tokens (block_size=5): set spd_k to 5"),
        (",head_layer_ids=[1]", "head_layer_ids=[1]: the head reads 2 hidden states, [1, 2]"),
    ],
)
def test_a_setting_that_does_not_fit(saved_pair, head, config_file, task_dir, capsys, more, told):  # noqa: F811
    args = f",pretrained={head},drafter=block{more}"
    assert evaluate(saved_pair, config_file, task_dir, more_args=args) == 2
    assert told in capsys.readouterr().err.splitlines()[-1]
