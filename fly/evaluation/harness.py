"""Chosen documents of a task through lm-eval, with a model that is already loaded."""

from __future__ import annotations

from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from fly.paths import data_dir

_tasks: TaskManager | None = None


def evaluate(
    model: Any,
    task: str,
    documents: list[int],
    *,
    chat: bool = True,
    gen_kwargs: str | None = None,
    num_fewshot: int | None = None,
) -> list[dict[str, Any]]:
    """lm-eval's samples of these documents of fly's tasks."""
    global _tasks
    _tasks = _tasks or TaskManager(include_path=str(data_dir("lm_eval_tasks")))
    result = simple_evaluate(
        model=model,
        tasks=[task],
        samples={task: documents},
        task_manager=_tasks,
        num_fewshot=num_fewshot,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        gen_kwargs=gen_kwargs,
        confirm_run_unsafe_code=True,
        bootstrap_iters=0,
    )
    samples: list[dict[str, Any]] = result["samples"][task]
    return samples
