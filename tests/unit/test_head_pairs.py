"""The shipped pairs with trained heads, and what `fly config check` says of such pairs."""

import json
import re
from pathlib import Path

import pytest
import torch

from fly import config
from fly.errors import FlyError
from fly.harness.vllm_config import FIRST_WITH_ALL, speculative_config
from fly.models.heads.checkpoint import Checkpoint
from fly.paths import data_dir
from tests import block_heads, heads, tiny
from tests.integration.test_cli import run

DOCS = (Path(__file__).parents[2] / "docs/drafters.md").read_text()
ROWS = re.findall(
    r"^\| `(\S+)` \| (\S+) \| (\S+) \| (EAGLE-3|DFlash|DSpark) \| (\d+) \| (\d+) \| (.+) \|$",
    DOCS,
    re.MULTILINE,
)
SHIPPED = [
    path
    for path in sorted(data_dir("fly_config").glob("*.json"))
    if path.name != "schema.json" and config.load(str(path)).head_class is not None
]


def said(capsys, path):
    """(exit status, lines) of `fly config check`."""
    status = run("config", "check", path)
    printed = capsys.readouterr()
    return status, (printed.out or printed.err).splitlines()


def test_the_documentation_lists_every_shipped_pair_with_a_head():
    assert sorted(row[0] for row in ROWS) == [path.stem for path in SHIPPED]
    assert len(ROWS) == 10


@pytest.mark.parametrize(("name", "target", "head", "kind", "k", "w", "engines"), ROWS)
def test_a_shipped_pair_is_what_the_documentation_says(
    name, target, head, kind, k, w, engines, capsys
):
    path = data_dir("fly_config") / f"{name}.json"
    found = config.load(str(path))
    assert (found.target_model_path, found.draft_model_path) == (target, head)
    assert (found.spd_k, found.win_len, found.mode) == (int(k), int(w), "fly")
    assert found.win_len == min(6, (found.spd_k - 1) // 2)
    assert found.drafter == ("eagle3" if kind == "EAGLE-3" else "block")
    method = None if kind == "EAGLE-3" else kind.lower()
    by_vllm = config.load(str(path), {"vllm_verification": "vllm"}, log=False)
    of_vllm = speculative_config(by_vllm, head, FIRST_WITH_ALL, method)
    assert "vllm" in engines
    assert of_vllm["method"] == (method or "eagle3")
    assert of_vllm["fly_window_size"] == int(w)
    status, (valid, *_) = said(capsys, path)  # nothing is downloaded
    assert status == 0
    assert valid.startswith(f"{path}: valid (fly, drafter {found.drafter}, ")


def pair(tmp_path, head, **keys):
    """A pair's file. The target has eight layers of hidden size 32."""
    tiny.model(1, layers=8).save_pretrained(tmp_path / "target")
    values = {"target_model_path": str(tmp_path / "target"), "draft_model_path": str(head)}
    file = tmp_path / "pair.json"
    file.write_text(json.dumps({**values, "spd_k": 5, "win_len": 2, **keys}))
    return file


def test_a_head_that_is_here_is_loaded(tmp_path, capsys):
    shape = {**heads.SHAPE, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    head = heads.save(tmp_path / "head", shape, heads.tensors(0, torch.arange(0, 64, 2)))
    status, (*_, read) = said(capsys, pair(tmp_path, head, drafter="eagle3"))
    assert status == 0
    assert read.endswith("head: reads hidden states [2, 4, 5]")
    _, (*_, read) = said(capsys, pair(tmp_path, head, drafter="eagle3", head_layer_ids=[1, 2, 3]))
    assert read.endswith("reads hidden states [1, 2, 3]")


def test_a_block_head_is_loaded(tmp_path, capsys):
    checkpoint = block_heads.published("dflash", tiny.model(1, layers=8))
    head = block_heads.save(checkpoint, tmp_path / "head")
    status, (*_, read) = said(capsys, pair(tmp_path, head, drafter="block"))
    assert status == 0
    assert read.endswith("head: reads hidden states [1, 2, 3, 4, 5, 6, 7, 8]")


@pytest.mark.parametrize(
    ("hidden_size", "line"),
    [
        (64, "is made for a target of hidden size 64, and the target's is 32"),
        (32, "the checkpoint lacks "),  # tensors are looked at, too
    ],
)
def test_a_head_that_does_not_fit_is_refused_as_by_a_run(tmp_path, capsys, hidden_size, line):
    shape = {**heads.SHAPE, "hidden_size": hidden_size}
    head = heads.save(tmp_path / "head", shape, {"norm.weight": torch.ones(hidden_size)})
    file = pair(tmp_path, head, drafter="eagle3")
    capsys.readouterr()
    assert run("config", "check", file) == 2
    (refused,) = capsys.readouterr().err.splitlines()
    assert refused.startswith(f"fly: error: pretrained={head}: ")
    assert line in refused


@pytest.mark.parametrize(("drafter", "key"), [("eagle3", "eagle_config"), ("block", "layer_types")])
def test_a_config_of_another_shape_is_one_line_of_config_check(tmp_path, capsys, drafter, key):
    keys = heads.SHAPE if drafter == "eagle3" else block_heads.config("dflash", tiny.model(1))
    head = heads.save(tmp_path / "head", {**keys, key: 5}, {"norm.weight": torch.ones(32)})
    file = pair(tmp_path, head, drafter=drafter)
    capsys.readouterr()
    assert run("config", "check", file) == 2
    said = f"fly: error: pretrained={head}: its config.json makes no sense: "
    assert capsys.readouterr().err.startswith(said)


def test_a_head_takes_memory_only_once_its_tensors_fit():
    made = []

    def make():
        made.append(torch.empty(0).device.type)
        return torch.nn.Linear(2, 1 << 20)

    with pytest.raises(FlyError, match=r"^pretrained=x: weight is 3 x 2, not 1048576 x 2"):
        tensors = {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
        Checkpoint("x", {}, tensors).build(make)
    assert made == ["meta"]
