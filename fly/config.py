"""FlyConfig: one flat JSON per draft-target pair, validated, with the reference's key names.

A file names what to decode and how; `model_args` on the command line override its keys. Every
refusal is one line with the field, the value and the fix.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fly import reading
from fly.errors import FlyError
from fly.models import pairs
from fly.paths import data_dir

logger = logging.getLogger(__name__)

DrafterName = Literal["model", "ngram", "cascade"]
EntropyKind = Literal["top3", "full", "normalized"]
Verification = Literal["fly", "exact", "typical", "top_k", "accept_all"]
Quantization = Literal["auto", "none", "int4", "int8", "fp8"]
Execution = Literal["auto", "kernels", "onednn", "eager"]
# what only one rule reads
KEYS_OF_RULE: dict[str, tuple[str, ...]] = {
    "fly": (
        "entropy_thre",
        "win_len",
        "entropy_kind",
        "margin_thre",
        "draft_ratio_thre",
        "draft_rank_max",
        "defer_across_rounds",
        "window_rule",
        "abla_no_window",
    ),
    "typical": ("typical_epsilon", "typical_delta"),
    "top_k": ("relaxed_top_k", "relaxed_delta"),
}
RECORDING_KEYS = ("verbose", "trace", "enable_statistics")  # change no text and no score
_NOT_SETTINGS = ("$schema", "$comment")  # for editors and readers; in no hash


class FlyConfig(BaseModel):
    """Every key of a pair's JSON. Keys of the reference code keep their names and meaning."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    target_model_path: str = Field(
        description="Target model: hub id, local folder, .gguf file, or pair:NAME/target for an "
        "embedded pair. The scores are this model's.",
    )
    draft_model_path: str | None = Field(
        None,
        description="Draft model, in the same forms. `pretrained=` in model_args overrides it. "
        "Not needed by drafter=ngram or use_sd=false.",
    )
    use_sd: bool = Field(
        True, description="false decodes with the target alone, through the same engine."
    )
    enable_fly: bool = Field(
        True, description="false is exact verification: lossless speculative decoding."
    )
    verification: Verification | None = Field(
        None,
        description="Which draft tokens stand. fly: also mismatches that pass the gates and whose "
        "window holds. exact: none but the target's own. typical: Medusa's typical acceptance. "
        "top_k: TensorRT-LLM's relaxed acceptance. accept_all: no verification, the lower bound of "
        "accuracy. null: fly if enable_fly, else exact.",
    )
    spd_k: int = Field(
        15, ge=0, le=256, description="K: most draft tokens per round. 0 is the target alone."
    )
    win_len: int = Field(
        6,
        ge=0,
        description="W: how many draft tokens after a deferred mismatch must all match the "
        "target. 0 is no window. (The reference code checks W-1.)",
    )
    entropy_thre: float | None = Field(
        0.3,
        ge=0,
        description="theta: a mismatch may be deferred only where the target's entropy is at "
        "least this; in the unit of entropy_kind. null switches the gate off.",
    )
    entropy_kind: EntropyKind = Field(
        "top3",
        description="top3: over the 3 largest probabilities, nats, not renormalised (what 0.3 was "
        "tuned for). full: whole vocabulary, nats. normalized: full divided by ln V, 0 to 1.",
    )
    margin_thre: float | None = Field(
        None,
        ge=0,
        le=1,
        description="A further gate of fly: the target's two largest probabilities differ by at "
        "most this (0 to 1). null switches it off. All gates that are on must pass.",
    )
    draft_ratio_thre: float | None = Field(
        None,
        ge=0,
        le=1,
        description="A further gate of fly: the draft token's target probability is at least this "
        "share of the largest one (0 to 1). null switches it off.",
    )
    draft_rank_max: int | None = Field(
        None,
        ge=1,
        description="A further gate of fly: at most this place of the draft token among the "
        "target's choices (2 is its second). null switches it off.",
    )
    defer_across_rounds: bool = Field(
        False,
        description="A deferral's window may be filled by later rounds; until then its tokens are "
        "provisional. false is the paper's rule: the window must fit into the round's draft.",
    )
    window_rule: Literal["paper", "reference"] = Field(
        "paper",
        description="paper: win_len following tokens are checked. reference: win_len - 1 are "
        "checked though win_len must follow, as the reference code does; to repeat its runs.",
    )
    typical_epsilon: float = Field(
        0.09, gt=0, lt=1, description="verification=typical: the hard threshold, a probability."
    )
    typical_delta: float = Field(
        0.3,
        gt=0,
        lt=1,
        description="verification=typical: the soft threshold is this times exp(-entropy in nats).",
    )
    relaxed_top_k: int = Field(
        10, ge=1, description="verification=top_k: the token is among so many likeliest ones."
    )
    relaxed_delta: float = Field(
        0.6,
        ge=0,
        le=1,
        description="verification=top_k: the largest probability exceeds the token's by at most "
        "this.",
    )
    abla_no_window: bool = Field(
        False, description="Ablation of the reference: accept every mismatch that passes the gate."
    )
    drafter: DrafterName | None = Field(
        None,
        description="model: the draft model. ngram: prompt lookup alone, no second model. cascade: "
        "n-gram proposes, draft model verifies, target verifies. null: cascade if use_ngram, "
        "else model.",
    )
    use_ngram: bool = Field(
        False, description="Accelerate the draft model by n-gram lookup (the cascade)."
    )
    max_ngram_size: int = Field(
        4, ge=1, le=32, description="Longest suffix that is looked up, in tokens."
    )
    min_ngram_size: int = Field(
        1,
        ge=1,
        le=32,
        description="Shortest suffix that is looked up, in tokens.",
    )
    num_ngram_pred_tokens: int = Field(
        6, ge=1, le=256, description="Most tokens that one n-gram lookup proposes."
    )
    temperature: float = Field(
        0.0,
        ge=0,
        description="0 is greedy. A task's gen_kwargs win over it.",
    )
    top_k: int | None = Field(
        None,
        ge=0,
        description="When sampling: only the so many likeliest tokens; 0 is off. As for the next "
        "three, a task's gen_kwargs win, and null leaves it to the target's generation_config.",
    )
    top_p: float | None = Field(
        None,
        gt=0,
        le=1,
        description="When sampling: the fewest tokens that hold this probability; 1 is off.",
    )
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="When sampling: tokens of at least this share of the largest probability.",
    )
    repetition_penalty: float | None = Field(
        None, gt=0, description="Penalty on tokens of the prompt and output; 1 is off."
    )
    seed: int | None = Field(
        None,
        ge=0,
        description="Where every request's random numbers start. null: lm-eval's --seed for torch.",
    )
    total_gen_tok: int | None = Field(
        None,
        ge=1,
        description="Cap on generated tokens per request, beside the task's max_gen_toks.",
    )
    enable_statistics: bool = Field(
        True, description="Print the speed table and write per-request records."
    )
    verbose: bool = Field(False, description="Log one line per round.")
    trace: bool = Field(
        False,
        description="Write every round to fly_trace_*.jsonl beside the samples (docs/traces.md).",
    )
    dual_tok: bool = Field(
        False,
        description="The reference's two-tokenizer mode. Only false: fly needs one vocabulary.",
    )
    compile: Literal["auto", "off"] = Field(
        "auto",
        description="auto: packed weights on a CPU (see execution), CUDA graphs on a GPU, and a "
        "logged reason where neither applies. off: the model's own eager passes.",
    )
    execution: Execution = Field(
        "auto",
        description="How a CPU computes the passes of bfloat16 models. kernels: fly's own, for "
        "x86-64 with AVX2, AVX-512 or AMX. onednn: oneDNN's prepacked weights, for CPUs with "
        "bfloat16 instructions. eager: the model's own passes. auto: the first of these that can "
        "be had here.",
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Threads of a CPU's passes. null: PyTorch's choice (OMP_NUM_THREADS), at most "
        "the cores that this process may use.",
    )
    draft_quantization: Quantization = Field(
        "auto",
        description="Weights of the draft model; exact verification stays lossless, FLy may accept "
        "other tokens. int8: on a CPU that packs weights (see execution), or on a GPU, by torchao. int4: "
        "with oneDNN's passes. fp8: on a GPU. auto: int8 with fly's kernels, int4 with oneDNN's "
        "passes, else none.",
    )
    draft_policy: Literal["auto", "fixed"] = Field(
        "auto",
        description="fixed: spd_k tokens every round. auto: as many of them as pay for the running "
        "sequences on this machine, by relative pass costs and counts; where the number would "
        "change texts (FLy and other lossy rules, sampling) spd_k or none, by a fixed rule for the "
        "whole run, which is logged.",
    )
    prefix_reuse: bool = Field(
        True,
        description="Order requests by their prompts and copy the K/V of shared prefixes instead "
        "of computing them again.",
    )
    draft_device: str | None = Field(
        None, description="Device of the draft model, e.g. cuda:1 or cpu. null: the target's."
    )
    draft_dtype: str | None = Field(
        None, description="dtype of the draft model, e.g. bfloat16. null: the target's."
    )
    draft_revision: str | None = Field(
        None,
        description="Branch, tag or commit of a draft model that lies on a hub. null: its main "
        "branch. `revision` in model_args is the target's.",
    )

    @property
    def drafter_name(self) -> DrafterName | None:
        """The drafter in force; None when the target decodes alone."""
        if not self.use_sd or self.spd_k == 0:
            return None
        return self.drafter or ("cascade" if self.use_ngram else "model")

    @property
    def needs_draft_model(self) -> bool:
        return self.drafter_name in ("model", "cascade")

    @property
    def window(self) -> int:
        """W as verification uses it."""
        return 0 if self.abla_no_window else self.win_len

    @property
    def rule(self) -> Verification:
        """The verification in force."""
        return self.verification or ("fly" if self.enable_fly else "exact")

    @property
    def mode(self) -> str:
        """`target-only`, or the rule in force: what the printed tables call this run."""
        return "target-only" if self.drafter_name is None else self.rule

    def hash(self) -> str:
        """First 12 hex digits of the SHA-256 of the resolved configuration, without what only
        says what is written down of a run."""
        text = json.dumps(self.model_dump(exclude=set(RECORDING_KEYS)), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def check_consistency(config: FlyConfig, where: str) -> None:
    """What a single field's type cannot express. Raises FlyError."""
    for name in ("target_model_path", "draft_model_path"):
        _check_model_name(name, getattr(config, name), where)
    if config.dual_tok:
        raise FlyError(
            f"dual_tok=true ({where}): fly needs one vocabulary for draft and target: "
            "set it to false and choose a draft of the target's family"
        )
    if config.compile == "off" and config.execution not in ("auto", "eager"):
        raise FlyError(
            f"execution={config.execution!r} contradicts compile='off' ({where}): "
            "set compile to 'auto', or leave execution out"
        )
    if config.drafter == "model" and config.use_ngram:
        raise FlyError(
            f"drafter='model' contradicts use_ngram=true ({where}): "
            "set drafter to 'cascade', or use_ngram to false"
        )
    if config.min_ngram_size > config.max_ngram_size:
        raise FlyError(
            f"min_ngram_size={config.min_ngram_size} is above "
            f"max_ngram_size={config.max_ngram_size} ({where}): raise max_ngram_size"
        )
    if config.entropy_kind == "normalized" and (config.entropy_thre or 0) > 1:
        raise FlyError(
            f"entropy_thre={config.entropy_thre} with entropy_kind='normalized' ({where}): "
            "a normalized entropy lies between 0 and 1, so nothing could ever be deferred"
        )
    if not config.enable_fly and config.verification not in (None, "exact"):
        raise FlyError(
            f"verification={config.verification!r} contradicts enable_fly=false ({where}): "
            "set enable_fly to true, or verification to 'exact'"
        )
    if config.defer_across_rounds and config.window_rule == "reference":
        raise FlyError(
            f"defer_across_rounds=true with window_rule='reference' ({where}): the reference code "
            "knows no window across rounds: set one of them back"
        )
    if _wants_room(config) and config.win_len >= config.spd_k:
        raise FlyError(
            f"win_len={config.win_len} needs spd_k >= {config.win_len + 1}, got {config.spd_k}: "
            f"lower win_len or raise spd_k ({where}); defer_across_rounds=true (with "
            "window_rule='paper') needs neither; for exact verification set enable_fly=false"
        )


def _check_model_name(field: str, name: str | None, where: str) -> None:
    """Whether it names a model at all; not whether that is here."""
    if name is None:
        return
    if not name.strip() or not name.isprintable():
        raise FlyError(
            f"{field}={name!r} ({where}): names no model: give a hub id, a model's folder, a .gguf "
            "file or pair:NAME/target"
        )
    try:
        pairs.role_of(name)
    except FlyError as error:
        raise FlyError(f"{field} ({where}): {error}") from None


def _wants_room(config: FlyConfig) -> bool:
    """Whether a window must fit into the draft of its round."""
    return config.mode == "fly" and not config.abla_no_window and not config.defer_across_rounds


def build(values: Mapping[str, Any], where: str) -> FlyConfig:
    """Validate `values`; `where` names the file or source in error messages."""
    values = {key: value for key, value in values.items() if key not in _NOT_SETTINGS}
    if unknown := [key for key in values if key not in FlyConfig.model_fields]:
        raise FlyError(_unknown_key(unknown[0], where))
    try:
        config = FlyConfig(**values)
    except ValidationError as error:
        raise FlyError(f"{reading.problem(error, where)}{_example(error)}") from None
    check_consistency(config, where)
    return config


def _unknown_key(key: str, where: str) -> str:
    nearest = difflib.get_close_matches(key, FlyConfig.model_fields, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]!r}?" if nearest else "`fly config schema` lists the keys"
    return f"unknown key {key!r} ({where}): {hint}"


def _example(error: ValidationError) -> str:
    """How to add the one key that has no default."""
    missing = error.errors()[0]["type"] == "missing"
    return ': add it, e.g. "target_model_path": "<hub id or folder>"' if missing else ""


def find_config_file(path: str) -> Path:
    """`path` itself, else a shipped configuration of that name (works from a wheel too)."""
    given = Path(str(path)).expanduser()
    shipped = data_dir("fly_config") / given.name
    for candidate in (given, shipped, shipped.with_name(shipped.name + ".json")):
        if candidate.is_file():
            return candidate
    names = ", ".join(sorted(p.name for p in data_dir("fly_config").glob("*.json") if _is_pair(p)))
    raise FlyError(f"config_path={path}: no such file; shipped configurations are {names}")


def _is_pair(path: Path) -> bool:
    return path.name != "schema.json"


def read_file(path: str) -> dict[str, Any]:
    """The JSON object in a configuration file, not yet validated."""
    return reading.read_object(find_config_file(path), path)


def load(path: str, overrides: Mapping[str, Any] | None = None, *, log: bool = True) -> FlyConfig:
    """Read and validate a pair's JSON; `overrides` replace its keys, each logged old -> new."""
    values = read_file(path)
    if not overrides:
        return build(values, path)
    config = build({**values, **_coerced(overrides)}, f"{path} with model_args")
    if log:
        for key in overrides:
            old = values.get(key, FlyConfig.model_fields[key].get_default())
            new = getattr(config, key)
            if old != new:
                logger.info("model_args override %s: %s -> %s", key, old, new)
    return config


def resolve(path: str | None, own: Mapping[str, Any], *, log: bool = True) -> FlyConfig:
    """The configuration that model_args mean: a file with overrides, or without one the keys."""
    config = build(_coerced(own), "model_args") if path is None else load(path, own, log=log)
    for line in _without_effect(config, own) if log else ():
        logger.warning("%s", line)
    return config


def _without_effect(config: FlyConfig, own: Mapping[str, Any]) -> Iterator[str]:
    """What model_args ask for and decoding does not do, one line each.

    `fly compare` decodes exactly with the keys that its run of fly has, so those pass there.
    """
    if config.drafter_name is None:
        return
    in_force = "fly" if config.rule == "exact" else config.rule
    for rule, keys in KEYS_OF_RULE.items():
        for key in keys if rule != in_force else ():
            if key in own:
                yield f"model_args {key}={own[key]}: verification={config.rule} does not read it"
    longest = min(config.spd_k, config.num_ngram_pred_tokens)
    if config.drafter_name == "ngram" and _wants_room(config) and config.win_len >= longest:
        yield (
            f"drafter=ngram: drafts of at most {longest} tokens leave no room for "
            f"win_len={config.win_len}, so nothing can be deferred: raise num_ngram_pred_tokens, "
            "lower win_len, or set defer_across_rounds=true"
        )


def _coerced(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: coerce(key, value) for key, value in values.items()}


def coerce(key: str, value: Any) -> Any:
    """A command-line value in the type that its key takes.

    lm-eval parses `key=3` to an int and, depending on where it comes from, `key=None` to None or a
    string; a float key given `1` is an int.
    """
    if key not in FlyConfig.model_fields:
        return value
    if key == "compile" and value is False:  # YAML's reading of off
        return "off"
    is_none = value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
    if is_none:
        return "none" if key == "draft_quantization" else None  # there it is a value of its own
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    kinds = get_args(FlyConfig.model_fields[key].annotation) or (
        FlyConfig.model_fields[key].annotation,
    )
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if (float in kinds or int in kinds) and isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def split_model_args(model_args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fly's own keys, what goes to lm-eval's HFLM). `pretrained` names the draft model."""
    own = {key: value for key, value in model_args.items() if key in FlyConfig.model_fields}
    rest = {key: value for key, value in model_args.items() if key not in FlyConfig.model_fields}
    if (draft := rest.pop("pretrained", None)) is not None:
        own["draft_model_path"] = draft
    return own, rest


def of_model_args(model_args: Mapping[str, Any]) -> tuple[FlyConfig, dict[str, Any]]:
    """(the configuration that model_args mean, what goes to lm-eval's HFLM); logs nothing."""
    own, rest = split_model_args(model_args)
    return resolve(rest.pop("config_path", None), own, log=False), rest


def schema() -> dict[str, Any]:
    """JSON schema of a pair's file, for editors (`$schema`) and `fly config schema`."""
    result = FlyConfig.model_json_schema()
    result["title"] = "fly: one draft-target pair"
    result["properties"]["$schema"] = {"type": "string"}
    result["properties"]["$comment"] = {
        "description": "For the reader, of any type; ignored. `fly tune` puts its evidence here."
    }
    result["properties"] = dict(sorted(result["properties"].items()))
    return result
