"""What is expensive to make and the same for all test processes."""

import os
import pickle

from filelock import FileLock


def once(tmp_path_factory, name: str, make):
    """What `make` returns, made by the first of the test processes that asks for it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    kept = folder / f"{name}.pickle"
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            kept.write_bytes(pickle.dumps(make()))
        return pickle.loads(kept.read_bytes())
