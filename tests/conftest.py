"""Shared fixtures: tiny random models, built here, and the embedded pair if fetched.

PyTorch and what needs it are imported where they are used: the process that hands out tests to the
others reads this file, too, before it starts them, and runs none itself.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may wait for a hub

import pytest


def pytest_collection_modifyitems(config, items):
    import torch

    from fly.models.pairs import store

    no_gpu = pytest.mark.skip(reason="no accelerator")
    no_pair = pytest.mark.skip(reason="run `fly pair fetch qwen2.5-coder` first")
    has_pair = store.locate("qwen2.5-coder") is not None
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if item.get_closest_marker("real") and not has_pair:
            item.add_marker(no_pair)


@pytest.fixture(scope="session")
def target():
    from tests import tiny

    return tiny.model(seed=0)


@pytest.fixture(scope="session")
def draft(target):
    """A noisy copy of the target: its drafts are partly rejected."""
    from tests import tiny

    return tiny.noisy_copy(target, 0.01)


@pytest.fixture(scope="session")
def saved_pair(tmp_path_factory):
    """Folders of a tiny target and draft with a byte-level tokenizer, as from_pretrained reads."""
    from tests import tiny

    return tiny.save_pair(tmp_path_factory.mktemp("pair"))
