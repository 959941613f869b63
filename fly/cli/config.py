"""`fly config check | show | schema`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from fly import config, registry
from fly.errors import FlyError
from fly.harness.vllm_config import (
    FIRST_WITH_ALL,
    speculative_config,
    verifies_by_fly,
    without_cascade,
)
from fly.models.sources import check_names, is_local, sources
from fly.runs.resume import parse_pairs


def add_command(subparsers: Any) -> None:
    """Register the subcommand with the CLI's parser."""
    parser = subparsers.add_parser("config", help="Check, show or describe a pair's JSON")
    commands = parser.add_subparsers(dest="config_command", metavar="check|show|schema")
    parser.set_defaults(func=lambda args: parser.print_help())
    check = commands.add_parser("check", help="validate a file")
    check.add_argument("file")
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
    for line in engines_of(found):
        print(line)
    if found.head_class is not None:
        _load_head(found, args.file)


def engines_of(found: config.FlyConfig) -> Iterator[str]:
    """Which engines take the pair's keys, and whose code verifies; else why not. Whether they know
    the models' architectures is seen when these load."""
    name = found.drafter_name
    alone = name is not None and registry.DRAFTERS[name].of_vllm
    yield f"--model hf: {f'no: only vLLM has drafter={name}' if alone else 'takes these keys'}"
    in_vllm = without_cascade(found)
    try:
        speculative_config(in_vllm, found.draft_model_path, FIRST_WITH_ALL)
    except FlyError as error:
        yield f"--model vllm: no: {str(error).removesuffix(', or use --model hf')}"
        return
    by = "fly's rules" if verifies_by_fly(in_vllm, FIRST_WITH_ALL) else "vLLM's own"
    whose = "no draft" if name is None else f"verification by {by}"
    dropped = "; use_ngram is dropped" if in_vllm is not found else ""
    yield f"--model vllm: takes these keys ({whose}{dropped})"


def _load_head(found: config.FlyConfig, where: str) -> None:
    """Load a head by its target's configuration, as a run does, if the files of both are here.

    Raises FlyError if it does not fit the target.
    """
    target, draft = sources(found, where)
    if draft is None or not (is_local(target) and is_local(draft)):
        return
    from transformers import AutoConfig

    from fly.models import gguf
    from fly.models.heads.checkpoint import TargetShape, read
    from fly.models.loading import naming_model

    with naming_model("target_model_path", str(found.target_model_path)):
        path = gguf.metadata_folder(target.file) if target.file else target.path
        shape = TargetShape.of(AutoConfig.from_pretrained(path))
    with naming_model("pretrained", str(found.draft_model_path)):
        checkpoint = read(draft, str(found.draft_model_path), {})
        head = registry.load(str(found.head_class)).from_checkpoint(
            checkpoint, shape, found.head_layer_ids
        )
    print(f"head {found.draft_model_path}: reads hidden states {[*head.layers_read]}")


def _show(args: argparse.Namespace) -> None:
    overrides: dict[str, Any] = {}
    for item in args.overrides:
        if "=" not in item:
            raise FlyError(f"override {item!r}: write it as key=value")
        overrides |= parse_pairs(item, "override")
    own, unknown = config.split_model_args(overrides)
    found = config.resolve(args.file, {**own, **unknown}, log=False)
    check_names(found, args.file)
    print(json.dumps(found.model_dump(), indent=2))
