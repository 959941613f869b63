"""What a pair's configuration means to vLLM, and what its own account of a request says.

Imports no vLLM. docs/vllm.md has the same table for users.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fly.config import FlyConfig
from fly.errors import FlyError
from fly.runs.records import Counts, Positions
from fly.settings import FlySettings
from fly.vllm_plugin import options

METHODS = {  # by drafter
    "model": "draft_model", "ngram": "ngram", "eagle3": "eagle3", "mtp": "mtp", "suffix": "suffix",
}  # fmt: skip
BLOCK_METHODS = ("dflash", "dspark")  # of drafter=block, by what the head's files say it is
# Keys that vLLM cannot follow, so that they must have their defaults or what asks no more: of every
# run, of those whose rounds it does not show, of those that draft, and of vLLM's own FLy.
_OF_EVERY_RUN = ("execution", "threads", "batch_invariant")
_OF_ROUNDS = ("trace", "verbose")
_OF_DRAFTS = (
    "draft_runs", "draft_sources", "draft_device", "draft_dtype", "draft_quantization",
    "head_layer_ids", "confidence_thre",
)  # fmt: skip
_OF_FLY = tuple(key for key in FlySettings.model_fields if key not in ("entropy_thre", "win_len"))
_ASKS_NO_MORE = {"batch_invariant": False, "draft_quantization": "none"}


@dataclass(frozen=True)
class Installed:
    """The installed vLLM."""

    version: str
    fields: Collection[str]  # of its SpeculativeConfig
    methods: Collection[str]  # of speculation that it knows

    def refuse(self, what: str, remedy: str) -> FlyError:
        return FlyError(f"{what}: vLLM {self.version} {remedy}, or use --model hf")


# The first release with all that is asked for here.
FIRST_WITH_ALL = Installed(
    "0.33",
    ("fly_window_size", "use_heterogeneous_vocab"),
    (*METHODS.values(), *BLOCK_METHODS),
)


def speculative_config(
    config: FlyConfig, draft: str | None, installed: Installed, head: str | None = None
) -> dict[str, Any] | None:
    """vLLM's `speculative_config` for the pair; None where the target decodes alone.

    draft: folder or hub id of the draft model or head. head: which of BLOCK_METHODS a block head
    is; None where its files are not read yet, and the result has no method. Raises FlyError, naming
    the key, for what this vLLM cannot do.
    """
    _refuse(config, _OF_EVERY_RUN, installed)
    by_fly = verifies_by_fly(config, installed, head)
    if not by_fly:
        _refuse(config, _OF_ROUNDS, installed)
    drafter = config.drafter_name
    if drafter is None:
        return None
    _refuse(config, _OF_DRAFTS, installed)
    method = head if drafter == "block" else METHODS.get(drafter)
    if method is None and drafter != "block":
        fix = "has no such drafter: set drafter to model or ngram"
        raise installed.refuse(f"drafter={drafter}", fix)
    if method is not None and method not in installed.methods:
        raise installed.refuse(f"drafter={drafter}", f"has no method {method}: upgrade it")
    if not by_fly and config.rule not in ("exact", "fly"):
        raise installed.refuse(
            f"verification={config.rule}", "has no such rule: set verification to exact or fly"
        )
    found: dict[str, Any] = {"method": method} if method is not None else {}
    found["num_speculative_tokens"] = config.spd_k
    if drafter == "ngram":
        found["num_speculative_tokens"] = min(config.spd_k, config.num_ngram_pred_tokens)
        found["prompt_lookup_min"] = config.min_ngram_size
        found["prompt_lookup_max"] = config.max_ngram_size
    elif config.needs_draft_model:
        found["model"] = draft
        found |= {"revision": config.draft_revision} if config.draft_revision else {}
        if config.dual_tok and drafter == "model":
            found["use_heterogeneous_vocab"] = True
    if by_fly:
        options.check(config)
    elif config.rule == "fly":
        found |= _fly(config, found["num_speculative_tokens"], installed)
    if "use_heterogeneous_vocab" in found and "use_heterogeneous_vocab" not in installed.fields:
        raise installed.refuse("dual_tok=True", "needs one vocabulary: upgrade it")
    return found


def verifies_by_fly(config: FlyConfig, installed: Installed, head: str | None = None) -> bool:
    """Whether fly's plugin verifies, else vLLM itself. head: as in `speculative_config`. Raises
    FlyError if the plugin is asked for and cannot run.

    Where nothing is said, exact verification is vLLM's own, which does not wait for the host.
    """
    asked = config.vllm_verification
    if config.drafter_name is None or asked == "vllm":
        return False
    if asked is None and config.rule == "exact" and not config.trace:
        return False
    lacks = None if options.supports(installed.version) else "is not one that fly's plugin knows"
    if head == "dspark":
        lacks = "drafts with DSpark in its second model runner, where fly's plugin cannot verify"
    if lacks is not None and asked == "fly":
        raise installed.refuse("vllm_verification=fly", f"{lacks}: leave the key out")
    return lacks is None


def without_cascade(config: FlyConfig) -> FlyConfig:
    """The pair as vLLM can draft with it: without n-grams that the draft model verifies."""
    is_asked = config.use_ngram and config.drafter is None and not config.draft_runs
    return config.model_copy(update={"use_ngram": False}) if is_asked else config


def _fly(config: FlyConfig, draft_tokens: int, installed: Installed) -> dict[str, Any]:
    """FLy's keys. theta null is a gate that everything passes: an entropy is never below 0."""
    if "fly_window_size" not in installed.fields:
        raise installed.refuse(
            "verification=fly", "has no FLy: upgrade it to 0.33 or later, set verification=exact"
        )
    _refuse(config, _OF_FLY, installed)
    if draft_tokens < 2:
        key = "spd_k" if config.spd_k < 2 else "num_ngram_pred_tokens"
        raise installed.refuse(f"{key}=1", "needs drafts of two tokens or more for FLy: raise it")
    if not 1 <= config.win_len < draft_tokens:
        raise installed.refuse(
            f"win_len={config.win_len}",
            f"needs a window of 1 to {draft_tokens - 1} for drafts of {draft_tokens} tokens: "
            "set it so",
        )
    return {
        "rejection_sample_method": "fly",
        "fly_window_size": config.win_len,
        "fly_entropy_threshold": config.entropy_thre or 0.0,
        "fly_entropy_top_k": 3,
    }


def _refuse(config: FlyConfig, keys: Sequence[str], installed: Installed) -> None:
    for key in keys:
        value, default = getattr(config, key), FlyConfig.model_fields[key].default
        allowed = [default, _ASKS_NO_MORE.get(key, default)]
        if value not in allowed:
            usual = " or ".join(dict.fromkeys(map(str, allowed)))
            raise installed.refuse(f"{key}={value}", f"cannot do that: set it to {usual}")


def counts(
    emitted: int, rounds: int, drafts: Sequence[tuple[int, int]]
) -> tuple[Counts, Positions]:
    """A request's counts.

    emitted: tokens of the output but the first, which is the prefill pass's. rounds: passes after
    that one. drafts: (drafted, accepted) of those that had a draft, in order; vLLM counts past the
    output's end, too. Which accepted tokens were deferred is not known: all count as matches.
    """
    positions, found = Positions(), Counts(emitted=emitted)
    found.rounds = max(0, rounds - len(drafts))
    left = emitted - found.rounds  # a pass without a draft emits one token
    for drafted, accepted in drafts:
        if left <= 0:
            break
        own = min(left, accepted + 1)
        left -= own
        found.rounds += 1
        found.corrections += accepted < min(drafted, own)
        positions.add_round(drafted, min(accepted, own))
    found.drafted = sum(positions.drafted)
    found.native_accepted = sum(positions.accepted)
    found.bonus = emitted - found.native_accepted - found.corrections
    return found, positions


def shares(elapsed: float, tokens: Iterable[int]) -> list[float]:
    """A pass's seconds divided among its sequences by the tokens that it computed for each."""
    weights = [max(1, count) for count in tokens]
    return [elapsed * weight / sum(weights) for weight in weights]
