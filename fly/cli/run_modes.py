"""The runs that a comparison needs, each in a process of its own, one after the other."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fly import config as fly_config
from fly import reading
from fly.cli.processes import run_child
from fly.errors import FlyError
from fly.harness.arguments import check_model_args, key_values
from fly.harness.summary import machine_facts, versions
from fly.models import sources
from fly.models.fingerprint import of_value
from fly.paths import write_whole
from fly.runs import manifest, reader
from fly.runs.resume import models_of

# What each mode changes in the pair's file; `hf` is lm-eval's own backend on the target.
NAMED: dict[str, dict[str, Any]] = {
    "target-only": {"use_sd": False},
    "exact": {"use_sd": True, "enable_fly": False, "verification": "exact"},
    "fly": {},
    "hf": {},
}
DEFAULT = ("target-only", "exact", "fly")
_MARK = "fly_compare.json"


@dataclass(frozen=True)
class Mode:
    """One run to be made: `fly run` with these model_args. identity: changes if the texts may.

    models: looks up what they are now, by role (fly.models.fingerprint). rule: what the run's own
    mode will be. records: what it is to write down, by configuration key.
    """

    name: str
    model: str
    model_args: dict[str, Any]
    identity: str
    models: Callable[[], dict[str, Any]] = dict
    rule: str = ""
    records: dict[str, bool] = field(default_factory=dict)


def plan(
    names: Sequence[str], custom: Sequence[str], model_args: Mapping[str, Any]
) -> dict[str, Mode]:
    """The modes by name, checked before anything runs. custom: NAME=key=value,..., in addition."""
    overrides = {}
    for name in names:
        if name not in NAMED:
            raise FlyError(f"--modes {name}: choose from {', '.join(NAMED)}, or define a --mode")
        overrides[name] = NAMED[name]
    for text in custom:
        name, _, rest = text.partition("=")
        if not re.fullmatch(r"[\w.-]+", name) or "=" not in rest:
            raise FlyError(f"--mode {text}: write it as NAME=key=value,key=value")
        if name in overrides or name in NAMED:
            raise FlyError(f"--mode {text}: the name {name} is taken: choose another")
        overrides[name] = key_values(rest, f"--mode {name}")
    return {name: _mode(name, {**model_args, **changes}) for name, changes in overrides.items()}


def _mode(name: str, model_args: dict[str, Any]) -> Mode:
    config, rest = fly_config.of_model_args(model_args)
    check_model_args(config, rest)
    target, _ = sources.sources(config)
    models = partial(models_of, config, rest)
    models()  # what is not there is refused now
    if name == "hf":
        models = partial(models_of, config.model_copy(update={"use_sd": False}), rest)
        gguf = {"gguf_file": target.gguf_file} if target.gguf_file else {}
        arguments = {"pretrained": target.path, **gguf, **rest}
        identity = json.dumps(arguments, sort_keys=True, default=str)
        return Mode(name, "hf", arguments, identity, models, "hf")
    identity = json.dumps([config.hash(), rest], sort_keys=True, default=str)
    records = {key: getattr(config, key) for key in fly_config.RECORDING_KEYS}
    return Mode(name, "fly", model_args, identity, models, config.mode, records)


def run_missing(
    modes: Mapping[str, Mode],
    flags: Sequence[str],
    output: Path,
    files: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Path]:
    """Run what is not finished yet; the folder of each mode. flags: of `fly run`, for all modes.
    files: fingerprints of what the flags name, by flag.

    A mode is finished if its folder holds the results of a run that this same command has begun,
    of the same files, models and versions, on such a machine: what the run itself has written
    tells, whoever saw it end. A failed run ends the comparison with FlyError; what has finished
    stays, and the next call goes on with the rest, in the middle of a run if its records are there.
    """
    folders = {}
    for name, mode in modes.items():
        folder = folders[name] = output / name
        mark = {
            "command": _hash(mode, flags),
            "files": dict(files or {}),
            "models": mode.models(),
            "versions": versions(),
            "machine": machine_facts(),
        }
        if (why := _why_anew(folder, mark)) is not None:
            print(f"{name}: made anew: {why}", flush=True)
        if (run := _finished(folder, mark)) is not None:
            print(f"{name}: finished before, in {folder}{_lacking(mode, run)}", flush=True)
            continue
        unfinished = _cut_short(folder, mark)
        how = ", going on" if unfinished else ""
        print(f"\n--- {name} ({len(folders)} of {len(modes)}){how} ---", flush=True)
        if unfinished:
            mark["before"] = _before(folder)
            again = [*_arguments(mode, flags, folder), "--resume", str(unfinished)]
            _run(mode, again, f"; to start it anew, remove {folder}")
        else:
            mark["before"] = [_relative(path, folder) for path in folder.rglob("*.json")]
            _set_mark(folder, mark)
            _run(mode, _arguments(mode, flags, folder))
        if (models := mode.models()) != _mark(folder).get("models"):  # a hub's commit, known by now
            _set_mark(folder, {**mark, "models": models})
    return folders


def _hash(mode: Mode, flags: Sequence[str]) -> str:
    return of_value([mode.model, mode.identity, list(flags)])


def _finished(folder: Path, mark: dict[str, Any]) -> reader.Run | None:
    """What this same command has made there, by what the run itself has written."""
    noted = _mark(folder)
    if not _agrees(noted, mark) or not noted.get("finished", True):  # an earlier fly's note
        return None
    try:
        run = reader.load(folder)
    except FlyError:
        return None
    return None if _relative(run.path, folder) in _before(folder) else run


def _lacking(mode: Mode, run: reader.Run) -> str:
    """In words, what a finished run has not written down though it is asked for now."""
    has = {
        "a trace": not mode.records.get("trace") or run.rounds,
        "records of its requests": not mode.records.get("enable_statistics") or run.requests,
    }
    missing = [what for what, there in has.items() if not there]
    return f" (without {' and '.join(missing)}: to have them, remove it)" if missing else ""


def _why_anew(folder: Path, mark: dict[str, Any]) -> str | None:
    """What has changed since a run of this command was made there; None if nothing has, or if the
    command is another one."""
    noted = _mark(folder)
    if noted.get("command") != mark["command"] or _agrees(noted, mark):
        return None
    facts = {key: value for key, value in noted.items() if key in mark}
    found = manifest.first_difference("", facts, manifest.plain(mark))
    return None if found is None else f"{found[0][1:]} was {found[1]}, is now {found[2]}"


def _cut_short(folder: Path, mark: dict[str, Any]) -> Path | None:
    """The unfinished run that this same command began there: what `--resume` goes on with."""
    if not _agrees(_mark(folder), mark):
        return None
    before = _before(folder)
    own = [run for run in manifest.all_in(folder) if _relative(run.path, folder) not in before]
    return own[-1].path if own and not own[-1].finished else None


def _before(folder: Path) -> list[str]:
    """Files that lay there when the marked run was begun."""
    return list(_mark(folder).get("before", []))


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _agrees(noted: dict[str, Any], mark: dict[str, Any]) -> bool:
    """The same mark; a hub id's commit may not have been known yet: it is when models load."""
    if not isinstance(noted.get("models"), dict):
        return False
    ours, theirs = noted["models"], mark["models"]
    facts = {**{key: noted.get(key) for key in mark}, "models": _without_unknown(ours, theirs)}
    return facts == {**mark, "models": _without_unknown(theirs, ours)}


def _without_unknown(models: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Without commits that the same model among the others does not have."""
    unknown = {role for role, model in others.items() if model.get("commit", "") is None}
    return {
        role: {**model, "commit": None} if role in unknown and "commit" in model else model
        for role, model in models.items()
    }


def _mark(folder: Path) -> dict[str, Any]:
    try:
        return reading.read_object(folder / _MARK)
    except FlyError:
        return {}


def _set_mark(folder: Path, mark: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / _MARK, json.dumps(mark) + "\n")


def _arguments(mode: Mode, flags: Sequence[str], folder: Path) -> list[str]:
    return [
        *flags,
        *("--model", mode.model, "--model_args", json.dumps(mode.model_args)),
        *("--output_path", str(folder), "--log_samples"),
    ]


def _run(mode: Mode, arguments: Sequence[str], way_out: str = "") -> None:
    command = [sys.executable, "-m", "fly", "run", *arguments]
    status = run_child(command)
    if status:
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        raise FlyError(
            f"mode {mode.name} failed ({how}); finished modes are kept: the same command goes on "
            f"with {mode.name}{way_out}"
        )
