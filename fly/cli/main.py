"""The command `fly`: every lm-eval flag and subcommand unchanged, plus fly's own subcommands."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lm_eval._cli import HarnessCLI
from lm_eval.utils import sanitize_model_name, setup_logging

import fly
from fly import config as fly_config
from fly.cli import compare as compare_command
from fly.cli import config as config_command
from fly.cli import pair as pair_command
from fly.cli import plot as plot_command
from fly.cli import processes
from fly.cli import report as report_command
from fly.cli import trace as trace_command
from fly.cli import tune as tune_command
from fly.errors import FlyError
from fly.harness.arguments import (
    HF_NAMES,
    NO_LITERAL,
    as_dict,
    check_json,
    check_model_args,
    check_run,
    yaml_values,
)
from fly.models import sources
from fly.models.fingerprint import of_value
from fly.paths import data_dir
from fly.runs import context, reader, resume

_COMMANDS = (
    compare_command,
    config_command,
    pair_command,
    plot_command,
    report_command,
    trace_command,
    tune_command,
)


class FlyCLI(HarnessCLI):
    """lm-eval's parser with fly's subcommands; `execute` edits the namespace and goes on there."""

    def __init__(self) -> None:
        super().__init__()
        self._parser.prog = "fly"
        self._parser.add_argument("--version", action="version", version=f"fly {fly.__version__}")
        for command in _COMMANDS:
            command.add_command(self._subparsers)
        self._subparsers.choices["run"].add_argument(
            "--resume",
            metavar="RUN_DIR",
            help="Go on with a run that was cut short; its other arguments are known",
        )
        _call_fly(self._parser, "fly")

    def parse_args(self) -> argparse.Namespace:
        """lm-eval's, which takes one word alone for a subcommand: here it may be --resume=DIR."""
        if len(sys.argv) == 2 and sys.argv[1].startswith("--resume="):
            sys.argv.insert(1, "run")
        check_json(sys.argv)
        try:
            return super().parse_args()
        except FlyError:
            raise
        except NO_LITERAL as error:
            raise FlyError(
                f"key=value flags: {error}: write texts with brackets in quotes"
            ) from None

    def execute(self, args: argparse.Namespace) -> None:
        if args.command == "run":
            self._run(args)
            return
        if hasattr(args, "include_path"):
            args.include_path = _include_paths(args, {})
        super().execute(args)

    def _run(self, args: argparse.Namespace) -> None:
        given = yaml_values(args.config)
        check_run(args, given)
        arguments = resume.given_arguments(args, given)
        reopened = None
        if args.resume is not None:
            reopened = resume.reopen(args, arguments, resume.given_secrets(args, given))
            arguments = reopened.data["arguments"]
            check_run(args, {})
            if reopened.finished:
                print(f"the run of {reopened.started} has ended: results: {reopened.results}")
                return
        del args.resume
        values = given if reopened is None else {}
        args.include_path = _include_paths(args, values)
        output_dir = _prepare_fly(args, values)
        before = _results_in(output_dir)
        current = context.start(output_dir)
        if _is_fly(args.model or values.get("model")):
            import fly.harness.hf  # noqa: F401  registers the model before lm_eval.models is imported

            with resume.kept(current, reopened, arguments, args.model_args):
                super().execute(args)
                _summarise(current)
        else:
            super().execute(args)
            _check_saved(output_dir, before)
        if output_dir is not None:
            print(f"results: {output_dir}")


def _summarise(run: context.Session) -> None:
    """fly's speed table, below lm-eval's own."""
    from fly.harness import summary

    if run.entry is not None and (entry := run.entry())["config"]["enable_statistics"]:
        summary.print_summary(entry)


def _call_fly(parser: argparse.ArgumentParser, name: str) -> None:
    """lm-eval's parsers call themselves lm-eval, and argparse answers with pages of usage."""

    def refuse(message: str) -> NoReturn:
        message = re.sub(r"invalid functools\..* value:", "invalid value:", message)
        raise FlyError(f"{message} (`{name} --help` lists the flags)")

    parser.prog, parser.error = name, refuse  # type: ignore[method-assign]
    for text in ("usage", "epilog"):
        if of_lm_eval := getattr(parser, text):
            setattr(parser, text, re.sub(r"\blm-eval\b", "fly", of_lm_eval))
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, child in action.choices.items():
                _call_fly(child, f"{name} {command}")


def _results_in(folder: Path | None) -> set[Path]:
    return set(folder.glob("*results_*.json")) if folder else set()


def _check_saved(folder: Path | None, before: set[Path]) -> None:
    """Raise FlyError if another backend's results are not there: lm-eval only warns.

    `resume.kept` sees to those of fly's.
    """
    if folder is None or os.environ.get("RANK", "0") != "0":
        return
    new = _results_in(folder) - before
    for path in new:
        reader.started_of(path)  # refuses half a file
    if not new:
        raise FlyError(
            f"output_path={folder}: the results could not be saved (lm-eval's warning says why)"
        )


def _is_fly(name: str | None) -> bool:
    return name == "fly"


def _include_paths(args: argparse.Namespace, values: dict[str, Any]) -> list[str]:
    """fly's tasks first, the user's after them: later paths override earlier ones."""
    user = args.include_path or values.get("include_path")
    paths = [str(data_dir("lm_eval_tasks"))]
    if user:
        paths += user if isinstance(user, list) else [user]
    return paths


def _prepare_fly(args: argparse.Namespace, values: dict[str, Any]) -> Path | None:
    """Route to fly's backend and check everything that can be checked before models load.

    Returns the folder lm-eval will write to, or None without --output_path.
    """
    model_args = args.model_args or as_dict(values.get("model_args"))
    model = args.model or values.get("model") or "hf"
    if model in HF_NAMES and "config_path" in model_args:
        model = args.model = "fly"
    if _is_fly(model):
        args.model_args = model_args = _checked_model_args(model_args)
        use_cache = args.use_cache or values.get("use_cache")
        if use_cache:  # lm-eval's keys ignore the models, their configuration and fly
            args.use_cache = f"{use_cache}_{_run_hash(model_args)}"
    output_path = args.output_path or values.get("output_path")
    if not output_path:
        return None
    folder = _output_folder(Path(output_path), model_args)
    context.check_writable(folder, "output_path")
    return folder


def _checked_model_args(model_args: dict[str, Any]) -> dict[str, Any]:
    """Validate the configuration and the models' paths; name the run for lm-eval's folders."""
    config, rest = fly_config.of_model_args(model_args)
    check_model_args(config, rest)
    sources.sources(config)
    if "pretrained" not in model_args:
        if config.needs_draft_model and config.draft_model_path:
            return {"pretrained": config.draft_model_path, **model_args}
        return {"model": config.target_model_path, **model_args}
    return model_args


def _run_hash(model_args: dict[str, Any]) -> str:
    """All that decides a text beside the request: the configuration, the models' files, whatever
    else is passed to the model, and the versions of what computes."""
    config, rest = fly_config.of_model_args(model_args)
    models = resume.models_of(config, rest, fetch=True)  # the next call must find this one's cache
    return of_value([config.hash(), rest, models, resume.deciding_versions()])[:12]


def _output_folder(path: Path, model_args: dict[str, Any]) -> Path:
    """Where lm-eval's EvaluationTracker will write samples."""
    if path.suffix == ".json":
        return path.parent
    for key in ("peft", "delta", "pretrained", "model", "path", "engine"):
        if key in model_args:
            return path / sanitize_model_name(str(model_args[key]))
    return path


def _not_about_our_tasks(record: logging.LogRecord) -> bool:
    """lm-eval warns of each of its tasks that fly's replace, which is what they are for."""
    return str(data_dir("lm_eval_tasks")) not in record.getMessage()


def _is_lm_evals_refusal(error: ValueError) -> bool:
    """Raised by lm-eval's own checks of its arguments: unknown task, unsafe code, bad flags."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    origin = Path(frame.tb_frame.f_code.co_filename) if frame is not None else Path()
    return origin.parent.name in ("lm_eval", "config") and origin.name in (
        "evaluator.py",
        "evaluate_config.py",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Bad input ends with one line and status 2, a signal with 128 + its number."""
    if argv is not None:
        sys.argv = ["fly", *argv]
    with processes.ending_in_order():
        processes.end_with_parent()
        _main()


def _main() -> None:
    setup_logging()
    logging.getLogger("lm_eval.tasks._index").addFilter(_not_about_our_tasks)
    try:
        cli = FlyCLI()
        cli.execute(cli.parse_args())
    except (ValueError, OSError) as error:
        message = _in_one_line(error)
        if os.environ.get("FLY_DEBUG") or message is None:
            raise
        print(f"fly: error: {message}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _in_one_line(error: ValueError | OSError) -> str | None:
    """What the user is told of bad input and of a full disk; None for anything else."""
    message = str(error)
    if isinstance(error, OSError):
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return None
        where = error.filename or "a file of this run"
        message = f"{where}: the disk is full: free some space, then run it again"
    elif not isinstance(error, FlyError) and not _is_lm_evals_refusal(error):
        return None
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)


if __name__ == "__main__":
    main()
