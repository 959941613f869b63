"""Checks lm-eval's flags, model_args and task files before anything loads.

Without these checks, bad values end in a traceback of lm-eval's, sometimes after hours, or are
misread without a word.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import yaml
from lm_eval.config.evaluate_config import EvaluatorConfig
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    with_config,
)
from typing_extensions import TypedDict

from fly import config as fly_config
from fly import reading, registry
from fly.config import FlyConfig
from fly.errors import FlyError
from fly.models import sources
from fly.paths import expanded
from fly.runs.resume import parse_pairs

HF_NAMES = [name for name, engine in registry.IN_PLACE_OF.items() if engine == "fly"]
_JSON_FLAGS = ("--model_args", "-a", "--gen_kwargs", "--metadata", "--samples", "-E")


def _as_list(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


def _whole(value: Any) -> Any:
    """Let 1e3 pass as a number of tokens; 1.5 stays a float and is refused."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _limit(value: float) -> float:
    if value >= 1 and not value.is_integer():
        raise ValueError("give a whole number of documents, or a share of them below 1")
    return value


def _batch_size(value: Any) -> Any:
    kind, _, times = str(value).partition(":")
    number = times or "1" if kind == "auto" else str(value)
    if isinstance(value, bool) or not (number.isdecimal() and int(number) >= 1):
        raise ValueError("give a whole number, at least 1, or auto")
    return value


_Text = Annotated[str, StringConstraints(min_length=1)]
_Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
_Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what numpy takes
_Verbosity = Literal["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET"]
_RequestCaching = Literal["cache_requests", "rewrite_requests_cache", "delete_requests_cache"]


class _Flags(TypedDict, total=False):
    """Flags of `fly run`, on the command line or in the file of `--config`, of which lm-eval's own
    annotations do not say enough; and flags of fly's own commands."""

    model: _Text
    model_args: dict[str, Any] | str
    tasks: Annotated[list[_Text | dict[str, Any]], BeforeValidator(_as_list), Field(min_length=1)]
    num_fewshot: NonNegativeInt
    batch_size: Annotated[Any, AfterValidator(_batch_size)]
    max_batch_size: PositiveInt
    device: _Text
    limit: Annotated[float, Field(gt=0, le=10**15, allow_inf_nan=False), AfterValidator(_limit)]
    samples: dict[str, Annotated[list[NonNegativeInt], Field(min_length=1)]]
    use_cache: _Text
    cache_requests: dict[_RequestCaching, bool]
    output_path: _Text
    include_path: Annotated[list[_Text], BeforeValidator(_as_list)]
    gen_kwargs: dict[str, Any] | str
    seed: Annotated[list[_Seed | None], BeforeValidator(_as_list)]
    verbosity: _Verbosity
    candidates: PositiveInt
    max_gen_toks: PositiveInt
    min_recovery: Annotated[float, Field(gt=0, le=1)]
    confidence: Annotated[float, Field(gt=0.5, lt=1)]


class _ModelArgs(TypedDict, total=False):
    """As `_Flags`, of HFLM's arguments and those that it hands to from_pretrained."""

    max_length: PositiveInt | None
    batch_size: Annotated[Any, AfterValidator(_batch_size)]
    max_batch_size: PositiveInt | None
    tokenizer: str | None
    low_cpu_mem_usage: bool | None
    local_files_only: bool | None
    force_download: bool | None
    use_safetensors: bool | None
    prefix_token_id: NonNegativeInt | None
    think_end_token: str | NonNegativeInt | None


class _GenKwargs(TypedDict, total=False):
    """The generation arguments that fly reads; max_gen_toks has several names in lm-eval."""

    until: Annotated[list[str], BeforeValidator(_as_list)]
    do_sample: bool | None
    temperature: float
    top_k: float | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    max_length: _Count | None
    max_gen_toks: _Count | None
    max_new_tokens: _Count | None
    max_tokens: _Count | None
    max_completion_tokens: _Count | None


@functools.cache
def _shape(of: Any, narrower: Any) -> Any:
    """Arguments by lm-eval's own annotations, and by `narrower` where these do not say enough."""
    hints = get_type_hints(of) | get_type_hints(narrower, include_extras=True)
    types = {name: hint for name, hint in hints.items() if hint is not dict}
    shape: Any = TypedDict("_Shape", types, total=False)  # type: ignore[misc]
    return with_config(ConfigDict(arbitrary_types_allowed=True))(shape)


def check_flags(given: Mapping[str, Any], where: str) -> None:
    """Refuse meaningless values of flags; None is "not given", other keys are ignored."""
    shape = _shape(EvaluatorConfig, _Flags)
    reading.check_shape({k: v for k, v in given.items() if v is not None}, shape, where)
    if device := given.get("device"):
        check_device("--device", device)


def check_gen_kwargs(given: Any, where: str) -> None:
    """Refuse malformed gen_kwargs of a task or of the command line."""
    reading.check_shape(given, _GenKwargs, where)


def checked_pair(
    model_args: Mapping[str, Any], engine: str = "fly"
) -> tuple[FlyConfig, dict[str, Any], sources.ModelSource]:
    """(configuration, what goes to lm-eval's class, the target).

    Raises FlyError for what is wrong with them, and for models whose files are not there or whole.
    """
    config, hf_args = fly_config.of_model_args(model_args)
    registry.load_engine(engine).check(config, hf_args)
    if "base_url" in hf_args:
        return config, hf_args, sources.ModelSource(config.target_model_path)
    target, draft = sources.sources(config, model_args.get("config_path"))
    revisions = {"revision": hf_args.get("revision"), "draft_revision": config.draft_revision}
    for (key, revision), model in zip(revisions.items(), (target, draft)):
        if revision is not None and model is not None and sources.is_local(model):
            raise FlyError(f"{key}={revision}: {model.path} is a local folder: leave it out")
    return config, hf_args, target


def check_model_args(config: FlyConfig, hf_args: Mapping[str, Any]) -> None:
    """Refuse model_args that HFLM would misread, or that would fail while a model loads.

    HFLM passes arguments that it does not know to from_pretrained; a misspelt key of fly's must
    not get there.
    """
    from lm_eval.models.huggingface import HFLM

    name = config.drafter_name
    if name is not None and registry.DRAFTERS[name].of_vllm:
        raise FlyError(f"drafter={name}: only vLLM has it: use --model vllm, or another drafter")
    known = inspect.signature(HFLM.__init__).parameters
    for key in hf_args:
        hint = reading.hint(key, FlyConfig.model_fields, "", cutoff=0.75)
        if key not in known and hint:
            raise FlyError(f"unknown model_args key {key!r}: {hint}")
    for field in ("dtype", "softmax_dtype"):
        _check_dtype(field, hf_args.get(field))
    reading.check_shape(dict(hf_args), _shape(HFLM.__init__, _ModelArgs), "model_args")
    autocast = hf_args.get("mixed_precision_dtype")
    if autocast not in (None, ""):  # HFLM runs its passes under it
        raise FlyError(
            f"mixed_precision_dtype={autocast}: fly's passes have one dtype: set "
            f"dtype={str(autocast).removeprefix('torch.')}, or run lm-eval's hf (no config_path)"
        )
    _check_dtype("draft_dtype", config.draft_dtype)
    if config.draft_device is not None:
        check_device("draft_device", config.draft_device)


def _check_dtype(field: str, dtype: object) -> None:
    import torch

    if dtype is None or isinstance(dtype, torch.dtype) or dtype == "auto":
        return
    if not isinstance(getattr(torch, str(dtype), None), torch.dtype):
        raise FlyError(f"{field}={dtype}: no such dtype: use e.g. bfloat16, float16, float32")


def check_device(field: str, name: str) -> None:
    """Refuse a device that this machine does not have."""
    import torch

    count = torch.cuda.device_count()
    here = ["cpu", *(["cuda"] if count else []), *(f"cuda:{index}" for index in range(count))]
    here += ["mps"] if torch.backends.mps.is_available() else []
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    # accelerators of other makers are left to PyTorch
    is_known = device is not None and device.type not in ("cpu", "cuda", "mps", "meta")
    if not is_known and name not in (*here, "cpu:0", "mps:0"):
        raise FlyError(f"{field}={name}: not available here: choose from {', '.join(here)}")


def merge_config(args: Any) -> set[str]:
    """Take the flags that the command line does not give from the file of --config, as lm-eval
    does when it reads the file again; their names."""
    if not args.config:
        return set()
    where = f"--config {args.config}"
    values = _read_yaml(Path(args.config), where, "flag")
    known = [field.name for field in fields(EvaluatorConfig)]
    for name in values:
        if name not in known:
            hint = reading.hint(str(name), known, "`fly run --help` lists the flags")
            raise FlyError(f"{where}: unknown key {reading.shown(name)}: {hint}")
    missing = {n for n in values if not (vars(args).get(n) or vars(args).get(n) == 0)}
    vars(args).update({name: values[name] for name in missing})
    return missing


class _Loader(yaml.SafeLoader):
    """YAML whose keys may not repeat; lm-eval's `!function` is text.

    Not libyaml's, which crashes where Python's raises RecursionError.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
        for key in set(keys):
            if keys.count(key) > 1:
                problem = f"key {key!r} is there twice: remove one"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


def _read_yaml(path: Path, where: str, kind: str) -> dict[str, Any]:
    """A file of `kind: value` lines."""
    text = reading.text_of(path, where)
    try:
        values = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise FlyError(f"{where}: not valid YAML{place}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = (str(error).splitlines() or ["nested too deeply"])[0]
        raise FlyError(f"{where}: not valid YAML: {reason}") from None
    if not isinstance(values, dict):
        raise FlyError(f"{where}: must hold `{kind}: value` lines, got {type(values).__name__}")
    return values


def check_task_files(tasks: Iterable[Any], folders: Sequence[str]) -> None:
    """Refuse a user's task files that cannot be read, or whose gen_kwargs make no sense.

    lm-eval skips files that it cannot read, and then does not find their tasks. A broken file
    that mentions none of these tasks is skipped here as well.
    """
    names = [task for task in tasks if isinstance(task, str)]
    given = [Path(name) for name in names if name.endswith(".yaml") and Path(name).is_file()]
    found: list[Path] = []
    for folder in map(expanded, folders):
        if not folder.is_dir():
            raise FlyError(f"--include_path {folder}: no such folder: give one that holds tasks")
        # what an editor leaves there may be no file: a link to nothing, for one
        found += sorted(file for file in folder.rglob("*.yaml") if file.is_file())
    for file in [*given, *found]:
        if file in given or any(name.encode() in file.read_bytes() for name in names):
            values = _read_yaml(file, f"task file {file}", "key")
            if file in given or values.get("task") in names:
                gen_kwargs = values.get("generation_kwargs") or {}
                check_gen_kwargs(gen_kwargs, f"generation_kwargs of {file}")


def spell_model_args(arguments: Sequence[str]) -> list[str]:
    """The command line with its model_args as lm-eval wants them: lists in brackets, and before a
    first text with a brace an empty one, as it takes that text for JSON."""
    flag, result = "", []
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if equals and name == "--model_args":
            result.append(name)
            argument = text
        flag = name if name.startswith("-") else flag
        if flag in ("--model_args", "-a") and not argument.lstrip().startswith("{"):
            argument = fly_config.bracket_lists(argument)
            if "{" in argument and result[-1] == flag:
                result.append("")
        result.append(argument)
    return result


def check_json(arguments: Sequence[str]) -> None:
    """Refuse invalid JSON and repeated keys on the command line, which lm-eval would misread."""
    for flag, text in pairwise(arguments):
        if flag in _JSON_FLAGS and text.lstrip().startswith("{"):
            reading.parse(text, flag)


def check_run(args: Any, from_config: Collection[str] = ()) -> None:
    """Check `fly run`'s flags as far as possible before anything loads.

    from_config: names of those that --config gave. args.samples is replaced by its parsed content.
    """
    flags = {name: value for name, value in vars(args).items() if value is not None}

    def where(name: str) -> str:
        return f"--config {args.config}" if name in from_config else f"--{name}"

    if "samples" in flags:
        if "limit" in flags:
            raise FlyError("--samples and --limit: lm-eval takes one of them: leave one out")
        args.samples = flags["samples"] = _samples(flags["samples"], where("samples"))
    on_line = {name: value for name, value in flags.items() if name not in from_config}
    check_flags(on_line, "fly run")
    check_flags({n: flags[n] for n in flags.keys() - on_line.keys()}, f"--config {args.config}")
    model_args = as_dict(flags.get("model_args"))
    for name in ("batch_size", "device"):
        if name in model_args:
            raise FlyError(f"model_args {name}={model_args[name]}: give it as --{name}")
    if "max_batch_size" in model_args and flags.get("max_batch_size") is not None:
        raise FlyError("--max_batch_size is also in model_args: remove one")
    _check_loggers(flags)
    model = flags.get("model") or "hf"
    if model in HF_NAMES or registry.engine_of(model, model_args):
        check_gen_kwargs(as_dict(flags.get("gen_kwargs")), where("gen_kwargs"))
    from fly.harness import evaluate

    tasks: list[Any] = []
    for part in _as_list(flags.get("tasks") or []):
        tasks += part.split(",") if isinstance(part, str) else [part]
    folders = _as_list(flags.get("include_path") or [])
    check_task_files(tasks, folders)
    evaluate.check_before_models_load(
        tasks, folders, flags.get("samples"),
        confirm_run_unsafe_code=bool(flags.get("confirm_run_unsafe_code")),
        is_scored=not flags.get("predict_only"),
    )  # fmt: skip


def _check_loggers(flags: Mapping[str, Any]) -> None:
    """Refuse what lm-eval hands to other libraries if these are not there or do not know it."""
    for name in ("wandb", "trackio"):
        if flags.get(f"{name}_args") and find_spec(name) is None:
            raise FlyError(f"--{name}_args: needs {name}: pip install {name}, or leave it out")
    if hub := as_dict(flags.get("hf_hub_log_args")):
        from lm_eval.loggers import EvaluationTracker

        known = [*inspect.signature(EvaluationTracker).parameters]
        for key in hub:
            if key not in known:
                hint = reading.hint(key, known, f"choose from {', '.join(known)}")
                raise FlyError(f"--hf_hub_log_args: unknown key {key!r}: {hint}")


def as_dict(value: Any) -> dict[str, Any]:
    """model_args or gen_kwargs, which are text in some files of --config."""
    return parse_pairs(value) if isinstance(value, str) else dict(value or {})


def _samples(given: Any, where: str) -> dict[str, list[int]]:
    """--samples as JSON, or as the path of a JSON file, checked and in the documents' order."""
    if isinstance(given, str):
        if not Path(given).is_file():
            raise FlyError(
                f"--samples {given}: no such file: give one, or JSON such as '{{\"task\": [0, 1]}}'"
            )
        given = reading.read_object(Path(given), f"--samples {given}")
    check_flags({"samples": given}, where)
    for task, numbers in given.items():
        for number in numbers:
            if numbers.count(number) > 1:
                raise FlyError(f"--samples: document {number} of {task} is there twice: remove one")
    # lm-eval goes through the documents in their own order, and numbers them by this list
    return {task: sorted(numbers) for task, numbers in given.items()}
