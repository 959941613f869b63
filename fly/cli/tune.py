"""`fly tune CONFIG --tasks ... --limit N --output FILE.json`. See docs/configuration.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lm_eval._cli.utils import MergeDictAction, SplitArgs

from fly import config as fly_config
from fly.errors import FlyError
from fly.models import sources
from fly.paths import timestamp
from fly.runs import context


def add_command(subparsers: Any) -> None:
    """Register the subcommand with the CLI's parser."""
    parser = subparsers.add_parser(
        "tune", help="Find the configuration that decodes a pair fastest on this machine"
    )
    add = parser.add_argument
    add("file", metavar="CONFIG", help="the pair's JSON, as for config_path")
    add("--tasks", nargs="+", action=SplitArgs, required=True, metavar="T", help="generation tasks")
    add("--limit", type=int, required=True, metavar="N", help="documents per task")
    add("--output", type=Path, required=True, metavar="FILE.json", help="the new configuration")
    add("--force", action="store_true", help="replace --output if it is there")
    add(
        "--candidates",
        type=int,
        default=3,
        metavar="N",
        help="configurations that are run on all documents, beside CONFIG and exact "
        "verification (3)",
    )
    add(
        "--min-recovery",
        type=float,
        default=0.99,
        metavar="SHARE",
        help="share of the target's score that every metric must keep (0.99)",
    )
    add("--max_gen_toks", type=int, help="instead of the tasks' own")
    add("--num_fewshot", type=int)
    add("--batch_size", default="1", help="running sequences; only 1")
    add("--apply_chat_template", action="store_true")
    add("--confirm_run_unsafe_code", action="store_true")
    add("--device")
    add("--include_path", metavar="DIR", help="folder of further tasks")
    add(
        "--model_args",
        "-a",
        nargs="+",
        action=MergeDictAction,
        metavar="key=value",
        help="as in a run: a=b,c=d or a=b c=d",
    )
    parser.set_defaults(func=_tune)


def _tune(args: argparse.Namespace) -> None:
    model_args, available = _check_arguments(args)
    from fly.execution.device import device_facts
    from fly.harness import evaluate
    from fly.tuning import output
    from fly.tuning.real_runs import TunedPair, Workload
    from fly.tuning.tune import Tuner, Tuning

    context.start()
    pair = TunedPair(args.file, model_args)
    workload = Workload(
        tasks=tuple(args.tasks),
        limit=args.limit,
        available=available,
        chat=args.apply_chat_template,
        max_gen_toks=args.max_gen_toks,
        num_fewshot=args.num_fewshot,
        include_path=args.include_path,
        confirm_run_unsafe_code=args.confirm_run_unsafe_code,
    )
    tuning = Tuning(pair.given, workload, args.min_recovery)
    facts = device_facts(pair.lm.device)
    print(f"tuning for {facts['name']} ({facts['type']}, {facts['threads']} threads)")
    record = args.output.with_name(f"fly_tune_{timestamp()}.json")

    def keep() -> None:
        output.write_record(record, tuning, pair)

    kept_runs = args.output.with_suffix(".runs")
    try:
        # they would log the same for every run, between our lines
        with evaluate.quiet("lm_eval"), evaluate.quiet("fly"):
            Tuner(pair, tuning, args.candidates, kept_runs, keep).run()
    except BaseException:
        if record.exists():
            print(f"what was measured before: {record}", file=sys.stderr)
        raise
    output.print_table(tuning)
    print(f"record: {record}")
    best, why = tuning.choose()
    if best is None:
        print(f"{why}: none was written", file=sys.stderr)
        sys.exit(1)
    print(why)
    output.write_config(args.output, args.file, best, tuning, record)
    print(f"configuration: {args.output}")


def _check_arguments(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, int]]:
    """Refuse what can be refused before models load.

    Returns the model's arguments, and how many documents each task has.
    """
    from fly.harness import evaluate
    from fly.harness.arguments import check_flags, check_model_args, check_task_files

    if args.batch_size != "1":
        raise FlyError(
            f"--batch_size {args.batch_size}: fly tune decodes document by document: use 1"
        )
    check_flags(vars(args), "fly tune")
    if args.max_gen_toks == 1:
        raise FlyError("--max_gen_toks 1: the first token is the prefill's: give at least 2")
    if args.output.suffix != ".json":
        raise FlyError(f"--output {args.output}: give the name of a .json file")
    if args.output.exists() and not args.force:
        raise FlyError(f"--output {args.output}: is there already: choose another, or add --force")
    for key, instead in (
        ("batch_size", "leave it out"),
        ("config_path", "give the file by itself"),
    ):
        if key in (args.model_args or {}):
            raise FlyError(f"--model_args {key}={args.model_args[key]}: {instead}")
    model_args = {**(args.model_args or {}), "trace": False}
    if args.device:
        model_args["device"] = args.device
    own, rest = fly_config.split_model_args(model_args)
    config = fly_config.load(args.file, own, log=False)
    _check_tunable(config, args.file)
    check_model_args(config, rest)
    sources.sources(config, args.file)
    check_task_files(args.tasks, [args.include_path] if args.include_path else [])
    unsafe = args.confirm_run_unsafe_code
    available = evaluate.check_generation(args.tasks, args.include_path, unsafe)
    context.check_writable(args.output.parent, "--output")
    return model_args, available


def _check_tunable(config: fly_config.FlyConfig, where: str) -> None:
    if not config.needs_draft_model:
        drafter = config.drafter_name or "none"
        raise FlyError(
            f"{where}: nothing to tune: no draft model takes part (use_sd={config.use_sd}, "
            f"spd_k={config.spd_k}, drafter {drafter}): set use_sd=true, spd_k >= 1 and drafter to "
            "model or cascade"
        )
    if config.head_class is not None:
        raise FlyError(
            f"{where}: drafter={config.drafter_name}: its list is for draft models, not heads: "
            "set drafter to model or cascade, or compare settings by fly compare"
        )
    if config.draft_model_path is None:
        raise FlyError(
            f"{where}: nothing to tune: it names no draft model: add draft_model_path, or "
            "--model_args pretrained=<hub id or folder>"
        )
