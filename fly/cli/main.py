"""The command `fly`: every lm-eval flag and subcommand unchanged, plus fly's own subcommands."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lm_eval._cli import HarnessCLI
from lm_eval.utils import sanitize_model_name, setup_logging

import fly
from fly import launch, reading, registry
from fly.cli import compare, config, history, pair, processes, report, tune
from fly.config import refuse_gone
from fly.errors import FlyError, LostProcessError, reason_of
from fly.harness import registration
from fly.harness.arguments import (
    HF_NAMES,
    as_dict,
    check_json,
    check_run,
    checked_pair,
    merge_config,
    spell_model_args,
)
from fly.models.fingerprint import hash_json
from fly.models.sources import resolve_source
from fly.runs import context, environment, reader, resume
from fly.runs.earlier_outputs import EarlierOutputs
from fly.runs.manifest import Manifest
from fly.version import VERSION

_COMMANDS = (compare, config, history, pair, report, tune)
_ABOUT = """EleutherAI's lm-evaluation-harness with a backend that decodes by FLy, loosely verified
speculative decoding, and commands that tell whether the scores held."""
_EXAMPLE = """  # A draft, and its target by the JSON, with fly's backend (docs/configuration.md)
  {}fly run --model hf --model_args pretrained=<draft>,config_path=<pair>.json --tasks gsm8k_cot

"""
_PACKAGE = Path(fly.__file__).parent
_HANDS_OVER = {
    Path(__file__),
    _PACKAGE / "__main__.py",
    *(_PACKAGE / "harness" / name for name in ("evaluate.py", "registration.py")),
}
_OF_FILES = {
    errno.ENOSPC: "the disk is full: free some space, then run it again",
    errno.EDQUOT: "the disk is full: free some space, then run it again",
    errno.ENAMETOOLONG: "no file can have so long a name: give another",
    errno.ELOOP: "a link that leads to itself: give another",
    errno.EACCES: "permission denied: give another, or change its permissions",
}
_NAMES_A_FILE = ("FILE", "RUN", "CONFIG", "DIR", "RUN_DIR", "FILE.json", "<path>")
_LAUNCHER_SECONDS = 5.0  # within which a launcher ends what is left of a run


class FlyCLI(HarnessCLI):
    """lm-eval's command line with fly's subcommands; `run` is checked, then left to lm-eval."""

    def __init__(self) -> None:
        super().__init__()
        self._parser.prog = "fly"
        self._parser.add_argument("--version", action="version", version=f"fly {VERSION}")
        for command in _COMMANDS:
            command.add_command(self._subparsers)
        self._subparsers.choices["run"].add_argument(
            "--resume",
            metavar="RUN_DIR",
            help="Continue a run that was cut short; its other arguments are known",
        )
        completion = self._subparsers.add_parser("completion", help="Print a shell's completions")
        completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
        completion.set_defaults(func=lambda args: print(_complete(self._parser, args.shell)))
        self._parser.description = _ABOUT
        _call_fly(self._parser, "fly")
        for parser, prompt in ((self._parser, ""), (self._subparsers.choices["run"], "$ ")):
            heading, _, rest = (parser.epilog or "").partition(":\n")
            parser.epilog = f"{heading}:\n{_EXAMPLE.format(prompt)}{rest}"

    def parse_args(self) -> argparse.Namespace:
        """As lm-eval's, but a single argument may also be --resume=DIR, not only a subcommand, and
        flags may be written with hyphens as well as with underscores."""
        if len(sys.argv) == 2 and sys.argv[1].startswith("--resume="):
            sys.argv.insert(1, "run")
        first, commands = "".join(sys.argv[1:2]), self._subparsers.choices
        known = commands.get(first, commands["run"])._option_string_actions
        sys.argv[1:] = [_spelled(word, known) for word in sys.argv[1:]]
        flags = [word.partition("=")[0] for word in sys.argv if word.startswith("--")]
        refuse_gone(dict.fromkeys([f"fly {first}", *flags]), "command line")
        if first not in commands and not first.startswith("-") and first:
            hint = reading.hint(first, commands, "`fly --help` lists the commands")
            raise FlyError(f"unknown command {first!r}: {hint}")
        check_json(sys.argv)
        sys.argv[:] = spell_model_args(sys.argv)
        try:
            args: argparse.Namespace = super().parse_args()
        except FlyError:
            raise
        except reading.NO_LITERAL as error:
            raise FlyError(
                f"key=value flags: {error}: write texts with brackets in quotes"
            ) from None
        if args.command == "compare":
            args.words = sys.argv[2:]  # what it hands on to the runs that it makes
        return args

    def execute(self, args: argparse.Namespace) -> None:
        if args.command in ("compare", "tune") and launch.processes() > 1:
            raise FlyError(
                f"fly {args.command}: works in one process: leave out torchrun or accelerate launch"
                + " (compare runs that were launched so)" * (args.command == "compare")
            )
        if args.command == "run":
            self._run(args)
            return
        if hasattr(args, "include_path"):
            registration.extend_tasks()
        super().execute(args)

    def _run(self, args: argparse.Namespace) -> None:
        check_run(args, merge_config(args))
        for name in ("lm_eval", "fly") if args.verbosity else ():  # lm-eval would do it at the end
            logging.getLogger(name).setLevel(args.verbosity)
        arguments, secrets = resume.split_secrets(args)
        reopened = None
        if args.resume is not None:
            reopened = resume.reopen(args, arguments, secrets)
            arguments = reopened.data["arguments"]
            check_run(args)
            if reopened.finished:
                _show(f"the run of {reopened.started} has ended: results: {reopened.results}")
                return
        del args.resume
        args.model_args = as_dict(args.model_args)
        registration.extend_tasks()
        registration.extend_command_line()
        output_dir = _prepare(args, reopened)
        before = set(reader.results_in(output_dir, below=True)) if output_dir else set()
        current = context.start(output_dir)
        if args.model in registry.ENGINES:
            registry.load_engine(args.model)  # refuses what is not installed
            from fly.harness import summary

            with resume.keeping_manifest(current, reopened, arguments, args.model_args):
                super().execute(args)
                entry = current.results_entry and current.results_entry()
                if entry and entry["config"]["enable_statistics"]:
                    summary.print_summary(entry)
        else:
            super().execute(args)
            _check_saved(output_dir, before)
        if output_dir is not None:
            _show(f"results: {output_dir}")


def _complete(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script that a shell sources to complete fly's commands and flags."""
    import shtab

    for command in parser._subparsers._group_actions[0].choices.values():  # type: ignore
        for action in command._actions:
            if action.metavar in _NAMES_A_FILE:
                action.complete = shtab.FILE
    return shtab.complete(parser, shell)


def _spelled(word: str, flags: Mapping[str, Any]) -> str:
    """The flag as the parser has it: lm-eval writes --model_args, fly --min-recovery."""
    name, equals, value = word.partition("=")
    for other in (name.replace("_", "-"), "--" + name[2:].replace("-", "_")):
        if name.startswith("--") and name not in flags and other in flags:
            return other + equals + value
    return word


def _show(line: str) -> None:
    """Print it once, however many processes the run has."""
    if launch.rank() == 0:
        print(line)


def _call_fly(parser: argparse.ArgumentParser, name: str) -> None:
    """Make lm-eval's parsers speak of fly, and refuse bad flags in one line."""

    def refuse(message: str) -> NoReturn:
        message = re.sub(r"invalid functools\..* value:", "invalid value:", message)
        is_command = re.match(r"argument .*\|.*: invalid choice: '(.*?)' \(choose from", message)
        if is_command and (choices := parser._subparsers):
            known = next(iter(choices._group_actions)).choices or ()
            hint = reading.hint(is_command[1], known, f"choose from {', '.join(known)}")
            raise FlyError(f"unknown command {f'{name} {is_command[1]}'!r}: {hint}")
        raise FlyError(f"{message} (`{name} --help` lists the flags)")

    parser.prog, parser.error = name, refuse  # type: ignore[method-assign]
    for text in ("usage", "epilog"):
        if of_lm_eval := getattr(parser, text):
            setattr(parser, text, re.sub(r"\blm-eval\b", "fly", of_lm_eval))
    for action in parser._actions:
        action.help = action.help and re.sub(r"\blm-eval (?=ls\b)", "fly ", action.help)
        if isinstance(action, argparse._SubParsersAction):
            for command, child in action.choices.items():
                _call_fly(child, f"{name} {command}")


def _check_saved(folder: Path | None, before: set[Path]) -> None:
    """Raise FlyError if another backend's results were not saved, of which lm-eval only warns.

    `resume.keeping_manifest` checks those of fly's own backend.
    """
    if folder is None or launch.rank() > 0:
        return
    # below: a model without a name gets a folder with a random one
    new = set(reader.results_in(folder, below=True)) - before
    for path in new:
        reader.started_of(path)  # refuses half a file
    if not new:
        raise FlyError(
            f"output_path={folder}: the results could not be saved (lm-eval's warning says why)"
        )


def _prepare(args: argparse.Namespace, reopened: Manifest | None) -> Path | None:
    """Choose the engine of fly's that is meant; check what can be checked before models load.

    reopened: of a resumed run. Returns the folder that lm-eval will write to, or None without
    --output_path.
    """
    args.model = args.model or "hf"
    if engine := registry.engine_of(args.model, args.model_args):
        args.model = engine
        _check_models(args)
    elif args.model in HF_NAMES and "pretrained" not in args.model_args:
        raise FlyError(
            "--model_args names no model: add config_path=<pair>.json, or pretrained=<model> to "
            "run lm-eval's own backend"
        )
    elif args.model in HF_NAMES and "gguf_file" not in args.model_args:
        named = resolve_source(str(args.model_args["pretrained"]), "pretrained")
        if named.gguf_file:  # which transformers wants as a folder and a file
            args.model_args |= {"pretrained": named.path, "gguf_file": named.gguf_file}
    if not args.output_path:
        return None
    folder = _output_folder(Path(args.output_path), args.model_args)
    context.check_writable(reopened.folder if reopened else folder, "output_path")
    return folder


def _check_models(args: argparse.Namespace) -> None:
    """Check the configuration and the models' files; name the run for lm-eval's folders.

    lm-eval's cache knows a request by its prompt alone, so the name of the cache gets a hash of
    all else that decides a text: configuration, engine, model files, versions, and the number of
    sequences where what is drafted follows it.
    """
    settings, rest, _ = checked_pair(args.model_args, args.model)
    args.model_args = registration.name_model(settings, args.model_args)
    if args.use_cache:
        # fetch: the next call must find this one's cache
        models = environment.models_of(settings, rest, fetch=True)
        deciding: list[Any] = [settings.hash(), rest, models, environment.deciding_versions()]
        deciding += [args.model, args.device]
        if settings.rule != "exact" and settings.draft_policy == "auto":  # K may be 0 beside many
            deciding += [vars(args).get("batch_size"), args.max_batch_size]
        if settings.earlier_runs:
            deciding.append(EarlierOutputs.read(settings.earlier_runs).digest())
        args.use_cache = f"{args.use_cache}_{hash_json(deciding)[:12]}"


def _output_folder(path: Path, model_args: dict[str, Any]) -> Path:
    """The folder in which lm-eval's EvaluationTracker will write samples."""
    if path.suffix == ".json":
        return path.parent
    for key in ("peft", "delta", "pretrained", "model", "path", "engine"):
        if key in model_args:
            return path / sanitize_model_name(str(model_args[key]))
    return path


def _explain_missing(task: str | None, model: str | None) -> str:
    """What lm-eval does not know, with the nearest name that it does."""
    if task:
        from fly.harness import evaluate

        return str(evaluate.no_such_task(task))
    from lm_eval.api.registry import model_registry

    known = [*registry.ENGINES, *model_registry.keys()]
    hint = reading.hint(str(model), known, "choose hf, vllm, server, or one of lm-eval's")
    return f"--model {model}: no such model: {hint}"


def _is_lm_evals(frames: list[Path]) -> bool:
    """Whether lm-eval's code raised it, or what that called, and none of fly's took part but what
    hands a run to lm-eval."""
    own = {file for file in frames if file.is_relative_to(_PACKAGE)}
    return own <= _HANDS_OVER and any("lm_eval" in file.parts for file in frames)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Bad input ends with one line and status 2, a signal with 128 + its number."""
    if argv is not None:
        sys.argv = ["fly", *argv]
    with processes.ending_in_order():
        processes.end_with_parent()
        _main()


def _set_up_logging() -> None:
    """lm-eval's log, with fly's own lines in it: lm-eval sets up its own logger only. Of lm-eval's
    lines only warnings are shown, unless --verbosity or LMEVAL_LOG_LEVEL says otherwise."""
    setup_logging()
    of_lm_eval, of_fly = logging.getLogger("lm_eval"), logging.getLogger("fly")
    of_fly.setLevel(of_lm_eval.level)
    if not os.environ.get("LMEVAL_LOG_LEVEL"):
        of_lm_eval.setLevel(logging.WARNING)
    for handler in of_lm_eval.handlers:
        if type(handler) is logging.StreamHandler:  # its own: others may have added more
            of_fly.addHandler(handler)
    if launch.rank() > 0:  # the first process says what all would
        logging.disable(logging.INFO)


def _main() -> None:
    try:
        launch.check()
    except FlyError as error:
        _fail(str(error))
    _set_up_logging()
    try:
        cli = FlyCLI()
        cli.execute(cli.parse_args())
        sys.stdout.flush()
    except BrokenPipeError:  # who read the output has seen enough: `fly pair list | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + 13)  # as SIGPIPE ends a process
    except Exception as error:
        message = _in_one_line(error)
        if os.environ.get("FLY_DEBUG") or message is None:
            if sys.argv[1:2] != ["compare"]:
                raise
            traceback.print_exc()
            sys.exit(2)  # 1 would say that the scores fell
        if launch.rank() > 0 or isinstance(error, LostProcessError):
            time.sleep(_LAUNCHER_SECONDS)  # the launcher ends this process if another has said why
        _fail(message)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str) -> NoReturn:
    """End with one line on stderr and status 2."""
    message = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)
    print(f"fly: error: {message}", file=sys.stderr)
    sys.exit(2)


def _in_one_line(error: Exception) -> str | None:
    """The message for what the user can mend, and for what lm-eval refuses or fails at by itself;
    None for any other error, which may be a defect of fly's."""
    if isinstance(error, FlyError):
        return str(error)
    message = reason_of(error)
    found = traceback.extract_tb(error.__traceback__)
    frames = [Path(frame.filename) for frame in found]
    if "did not find any docs" in message and launch.processes() > 1:
        return f"a task has fewer documents than the run has processes ({launch.processes()})"
    if any(file.parts[-3:] == ("lm_eval", "api", "samplers.py") for file in frames[-2:]):
        return f"num_fewshot: a task has fewer few-shot documents: lower it (lm-eval: {message})"
    if isinstance(error, OSError) and error.errno in _OF_FILES:
        where = error.filename or "a file of this run"
        return f"{reading.shown(str(where))[1:-1]}: {_OF_FILES[error.errno]}"
    if not _is_lm_evals(frames):
        return None
    if message.startswith("Duplicate task "):
        message += ": leave one of them out of --tasks"
    if missing := re.match(r"Tasks not found: ([^,]+)|.*load model '(.+?)'", message):
        return _explain_missing(*missing.groups())
    if "lm_eval" in frames[-1].parts and (found[-1].line or "").startswith("raise "):
        return message  # its own words for its user
    where = f"{'/'.join(frames[-1].parts[-3:])}, line {found[-1].lineno}"
    return f"lm-eval: {type(error).__name__}: {message} ({where}; FLY_DEBUG=1 shows the traceback)"


if __name__ == "__main__":
    main()
