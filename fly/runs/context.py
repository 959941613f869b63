"""What one command-line run shares between the CLI and the model it makes lm-eval create.

lm-eval builds the model itself, from JSON-able arguments; this is the way back.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fly.errors import FlyError
from fly.paths import fly_home, write_whole

if TYPE_CHECKING:
    from fly.runs.finished_requests import Earlier
    from fly.runs.manifest import Manifest

logger = logging.getLogger(__name__)


@dataclass
class Session:
    """`output_dir`: where lm-eval will write samples; None without --output_path.

    entry: makes `config.fly` of the results (None before a model is made, and in all processes
    but the first). traced_requests, traced_tokens: how many requests are in the trace file, and
    which token ids in the vocabulary beside it; all of a run's calls share both files. manifest: of
    a run that can be resumed. earlier: what was finished before it was (None if it was not).
    """

    output_dir: Path | None = None
    entry: Callable[[], dict[str, Any]] | None = None
    traced_requests: int = 0
    traced_tokens: set[int] = field(default_factory=set)
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H-%M-%S"))
    manifest: Manifest | None = None
    earlier: Earlier | None = None

    def go_on_as(self, manifest: Manifest, earlier: Earlier | None) -> None:
        """Be the run of this manifest: its files grow."""
        self.manifest, self.earlier, self.started = manifest, earlier, manifest.started
        if earlier is not None:
            self.traced_requests = earlier.traced_requests
            self.traced_tokens = earlier.traced_tokens

    def go_on(self) -> None:
        """Nothing speaks against resuming the run: from here on its files change."""
        if self.manifest is not None and self.earlier is not None:
            self.earlier.mend_trace()
            self.manifest.save()

    @property
    def resumed(self) -> dict[str, Any] | None:
        """For the results: requests that earlier processes finished, and when it was resumed."""
        if self.manifest is None or self.earlier is None:
            return None
        return {"requests": len(self.earlier), "at": self.manifest.data["resumed"]}

    @property
    def way_on(self) -> str:
        """In words, how what is left can be computed after an interruption."""
        if self.manifest is None:
            return (
                "with --use_cache the same command would go on from where it stopped "
                "(greedy requests)"
            )
        return f"`fly --resume {shlex.quote(str(self.manifest.folder))}` goes on with the rest"


_current = Session()


def current() -> Session:
    return _current


def start(output_dir: Path | None = None) -> Session:
    global _current
    _current = Session(output_dir)
    return _current


def check_writable(folder: Path, field_name: str) -> None:
    """Fail before hours of decoding, not after: lm-eval only warns when it cannot save."""
    probe = folder / f".fly-{time.time_ns()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise FlyError(
            f"{field_name}={folder}: cannot be written ({error.strerror}): "
            "choose a folder that you may write to"
        ) from None


class JsonLines:
    """A JSONL file of the run, one line the moment something ends.

    With an output folder the file grows there during the run; what was written survives the death
    of the process, SIGKILL included (not the machine's: nothing is synced to disk). Without one,
    records are kept in memory and written to FLY_HOME only if `flush` is called (the run is cut
    short), so that nothing computed is lost.
    """

    def __init__(self, session: Session, name: str, rank: int) -> None:
        suffix = f"_rank{rank}" if rank else ""
        self._name = f"{name}_{session.started}{suffix}.jsonl"
        self._folder = session.output_dir and session.output_dir.absolute()
        self._session = session
        self._file: IO[str] | None = None
        self._unsaved: list[str] = []
        self.count = 0

    @property
    def path(self) -> Path:
        return (self._folder or fly_home() / "interrupted") / self._name

    def write(self, record: dict[str, Any]) -> None:
        self.count += 1
        self._unsaved.append(json.dumps(record, ensure_ascii=False))
        if self._folder is not None:
            self.flush()

    def flush(self) -> None:
        """Append what is in memory to the file. Raises FlyError if the file was taken away."""
        if not self._unsaved:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115
        text = "\n".join(self._unsaved) + "\n"
        self._unsaved = []  # first: what a signal cuts short must not be written twice
        self._file.write(text)
        self._file.flush()
        if not self._is_in_place(self._file):
            raise FlyError(
                f"output_path={self._session.output_dir}: was removed or moved while the run wrote "
                f"to it: what was finished is put back there; {self._session.way_on}"
            )

    def close(self) -> None:
        """Closed, the file is where it belongs: an open one outlives the removal of its folder."""
        if self._file is None:
            return
        if not self._is_in_place(self._file):
            self._file.seek(0)
            self._put_back(self._file.read())
        self._file.close()
        self._file = None

    def _is_in_place(self, file: IO[str]) -> bool:
        return os.fstat(file.fileno()).st_nlink > 0 and self.path.exists()

    def _put_back(self, text: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, text)
        except OSError:
            if self._folder is None:
                raise
            self._folder = None  # what cannot go there goes to FLY_HOME
            self._put_back(text)
            logger.warning("kept in %s", self.path)
