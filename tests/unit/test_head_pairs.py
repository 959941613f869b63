"""The shipped pairs with trained heads, and what `fly config check` says of such pairs."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from fly import config
from fly.paths import data_dir
from tests import block_heads, heads, tiny
from tests.integration.test_cli import run

DOCS = (Path(__file__).parents[2] / "docs/heads.md").read_text()
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
    assert len(ROWS) == 9


@pytest.mark.skipif(transformers.__version__ < "5", reason="minimax_m2 and kimi_k25 are newer")
@pytest.mark.parametrize(("name", "target", "head", "kind", "k", "w", "engines"), ROWS)
def test_a_shipped_pair_is_what_the_documentation_says(
    name, target, head, kind, k, w, engines, capsys, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = data_dir("fly_config") / f"{name}.json"
    found = config.load(str(path))
    assert (found.target_model_path, found.draft_model_path) == (target, head)
    assert (found.spd_k, found.win_len, found.mode) == (int(k), int(w), "fly")
    assert found.win_len == min(6, (found.spd_k - 1) // 2)
    assert found.drafter == ("eagle3" if kind == "EAGLE-3" else "block")
    status, lines = said(capsys, path)
    assert status == 0
    valid, of_target, of_head, drafts, hf, vllm = lines
    assert valid.startswith(f"{path}: valid (fly, drafter {found.drafter}, ")
    assert of_target.startswith(f"target {target}: ")
    assert of_head.startswith(f"head {head}: ")
    assert f"with win_len={w} the first {int(k) - int(w)} may be deferred" in drafts
    assert hf.startswith("--model hf: runs it" if "hf" in engines else "--model hf: refuses it: ")
    assert vllm.startswith("--model vllm: method=")
    assert f"fly_window_size={w}" in vllm


def pair(tmp_path, head, **keys):
    """A pair's file. The target has eight layers of hidden size 32."""
    tiny.model(1, layers=8).save_pretrained(tmp_path / "target")
    values = {"target_model_path": str(tmp_path / "target"), "draft_model_path": str(head)}
    file = tmp_path / "pair.json"
    file.write_text(json.dumps({**values, "spd_k": 5, "win_len": 2, **keys}))
    return file


def test_a_head_that_is_here_is_read(tmp_path, capsys):
    shape = {**heads.SHAPE, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    head = heads.save(tmp_path / "head", shape, heads.tensors(0, torch.arange(0, 64, 2)))
    status, lines = said(capsys, pair(tmp_path, head, drafter="eagle3"))
    assert status == 0
    assert lines[1].endswith("target: 8 layers of hidden size 32; here")
    assert lines[2].endswith("head: EAGLE-3, reads hidden states 2, 4, 5; here")
    assert lines[4] == "--model hf: runs it"
    _, lines = said(capsys, pair(tmp_path, head, drafter="eagle3", head_layer_ids=[1, 2, 3]))
    assert "reads hidden states 1, 2, 3;" in lines[2]
    assert "head_layer_ids=(1, 2, 3): vLLM 0.33 cannot do that" in lines[5]


def test_a_block_head_says_how_much_it_drafts(tmp_path, capsys):
    checkpoint = block_heads.published("dflash", tiny.model(1, layers=8))
    head = block_heads.save(checkpoint, tmp_path / "head")
    _, lines = said(capsys, pair(tmp_path, head, drafter="block"))
    assert "dflash of at most 5 tokens, reads hidden states 1, 2, 3, 4, 5, 6, 7, 8" in lines[2]
    assert lines[3] == (
        "drafts: spd_k=5 tokens a round, in one pass; with win_len=2 the first 3 may be deferred"
    )
    assert "--model vllm: method=dflash, " in lines[5]
    _, lines = said(capsys, pair(tmp_path, head, drafter="block", spd_k=6))
    assert lines[4].startswith("--model hf: refuses it: spd_k=6: this head drafts at most 5 tokens")


def test_what_a_run_would_refuse_is_said(tmp_path, capsys):
    shape = {**heads.SHAPE, "hidden_size": 64}
    head = heads.save(tmp_path / "head", shape, {"norm.weight": torch.ones(64)})
    status, lines = said(
        capsys, pair(tmp_path, head, drafter="eagle3", win_len=9, defer_across_rounds=True)
    )
    assert status == 0  # the file is valid
    assert "head: does not fit; here" in lines[2]
    assert lines[3].endswith("win_len=9 may be filled by later rounds: each may be deferred")
    assert "is made for a target of hidden size 64, and the target's is 32" in lines[4]
    assert lines[5].startswith("--model vllm: refuses it: defer_across_rounds=True: vLLM 0.33")
