"""A tiny pair and a task for vLLM's CPU build."""

import json

import pytest


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a pair whose heads are as large as vLLM needs, its file and a task."""
    import torch

    from tests import tiny
    from tests.integration.test_cli import write_task

    root = tmp_path_factory.mktemp("vllm")
    shape = {"hidden_size": 128, "vocab": tiny.TOKENIZER_VOCAB}
    target = tiny.model(seed=1, **shape)
    for name, saved in (("target", target), ("draft", tiny.noisy_copy(target, 0.01))):
        saved.to(torch.float32).save_pretrained(root / name)
        tiny.byte_tokenizer().save_pretrained(root / name)
    pair = {"target_model_path": str(root / "target"), "spd_k": 4, "win_len": 2}
    (root / "pair.json").write_text(json.dumps(pair))
    write_task(root / "tasks", documents=4)
    # ' ' is a stop string that random texts meet in the middle of a draft
    task = root / "tasks" / "tiny_task.yaml"
    task.write_text(task.read_text().replace('["zzz"]', '["zzz", " "]'))
    return root
