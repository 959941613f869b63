"""The run of this process: what the command line and the model that lm-eval creates share.

lm-eval makes the model itself, from arguments that fit into JSON; whatever else the model needs of
the run, and the run of the model, is here.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fly import launch
from fly.errors import FlyError
from fly.paths import timestamp

if TYPE_CHECKING:
    from fly.runs.finished_requests import FinishedRequests
    from fly.runs.manifest import Manifest


@dataclass
class RunContext:
    """One run, as all that takes part in it knows it. All calls share its traces' files."""

    output_dir: Path | None = None  # where lm-eval writes samples; None without --output_path
    # makes `config.fly` of the results; None until a model is made, and in all processes but the
    # first
    results_entry: Callable[[], dict[str, Any]] | None = None
    traced_requests: int = 0  # how many are in the trace file
    traced_tokens: set[int] = field(default_factory=set)  # which ids are in its vocabulary
    started: str = field(default_factory=timestamp)
    manifest: Manifest | None = None  # of a run that can be resumed, in its first process
    finished_requests: FinishedRequests | None = None  # of a resumed run; else None
    is_resumable: bool = False  # there is a manifest
    # the documents that were chosen, by task; None for all
    samples: dict[str, list[int]] | None = None
    # prompts may be --cache_requests's: the chat template that they have is not applied again
    has_kept_prompts: bool = False
    # lines of files that have no folder yet, by the file's name: Python code names one at the end
    unsaved: dict[str, list[str]] = field(default_factory=dict)
    is_reported: bool = False  # its results were made: the next evaluation is another run

    def join(self, manifest: Manifest, finished: FinishedRequests | None) -> None:
        """Become the run of this manifest; finished: of a resumed run, whose files go on."""
        self.manifest = manifest
        self.join_first(manifest.started, True, finished)

    def join_first(
        self, started: str, is_resumable: bool, finished: FinishedRequests | None
    ) -> None:
        """Become the run of these facts, which its first process has of its manifest."""
        self.started, self.is_resumable, self.finished_requests = started, is_resumable, finished
        if finished is not None:
            self.traced_requests = finished.traced_requests
            self.traced_tokens = finished.traced_tokens

    def begin_resumed(self) -> None:
        """All checks of a resumed run have passed: its files may change from here on."""
        if self.finished_requests is None:
            return
        self.finished_requests.drop_unfinished_rounds()
        if self.manifest is not None:
            self.manifest.save()

    def save_records(self, folder: Path) -> None:
        """Write the lines that had no folder."""
        for name, lines in self.unsaved.items():
            (folder / name).write_text("".join(lines), encoding="utf-8")

    @property
    def resumed(self) -> dict[str, Any] | None:
        """For the results: requests that earlier processes finished, and when it was resumed."""
        if self.manifest is None or self.finished_requests is None:
            return None
        return {"requests": len(self.finished_requests), "at": self.manifest.data["resumed"]}

    @property
    def resume_hint(self) -> str:
        """How the rest can be computed after an interruption, in words."""
        if not self.is_resumable or self.output_dir is None:
            return (
                "with --use_cache the same command would go on from where it stopped "
                "(greedy requests)"
            )
        launched = " (launched as this run was)" if launch.processes() > 1 else ""
        folder = shlex.quote(str(self.output_dir))
        return f"`fly --resume {folder}`{launched} goes on with the rest"


_current = RunContext()


def current() -> RunContext:
    return _current


def unreported() -> RunContext:
    """The current run; a new one if the results of the current one were made."""
    global _current
    if _current.is_reported:
        _current = RunContext(samples=_current.samples, has_kept_prompts=_current.has_kept_prompts)
    return _current


def start(output_dir: Path | None = None) -> RunContext:
    """Begin a new run; `current` returns it from now on."""
    global _current
    _current = RunContext(output_dir)
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
