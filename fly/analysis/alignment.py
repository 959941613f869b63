"""`--pair-by document`: runs whose prompts differ in form, paired by what their documents hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fly.analysis.scores import Measured, Task
from fly.errors import FlyError

_Key = tuple[str, int]  # a document's hash, and how many of the same come before it


def pair_by_document(runs: Sequence[Measured]) -> list[Measured]:
    """The runs with the documents that all of them have, under the first run's numbers and prompts.

    A note says which prompts differ and what was left out. Raises FlyError for a task that only
    some of the runs have, or of which they share no document.
    """
    first, found = runs[0], [dict(run.tasks) for run in runs]
    notes = []
    for run in runs:
        if only := sorted(first.tasks.keys() ^ run.tasks.keys()):
            raise FlyError(
                f"{first.name} and {run.name} cannot be compared: task {only[0]} is only in one"
            )
    for name, ours in first.tasks.items():
        tasks = [run.tasks[name] for run in runs]
        numbers = [_numbers(task) for task in tasks]
        shared = [key for key in numbers[0] if all(key in of_run for of_run in numbers)]
        if not shared:
            raise FlyError(f"--pair-by document: {name}: the runs share no document")
        for run, own, task, of_run in zip(runs, found, tasks, numbers):
            new = {of_run[key]: numbers[0][key] for key in shared}
            own[name] = _under_prompts_of(ours, task.select(new))
            changed = sum(
                task.documents[i].prompt != ours.documents[at].prompt for i, at in new.items()
            )
            who = f"{run.name}: {name}:"
            if changed:
                notes.append(
                    f"{who} paired by document: {changed:,} of {len(shared):,} prompts are not "
                    f"those of {first.name}, so scores may differ by the prompt alone"
                )
            if left_out := len(task.documents) - len(shared):
                notes.append(f"{who} {left_out:,} documents that not all runs have are left out")
    together = [run.model_copy(update={"tasks": tasks}) for run, tasks in zip(runs, found)]
    together[0] = together[0].model_copy(update={"notes": [*first.notes, *notes]})
    return together


def _numbers(task: Task) -> dict[_Key, int]:
    seen = Counter[str]()
    found = dict[_Key, int]()
    for number, document in sorted(task.documents.items()):
        found[document.doc, seen[document.doc]] = number
        seen[document.doc] += 1
    return found


def _under_prompts_of(first: Task, task: Task) -> Task:
    documents = {
        number: document.model_copy(update={"prompt": first.documents[number].prompt})
        for number, document in task.documents.items()
    }
    return task.model_copy(update={"documents": documents})
