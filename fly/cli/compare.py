"""`fly compare RUN RUN ...`, or `fly compare --model_args ... --tasks ...`: did the scores hold?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fly import api
from fly.cli import outputs
from fly.errors import FlyError

if TYPE_CHECKING:
    from fly.analysis.scores import Measured
    from fly.analysis.statistics import Demand, Verdict
    from fly.runs.reader import Run

_FILES = ("json", "markdown", "junit", "csv")
_OF_VERDICTS = (
    "min_recovery", "confidence", "allow_inconclusive", "min_tau", "min_time_x", "min_decoding_x",
)  # fmt: skip
_NOT_OF_MATRIX = (
    "by", "baseline_run", "baseline", "save_baseline", "with_outputs", "noise_floor", "concurrency",
    "parallel", "csv", "junit", "history", "link", *_OF_VERDICTS,
)  # fmt: skip
_STATUS = {"held": 0, "unchanged": 0, "fell": 1, "not enough evidence": 3}
_USAGE = """fly compare RUN RUN ... [options]
       fly compare RUN RUN ... --matrix [options]
       fly compare --model_args config_path=<pair>.json --tasks <task> ... --output_path <folder>
                   [options] [any flag of fly run]"""
_DESCRIPTION = """Compare runs on the same documents: scores, recovery, time x, and a verdict per
task (docs/compare.md). With --min-..., --confidence, --allow-inconclusive or --junit the exit
status is the verdict: 0 held or unchanged, 1 fell, 3 not enough evidence; 2: bad usage or a failed
run."""


def add_command(subparsers: Any) -> None:
    """Register the subcommand, with every flag of `run` besides its own."""
    parser = subparsers.add_parser(
        "compare",
        help="Did the scores hold? Compare runs, or make them and compare",
        usage=_USAGE,
        description=_DESCRIPTION,
        parents=[subparsers.choices["run"]],  # brings its own -h
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="folder or results file; NAME=PATH names it"
    )
    _add_options(parser)
    parser._action_groups.insert(2, parser._action_groups.pop())  # its own before those of `run`
    parser.set_defaults(func=_execute)


def _add_options(parser: argparse.ArgumentParser) -> None:
    """What `fly run` does not know."""
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--modes",
        nargs="+",
        metavar="MODE",
        help="of target-only, exact, fly (default: these three) and hf; fly is the pair's file "
        "as it is",
    )
    group.add_argument(
        "--mode",
        action="append",
        default=[],
        metavar="NAME=key=value,...",
        help="one more mode: the pair's file with these keys; may be repeated",
    )
    group.add_argument(
        "--rules",
        nargs="+",
        metavar="RULE",
        help="verification rules as modes, each with the pair's keys, beside target-only",
    )
    group.add_argument(
        "--drafters",
        nargs="+",
        metavar="DRAFTER",
        help="every mode that drafts once with each of these drafters, as MODE-DRAFTER",
    )
    group.add_argument(
        "--baseline-run", metavar="NAME", help="default: target-only, else the first"
    )
    outputs.add_file(group, "--baseline", "a stored target-only run instead of one")
    outputs.add_file(group, "--save-baseline", "store the baseline")
    group.add_argument(
        "--with-outputs",
        action="store_true",
        help="store the baseline's outputs too, for later runs to draft from",
    )
    group.add_argument(
        "--pair-by",
        choices=("prompt", "document"),
        default="prompt",
        help="document: runs whose prompts differ in form, as texts and messages do, are paired by "
        "what their documents hold",
    )
    group.add_argument("--metric", nargs="+", metavar="NAME", help="only these metrics")
    group.add_argument(
        "--cluster",
        metavar="FIELD",
        help="documents that share this field's value (a passage, a dialogue) are not independent: "
        "take them as one",
    )
    group.add_argument(
        "--by",
        metavar="FIELD",
        help="also every value of this field of the documents (category, level) by itself",
    )
    group.add_argument(
        "--noise-floor",
        action="store_true",
        help="also what rounding alone changes: the baseline again at another batch size, the run "
        "called noise",
    )
    group.add_argument(
        "--concurrency",
        nargs="+",
        type=int,
        metavar="N",
        help="of servers: every mode with at most so many requests at once, as a curve of "
        "throughput against interactivity (--csv FILE)",
    )
    group.add_argument(
        "--parallel",
        action="store_true",
        help="of servers on machines of their own: ask all of them at once",
    )
    group.add_argument(
        "--matrix",
        action="store_true",
        help="runs of several targets, drafters and rules as one matrix, each against the "
        "target-only run of its own target",
    )
    add_demand(group, "the baseline's score that a run must keep")
    for flag, what in (
        ("--min-tau", "mean acceptance length; 97%% is a share of the baseline's"),
        ("--min-time-x", "time x, end to end"),
        ("--min-decoding-x", "time x of decoding alone"),
    ):
        group.add_argument(
            flag, nargs="+", metavar="[TASK=]VALUE", help=f"least {what}, in all tasks or in one"
        )
    outputs.add_file(group, "--history", "append the runs there (fly history FILE)")
    group.add_argument(
        "--link", metavar="URL", help="where the report will lie, for the links of --markdown"
    )
    group.add_argument(
        "--details", action="store_true", help="all tables and notes, also on a terminal"
    )
    for name in _FILES:
        outputs.add_file(group, f"--{name}", f"write {name} there")
    outputs.add_force(group)


def add_demand(parser: Any, kept: str) -> None:
    """The flags that make a verdict the exit status. kept: share of what --min-recovery is."""
    add = parser.add_argument
    add("--min-recovery", type=float, metavar="SHARE", help=f"share of {kept} (default: 0.99)")
    add(
        "--confidence", type=float, metavar="SHARE",
        help="how sure a verdict must be (default: 0.95)",
    )  # fmt: skip
    add("--allow-inconclusive", action="store_true", help="exit status 0 without enough evidence")


def read_demand(args: argparse.Namespace, command: str) -> Demand:
    from fly.analysis.statistics import Demand
    from fly.harness.arguments import check_flags

    given = {name: getattr(args, name) for name in ("min_recovery", "confidence")}
    given = {name: value for name, value in given.items() if value is not None}
    check_flags(given, command)
    return Demand(**given)


def exit_with(verdict: Verdict, args: argparse.Namespace, *, is_gate: bool = False) -> None:
    """End with the verdict's status, if a flag asks for it. is_gate: whether another flag does."""
    asked = (args.min_recovery, args.confidence, args.allow_inconclusive or None)
    is_allowed = verdict == "not enough evidence" and args.allow_inconclusive
    if (is_gate or any(value is not None for value in asked)) and not is_allowed:
        sys.exit(_STATUS[verdict])


def _execute(args: argparse.Namespace) -> None:
    from fly.analysis import (
        alignment,
        categories,
        comment,
        comparability,
        compare,
        compare_files,
        compare_table,
        gates,
        history,
        noise,
        scores,
    )
    from fly.cli import screen

    if args.matrix:
        _matrix(args)
        return
    demand = read_demand(args, "fly compare")
    stored = scores.read(args.baseline) if args.baseline else None
    if stored:
        scores.check_storable(stored.mode, f"--baseline {args.baseline}")
        if args.baseline_run:
            raise FlyError("--baseline-run contradicts --baseline: the file is the baseline")
    _check_outputs(args)
    limits = [
        gates.parse(kind, text)
        for kind, flag in gates.FLAGS.items()
        for text in getattr(args, flag[2:].replace("-", "_")) or ()
    ]
    loaded = _load(args, stored)
    if args.csv and not any(run.entry and run.entry.get("server") for run, _ in loaded):
        raise FlyError("--csv: it is of servers' runs: leave it out")
    found = [measured for _, measured in loaded]
    runs = [stored, *found] if stored else found
    if args.pair_by == "document":
        runs = alignment.pair_by_document(runs)
    measured_noise = None
    if args.noise_floor:
        measured_noise, runs = noise.take_noise(runs)
    name = stored.name if stored else args.baseline_run
    baseline, others = compare.split_baseline(runs, name)
    if stored:
        for run in others:
            comparability.check_reusable(args.baseline, baseline, run)
    if args.save_baseline:
        scores.check_storable(baseline.mode, f"--save-baseline {args.save_baseline}")
    if others:
        result = compare.compare(baseline, others, demand, args.metric, measured_noise, limits)
        groups = categories.rows(baseline, others, demand, args.metric) if args.by else []
        _write(
            args,
            json=lambda: compare_files.as_json(result, groups),
            markdown=lambda: comment.markdown(result, [baseline, *others], args.link, groups),
            junit=lambda: compare_files.as_junit(result, args.allow_inconclusive),
            csv=lambda: compare_table.curve_csv(result),
        )
        is_asked = args.details or args.by or limits or result.noise or result.curve
        if screen.is_wanted() and not is_asked:
            compare_table.print_short(result)
        else:
            compare_table.print_result(result, groups)
        if args.history:
            against = {each.name: each for each in result.others}
            told = {baseline.name, *against}  # not the noise run
            lines = [
                history.line_of(run, own, against.get(own.name))
                for run, own in loaded
                if own.name in told
            ]
            history.append(args.history, lines)
            skipped = "" if any(line.tasks for line in lines) else " (no scores: not in its page)"
            print(f"history: {args.history}{skipped}")
    else:
        _check_nothing_else_asked(args, baseline.name)
    if args.save_baseline:  # last: what cannot be stored takes no comparison with it
        scores.save(baseline, args.save_baseline, with_outputs=args.with_outputs)
        print(f"baseline {baseline.name} saved: {args.save_baseline}")
    if not others:
        return
    exit_with(result.verdict, args, is_gate=bool(args.junit or limits))


def _check_nothing_else_asked(args: argparse.Namespace, baseline: str) -> None:
    """Refuse a lone baseline wherever a comparison was asked for, too."""
    asked = [
        f"--{name.replace('_', '-')}"
        for name in (*_FILES, *_OF_VERDICTS, "history", "noise_floor")
        if getattr(args, name)
    ]
    if asked or not args.save_baseline:
        flag = f"{asked[0]}: " if asked else ""
        raise FlyError(f"{flag}nothing to compare {baseline} with: name one more run")


def _check_outputs(args: argparse.Namespace) -> None:
    """Before hours of decoding, not after."""
    if args.with_outputs and not args.save_baseline:
        raise FlyError(
            "--with-outputs: says what a stored baseline holds: add --save-baseline FILE"
        )
    files = {f"--{name}": getattr(args, name) for name in _FILES}
    outputs.check(args, {**files, "--history": args.history, "--save-baseline": args.save_baseline})


def _matrix(args: argparse.Namespace) -> None:
    """The command's other answer: no verdict, but every run against its own target."""
    from fly.analysis import matrix, matrix_table

    for name in _NOT_OF_MATRIX:
        if getattr(args, name) not in (None, False, []):
            raise FlyError(
                f"--matrix: leave --{name.replace('_', '-')} out: a matrix compares runs with "
                "their own target's, without verdicts"
            )
    _check_outputs(args)
    found = matrix.build(_load(args), args.metric)
    if not found.cells:
        raise FlyError(
            "--matrix: no task has a score to compare: leave it out: then time x, acceptance and "
            "the number of equal texts are compared"
        )
    _write(
        args,
        json=lambda: matrix_table.as_json(found),
        markdown=lambda: matrix_table.markdown(found),
    )
    matrix_table.print_matrix(found)


def _write(args: argparse.Namespace, **texts: Callable[[], str]) -> None:
    """The files that were asked for, by the names of their flags."""
    from fly.paths import write_output

    for name, text in texts.items():
        path = getattr(args, name)
        if path is not None:
            write_output(path, text(), f"--{name}")
            print(f"{name}: {path}")


def _load(args: argparse.Namespace, stored: Measured | None = None) -> list[tuple[Run, Measured]]:
    """The runs that the command names, or else makes where it has not before; with their scores."""
    from fly.analysis import scores
    from fly.runs import reader

    named: list[tuple[str | None, str | Path]]
    if args.runs:
        _check_finished(args, stored)
        named = [*map(reader.named, args.runs)]
        if args.matrix:
            named = [(name or str(path), path) for name, path in named]
    else:
        named = [*_make_missing(args, stored).items()]
    return [
        (run, scores.measure(run, with_outputs=args.with_outputs, cluster=args.cluster, by=args.by))
        for run in api.read_runs(named, [stored.name] if stored else [])
    ]


def _check_finished(args: argparse.Namespace, stored: Measured | None) -> None:
    """Refuse flags that say how runs are made: these are; and a run without another."""
    makes = (
        "model_args", "modes", "mode", "rules", "drafters", "concurrency", "parallel",
        "output_path", "log_samples",
    )  # fmt: skip
    given = [f"--{name}" for name in makes if getattr(args, name, None)]
    given += [word for word in _run_flags(args) if word.startswith("-") and word not in args.runs]
    if given:
        flag = given[0].partition("=")[0]
        raise FlyError(f"{flag}: finished runs are compared as they are: leave it out")
    if len(args.runs) < 2 and not (stored or args.save_baseline or args.matrix):
        raise FlyError(f"fly compare {args.runs[0]}: give at least two runs, or --baseline FILE")


def _make_missing(args: argparse.Namespace, stored: Measured | None) -> dict[str, Path]:
    """The folder of every mode's run."""
    from fly.analysis import noise
    from fly.cli import compare_plan, run_modes, screen
    from fly.runs import context

    planned = compare_plan.plan_runs(args, _run_flags(args), stored)
    compared = [n for n in planned.modes if not (args.noise_floor and n == noise.NAME)]
    if len(compared) == 1 and not stored:
        _check_nothing_else_asked(args, *compared)
    context.check_writable(planned.output, "output_path")
    shown = screen.Screen(planned.output / "log.txt") if screen.is_wanted() else None
    return run_modes.run_missing(planned, shown)


def _run_flags(args: argparse.Namespace) -> list[str]:
    """The command line without compare's own flags and those that each mode sets."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_options(parser)
    parser.add_argument("--model", "-M")
    parser.add_argument("--model_args", "-a", nargs="+")
    parser.add_argument("--output_path", "-o")
    parser.add_argument("--log_samples", "-s", action="store_true")
    return parser.parse_known_args(args.words)[1]
