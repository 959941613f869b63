"""Runs of the whole command, made affordable."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def lm_evals_task_files_are_read_once():
    """lm-eval parses its thousands of task files at every start: most of a tiny run's time.

    Kept are what stands in its own folder; how tasks are found, named and overridden stays its own.
    """
    try:
        from lm_eval.tasks import _index
    except ImportError:  # another release of lm-eval
        yield
        return
    read, own_folder, kept = _index.load_yaml, Path(_index.__file__).parent, {}

    def load_yaml(path, **how):
        if own_folder not in Path(path).parents:
            return read(path, **how)
        key = (path, *sorted(how.items()))
        if key not in kept:
            kept[key] = read(path, **how)
        return dict(kept[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_index, "load_yaml", load_yaml)
        yield
