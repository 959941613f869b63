"""Makes lm-eval know fly: its engines by name, its tasks, and what a run of Python code leaves.

lm-eval has no plugins for these (0.4.13): a few of its functions are replaced by ones that first do
what they did.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_eval.api import registry as of_lm_eval

from fly import config as fly_config
from fly import registry
from fly.config import FlyConfig
from fly.paths import data_dir
from fly.runs import context

_theirs = of_lm_eval.get_model


def register() -> None:
    """Called by `import fly`; loads no engine."""
    import lm_eval.models  # noqa: F401  # it registers its own only while nothing is registered

    for name, where in registry.ENGINES.items():
        if name not in of_lm_eval.model_registry:
            of_lm_eval.model_registry.register(name, target=where)
    of_lm_eval.get_model = _get_model


def _get_model(name: str) -> Any:
    """As lm-eval's; `hf` and `vllm` with config_path in their arguments become fly's engine."""
    extend_tasks()
    extend_tracker()
    found = _theirs(name)
    if name not in registry.IN_PLACE_OF:
        return found

    class Chosen(found):  # type: ignore[misc,valid-type]
        @classmethod
        def create_from_arg_obj(cls, arg_dict: dict[str, Any], more: Any = None) -> Any:
            engine = registry.engine_of(name, arg_dict)
            model = registry.load_engine(engine) if engine else found
            return model.create_from_arg_obj(arg_dict, more)

        @classmethod
        def create_from_arg_string(cls, arg_string: str, more: Any = None) -> Any:
            from fly.runs.resume import parse_pairs

            return cls.create_from_arg_obj(parse_pairs(arg_string), more)

    return Chosen


@functools.cache
def extend_tasks() -> None:
    """From now on every TaskManager knows fly's tasks. They go before lm-eval's of the same names,
    and the user's before both."""
    from lm_eval.tasks import TaskManager

    original = TaskManager.__init__

    def init(self: Any, verbosity: Any = None, include_path: Any = None, *args: Any, **kw: Any):  # type: ignore[no-untyped-def]
        given = include_path if isinstance(include_path, (list, tuple)) else [include_path]
        paths = [str(data_dir("lm_eval_tasks")), *filter(None, given)]
        original(self, verbosity, paths, *args, **kw)

    TaskManager.__init__ = init
    logging.getLogger("lm_eval.tasks._index").addFilter(_not_about_our_tasks)


@functools.cache
def extend_command_line() -> None:
    """From now on a command line looks for lm-eval's own tasks, which takes seconds, only if it may
    mean one."""
    from lm_eval import tasks
    from lm_eval.config.evaluate_config import EvaluatorConfig

    original, manager = EvaluatorConfig.process_tasks, tasks.TaskManager

    def process_tasks(config: EvaluatorConfig, *args: Any) -> Any:
        given: Any = [config.tasks] if isinstance(config.tasks, str) else config.tasks
        names = [name for part in given or () for name in str(part).split(",")]
        own = manager(include_path=config.include_path, include_defaults=False)
        has_defaults = not all(name in own.all_subtasks for name in names)
        tasks.TaskManager = functools.partial(manager, include_defaults=has_defaults)
        try:
            return original(config, *args)
        finally:
            tasks.TaskManager = manager

    EvaluatorConfig.process_tasks = process_tasks


def _not_about_our_tasks(record: logging.LogRecord) -> bool:
    """Filters lm-eval's warnings that fly's tasks replace its own, which they are meant to."""
    return str(data_dir("lm_eval_tasks")) not in record.getMessage()


@functools.cache
def extend_tracker() -> None:
    """An EvaluationTracker saves a pair's run under the name of its model, with the records that
    `fly compare` takes the times from."""
    from lm_eval.loggers.evaluation_tracker import EvaluationTracker, GeneralConfigTracker

    from fly.runs.resume import parse_pairs

    get_name, save = GeneralConfigTracker._get_model_name, EvaluationTracker.save_results_aggregated

    def get_model_name(model_args: Any) -> Any:
        given = parse_pairs(model_args) if isinstance(model_args, str) else dict(model_args or {})
        if given.keys() & {"config_path", "target_model_path"}:
            given = name_model(fly_config.of_model_args(given)[0], given)
        return get_name(given)

    def save_results(self: Any, results: dict[str, Any], samples: Any = None) -> None:
        save(self, results, samples)
        run = context.current()
        entry = results["config"].get("fly") or {}
        if self.output_path and run.output_dir is None and entry.get("started") == run.started:
            path = Path(self.output_path)
            name = self.general_config_tracker.model_name_sanitized
            run.save_records(path.parent if path.suffix == ".json" else path / name)

    GeneralConfigTracker._get_model_name = staticmethod(get_model_name)
    EvaluationTracker.save_results_aggregated = save_results


@functools.cache
def extend_evaluate() -> None:
    """Documents that are chosen (`samples`) keep their own numbers: lm-eval numbers its requests
    from 0, and its samples by the given list, but decodes in the documents' order."""
    from lm_eval import evaluator

    original = evaluator.evaluate

    @functools.wraps(original)
    def evaluate(*args: Any, samples: dict[str, list[int]] | None = None, **kw: Any) -> Any:
        if samples is not None:
            samples = {task: sorted(set(numbers)) for task, numbers in samples.items()}
        context.current().samples = samples
        has_kept = kw.get("cache_requests") and kw.get("apply_chat_template")
        context.current().has_kept_prompts = bool(has_kept)
        return original(*args, samples=samples, **kw)

    evaluator.evaluate = evaluate


def name_model(config: FlyConfig, model_args: Mapping[str, Any]) -> dict[str, Any]:
    """model_args that name a model, by which lm-eval calls the folder of a run: the draft, or the
    target where there is none."""
    if "pretrained" in model_args:
        return dict(model_args)
    if config.needs_draft_model and config.draft_model_path:
        return {"pretrained": config.draft_model_path, **model_args}
    return {"model": config.target_model_path, **model_args}
