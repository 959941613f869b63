"""`--resume RUN_DIR`: a run that was killed goes on as the same run, with the same arguments.

Here: its arguments, and when it begins and ends. finished_requests.py reads its records.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from lm_eval._cli.utils import key_val_to_dict, split_top_level
from lm_eval.config.evaluate_config import EvaluatorConfig

from fly import config as fly_config
from fly import launch, reading
from fly.errors import FlyError
from fly.paths import run_files, timestamp
from fly.runs import reader, shapes
from fly.runs.context import RunContext
from fly.runs.environment import deciding_versions, models_of
from fly.runs.finished_requests import FinishedRequests
from fly.runs.manifest import Manifest, find, first_difference, plain

logger = logging.getLogger(__name__)

_NOT_ARGUMENTS = ("command", "func", "config", "resume")
_ARGUMENTS = {field.name for field in fields(EvaluatorConfig)} - {*_NOT_ARGUMENTS}
_KEY_VALUES = shapes.Arguments.__annotations__.keys() - {"output_path"}  # key=value flags
_SECRETS = {
    "token", "hf_token", "auth_token", "use_auth_token", "access_token", "key", "api_key", "secret",
    "password",
}  # fmt: skip
_LOCK_SECONDS = 5.0  # a process that was told to end may take so long


def split_secrets(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """lm-eval's arguments without the secrets among key=value pairs; and these secrets by argument,
    which are never written down."""
    arguments: dict[str, Any] = plain({
        name: value
        for name, value in vars(args).items()
        if (value or value == 0) and name not in _NOT_ARGUMENTS
    })  # fmt: skip
    secrets = {}
    for name, value in arguments.items():
        if name in _KEY_VALUES and isinstance(value, str):  # as --config's file may have it
            value = arguments[name] = parse_pairs(value)
        if isinstance(value, dict):
            secrets[name] = {key: value.pop(key) for key in [*value] if key.lower() in _SECRETS}
    return arguments, {name: found for name, found in secrets.items() if found}


def parse_pairs(text: str, flag: str = "--config") -> dict[str, Any]:
    """`key=value,...` of fly's own flags and of a file of --config; lm-eval parses its own flags.

    Raises FlyError if it is not such a list, or has a key twice.
    """
    text = fly_config.bracket_lists(text)
    names = [part.partition("=")[0] for part in split_top_level(text)]
    try:
        found: dict[str, Any] = key_val_to_dict(text)
    except reading.NO_LITERAL as error:
        raise FlyError(f"{flag} {reading.shown(text)}: {error}") from None
    if len(found) < len(names):
        raise FlyError(f"{flag} {reading.shown(text)}: a key is given twice: remove one")
    return found


def reopen(args: argparse.Namespace, given: dict[str, Any], secrets: dict[str, Any]) -> Manifest:
    """The run that --resume names; unless it has ended, `args` become its arguments and `secrets`.

    Changes to the folder that the run was started in. Raises FlyError if there is no such run, or
    an argument in `given` is not the run's.
    """
    manifest = find(args.resume)
    if manifest.finished:
        _check_ended(manifest)
        return manifest
    for name in manifest.data["arguments"]:
        if name not in _ARGUMENTS:
            hint = reading.hint(name, _ARGUMENTS, "remove it")
            raise FlyError(f"{manifest.path}: arguments.{name}: `fly run` has no such flag: {hint}")
    _check_given(manifest, given)
    args.config = None
    own = manifest.data["arguments"]
    with_secrets = {name: {**own.get(name, {}), **found} for name, found in secrets.items()}
    vars(args).update({**own, **with_secrets})
    args.output_path = str(manifest.output_path)
    folder = manifest.data["working_directory"]
    if folder != str(Path.cwd()):
        if Path(folder).is_dir():
            logger.info("going on in the folder that the run was started in: %s", folder)
            os.chdir(folder)
        else:
            logger.warning("%s, where the run was started, is gone: relative paths may be", folder)
    return manifest


def _check_given(manifest: Manifest, given: dict[str, Any]) -> None:
    """Raise FlyError unless these are the run's arguments; key=value pairs may be left out."""
    arguments = manifest.data["arguments"]
    for name, value in given.items():
        noted = arguments.get(name)
        if name == "output_path" and Path(value).resolve() == manifest.output_path.resolve():
            continue
        if name in _KEY_VALUES and isinstance(value, dict) and isinstance(noted, dict):
            noted = {key: noted[key] for key in value if key in noted}
        if found := first_difference(f"--{name}", noted, value):
            what, old, new = found
            raise FlyError(
                f"--resume {manifest.folder}: {what} was "
                f"{old if name in arguments else 'not given'}, is now {new}: leave it out, or "
                "start a new run (leave --resume out)"
            )


@contextmanager
def keeping_manifest(
    run: RunContext,
    reopened: Manifest | None,
    arguments: dict[str, Any],
    model_args: dict[str, Any],
) -> Iterator[None]:
    """Keep the run's manifest while it lasts, if it is a run that can be resumed.

    Its first process does; the others learn of it when all meet (fly/harness/backend.py).
    reopened: the manifest to go on with. A new run that fails before its first record (bad input)
    leaves none behind. Raises FlyError if another process works on the run, or a fact has changed.
    """
    config, hf_args = fly_config.of_model_args(model_args)
    folder = run.output_dir
    if reopened:
        run.started = reopened.started
    if folder is None or launch.rank() > 0 or not (reopened or config.enable_statistics):
        yield
        return
    if reopened and "config" in reopened.data:  # first: the folder is named after the draft
        reopened.agree("config", config.model_dump())
    manifest = _join(folder, reopened) if reopened else Manifest.create(folder, arguments)
    try:
        manifest.agree("config", config.model_dump())
        manifest.agree("versions", deciding_versions())
        check_models(manifest, config, hf_args, loaded=False)
        finished = None
        if reopened:
            finished = FinishedRequests(folder, manifest.started, is_traced=config.trace)
        run.join(manifest, finished)
        yield
        _finish(run, manifest, arguments)
    except Exception:
        records = list(folder.glob(f"fly_requests_{manifest.started}*"))
        if not (reopened or records or _results(manifest)):
            with suppress(OSError):  # its folder may be gone
                manifest.path.unlink(missing_ok=True)
        elif not manifest.path.exists():  # the folder was removed, and its records put back
            with suppress(OSError):
                manifest.save()
        raise
    finally:
        run.manifest = run.finished_requests = None  # this process may decode more, of no run
        run.is_resumable = False
        manifest.release()


def _join(folder: Path, manifest: Manifest) -> Manifest:
    """Take over a run that no other process works on, as the last one has left it."""
    if folder.resolve() != manifest.folder.resolve():
        raise FlyError(
            f"--resume {manifest.folder}: the folder was called {folder.name}: "
            "give it its name back"
        )
    if not manifest.hold(_LOCK_SECONDS):
        raise FlyError(f"--resume {manifest.folder}: another process is working on this run")
    manifest.data = Manifest.read(manifest.path).data
    if manifest.finished:
        raise FlyError(f"--resume {manifest.folder}: another process has just ended this run")
    manifest.data["resumed"].append(timestamp())
    return manifest


def check_models(
    manifest: Manifest, config: fly_config.FlyConfig, hf_args: dict[str, Any], loaded: bool
) -> None:
    """Note or check which models these are; a hub model's commit may be unknown until `loaded`."""
    found = models_of(config, hf_args)
    if loaded or all(model.get("commit", "") is not None for model in found.values()):
        manifest.agree("models", found)


def _finish(run: RunContext, manifest: Manifest, arguments: dict[str, Any]) -> None:
    """Note that the run has ended. Raises FlyError if a file that it should leave is missing."""
    assert run.results_entry is not None
    requests = run.results_entry()["stats"]["requests"]
    # with --use_cache lm-eval answers from its cache, and fly is not asked
    if run.finished_requests and not arguments.get("use_cache"):
        run.finished_requests.check_all_asked()
    results = _results(manifest)
    if results is None:
        raise FlyError(
            f"output_path={run.output_dir}: the results could not be saved (lm-eval's warning says "
            f"why); {run.resume_hint}"
        )
    if arguments.get("log_samples"):
        reader.check_samples(results)
    count = _count_records(manifest)
    if count != requests:
        raise FlyError(
            f"output_path={run.output_dir}: holds {count} of {requests} records: files "
            f"were removed while the run went on; {run.resume_hint}"
        )
    manifest.finish(results)


def _check_ended(manifest: Manifest) -> None:
    """Raise FlyError unless a run that is said to have ended has left results and all records."""
    results = manifest.results
    if results is None or not results.is_file():
        lacks = f"no results file {manifest.data['results']}"
    else:
        stats = (reader.read_results(results)["config"].get("fly") or {}).get("stats") or {}
        requests, count = stats.get("requests"), _count_records(manifest)
        if requests in (count, None):
            return
        lacks = f"{count} of {requests} records"
    raise FlyError(
        f"{manifest.path}: finished=true, and the folder holds {lacks}: put its files back, or set "
        "finished to false and resume"
    )


def _count_records(manifest: Manifest) -> int:
    paths = run_files(manifest.folder, "fly_requests", manifest.started).values()
    return sum(reading.bytes_of(path, str(path)).count(b"\n") for path in paths)


def _results(manifest: Manifest) -> Path | None:
    """The results file that lm-eval wrote for this run; None without a whole one."""
    for path in reversed(reader.results_in(manifest.folder)):
        with suppress(FlyError):
            if reader.started_of(path) == manifest.started:
                return path
    return None
