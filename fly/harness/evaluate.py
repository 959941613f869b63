"""Runs tasks through lm-eval with a model that is already loaded, and checks tasks beforehand."""

from __future__ import annotations

import functools
import glob
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from fly import reading
from fly.errors import FlyError
from fly.harness import code_metrics, registration, sandbox


def evaluate(model: Any, task: str, documents: list[int], **settings: Any) -> list[dict[str, Any]]:
    """lm-eval's samples of these documents of one task.

    settings: of `run_tasks`; here the chat template is applied and programs are run by default.
    """
    settings = {"chat": True, "confirm_run_unsafe_code": True, **settings}
    return run_tasks(model, [task], samples={task: documents}, **settings)["samples"][task]


def run_tasks(
    model: Any,
    tasks: Sequence[str],
    *,
    samples: dict[str, list[int]] | None,
    chat: bool = False,
    gen_kwargs: str | None = None,
    num_fewshot: int | None = None,
    include_path: str | None = None,
    confirm_run_unsafe_code: bool = False,
) -> dict[str, Any]:
    """lm-eval's results of these documents by task, or of all, samples included. fly's tasks go
    before lm-eval's, the user's before both."""
    return simple_evaluate(
        model=model,
        tasks=list(tasks),
        samples=samples,
        task_manager=_manager_of(tasks, include_path),
        num_fewshot=num_fewshot,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        gen_kwargs=gen_kwargs,
        confirm_run_unsafe_code=confirm_run_unsafe_code,
        bootstrap_iters=0,
    )


def load_tasks(names: Sequence[str], include_path: str | None = None) -> dict[str, Task]:
    """What these tasks, groups, tags or tasks' files mean: tasks with their documents, by name.

    Raises FlyError if one does not exist or cannot be loaded.
    """
    manager = _manager_of(names, include_path)
    tasks: dict[str, Task] = {}
    for name in names:
        if name not in manager.all_tasks and not Path(name).is_file():
            raise no_such_task(name, include_path)
        tasks |= _load(manager, name)
    return tasks


def check_generation(
    names: Sequence[str], include_path: str | None, confirm_run_unsafe_code: bool
) -> dict[str, int]:
    """Load what is to be decoded, as `load_tasks`; how many documents each task has.

    Raises FlyError if one cannot be loaded or run, or if none generates text.
    """
    tasks = load_tasks(names, include_path)
    for name, task in tasks.items():
        check_scoring(name, task, confirm_run_unsafe_code)
    if all(task.OUTPUT_TYPE != "generate_until" for task in tasks.values()):
        raise FlyError(
            f"--tasks {' '.join(names)}: no request generates text, so there is nothing to decode "
            "faster: choose generation tasks"
        )
    return {name: len(task.eval_docs) for name, task in tasks.items()}


def check_before_models_load(
    names: Sequence[Any],
    folders: Sequence[str],
    samples: dict[str, list[int]] | None,
    confirm_run_unsafe_code: bool,
    is_scored: bool = True,
) -> None:
    """Load fly's and the user's own tasks among these, and all of them where samples are chosen.

    Raises FlyError if one cannot be loaded or run, or has no such document. Finding lm-eval's own
    tasks takes seconds, so what else is wrong with those is for lm-eval to say.
    """
    registration.extend_tasks()
    wanted = [name for name in names if isinstance(name, str)]
    tasks: dict[str, Task] = {}
    with quiet("lm_eval", logging.ERROR):
        manager = TaskManager(include_path=[*folders], include_defaults=False)
        known = manager.all_subtasks
        if samples and not all(name in known or name.endswith(".yaml") for name in wanted):
            manager = TaskManager(include_path=[*folders])
            known = manager.all_tasks
        resolved = {name: _resolve(manager, name) for name in wanted}
        for name in dict.fromkeys(chain(*resolved.values())):
            if name in known or name.endswith(".yaml"):
                tasks |= _load(manager, name)
    all_known = len(wanted) == len(names) and all(resolved.values())
    for name, task in tasks.items():
        check_scoring(name, task, confirm_run_unsafe_code, is_scored)
    for name, numbers in (samples or {}).items():
        if name not in tasks:
            if not all_known:
                continue
            raise FlyError(f"--samples: {name} is not among --tasks: {', '.join(tasks)}")
        if (count := len(tasks[name].eval_docs)) <= max(numbers):
            raise FlyError(
                f"--samples: {name} has no document {max(numbers)}: it has 0 to {count - 1}"
            )


def check_scoring(
    name: str, task: Task, confirm_run_unsafe_code: bool, is_scored: bool = True
) -> None:
    """Refuse a task whose answers could not be scored once they are decoded.

    is_scored: whether they are to be, which takes a machine that can run programs.
    """
    if getattr(task, "UNSAFE_CODE", False) and not confirm_run_unsafe_code:
        raise FlyError(
            f"task {name}: scoring runs the program that the model writes: "
            "add --confirm_run_unsafe_code"
        )
    repeats: Any = task.config.repeats
    if type(repeats) is not int or repeats < 1:
        raise FlyError(f"task {name}: repeats={repeats!r}: must be a whole number, at least 1")
    for metric in task.config.metric_list or []:
        if getattr(metric["metric"], "__name__", "") == "pass_at_k":
            ks = metric.get("k", [1])
            ks = ks if isinstance(ks, list) else [ks]
            code_metrics.check_samples(f"task {name}", repeats, ks)
            if is_scored:
                sandbox.isolation_level()


@contextmanager
def quiet(name: str, level: int = logging.WARNING) -> Iterator[None]:
    """Show a package's log from `level` on only."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


def _load(manager: TaskManager, name: str) -> dict[str, Task]:
    """The tasks of this name: one, or those of a group or tag."""
    try:
        return manager.load([name])["tasks"]
    except FlyError:
        raise
    except Exception as error:  # loading runs the task's own functions
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise FlyError(
            f"task {name}: cannot be loaded: {type(error).__name__}: {reason}"
        ) from error


def _resolve(manager: TaskManager, name: str) -> list[str]:
    """What lm-eval takes this for: tasks, groups and tags, by wildcards too, or tasks' files."""
    if name.endswith(".yaml"):
        return sorted(glob.glob(str(Path(name).absolute())))
    return manager.match_tasks([name])


def no_such_task(name: str, include_path: str | None = None) -> FlyError:
    """The error for a name that no task has; it names the nearest that one has."""
    known = _manager(include_path, include_defaults=True).all_tasks
    hint = reading.hint(name, known, "`fly ls tasks` lists them")
    return FlyError(f"task {name!r}: no such task: {hint}")


def _manager_of(names: Sequence[str], include_path: str | None) -> TaskManager:
    """Knows these; lm-eval's own tasks, which take seconds to find, only if one may be of them."""
    own = _manager(include_path, include_defaults=False)
    if all(name in own.all_subtasks for name in names):
        return own
    return _manager(include_path, include_defaults=True)


@functools.cache
def _manager(include_path: str | None, include_defaults: bool) -> TaskManager:
    registration.extend_tasks()
    return TaskManager(include_path=include_path, include_defaults=include_defaults)
