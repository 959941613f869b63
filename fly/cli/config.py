"""`fly config check | show | schema`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from fly import config, registry
from fly.errors import FlyError
from fly.harness.arguments import key_values
from fly.models.sources import check_names, is_local, sources


def add_command(subparsers: Any) -> None:
    """Register the subcommand with the CLI's parser."""
    parser = subparsers.add_parser("config", help="Check, show or describe a pair's JSON")
    commands = parser.add_subparsers(dest="config_command", metavar="check|show|schema")
    parser.set_defaults(func=lambda args: parser.print_help())
    check = commands.add_parser("check", help="validate a file")
    check.add_argument("file")
    check.add_argument(
        "--memory", action="store_true", help="what every GPU holds, and whether the pair fits"
    )
    check.add_argument(
        "--gpus", type=_positive(int), default=1, help="GPUs of one copy of the pair"
    )
    check.add_argument(
        "--gpu-memory", type=_positive(float), default=80.0, metavar="GIB", help="of each (80)"
    )
    check.add_argument(
        "--context", type=_positive(int), default=8192, metavar="TOKENS",
        help="the longest sequence, prompt and answer (8192)",
    )  # fmt: skip
    check.set_defaults(func=_check)
    show = commands.add_parser("show", help="print the resolved configuration")
    show.add_argument("file")
    show.add_argument(
        "overrides", nargs="*", metavar="key=value", help="keys to override, as in model_args"
    )
    show.set_defaults(func=_show)
    schema = commands.add_parser("schema", help="print the JSON schema")
    schema.set_defaults(func=lambda args: print(json.dumps(config.schema(), indent=2)))


def _check(args: argparse.Namespace) -> None:
    found = config.load(args.file)
    check_names(found, args.file)
    print(f"{args.file}: valid ({found.mode}, drafter {found.drafter_name}, {found.hash()})")
    if found.head_class is not None:
        _load_head(found, args.file)
    if args.memory:
        _print_memory(args, found)


def _load_head(found: config.FlyConfig, where: str) -> None:
    """Load a head whose files are here, and its target's, as a run would: without the target.

    Raises FlyError if the head does not fit it.
    """
    target, draft = sources(found, where)
    if draft is None or not (is_local(target) and is_local(draft)):
        return
    from transformers import AutoConfig

    from fly.models.heads.checkpoint import TargetShape, read
    from fly.models.loading import naming_model

    files = {"gguf_file": target.gguf_file} if target.gguf_file else {}
    with naming_model("target_model_path", str(found.target_model_path)):
        shape = TargetShape.of(AutoConfig.from_pretrained(target.path, **files))
    with naming_model("pretrained", str(found.draft_model_path)):
        checkpoint = read(draft, str(found.draft_model_path), {})
        head = registry.load(str(found.head_class)).from_checkpoint(
            checkpoint, shape, found.head_layer_ids
        )
    print(f"head {found.draft_model_path}: reads hidden states {[*head.layers_read]}")


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def parsed(text: str) -> float:
        if not 0 < (value := kind(text)) < float("inf"):
            raise ValueError(text)
        return value

    parsed.__name__ = f"positive {kind.__name__}"  # in argparse's message
    return parsed


def _print_memory(args: argparse.Namespace, found: config.FlyConfig) -> None:
    """Raises FlyError for a model that is not known; exit status 1 if the pair does not fit."""
    from fly.execution import memory  # torch and transformers

    pair = memory.pair_of(found, args.file, args.context)
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        if model is not None:
            print(f"{role} {model.name}: {model.count / 1e9:.2f} billion parameters, {model.dtype}")
    print(
        f"GiB on the fullest GPU of {args.gpus} with {args.gpu_memory:g} each; "
        f"K/V of a sequence of {args.context} tokens"
    )
    gpu = int(args.gpu_memory * memory.GIB)
    print(f"{'':34}{'target':>8}{'draft':>8}{'K/V':>8}{'left':>8}  sequences")
    fits = False
    for layout in memory.LAYOUTS if args.gpus > 1 else [memory.ONE_GPU]:
        try:
            need = pair.need(layout, args.gpus)
        except FlyError as error:
            print(f"{layout.name:34}  not possible: {error}")
            continue
        sequences = need.sequences(gpu)
        fits = fits or sequences > 0
        numbers = (need.target, need.draft, need.sequence, need.left(gpu))
        cells = "".join(f"{number / memory.GIB:8.2f}" for number in numbers)
        least = f"does not fit: takes GPUs of {-(-need.least // memory.GIB)}"
        print(f"{layout.name:34}{cells}  {sequences or least}")
    if not fits:
        others = [f"{layout.name}: {gpus} GPUs" for layout, gpus in memory.fitting(pair, gpu)]
        print(f"does not fit; would: {'; '.join(others) or 'no number of such GPUs up to 64'}")
        sys.exit(1)


def _show(args: argparse.Namespace) -> None:
    for item in args.overrides:
        if "=" not in item:
            raise FlyError(f"override {item!r}: write it as key=value")
    overrides: dict[str, Any] = {}
    for item in args.overrides:
        overrides |= key_values(item, "override")
    own, unknown = config.split_model_args(overrides)
    found = config.resolve(args.file, {**own, **unknown}, log=False)
    check_names(found, args.file)
    print(json.dumps(found.model_dump(), indent=2))
