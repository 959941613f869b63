"""What is said before a model is loaded."""

import pytest

from fly.execution import self_check
from fly.models.sources import ModelSource, weight_bytes


@pytest.fixture
def stored(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 4000)
    (tmp_path / "config.json").write_text("{}")
    return ModelSource(str(tmp_path))


def test_too_little_memory_is_said_before_loading(stored, monkeypatch, caplog):
    monkeypatch.setattr(self_check, "_WORKSPACE", 10**9)
    monkeypatch.setattr(self_check.oom, "free_bytes", lambda device: 10**8)
    self_check.warn_if_memory_is_short(stored, stored, "cpu")
    assert "will take about 1.0 GB of memory and 0.1 GB are free" in caplog.text


@pytest.mark.parametrize(
    ("free", "device", "source"),
    [(10**10, "cpu", None), (0, "cuda:0", None), (0, "cpu", ModelSource("org/on-a-hub"))],
)
def test_nothing_is_said_without_need(stored, monkeypatch, caplog, free, device, source):
    monkeypatch.setattr(self_check.oom, "free_bytes", lambda device: free)
    self_check.warn_if_memory_is_short(source or stored, None, device)
    assert not caplog.text


def test_a_gguf_file_counts_as_what_it_is_dequantised_to(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"\0" * 1000)
    assert weight_bytes(ModelSource(str(tmp_path), "m.gguf")) == 3500
