"""Files that are others than before are noticed, and large ones read once."""

import os

import pytest

from fly.models import fingerprint
from fly.models.sources import ModelSource


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLY_HOME", str(tmp_path / "home"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"\0" * 5_000_000)
    return model


@pytest.fixture
def reads(monkeypatch):
    """The files that were read."""
    seen = []
    whole = fingerprint.sha256_of
    monkeypatch.setattr(
        fingerprint, "sha256_of", lambda path: seen.append(path.name) or whole(path)
    )
    return seen


def change(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(b"\1")


def test_a_weight_in_the_middle_of_a_large_file_counts(folder):
    """The two ends alone were read."""
    before = fingerprint.hash_model(ModelSource(str(folder)))
    change(folder / "model.safetensors", 2_500_000)
    assert fingerprint.hash_model(ModelSource(str(folder))) != before


def test_a_large_file_is_read_once_per_state(folder, reads):
    first = fingerprint.hash_folder(folder)
    assert reads.count("model.safetensors") == 1
    assert fingerprint.hash_folder(folder) == first
    assert reads.count("model.safetensors") == 1
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert fingerprint.hash_folder(folder) == first  # the content is as it was
    assert reads.count("model.safetensors") == 2


@pytest.mark.parametrize("home", ["file/below", "~no-such-user-here/fly"])
def test_a_home_that_cannot_be_written_costs_only_time(folder, reads, tmp_path, monkeypatch, home):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLY_HOME", home)
    first = fingerprint.hash_folder(folder)
    assert fingerprint.hash_folder(folder) == first
    assert reads.count("model.safetensors") == 2


def test_files_at_any_depth(tmp_path):
    (tmp_path / "tasks" / "own").mkdir(parents=True)
    (tmp_path / "tasks" / "own" / "a.yaml").write_text("task: a")
    before = fingerprint.hash_files(tmp_path / "tasks")
    assert list(before) == [os.path.join("own", "a.yaml")]
    (tmp_path / "tasks" / "own" / "a.yaml").write_text("task: b")
    assert fingerprint.hash_files(tmp_path / "tasks") != before
    assert len(fingerprint.hash_files(tmp_path / "tasks" / "own" / "a.yaml")) == 1
    assert fingerprint.hash_files(tmp_path / "nothing") == {}
