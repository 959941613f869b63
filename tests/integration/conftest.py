"""Runs of the whole command, made affordable."""

import functools
from pathlib import Path

import pytest
import torch.utils.collect_env

from tests.once import once


@pytest.fixture(scope="session", autouse=True)
def lm_evals_task_files_are_read_once(tmp_path_factory):
    """lm-eval parses its thousands of task files at every start: most of a tiny run's time.

    Kept is what stands in its own folder; how tasks are named and overridden stays its own.
    """
    try:
        from lm_eval.tasks import _index
    except ImportError:  # another release of lm-eval
        yield
        return
    read, walk = _index.load_yaml, _index.TaskIndex._iter_yaml_files
    own_folder, how_all = Path(_index.__file__).parent, {"resolve_func": False, "recursive": True}
    kept = {}

    def read_all():
        found = {}
        for path in walk(own_folder):
            try:
                found[path] = read(path, **how_all)
            except Exception:  # as lm-eval meets it: it skips such a file
                found[path] = None
        return found

    def iter_yaml_files(root):
        if root != own_folder:
            return walk(root)
        if not kept:
            kept.update(once(tmp_path_factory, "tasks of lm-eval", read_all))
        return iter(kept)

    def load_yaml(path, **how):
        config = kept.get(path) if how == how_all else None
        return read(path, **how) if config is None else dict(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_index, "load_yaml", load_yaml)
        patch.setattr(_index.TaskIndex, "_iter_yaml_files", staticmethod(iter_yaml_files))
        yield


@pytest.fixture(scope="session", autouse=True)
def the_machine_is_described_once():
    """For every results file PyTorch asks pip, the compiler and others: a second each time."""
    described = functools.cache(torch.utils.collect_env.get_pretty_env_info)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.collect_env, "get_pretty_env_info", described)
        yield
