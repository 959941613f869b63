"""Make the runs that a comparison needs, one after the other, each in a process of its own."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fly import config as fly_config
from fly import reading, registry
from fly.cli.processes import run_child
from fly.config import FlyConfig
from fly.errors import FlyError
from fly.execution.device import machine_facts
from fly.harness.arguments import checked_pair, key_values
from fly.models.fingerprint import of_value
from fly.paths import write_whole
from fly.runs import manifest, reader
from fly.runs.earlier_outputs import EarlierOutputs
from fly.runs.environment import deciding_versions, models_of, versions
from fly.settings import RECORDING_KEYS

# What each mode changes in the pair's file; `hf` is lm-eval's own backend on the target.
NAMED: dict[str, dict[str, Any]] = {
    "target-only": {"use_sd": False},
    "exact": {"use_sd": True, "enable_fly": False, "verification": "exact"},
    "fly": {},
    "hf": {},
}
DEFAULT = ("target-only", "exact", "fly")
_MARK = "fly_compare.json"  # what the last run that was begun in a mode's folder depends on


@dataclass(frozen=True)
class Mode:
    """One run to be made: `fly run` with `model` and these `model_args`.

    identity: what the texts depend on; a run of another identity is not reused. models: looks up
    the models' fingerprints, by role. rule: the mode that the run itself will report. records: the
    configuration's RECORDING_KEYS, with their values. flags: of `fly run`, after all modes'.
    """

    name: str
    model: str
    model_args: dict[str, Any]
    identity: str
    models: Callable[..., dict[str, Any]] = dict
    rule: str = ""
    records: dict[str, bool] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


def with_own_cache(mode: Mode, cache: str) -> Mode:
    """lm-eval's cache knows a request by its prompt alone: the name gets what else decides a text,
    as `fly run` does for fly's own modes."""
    # fetch: the next call must find this one's cache
    deciding = [mode.identity, mode.models(fetch=True), deciding_versions()]
    return replace(mode, flags=("--use_cache", f"{cache}_{of_value(deciding)[:12]}"))


def in_other_batches(mode: Mode, name: str, batch_size: Any) -> Mode:
    """The same decoding with another number of running sequences, whose passes round otherwise."""
    other = "8" if str(batch_size or 1) == "1" else "1"
    return replace(mode, name=name, flags=("--batch_size", other))


def plan(
    names: Sequence[str],
    custom: Sequence[str],
    model_args: Mapping[str, Any],
    outputs: Path | None = None,
    engine: str = "fly",
) -> dict[str, Mode]:
    """The modes by name, checked before anything runs. custom: more of them, NAME=key=value,...

    outputs: a baseline file with outputs, from which exact modes draft unless they say otherwise.
    engine: what decodes them, a name in registry.ENGINES.
    """
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
    asked = {
        name: _asked(name, {**model_args, **changes}, outputs)
        for name, changes in overrides.items()
    }
    return {name: _mode(name, model_args, engine) for name, model_args in asked.items()}


def _asked(name: str, model_args: dict[str, Any], outputs: Path | None) -> dict[str, Any]:
    """A mode's model_args, with what earlier runs' outputs change in them."""
    config, _ = fly_config.of_model_args(model_args)
    is_loose = config.enable_fly and config.verification is None
    if name == "fly" and config.draft_runs and is_loose:  # who names the mode asks for its rule
        return {**model_args, "verification": "fly"}
    if outputs is None or name == "hf" or not _drafts_from_texts(config):
        return model_args
    if config.rule != "exact" or config.draft_runs or "draft_runs" in model_args:
        return model_args
    print(f"{name}: drafts from the outputs in {outputs}", flush=True)
    return {**model_args, "draft_runs": [str(outputs)]}


def _drafts_from_texts(config: FlyConfig) -> bool:
    """Whether the mode drafts, and may draft from earlier outputs."""
    drafts = config.drafter is None or registry.DRAFTERS[config.drafter].from_texts
    return config.asks_earlier_runs and drafts


def _mode(name: str, model_args: dict[str, Any], engine: str) -> Mode:
    if name == "hf" and engine != "fly":
        raise FlyError("--modes hf: lm-eval's hf goes with --model hf: run it by itself")
    config, rest, target = checked_pair(model_args, engine)
    models = partial(models_of, config, rest)
    models()  # what is not there is refused now
    if name == "hf":
        models = partial(models_of, config.model_copy(update={"use_sd": False}), rest)
        gguf = {"gguf_file": target.gguf_file} if target.gguf_file else {}
        arguments = {"pretrained": target.path, **gguf, **rest}
        identity = json.dumps(arguments, sort_keys=True, default=str)
        return Mode(name, "hf", arguments, identity, models, "hf")
    deciding: list[Any] = [config.hash(), rest]
    if config.earlier_runs:
        deciding.append(EarlierOutputs.read(config.earlier_runs).digest())
    identity = json.dumps(deciding, sort_keys=True, default=str)
    records = {key: getattr(config, key) for key in RECORDING_KEYS}
    return Mode(name, engine, model_args, identity, models, config.mode, records)


def run_missing(
    modes: Mapping[str, Mode],
    flags: Sequence[str],
    output: Path,
    files: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Path]:
    """Run the modes that are not finished yet; returns the folder of each.

    flags: of `fly run`, for all modes. files: fingerprints of the files that the flags name, by
    flag. A mode is finished if its folder holds the results of a run of this command, with the
    same files, models and versions, on the same kind of machine. Whether the run has ended is told
    by what the run itself wrote, not by who saw it end. Raises FlyError if a run fails; the next
    call continues there, in the middle of a run if its records allow it.
    """
    folders = {name: output / name for name in modes}
    for number, (name, mode) in enumerate(modes.items(), 1):
        folder = folders[name]
        mark = {
            "command": of_value([mode.model, mode.identity, [*flags, *mode.flags]]),
            "files": dict(files or {}),
            "models": mode.models(),
            "versions": versions(),
            "machine": machine_facts(),
        }
        noted = _read_mark(folder)
        difference = _difference(noted, mark)
        finished = unfinished = None
        if difference is None:
            finished, unfinished = _begun(folder, noted["before"])
        elif noted.get("command") == mark["command"]:
            what, old, new = difference
            print(f"{name}: made anew: {what} was {old}, is now {new}", flush=True)
        if finished is not None:
            print(f"{name}: finished before, in {folder}{_lacking(mode, finished)}", flush=True)
            continue
        how = ", going on" if unfinished else ""
        print(f"\n--- {name} ({number} of {len(modes)}){how} ---", flush=True)
        arguments = [
            *flags,
            *mode.flags,
            *("--model", mode.model, "--model_args", json.dumps(mode.model_args)),
            *("--output_path", str(folder), "--log_samples"),
        ]
        if unfinished:
            mark["before"] = noted["before"]
            arguments += ["--resume", str(unfinished)]
            _run(mode, arguments, f"; to start it anew, remove {folder}")
        else:
            mark["before"] = [_relative(path, folder) for path in folder.rglob("*.json")]
            _write_mark(folder, mark)
            _run(mode, arguments)
        models = mode.models()
        if models != _read_mark(folder).get("models"):  # the run has fetched a hub's commit
            _write_mark(folder, {**mark, "models": models})
    return folders


def _difference(noted: dict[str, Any], mark: dict[str, Any]) -> tuple[str, str, str] | None:
    """(what, old, new) of the first difference between two marks; None if there is none.

    A hub model's commit differs only where both marks know it: it may be known only after loading.
    """
    old, new = {key: noted.get(key) for key in mark}, manifest.plain(mark)
    if isinstance(old["models"], dict):
        for role, model in old["models"].items():
            other = new["models"].get(role, {})
            if None in (model.get("commit", ""), other.get("commit", "")):
                model["commit"] = other["commit"] = None
    found = manifest.first_difference("", old, new)
    return found and (found[0].removeprefix("."), *found[1:])


def _begun(folder: Path, before: Sequence[str]) -> tuple[reader.Run | None, Path | None]:
    """(the finished run, the manifest of the unfinished one) that the marked command began there.

    before: files that were in the folder when it began, which are another command's.
    """
    with suppress(FlyError):
        run = reader.load(folder)
        if _relative(run.path, folder) not in before:
            return run, None
    own = [run for run in manifest.all_in(folder) if _relative(run.path, folder) not in before]
    return None, own[-1].path if own and not own[-1].finished else None


def _lacking(mode: Mode, run: reader.Run) -> str:
    """In words, the records that are asked for now and that a finished run did not write."""
    has = {
        "a trace": not mode.records.get("trace") or run.rounds,
        "records of its requests": not mode.records.get("enable_statistics") or run.requests,
    }
    missing = [what for what, there in has.items() if not there]
    return f" (without {' and '.join(missing)}: to have them, remove it)" if missing else ""


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _read_mark(folder: Path) -> dict[str, Any]:
    """The mark of the last run that was begun in the folder; empty if there is none."""
    try:
        return {"before": [], **reading.read_object(folder / _MARK)}
    except FlyError:
        return {}


def _write_mark(folder: Path, mark: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / _MARK, json.dumps(mark) + "\n")


def _run(mode: Mode, arguments: Sequence[str], hint: str = "") -> None:
    """Run the mode in a process of its own. Raises FlyError if it fails."""
    status = run_child([sys.executable, "-m", "fly", "run", *arguments])
    if status:
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        raise FlyError(
            f"mode {mode.name} failed ({how}); finished modes are kept: the same command goes on "
            f"with {mode.name}{hint}"
        )
