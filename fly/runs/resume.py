"""`--resume RUN_DIR`: a run that was killed goes on as the same run, with the same arguments.

Here: the arguments, and the checks that they mean what they meant. finished_requests.py has the
records.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lm_eval.utils import simple_parse_args_string

from fly import config as fly_config
from fly.errors import FlyError
from fly.models import fingerprint, sources
from fly.runs import reader
from fly.runs.context import Session
from fly.runs.finished_requests import Earlier
from fly.runs.manifest import Manifest, find, first_difference, plain

logger = logging.getLogger(__name__)

_NOT_ARGUMENTS = ("command", "func", "config", "resume")
_TAKEN_APART = (  # key=value flags
    "model_args", "gen_kwargs", "metadata", "hf_hub_log_args", "wandb_args", "wandb_config_args",
    "trackio_args",
)  # fmt: skip
_SECRETS = {
    "token", "hf_token", "auth_token", "use_auth_token", "access_token", "key", "api_key", "secret",
    "password",
}  # fmt: skip
_ONE_PROCESS = "WORLD_SIZE"  # set by torchrun and accelerate
_ENDING = 5.0  # seconds that a process may take which was told to end
_BESIDE = ("tokenizer", "peft", "delta")  # model_args that may name folders, too
_DECIDING = ("fly", "torch", "transformers", "lm-eval", "tokenizers")


def given_arguments(args: argparse.Namespace, yaml_values: dict[str, Any]) -> dict[str, Any]:
    """What lm-eval will see: --config's values under the command line's, without secrets."""
    return {
        name: {key: part for key, part in value.items() if not _is_secret(key)}
        if isinstance(value, dict)
        else value
        for name, value in _merged(args, yaml_values).items()
    }


def given_secrets(args: argparse.Namespace, yaml_values: dict[str, Any]) -> dict[str, Any]:
    """What `given_arguments` leaves out, by argument: never written down."""
    return {
        name: found
        for name, value in _merged(args, yaml_values).items()
        if isinstance(value, dict) and (found := {k: v for k, v in value.items() if _is_secret(k)})
    }


def _merged(args: argparse.Namespace, yaml_values: dict[str, Any]) -> dict[str, Any]:
    on_line = {
        name: value
        for name, value in vars(args).items()
        if (value or value == 0) and name not in _NOT_ARGUMENTS
    }
    arguments: dict[str, Any] = plain({**yaml_values, **on_line})
    for name in _TAKEN_APART:
        if isinstance(text := arguments.get(name), str):  # as YAML may have it
            arguments[name] = simple_parse_args_string(text)
    return arguments


def _is_secret(key: str) -> bool:
    return key.lower() in _SECRETS


def is_one_process() -> bool:
    return int(os.environ.get(_ONE_PROCESS) or 1) == 1


def reopen(args: argparse.Namespace, given: dict[str, Any], secrets: dict[str, Any]) -> Manifest:
    """The run that --resume names; unless it has ended, `args` become its arguments and `secrets`.

    Changes to the folder that the run was started in. Raises FlyError if there is no such run, or
    an argument in `given` is not the run's.
    """
    manifest = find(args.resume)
    if manifest.finished:
        return manifest
    if not is_one_process():
        raise FlyError(
            f"--resume with {_ONE_PROCESS}={os.environ[_ONE_PROCESS]}: only runs of one process "
            "can be resumed: start one process (without torchrun or accelerate launch)"
        )
    manifest.check_resumable()
    _check_given(manifest, given)
    args.config = None
    for name, value in manifest.data["arguments"].items():
        setattr(args, name, value)
    for name, found in secrets.items():
        setattr(args, name, {**(getattr(args, name, None) or {}), **found})
    args.output_path = _output_path(manifest)
    there = manifest.data["working_directory"]
    if there != str(Path.cwd()):
        if Path(there).is_dir():
            logger.info("going on in the folder that the run was started in: %s", there)
            os.chdir(there)
        else:
            logger.warning("%s, where the run was started, is gone: relative paths may be", there)
    return manifest


@contextmanager
def kept(
    run: Session, reopened: Manifest | None, arguments: dict[str, Any], model_args: dict[str, Any]
) -> Iterator[None]:
    """Keep the run's manifest while it lasts, if it is one that can be resumed.

    reopened: the manifest to go on with. A new run that fails before its first record (bad input)
    leaves none behind. Raises FlyError if another process works on the run, or a fact has changed.
    """
    config, rest = fly_config.of_model_args(model_args)
    if run.output_dir is None or not (reopened or (is_one_process() and config.enable_statistics)):
        yield
        return
    manifest = _join(run, reopened) if reopened else _new(run, arguments)
    try:
        for name, fact in _facts(config).items():
            manifest.agree(name, fact)
        check_models(manifest, config, rest, loaded=False)
        run.go_on_as(manifest, Earlier(manifest.folder, manifest.started) if reopened else None)
        yield
        _finish(run, manifest, arguments)
    except Exception:
        records = list(manifest.folder.glob(f"fly_requests_{run.started}*"))
        if not (reopened or records or _results(run)):
            manifest.remove()
        elif not manifest.path.exists():  # the folder was removed, and its records put back
            with suppress(OSError):
                manifest.save()
        raise
    finally:
        run.manifest = run.earlier = None  # what else this process decodes is not of the run
        manifest.release()


def _new(run: Session, arguments: dict[str, Any]) -> Manifest:
    assert run.output_dir is not None
    return Manifest.create(
        run.output_dir,
        working_directory=str(Path.cwd()),
        below=Path(arguments["output_path"]) != run.output_dir,
        arguments=arguments,
    )


def _join(run: Session, manifest: Manifest) -> Manifest:
    assert run.output_dir is not None
    if run.output_dir.resolve() != manifest.folder.resolve():
        raise FlyError(
            f"--resume {manifest.folder}: the folder was called {run.output_dir.name}: "
            "give it its name back"
        )
    if not manifest.hold(_ENDING):
        raise FlyError(f"--resume {manifest.folder}: another process is working on this run")
    manifest.data = Manifest.read(manifest.path).data  # as that process has left it
    if manifest.finished:
        raise FlyError(f"--resume {manifest.folder}: another process has just ended this run")
    manifest.data["resumed"].append(time.strftime("%Y-%m-%dT%H-%M-%S"))
    return manifest


def _facts(config: fly_config.FlyConfig) -> dict[str, Any]:
    return {
        "config": config.model_dump(),
        "versions": deciding_versions(),
    }


def deciding_versions() -> dict[str, str]:
    """Versions of what may change a text."""
    from fly.harness import summary

    installed = summary.versions()
    return {name: installed[name] for name in _DECIDING}


def _finish(run: Session, manifest: Manifest, arguments: dict[str, Any]) -> None:
    """Note that the run has ended, if all that it is to leave is there."""
    assert run.entry is not None
    requests = run.entry()["stats"]["requests"]
    if run.earlier and not arguments.get("use_cache"):  # which answers some before fly is asked
        run.earlier.check_all_asked()
    results = _results(run)
    if results is None:
        raise FlyError(
            f"output_path={run.output_dir}: the results could not be saved (lm-eval's warning says "
            f"why); {run.way_on}"
        )
    if arguments.get("log_samples"):
        reader.check_samples(results)
    records = manifest.folder / f"fly_requests_{run.started}.jsonl"
    kept = records.read_bytes().count(b"\n") if records.is_file() else 0
    if kept != requests:
        raise FlyError(
            f"output_path={run.output_dir}: holds {kept} of {requests} records: files "
            f"were removed while the run went on; {run.way_on}"
        )
    manifest.finish(results)


def _results(run: Session) -> Path | None:
    """The results file that lm-eval wrote for this run."""
    assert run.output_dir is not None
    found = run.output_dir.glob("*results_*.json")
    for path in sorted(found, key=lambda path: path.stem.rsplit("_", 1)[1], reverse=True):
        with suppress(FlyError):  # one that a kill left unfinished
            if reader.started_of(path) == run.started:
                return path
    return None


def _check_given(manifest: Manifest, given: dict[str, Any]) -> None:
    noted = manifest.data["arguments"]
    for name, value in given.items():
        old = noted.get(name)
        if name == "output_path":
            if Path(value).resolve() != Path(_output_path(manifest)).resolve():
                raise _refused(manifest, name, json.dumps(old), json.dumps(value))
        elif name in _TAKEN_APART and isinstance(value, dict) and isinstance(old, dict):
            known = {key: old[key] for key in value if key in old}
            if found := first_difference(name, known, value):
                raise _refused(manifest, *found)
        elif name not in noted:
            raise _refused(manifest, name, "not given", json.dumps(value))
        elif old != value:
            raise _refused(manifest, name, json.dumps(old), json.dumps(value))


def _refused(manifest: Manifest, name: str, old: str, new: str) -> FlyError:
    return FlyError(
        f"--resume {manifest.folder}: --{name} was {old}, is now {new}: leave it out, or start a "
        "new run (leave --resume out)"
    )


def _output_path(manifest: Manifest) -> str:
    """--output_path of the run, wherever its folder lies now."""
    original = Path(manifest.data["arguments"]["output_path"])
    if original.suffix == ".json":
        return str(manifest.folder / original.name)
    return str(manifest.folder.parent if manifest.data["below"] else manifest.folder)


def check_models(
    manifest: Manifest, config: fly_config.FlyConfig, hf_args: dict[str, Any], loaded: bool
) -> None:
    """Note or check which models these are. A hub id's commit may be known only once `loaded`."""
    found = models_of(config, hf_args)
    if loaded or all(model.get("commit", "") is not None for model in found.values()):
        manifest.agree("models", found)


def models_of(
    config: fly_config.FlyConfig, hf_args: dict[str, Any], fetch: bool = False
) -> dict[str, Any]:
    """Fingerprints of the models, and of folders beside them, that take part in a run.

    fetch: also of models on a hub of which nothing is here yet.
    """
    cache = hf_args.get("cache_dir")
    found: dict[str, Any] = {
        name: {"path": path, "files": fingerprint.of_folder(Path(path))}
        for name in _BESIDE
        if Path(path := str(hf_args.get(name) or "")).is_dir() and path
    }
    target = sources.resolve_source(config.target_model_path, "target_model_path")
    found["target"] = fingerprint.of_model(target, hf_args.get("revision"), cache, fetch)
    if config.needs_draft_model and config.draft_model_path:
        draft = sources.resolve_source(config.draft_model_path, "pretrained")
        found["draft"] = fingerprint.of_model(draft, config.draft_revision, cache, fetch)
    return found
