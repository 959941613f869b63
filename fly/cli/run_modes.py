"""Make the runs that a comparison needs, each in a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import Timeout

from fly import reading, registry
from fly.cli.compare_plan import Mode, PlannedRuns
from fly.cli.processes import run_children
from fly.cli.screen import Screen
from fly.errors import FlyError
from fly.execution.device import machine_facts
from fly.models.fingerprint import hash_json
from fly.paths import hold, write_whole
from fly.runs import manifest, reader
from fly.runs.environment import versions

# in a mode's folder: what the last run that was begun there depends on, and of those before it
# (`earlier`) also the results or, of one that was cut short, the manifest (`run`)
_MARK = "fly_compare.json"
_MOMENT = 5.0  # seconds


def run_missing(planned: PlannedRuns, screen: Screen | None = None) -> dict[str, Path]:
    """Run the modes that are not finished yet; returns the folder or results file of each.

    A mode is finished if its folder holds the results of a run of this command, with the same
    input files, models and versions, on the same kind of machine. Whether the run has ended is told
    by what the run itself wrote, not by who saw it end. Raises FlyError if a run fails; the next
    call continues there, in the middle of a run if its records allow it. Raises it, too, if another
    comparison is making one of them. screen: shows how far it is, instead of the runs' own output.
    """
    found = {name: planned.output / name for name in planned.modes}
    left = list[_Begun]()
    # what may be refused comes first: before hours of decoding, not after
    in_turn = sorted(planned.modes.values(), key=lambda mode: not _is_for_one_temperature(mode))
    with ExitStack() as held:
        for number, mode in enumerate(in_turn, 1):
            folder = found[mode.name]
            with ExitStack() as lock:
                lock.enter_context(_alone_in(folder))
                begun = _begin(planned, mode, folder, (number, len(found)), screen)
                if isinstance(begun, _Begun):
                    held.push(lock.pop_all())
            if isinstance(begun, Path):
                found[mode.name] = begun
            else:
                left.append(begun)
            if not planned.at_once:
                _run(left, screen)
                left = []
                held.close()
        _run(left, screen)
    return found


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Holds a mode's folder for this process. Raises FlyError if another keeps it for longer than a
    moment."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = hold(folder / ".fly_compare.lock", _MOMENT)
    except Timeout:
        raise FlyError(
            f"{folder}: another fly compare is making this run: wait for it, or give another "
            "--output_path"
        ) from None
    try:
        yield
    finally:
        if lock is not None:
            with suppress(OSError):  # Windows removes no open file
                Path(lock.lock_file).unlink()
            lock.release()


def _is_for_one_temperature(mode: Mode) -> bool:
    """Whether its rule is for greedy requests alone, or for samples alone. Which of them the tasks
    make is known once a run has begun."""
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
) -> _Begun | Path:
    """Mark the mode's folder; the results if its run is finished. place: of how many, for the
    screen."""
    name = mode.name
    mark = {
        "command": hash_json([mode.model, mode.identity, [*planned.flags, *mode.flags]]),
        "files": dict(planned.inputs),
        "models": mode.models(),
        "versions": versions(),
        "machine": machine_facts(),
    }
    noted = _read_mark(folder)
    difference, earlier = _difference(noted, mark), noted["earlier"]
    finished, unfinished = _find_begun(folder, noted) if "command" in noted else (None, None)
    if difference is not None:
        if path := finished.path if finished else unfinished:
            facts = {key: noted.get(key) for key in mark}
            earlier = [*earlier, {**facts, "run": _relative(path, folder)}]
        finished, unfinished = _find_earlier(folder, earlier, mark)
        if not (finished or unfinished) and "command" in noted:
            why = f"flags or settings are not those of the run before in {folder}, which stays"
            if noted["command"] == mark["command"]:
                why = "{} was {}, is now {}".format(*difference)
            print(f"{name}: made anew: {why}", flush=True)
    if screen:
        screen.begin(*place, name)
    if finished is not None:
        where = folder if difference is None else finished.path  # it is not the newest there
        done = f"finished before, in {where}{_lacking(mode, finished)}"
        if screen:
            screen.end(done)
        else:
            print(f"{name}: {done}", flush=True)
        return finished.path
    if not screen:
        how = ", going on" if unfinished else ""
        print(f"\n--- {name} ({place[0]} of {place[1]}){how} ---", flush=True)
    arguments = [
        *planned.flags,
        *mode.flags,
        *("--model", mode.model, "--model_args", json.dumps(mode.model_args)),
        *("--output_path", str(folder), "--log_samples"),
    ]
    hint = ""
    if unfinished:
        arguments += ["--resume", str(unfinished)]
        hint = f"; to start it anew, remove {unfinished}"
    others = (path for path in folder.rglob("*.json") if path != unfinished)
    mark |= {"before": [_relative(path, folder) for path in others], "earlier": earlier}
    _write_mark(folder, mark)
    return _Begun(mode, folder, mark, arguments, hint)


def _difference(noted: dict[str, Any], mark: dict[str, Any]) -> tuple[str, str, str] | None:
    """(what, old, new) of the first difference between two marks; None if there is none.

    A hub model's commit differs only where both marks know it: it may be known only after loading.
    """
    old, new = manifest.plain({key: noted.get(key) for key in mark}), manifest.plain(mark)
    if isinstance(old["models"], dict):
        for role, model in old["models"].items():
            other = new["models"].get(role, {})
            if None in (model.get("commit", ""), other.get("commit", "")):
                model["commit"] = other["commit"] = None
    found = manifest.first_difference("", old, new)
    return found and (found[0].removeprefix("."), *found[1:])


def _find_earlier(
    folder: Path, earlier: Sequence[dict[str, Any]], mark: dict[str, Any]
) -> tuple[reader.Run | None, Path | None]:
    """As `_find_begun`, of this command's newest run among the earlier ones."""
    for past in reversed(earlier):
        if _difference(past, mark) is None:
            path = folder / past["run"]
            with suppress(FlyError):
                if path.name.startswith("fly_run_"):
                    own = manifest.Manifest.read(path)
                    if not own.finished:
                        return None, path
                    path = path.with_name(own.data["results"])
                return reader.load(path), None
    return None, None


def _find_begun(folder: Path, noted: dict[str, Any]) -> tuple[reader.Run | None, Path | None]:
    """(the finished run, the manifest of the unfinished one) that the marked command began there.
    Files that were in the folder before are another command's."""
    before = noted["before"]
    with suppress(FlyError):
        run = reader.load(folder)
        own_files = [run.path]
        if run.entry and (started := run.entry.get("started")):
            own_files.append(manifest.path_in(run.path.parent, started))
        if not any(_relative(path, folder) in before for path in own_files):
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
    where = f": to have this, remove {run.path}"
    return f" (without {' and '.join(missing)}{where})" if missing else ""


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _read_mark(folder: Path) -> dict[str, Any]:
    """The mark of the last run that was begun in the folder; of none if there is none."""
    try:
        return {"before": [], "earlier": [], **reading.read_object(folder / _MARK)}
    except FlyError:
        return {"before": [], "earlier": []}


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
            goes_on = f"the same command goes on with {begun.mode.name}{begun.hint}"
            if status == 2:  # it may have been refused, as the same again would be
                goes_on = f"once what the run says is mended, {goes_on}"
            raise FlyError(
                f"mode {begun.mode.name} failed ({how}); finished modes are kept: {goes_on}"
            )
        models = begun.mode.models()
        if models != _read_mark(begun.folder).get("models"):  # it has fetched a hub's commit
            _write_mark(begun.folder, {**begun.mark, "models": models})
    if screen:
        screen.end()
