"""What a comparison will run: the modes as planned, before anything decodes."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fly import config as fly_config
from fly import registry
from fly.analysis import comparability, noise, scores
from fly.cli import run_inputs
from fly.errors import FlyError
from fly.harness.arguments import as_dict, check_run, checked_pair, merge_config
from fly.models.fingerprint import hash_json
from fly.runs.earlier_outputs import EarlierOutputs
from fly.runs.environment import deciding_versions, models_of
from fly.runs.resume import parse_pairs
from fly.settings import RECORDING_KEYS

# What each mode changes in the pair's file; `hf` is lm-eval's own backend on the target.
NAMED: dict[str, dict[str, Any]] = {
    "target-only": {"use_sd": False},
    "exact": {"use_sd": True, "enable_fly": False, "verification": "exact"},
    "fly": {},
    "hf": {},
}
DEFAULT = ("target-only", "exact", "fly")
_SERVER = "server"


@dataclass(frozen=True)
class Mode:
    """One run to be made: `fly run` with `model` and these `model_args`."""

    name: str
    model: str
    model_args: dict[str, Any]
    identity: str  # what the texts depend on; a run of another identity is not reused
    models: Callable[..., dict[str, Any]] = dict  # looks up the models' fingerprints, by role
    rule: str = ""  # the mode that the run itself will report
    # the configuration's RECORDING_KEYS, with their values
    records: dict[str, bool] = field(default_factory=dict)
    flags: tuple[str, ...] = ()  # of `fly run`, after all modes'


@dataclass(frozen=True)
class PlannedRuns:
    """Runs to be made."""

    modes: dict[str, Mode]  # by name, in the order of the tables
    output: Path
    flags: Sequence[str] = ()  # the command line's flags of `fly run`, for every mode
    # hashes of the files that the flags name, by flag; see run_inputs
    inputs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    at_once: bool = False  # ask all servers together


def plan_runs(
    args: argparse.Namespace, flags: Sequence[str], stored: scores.Measured | None
) -> PlannedRuns:
    """The runs that the command line asks for, with what --config adds to it.

    flags: those of `fly run`, for every mode. stored: the run of --baseline. Raises FlyError for
    flags that cannot be, and for what could not be compared or stored.
    """
    from_config = merge_config(args)
    samples = args.samples
    check_run(args, from_config)  # replaces --samples by its content
    model = args.model or "hf"
    for flag in ("tasks", "model_args", "output_path"):
        is_optional = flag == "model_args" and model == _SERVER
        if not (getattr(args, flag) or is_optional):
            raise FlyError(f"fly compare needs --{flag}, or finished runs: fly compare RUN RUN ...")
    model_args, output = as_dict(args.model_args), Path(args.output_path)
    inputs = run_inputs.hash_inputs(args, output, samples)
    engine = registry.IN_PLACE_OF.get(model, model)
    if engine not in registry.ENGINES:
        raise FlyError(f"--model {model}: fly compare makes runs of hf, vllm and server")
    if args.csv and engine != _SERVER:
        raise FlyError("--csv: it is of servers' runs: leave it out")
    default: Sequence[str] = DEFAULT[:1] if args.rules else DEFAULT
    if engine == _SERVER:  # servers have no modes but their own
        default = ()
    modes = plan_modes(
        args.modes or [name for name in default if not (stored and name == stored.mode)],
        args.mode,
        model_args,
        args.baseline if stored and stored.has_outputs else None,
        engine,
        args.concurrency or (),
        args.rules or (),
        args.drafters or (),
    )
    if len(modes) < (1 if stored or args.save_baseline else 2):
        raise FlyError("--modes: give at least two, or --baseline FILE")
    if args.baseline_run and args.baseline_run not in modes:
        raise FlyError(f"--baseline-run {args.baseline_run}: choose one of {', '.join(modes)}")
    if stored:  # before anything runs: another target, or other gen_kwargs on the command line
        config, _ = fly_config.of_model_args(model_args)
        files = scores.fingerprint(config.target_model_path)
        comparability.check_reusable_for(args.baseline, stored, files, as_dict(args.gen_kwargs))
    target_only = [name for name, mode in modes.items() if mode.rule == "target-only"]
    baseline = modes[args.baseline_run or [*target_only, *modes][0]]
    if args.save_baseline:
        _check_storable(baseline, args)
    if args.noise_floor:
        if stored:
            raise FlyError("--noise-floor: needs the baseline made here: leave --baseline out")
        if noise.NAME in modes:
            raise FlyError(f"--mode {noise.NAME}: --noise-floor makes it: choose another name")
        modes[noise.NAME] = _noise_mode(baseline, args)
    if args.use_cache and "hf" in modes:
        modes["hf"] = _with_own_cache(modes["hf"], args.use_cache)
    if args.parallel and engine != _SERVER:
        raise FlyError("--parallel: runs of one machine would slow each other: leave it out")
    return PlannedRuns(modes, output, flags, inputs, args.parallel)


def _check_storable(mode: Mode, args: argparse.Namespace) -> None:
    scores.check_storable(mode.rule, f"--save-baseline {args.save_baseline}")
    if args.with_outputs and not mode.records.get("enable_statistics"):
        raise FlyError(
            f"--with-outputs: {mode.name} keeps no token ids: take a mode of fly's own backend, "
            "with enable_statistics=true"
        )


def _noise_mode(baseline: Mode, args: argparse.Namespace) -> Mode:
    """The baseline's decoding with another number of running sequences, whose passes round
    otherwise."""
    if args.use_cache:
        raise FlyError(
            "--noise-floor with --use_cache: the noise run would get the baseline's texts "
            "instead of decoding: leave one of them out"
        )
    if args.model == _SERVER:  # what else it decodes meanwhile rounds otherwise, too
        return replace(baseline, name=noise.NAME)
    if baseline.rule == "hf":
        raise FlyError(
            "--noise-floor with hf as the baseline: its batch size is not fly's to choose: "
            "add target-only to --modes, or name another --baseline-run"
        )
    other = "8" if str(vars(args).get("batch_size") or 1) == "1" else "1"
    return replace(baseline, name=noise.NAME, flags=("--batch_size", other))


def plan_modes(
    names: Sequence[str],
    custom: Sequence[str],
    model_args: Mapping[str, Any],
    outputs: Path | None = None,
    engine: str = "fly",
    concurrency: Sequence[int] = (),
    rules: Sequence[str] = (),
    drafters: Sequence[str] = (),
) -> dict[str, Mode]:
    """The modes by name, checked before anything runs. custom: more of them, NAME=key=value,...

    outputs: a baseline file with outputs, from which exact modes draft unless they say otherwise.
    engine: what decodes them, a name in registry.ENGINES. concurrency: each mode once for each, as
    NAME@N. rules: further modes, by verification rule. drafters: each mode that drafts once for
    each, as NAME-DRAFTER.
    """
    overrides = dict[str, dict[str, Any]]()
    for name in names:
        if engine == _SERVER:
            raise FlyError(f"--modes {name}: a server decodes as it was started: --mode NAME=URL")
        if name not in NAMED:
            raise FlyError(f"--modes {name}: choose from {', '.join(NAMED)}, or define a --mode")
        overrides[name] = NAMED[name]
    for rule in rules:
        if rule not in registry.RULES or engine == _SERVER:
            raise FlyError(f"--rules {rule}: choose from {', '.join(registry.RULES)}, or leave out")
        if rule in overrides:
            raise FlyError(f"--rules {rule}: a mode has that name already: leave one of them out")
        is_loose = rule != "exact"
        overrides[rule] = {"use_sd": True, "enable_fly": is_loose, "verification": rule}
    for text in custom:
        name, _, rest = text.partition("=")
        is_named = name in NAMED and engine != _SERVER
        if engine == _SERVER and rest.startswith(("http://", "https://")):
            rest = f"base_url={rest}"
        if not re.fullmatch(r"\w[\w.-]*", name) or "=" not in rest:
            raise FlyError(
                f"--mode {text}: write it as NAME=key=value,key=value: NAME begins with a "
                "letter, digit or _, and has those, . and - alone"
            )
        if name in overrides or is_named:
            raise FlyError(f"--mode {text}: the name {name} is taken: choose another")
        overrides[name] = parse_pairs(rest, f"--mode {name}")
    if drafters:
        crossed = dict[str, dict[str, Any]]()
        for name, changes in overrides.items():
            drafts = name != "hf" and changes.get("use_sd", True) is not False
            made = [(f"{name}-{drafter}", {**changes, "drafter": drafter}) for drafter in drafters]
            for whole, own in made if drafts else [(name, changes)]:
                if whole in crossed:
                    raise FlyError(f"--drafters: two modes are called {whole}: rename one of them")
                crossed[whole] = own
        overrides = crossed
    if concurrency:
        if engine != _SERVER:
            raise FlyError("--concurrency: goes with --model server: leave it out")
        overrides = {
            f"{name}@{count}": {**changes, "num_concurrent": count}
            for name, changes in overrides.items()
            for count in concurrency
        }
    resolved = {
        name: _resolve_drafts(name, {**model_args, **changes}, outputs)
        for name, changes in overrides.items()
    }
    return {name: _build_mode(name, model_args, engine) for name, model_args in resolved.items()}


def _resolve_drafts(name: str, model_args: dict[str, Any], outputs: Path | None) -> dict[str, Any]:
    """A mode's model_args, with what earlier runs' outputs change in them."""
    config, _ = fly_config.of_model_args(model_args)
    is_loose = config.enable_fly and config.verification is None
    if name == "fly" and config.draft_runs and is_loose:  # who names the mode asks for its rule
        return {**model_args, "verification": "fly"}
    may_draft = config.drafter is None or registry.DRAFTERS[config.drafter].from_texts
    if outputs is None or name == "hf" or not (may_draft and config.asks_earlier_runs):
        return model_args
    if config.rule != "exact" or config.draft_runs or "draft_runs" in model_args:
        return model_args
    print(f"{name}: drafts from the outputs in {outputs}", flush=True)
    return {**model_args, "draft_runs": [str(outputs)]}


def _build_mode(name: str, model_args: dict[str, Any], engine: str) -> Mode:
    if name == "hf" and engine not in ("fly", _SERVER):
        raise FlyError("--modes hf: lm-eval's hf goes with --model hf: run it by itself")
    config, rest, target = checked_pair(model_args, engine)
    models = partial(models_of, config, rest)
    models()  # what is not there is refused now
    if name == "hf" and engine == "fly":
        models = partial(models_of, config.model_copy(update={"use_sd": False}), rest)
        gguf = {"gguf_file": target.gguf_file} if target.gguf_file else {}
        arguments = {"pretrained": target.path, **gguf, **rest}
        identity = json.dumps(arguments, sort_keys=True, default=str)
        return Mode(name, "hf", arguments, identity, models, "hf")
    deciding: list[Any] = [config.hash(), rest]
    if config.earlier_runs:
        deciding.append(EarlierOutputs.read(config.earlier_runs).digest())
    identity = json.dumps(deciding, sort_keys=True, default=str)
    records = {key: getattr(config, key) for key in RECORDING_KEYS}
    return Mode(name, engine, model_args, identity, models, config.mode, records)


def _with_own_cache(mode: Mode, cache: str) -> Mode:
    """lm-eval's cache knows a request by its prompt alone: the name gets what else decides a text,
    as `fly run` does for fly's own modes."""
    # fetch: the next call must find this one's cache
    deciding = [mode.identity, mode.models(fetch=True), deciding_versions()]
    return replace(mode, flags=("--use_cache", f"{cache}_{hash_json(deciding)[:12]}"))
