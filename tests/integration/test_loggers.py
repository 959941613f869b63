"""lm-eval's own loggers beside fly's backend: Weights & Biases offline, and the hub without one."""

import json

import pytest

from tests.integration.test_cli import config_file, evaluate, task_dir  # noqa: F401  fixtures


def test_wandb_offline(saved_pair, config_file, task_dir, tmp_path, monkeypatch):  # noqa: F811
    """Results with fly's entry must be what wandb can store."""
    pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    extra = ("--log_samples", "--output_path", tmp_path / "out", "--limit", "2")
    given = ("--wandb_args", f"project=fly,dir={tmp_path}")
    assert evaluate(saved_pair, config_file, task_dir, *extra, *given) == 0
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    (stored,) = folder.glob("run-*.wandb")
    assert b"exact_match" in stored.read_bytes()
    assert next((tmp_path / "out").rglob("results_*.json"))


def test_hub_log_args(saved_pair, config_file, task_dir, tmp_path, monkeypatch):  # noqa: F811
    """What is pushed is the results file that is on disk, and the samples."""
    pushed = {}

    class Hub:
        def __init__(self, token):
            pushed["token"] = token

        def create_repo(self, **_):
            pass

        def upload_file(self, path_or_fileobj, **_):
            pushed["results"] = json.loads(open(path_or_fileobj).read())  # noqa: SIM115

        def upload_folder(self, folder_path, commit_message, **_):
            pushed["samples"] = commit_message

        def list_repo_files(self, **_):
            return []

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    tracker = "lm_eval.loggers.evaluation_tracker.EvaluationTracker"
    monkeypatch.setattr(f"{tracker}.recreate_metadata_card", lambda _: None)
    extra = ("--log_samples", "--output_path", tmp_path / "out", "--limit", "2")
    hub = "hub_results_org=me,push_results_to_hub=True,push_samples_to_hub=True,token=secret-token"
    assert evaluate(saved_pair, config_file, task_dir, *extra, "--hf_hub_log_args", hub) == 0
    assert pushed["token"] == "secret-token"
    assert pushed["results"]["config"]["fly"]["stats"]["requests"] == 2
    assert "tiny_task" in str(pushed["samples"])
    for file in (tmp_path / "out").rglob("*"):  # the token is no part of what is kept
        assert file.is_dir() or b"secret-token" not in file.read_bytes()
