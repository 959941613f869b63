"""Make the runs that a comparison needs, one after the other, each in a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fly import reading
from fly.cli.compare_plan import Mode, PlannedRuns
from fly.cli.processes import run_child
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
    modes, flags = planned.modes, planned.flags
    folders = {name: planned.output / name for name in modes}
    for number, (name, mode) in enumerate(modes.items(), 1):
        folder = folders[name]
        mark = {
            "command": hash_json([mode.model, mode.identity, [*flags, *mode.flags]]),
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
        if finished is not None:
            done = f"finished before, in {folder}{_lacking(mode, finished)}"
            if screen:
                screen.begin(number, len(modes), name)
                screen.end(done)
            else:
                print(f"{name}: {done}", flush=True)
            continue
        how = ", going on" if unfinished else ""
        if screen:
            screen.begin(number, len(modes), name)
        else:
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
            _run(mode, arguments, screen, f"; to start it anew, remove {folder}")
        else:
            mark["before"] = [_relative(path, folder) for path in folder.rglob("*.json")]
            _write_mark(folder, mark)
            _run(mode, arguments, screen)
        if screen:
            screen.end()
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


def _run(
    mode: Mode, arguments: Sequence[str], screen: Screen | None = None, hint: str = ""
) -> None:
    """Run the mode in a process of its own. Raises FlyError if it fails."""
    command = [sys.executable, "-m", "fly", "run", *arguments]
    status = run_child(command, screen.log, screen.show) if screen else run_child(command)
    if status:
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        if screen:
            screen.fail()
        raise FlyError(
            f"mode {mode.name} failed ({how}); finished modes are kept: the same command goes on "
            f"with {mode.name}{hint}"
        )
