"""FlyConfig: one flat JSON per draft-target pair, validated, with the reference's key names.

A file names what to decode and how; `model_args` on the command line override its keys. Every
refusal is one line that names the key and its value, and says what to change.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from fly import reading, registry
from fly.errors import FlyError
from fly.paths import data_dir, expanded
from fly.settings import (
    GONE,
    RECORDING_KEYS,
    DrafterSettings,
    ExecutionSettings,
    FlySettings,
    ModelSettings,
    OutputSettings,
    RuleSettings,
    SamplingSettings,
    Settings,
    TextSourceName,
    TopKSettings,
    TypicalSettings,
    settings_of_rule,
)

logger = logging.getLogger(__name__)

SERVED = "served"  # names the one model of a server that was not named
_NOT_SETTINGS = ("$schema", "$comment")  # for editors and readers; in no hash


class FlyConfig(
    ModelSettings,
    DrafterSettings,
    RuleSettings,
    FlySettings,
    TypicalSettings,
    TopKSettings,
    SamplingSettings,
    ExecutionSettings,
    OutputSettings,
):
    """Every key of a pair's JSON. Keys of the reference code keep their names and meaning."""

    model_config = ConfigDict(extra="allow")  # keys of a rule that brings its own along

    @property
    def drafter_name(self) -> str | None:
        """The drafter in force; None when the target decodes alone."""
        if not self.use_sd or self.spd_k == 0:
            return None
        if self.drafter is None and self.draft_runs:
            return "cascade" if self.draft_model_path else "ngram"
        return self.drafter or ("cascade" if self.use_ngram else "model")

    @property
    def needs_draft_model(self) -> bool:
        name = self.drafter_name
        return name is not None and registry.DRAFTERS[name].needs_draft_model

    @property
    def head_class(self) -> str | None:
        """Where the draft's class is, if it is a head of the target; see fly/registry.py."""
        name = self.drafter_name
        return None if name is None else registry.DRAFTERS[name].head

    @property
    def rule(self) -> str:
        """The verification in force.

        With earlier runs FLy has to be asked for by `verification`: its texts lean towards theirs.
        """
        is_loose = self.enable_fly and not self.draft_runs
        return self.verification or ("fly" if is_loose else "exact")

    @property
    def rule_settings(self) -> Settings:
        """The keys of the rule in force."""
        kind = settings_of_rule(self.rule)
        return kind.model_construct(**{name: getattr(self, name) for name in kind.model_fields})

    @property
    def earlier_runs(self) -> list[str]:
        """The earlier runs that are drafted from; none where the target decodes alone."""
        return list(self.draft_runs or ()) if self.asks_earlier_runs else []

    @property
    def asks_earlier_runs(self) -> bool:
        """Whether earlier runs are drafted from, if there are any."""
        return self.drafter_name is not None and "runs" in self.text_sources

    @property
    def text_sources(self) -> tuple[TextSourceName, ...]:
        """The texts that ngram and cascade draft from, where drafts change no text."""
        return get_args(TextSourceName) if self.draft_sources is None else self.draft_sources

    @property
    def mode(self) -> str:
        """`target-only`, or the rule in force: what the printed tables call this run."""
        return "target-only" if self.drafter_name is None else self.rule

    def hash(self) -> str:
        """First 12 hex digits of the SHA-256 of the resolved configuration, without what only
        says what is written down of a run."""
        values = self.model_dump(exclude=set(RECORDING_KEYS))
        values["use_ngram"] = bool(self.use_ngram)  # null is decided once the models are loaded
        for key, unset in (("vllm_verification", None), ("relax_in", "everywhere")):
            if values[key] == unset:  # runs of before this key are of the same hash
                del values[key]
        if "relax_in" not in values:
            del values["think_tokens"]
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _contradictions(config: FlyConfig) -> Iterator[str]:
    """What a single field's type cannot express."""
    for field in ("target_model_path", "draft_model_path"):
        name = getattr(config, field)
        if name is not None and (not name.strip() or not name.isprintable()):
            yield (
                f"{field}={name!r} names no model: give a hub id, a model's folder, a .gguf file "
                "or pair:NAME/target"
            )
    if config.compile == "off" and config.execution not in ("auto", "eager"):
        set_back = "set compile to 'auto', or leave execution out"
        yield f"execution={config.execution!r} contradicts compile='off': {set_back}"
    if config.compile == "inductor" and config.batch_invariant is True:
        yield "compile='inductor' contradicts batch_invariant=true: set one of them to auto"
    if config.drafter == "model" and config.use_ngram:
        set_back = "set drafter to 'cascade', or use_ngram to false"
        yield f"drafter='model' contradicts use_ngram=true: {set_back}"
    drafter = config.drafter_name
    if config.draft_runs and drafter is not None and not registry.DRAFTERS[drafter].from_texts:
        yield (
            f"draft_runs with drafter={drafter!r}, which does not draft from texts: set drafter to "
            "'cascade' or 'ngram', or leave draft_runs out"
        )
    if config.min_ngram_size > config.max_ngram_size:
        sizes = f"{config.min_ngram_size} is above max_ngram_size={config.max_ngram_size}"
        yield f"min_ngram_size={sizes}: raise max_ngram_size"
    if config.entropy_kind == "normalized" and (config.entropy_thre or 0) > 1:
        yield (
            f"entropy_thre={config.entropy_thre} with entropy_kind='normalized': a normalized "
            "entropy lies between 0 and 1, so nothing could ever be deferred"
        )
    if not config.enable_fly and not registry.RULES[config.rule].is_lossless:
        set_back = "set enable_fly to true, or verification to 'exact'"
        yield f"verification={config.verification!r} contradicts enable_fly=false: {set_back}"
    needs_q = registry.RULES[config.rule].needs_q
    if needs_q and drafter is not None and not registry.DRAFTERS[drafter].has_q:
        yield (
            f"verification={config.rule!r} needs the draft's probabilities, which "
            f"drafter={drafter!r} does not have: set drafter to 'model' or 'cascade', or another "
            "rule"
        )
    if len(set(config.think_tokens)) == 1:
        yield (
            f"think_tokens={list(config.think_tokens)}: what opens a thought is what closes it: "
            "give two different ones"
        )
    if config.defer_across_rounds and config.window_rule == "reference":
        yield (
            "defer_across_rounds=true with window_rule='reference': the reference code knows no "
            "window across rounds: set one of them back"
        )
    if _wants_room(config) and config.win_len >= config.spd_k:
        yield (
            f"win_len={config.win_len} needs spd_k >= {config.win_len + 1}, got {config.spd_k}: "
            "lower win_len or raise spd_k; defer_across_rounds=true (with window_rule='paper') "
            "needs neither; for exact verification set enable_fly=false"
        )


def _wants_room(config: FlyConfig) -> bool:
    """Whether a window must fit into the draft of its round."""
    return config.mode == "fly" and not config.abla_no_window and not config.defer_across_rounds


def build(values: Mapping[str, Any], where: str) -> FlyConfig:
    """Validate `values`; `where` names the file or source in error messages."""
    values = {key: value for key, value in values.items() if key not in _NOT_SETTINGS}
    refuse_gone(values, where)
    keys = _known_keys()
    for key in values:
        if key not in keys:
            hint = reading.hint(key, keys, "`fly config schema` lists the keys", cutoff=0.4)
            raise FlyError(f"unknown key {key!r} ({where}): {hint}")
    try:
        config = FlyConfig(**{**values, **_keys_of_further_rules(values)})
    except ValidationError as error:
        problem = reading.problem(error, where)
        if error.errors()[0]["type"] == "missing":  # of the one key that has no default
            problem += ': add it, e.g. "target_model_path": "<hub id or folder>"'
        raise FlyError(problem) from None
    for problem in _contradictions(config):
        raise FlyError(f"{problem} ({where})")
    return config


def refuse_gone(values: Mapping[str, Any], where: str) -> None:
    """Raise FlyError for a key or value that fly had once, naming its successor."""
    for key, value in values.items():
        items = value.strip("[]").split(",") if isinstance(value, str) else value
        items = items if isinstance(items, (list, tuple)) else [items]
        for name in (key, *(f"{key}={str(item).strip()}" for item in items)):
            if name in GONE:
                raise FlyError(f"{name} ({where}) is no longer supported: {GONE[name]}")


def _known_keys() -> dict[str, FieldInfo]:
    """Every key that a pair's JSON may have."""
    found = dict(FlyConfig.model_fields)
    for settings in _further_rules().values():
        found |= settings.model_fields
    return found


def _further_rules() -> dict[str, type[Settings]]:
    """The settings of registered rules whose keys are not FlyConfig's own."""
    all_settings = {name: settings_of_rule(name) for name in registry.RULES}
    return {name: kind for name, kind in all_settings.items() if not issubclass(FlyConfig, kind)}


def _keys_of_further_rules(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that are not FlyConfig's own, checked: those given, and all of the rule in `values`."""
    found: dict[str, Any] = {}
    for name, settings in _further_rules().items():
        given = {key: value for key, value in values.items() if key in settings.model_fields}
        is_in_force = name == values.get("verification")
        if given or is_in_force:
            found |= settings(**given).model_dump(exclude_unset=not is_in_force)
    return found


def find_config_file(path: str) -> Path:
    """`path` itself, else a shipped configuration of that name (works from a wheel too)."""
    given = expanded(str(path))
    shipped = data_dir("fly_config") / given.name
    for candidate in (given, shipped, shipped.with_name(shipped.name + ".json")):
        if candidate.is_file():
            return candidate
    names = ", ".join(
        sorted(p.name for p in data_dir("fly_config").glob("*.json") if p.name != "schema.json")
    )
    raise FlyError(f"config_path={path}: no such file; shipped configurations are {names}")


def read_file(path: str) -> dict[str, Any]:
    """The JSON object in a configuration file, not yet validated."""
    return reading.read_object(find_config_file(path), path)


def load(path: str, overrides: Mapping[str, Any] | None = None, *, log: bool = True) -> FlyConfig:
    """Read and validate a pair's JSON; `overrides` replace its keys, each logged old -> new."""
    values = read_file(path)
    if not overrides:
        return build(values, path)
    config = build({**values, **_coerce_all(overrides)}, f"{path} with model_args")
    if log:
        for key in overrides:
            old = values.get(key, _known_keys()[key].get_default())
            new = getattr(config, key)
            if old != new:
                logger.info("model_args override %s: %s -> %s", key, old, new)
    return config


def resolve(path: str | None, own: Mapping[str, Any], *, log: bool = True) -> FlyConfig:
    """The configuration that model_args mean: a file with overrides, or without one the keys."""
    if own.get("spd_k"):  # a file's is the draft model's; who says it now means every draft
        own = {"lookup_k": own["spd_k"], **own}
    config = build(_coerce_all(own), "model_args") if path is None else load(path, own, log=log)
    for line in _without_effect(config, own) if log else ():
        logger.warning("%s", line)
    return config


def _without_effect(config: FlyConfig, own: Mapping[str, Any]) -> Iterator[str]:
    """What model_args ask for and decoding does not do, one line each.

    `fly compare` decodes exactly with the keys that its run of fly has, so those pass there.
    """
    if config.drafter_name is None:
        return
    in_force = settings_of_rule("fly" if config.rule == "exact" else config.rule).model_fields
    of_rules = {key for rule in registry.RULES for key in settings_of_rule(rule).model_fields}
    for key in own:
        if key in of_rules - in_force.keys():
            yield f"model_args {key}={own[key]}: verification={config.rule} does not read it"
    longest = min(config.spd_k, config.num_ngram_pred_tokens)
    from_own_text = config.drafter_name == "ngram" and not config.earlier_runs
    if from_own_text and _wants_room(config) and config.win_len >= longest:
        yield (
            f"drafter=ngram: drafts of at most {longest} tokens leave no room for "
            f"win_len={config.win_len}, so nothing can be deferred: raise num_ngram_pred_tokens, "
            "lower win_len, or set defer_across_rounds=true"
        )


def _coerce_all(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: coerce(key, value) for key, value in values.items()}


def coerce(key: str, value: Any) -> Any:
    """A command-line value, which may be a text, in the type that its key takes.

    lm-eval parses `key=None`, depending on where it comes from, to None or a text.
    """
    known: Any = _known_keys().get(key)
    if known is None:
        return value
    if key == "compile" and value is False:  # YAML's reading of off
        return "off"
    if value is None or str(value).lower() in ("none", "null"):
        return "none" if key == "draft_quantization" else None  # there it is a value of its own
    if isinstance(value, str):
        with suppress(ValidationError):
            return TypeAdapter(known.annotation).validate_python(value)
    return value


# A key whose value is a list, in a text of several `key=value`: its value ends at the next key.
_LISTS = re.compile(
    r"(^|,)(draft_runs|draft_sources|head_layer_ids|think_tokens)=(\[[^\]]*\]|[^=\[\]]*?)(?=,[^,=]+=|$)"
)


def bracket_lists(text: str) -> str:
    """`draft_runs=A,B` as `draft_runs=[A,B]`: lm-eval takes a comma outside of brackets for the
    end of a value."""

    def bracketed(found: re.Match[str]) -> str:
        before, key, value = found.groups()
        is_list = "," in value and not value.startswith("[")
        return f"{before}{key}=[{value}]" if is_list else found[0]

    return _LISTS.sub(bracketed, text)


def split_model_args(model_args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fly's own keys, what goes to lm-eval's HFLM). `pretrained` names the draft model."""
    refuse_gone(model_args, "model_args")
    keys = _known_keys()
    own = {key: value for key, value in model_args.items() if key in keys}
    rest = {key: value for key, value in model_args.items() if key not in keys}
    if "base_url" in rest:  # a server's model has no files here
        own.setdefault("target_model_path", str(rest.get("model") or SERVED))
        own.setdefault("use_sd", False)
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
    result["additionalProperties"] = False
    for settings in _further_rules().values():
        result["properties"] |= settings.model_json_schema()["properties"]
    for key in result["properties"].values():
        if "description" in key:  # a docstring has line breaks
            key["description"] = " ".join(key["description"].split())
    result["properties"]["$schema"] = {"type": "string"}
    result["properties"]["$comment"] = {
        "description": "For the reader, of any type; ignored. `fly tune` puts its evidence here."
    }
    result["properties"] = dict(sorted(result["properties"].items()))
    return result
