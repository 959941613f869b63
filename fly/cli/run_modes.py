"""Make the runs that a comparison needs, each in a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fly import reading, registry
from fly.cli.compare_plan import Mode, PlannedRuns
from fly.cli.processes import run_children
from fly.cli.screen import Screen
from fly.errors import FlyError
from fly.execution.device import machine_facts
from fly.models.fingerprint import hash_json
from fly.paths import write_whole
from fly.runs import manifest, reader
from fly.runs.environment import versions

_MARK = "fly_compare.json"  # what the last run that was begun in a mode's folder depends on


def run_missing(planned: PlannedRuns, screen: Screen | None = None) -> dict[str, Path]:
    """Run the modes that are not finished yet; returns the folder of each.

    A mode is finished if its folder holds the results of a run of this command, with the same
    input files, models and versions, on the same kind of machine. Whether the run has ended is told
    by what the run itself wrote, not by who saw it end. Raises FlyError if a run fails; the next
    call continues there, in the middle of a run if its records allow it. screen: shows how far it
    is, instead of the runs' own output.
    """
    folders = {name: planned.output / name for name in planned.modes}
    left = []
    in_turn = sorted(planned.modes.values(), key=lambda mode: not _is_for_one_temperature(mode))
    for number, mode in enumerate(in_turn, 1):
        begun = _begin(planned, mode, folders[mode.name], (number, len(folders)), screen)
        left += [begun] if begun else []
        if not planned.at_once:
            _run(left, screen)
            left = []
    _run(left, screen)
    return folders


def _is_for_one_temperature(mode: Mode) -> bool:
    """Whether its rule is for greedy requests alone, or for samples alone. What tasks ask for is
    known once a run has begun, so that these come first: refused before hours of decoding."""
    rule = registry.RULES.get(mode.rule)
    return rule is not None and registry.load(rule.where).requests != "all"


@dataclass(frozen=True)
class _Begun:
    """A run whose folder is marked. hint: what a user may do if it fails."""

    mode: Mode
    folder: Path
    mark: dict[str, Any]
    arguments: list[str]
    hint: str


def _begin(
    planned: PlannedRuns,
    mode: Mode,
    folder: Path,
    place: tuple[int, int],
    screen: Screen | None,
) -> _Begun | None:
    """Mark the mode's folder; None if its run is finished. place: of how many, for the screen."""
    name = mode.name
    mark = {
        "command": hash_json([mode.model, mode.identity, [*planned.flags, *mode.flags]]),
        "files": dict(planned.inputs),
        "models": mode.models(),
        "versions": versions(),
        "machine": machine_facts(),
    }
    noted = _read_mark(folder)
    difference = _difference(noted, mark)
    finished = unfinished = None
    if difference is None:
        finished, unfinished = _find_begun(folder, noted["before"])
    elif noted.get("command") == mark["command"]:
        what, old, new = difference
        print(f"{name}: made anew: {what} was {old}, is now {new}", flush=True)
    elif noted:
        others = f"flags or settings are not those of the run before in {folder}, which stays"
        print(f"{name}: made anew: {others}", flush=True)
    if screen:
        screen.begin(*place, name)
    if finished is not None:
        done = f"finished before, in {folder}{_lacking(mode, finished)}"
        if screen:
            screen.end(done)
        else:
            print(f"{name}: {done}", flush=True)
        return None
    if not screen:
        how = ", going on" if unfinished else ""
        print(f"\n--- {name} ({place[0]} of {place[1]}){how} ---", flush=True)
    arguments = [
        *planned.flags,
        *mode.flags,
        *("--model", mode.model, "--model_args", json.dumps(mode.model_args)),
        *("--output_path", str(folder), "--log_samples"),
    ]
    if unfinished:
        mark["before"] = noted["before"]
        arguments += ["--resume", str(unfinished)]
        return _Begun(mode, folder, mark, arguments, f"; to start it anew, remove {folder}")
    mark["before"] = [_relative(path, folder) for path in folder.rglob("*.json")]
    _write_mark(folder, mark)
    return _Begun(mode, folder, mark, arguments, "")


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


def _find_begun(folder: Path, before: Sequence[str]) -> tuple[reader.Run | None, Path | None]:
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
        "a trace": not mode.records.get("trace") or any(True for _ in run.rounds),
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


def _run(runs: Sequence[_Begun], screen: Screen | None) -> None:
    """Run them in processes of their own, all at once. Raises FlyError if one fails."""
    if not runs:
        return
    commands = [[sys.executable, "-m", "fly", "run", *begun.arguments] for begun in runs]
    output = (screen.log, screen.show) if screen else (None, None)
    statuses = run_children(commands, *output)
    for begun, status in zip(runs, statuses):
        if status:
            how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            if screen:
                screen.fail()
            raise FlyError(
                f"mode {begun.mode.name} failed ({how}); finished modes are kept: the same command "
                f"goes on with {begun.mode.name}{begun.hint}"
            )
        models = begun.mode.models()
        if models != _read_mark(begun.folder).get("models"):  # it has fetched a hub's commit
            _write_mark(begun.folder, {**begun.mark, "models": models})
    if screen:
        screen.end()
