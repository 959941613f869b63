"""`fly trace`: watch one prompt, or one document of a task, being decoded.

docs/report.md explains what it prints.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from lm_eval._cli.utils import MergeDictAction

from fly.errors import FlyError

if TYPE_CHECKING:
    from fly.config import FlyConfig
    from fly.harness.hf import FlyLM

_MAX_GEN_TOKS = 200


def add_command(subparsers: Any) -> None:
    """Register the subcommand with the CLI's parser."""
    parser = subparsers.add_parser("trace", help="Watch one prompt or document being decoded")
    parser.add_argument("prompt", nargs="?", help="what to decode; - reads it from standard input")
    parser.add_argument("--task", help="decode a document of this task instead")
    parser.add_argument("--doc", type=int, metavar="N", help="which, from 0 (default 0)")
    parser.add_argument(
        "--model_args", nargs="+", action=MergeDictAction, default={}, metavar="KEY=VALUE",
        help="as of `fly run`: config_path=fly_config/PAIR.json and overrides",
    )  # fmt: skip
    parser.add_argument("--device", help="as of `fly run`")
    parser.add_argument("--num_fewshot", type=int, metavar="N", help="as of `fly run`")
    parser.add_argument("--include_path", metavar="DIR", help="as of `fly run`")
    parser.add_argument("--confirm_run_unsafe_code", action="store_true", help="as of `fly run`")
    parser.add_argument(
        "--max_gen_toks", type=int, metavar="N",
        help=f"most new tokens (default: {_MAX_GEN_TOKS}, the task's own with --task)",
    )  # fmt: skip
    parser.add_argument(
        "--apply_chat_template", action=argparse.BooleanOptionalAction,
        help="default: if the target has one",
    )  # fmt: skip
    parser.add_argument(
        "--keep-dropped", action="store_true", help="leave rolled-back tokens in, struck through"
    )
    parser.add_argument(
        "--no-color", action="store_true", help="letters below the text instead of colours"
    )
    parser.set_defaults(func=_trace)


def _trace(args: argparse.Namespace) -> None:
    _check(args)
    for name in ("lm_eval", "fly"):  # the screen is for the text
        logging.getLogger(name).setLevel(logging.WARNING)
    if args.task:
        _check_task(args)
    from rich.console import Console

    from fly.analysis.terminal.display import Display
    from fly.analysis.terminal.styles import legend
    from fly.analysis.terminal.summary import print_deferrals
    from fly.harness.hf import FlyLM
    from fly.harness.summary import print_summary
    from fly.models.token_bytes import reader
    from fly.runs import context

    context.start(None)
    device = {} if args.device is None else {"device": args.device}
    lm = FlyLM(**args.model_args, **device)
    if args.apply_chat_template is None:
        args.apply_chat_template = getattr(lm.tokenizer, "chat_template", None) is not None
    text_of = reader(lm.tokenizer)
    console = Console(highlight=False)
    colours = console.is_terminal and not args.no_color and "NO_COLOR" not in os.environ
    display = Display(console, text_of, colours=colours, keep_dropped=args.keep_dropped)
    console.print(_headline(lm, args), markup=False)
    absent = _absent(lm.fly_config, args)
    console.print(legend(colours=colours, lasting_drops=args.keep_dropped, absent=absent))
    console.print()
    lm.observers.append(display.on_round)
    with display:
        score = _decode_document(lm, args) if args.task else _decode_prompt(lm, args)
    for generation in display.generations:
        console.print()
        print_deferrals(console, generation, text_of, lm.fly_config.entropy_kind)
    print_summary(lm.results_entry())
    if score:
        console.print(score, markup=False)


def _check(args: argparse.Namespace) -> None:
    from fly.harness.arguments import check_flags, check_task_files

    if (args.prompt is None) == (args.task is None):
        raise FlyError('give a prompt (fly trace "...") or a document (--task NAME --doc N)')
    if args.doc is not None and args.task is None:
        raise FlyError(f"--doc {args.doc}: of which task? add --task NAME")
    check_flags(vars(args), "fly trace")
    if "config_path" not in args.model_args and "target_model_path" not in args.model_args:
        raise FlyError("--model_args names no pair: add config_path=fly_config/PAIR.json")
    if args.model_args.get("batch_size", 1) != 1:
        raise FlyError("--model_args batch_size: fly trace decodes one row: leave it out")
    if args.device is not None and "device" in args.model_args:
        raise FlyError("--device and --model_args device: give it once")
    if args.model_args.get("trace"):
        raise FlyError("--model_args trace: fly trace writes no file: leave it out, or use fly run")
    try:
        if args.prompt == "-":
            args.prompt = sys.stdin.read()
        (args.prompt or "").encode()
    except UnicodeDecodeError as error:
        raise FlyError(f"standard input: not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError as error:
        raise FlyError(
            f"the prompt's character {error.start + 1} is {args.prompt[error.start]!r}, which has "
            "no UTF-8: remove it"
        ) from None
    check_task_files([args.task], [args.include_path] if args.include_path else [])


def _check_task(args: argparse.Namespace) -> None:
    """Check the task and the document before models load."""
    from fly.harness import evaluate

    task = evaluate.load_task(args.task, args.include_path)
    if task.OUTPUT_TYPE != "generate_until":
        raise FlyError(f"--task {args.task}: it generates nothing ({task.OUTPUT_TYPE})")
    count = len(task.eval_docs)
    if not 0 <= (args.doc or 0) < count:
        raise FlyError(f"--doc {args.doc}: {args.task} has documents 0 to {count - 1}")
    evaluate.check_scoring(args.task, task, args.confirm_run_unsafe_code)


def _absent(config: FlyConfig, args: argparse.Namespace) -> set[str]:
    """Sources of tokens that cannot occur: only old runs drafted from siblings and others."""
    absent = {"sibling", "other"}
    return absent if args.task and config.earlier_runs else absent | {"earlier"}


def _headline(lm: FlyLM, args: argparse.Namespace) -> str:
    from fly.harness.summary import in_words

    config = lm.fly_config
    what = f"{args.task}, document {args.doc or 0}" if args.task else "prompt"
    how = in_words(config.mode, config.drafter_name, config.model_dump())
    chat = "chat template" if args.apply_chat_template else "no chat template"
    return f"{what} by {config.target_model_path}, {how}, {chat}"


def _decode_prompt(lm: FlyLM, args: argparse.Namespace) -> str:
    from lm_eval.api.instance import Instance

    prompt = args.prompt
    if args.apply_chat_template:
        prompt = lm.apply_chat_template([{"role": "user", "content": prompt}])
    gen_kwargs: dict[str, Any] = {"until": [], "max_gen_toks": args.max_gen_toks or _MAX_GEN_TOKS}
    lm.generate_until(
        [Instance("generate_until", {}, (prompt, gen_kwargs), 0, metadata=("prompt", 0, 1))]
    )
    return ""


def _decode_document(lm: FlyLM, args: argparse.Namespace) -> str:
    """Decode it as lm-eval does, from the prompt to the score; returns the score in words."""
    from fly.harness import evaluate

    number = args.doc or 0
    results = evaluate.run_tasks(
        lm,
        [args.task],
        samples={args.task: [number]},
        chat=args.apply_chat_template,
        gen_kwargs=f"max_gen_toks={args.max_gen_toks}" if args.max_gen_toks else None,
        num_fewshot=args.num_fewshot,
        include_path=args.include_path,
        confirm_run_unsafe_code=args.confirm_run_unsafe_code,
    )
    scores = [
        f"{metric} ({sample['filter']}) {sample[metric]}"
        for sample in results["samples"][args.task]
        for metric in sample["metrics"]
    ]
    return f"score of {args.task}, document {number}: {', '.join(scores)}"
