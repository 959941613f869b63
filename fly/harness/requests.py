"""From lm-eval's requests to the engine's, and from tokens back to lm-eval's text.

lm-eval's per-request semantics (0.4.13, HFLM.generate_until) hold: until, max_gen_toks and its
aliases, left truncation, think_end_token, stop strings cut from the text.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import handle_non_serializable, hash_string

from fly.errors import FlyError
from fly.harness.arguments import check_gen_kwargs
from fly.speculation.rules import rule_of
from fly.speculation.sampling import Sampling
from fly.speculation.sequence import Request

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from fly.config import FlyConfig
    from fly.runs.records import RequestRecord

logger = logging.getLogger(__name__)

# Values under which a transformers generation argument changes nothing.
_INERT: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "typical_p": (1, 1.0),
    "no_repeat_ngram_size": (0,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "num_return_sequences": (1,),
    "use_cache": (True,),
}
# What a generation_config may hold that transformers' generate would apply and fly does not, with
# the values under which it changes nothing; None and what is empty never do.
_UNAPPLIED: dict[str, tuple[Any, ...]] = {
    "num_beams": _INERT["num_beams"],
    "no_repeat_ngram_size": _INERT["no_repeat_ngram_size"],
    **dict.fromkeys(("penalty_alpha", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(
        ("bad_words_ids", "max_new_tokens", "max_time", "stop_strings", "forced_bos_token_id",
         "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "sequence_bias",
         "exponential_decay_length_penalty"), ()
    ),
}  # fmt: skip
_UNAPPLIED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "typical_p": _INERT["typical_p"],
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
}
_KNOWN = (
    "until", "max_gen_toks", "max_length", "max_new_tokens",
    "do_sample", "temperature", "repetition_penalty", "top_k", "top_p", "min_p",
)  # fmt: skip


class Asked(Protocol):
    """What a request takes from the model that it is put to (fly.harness.backend.Backend)."""

    fly_config: FlyConfig
    tokenizer: Any
    think_end_token: str | int | None
    max_gen_toks: int
    max_length: int
    prefix_token_id: int
    eot_token_id: int | None

    @property
    def generation_config(self) -> Any: ...

    @property
    def is_cached(self) -> bool: ...

    def encode_prompt(self, text: str, room: int) -> list[int]: ...


def build_request(instance: Instance, lm: Asked, nth: int = 0) -> Request:
    """Tokenize and check one lm-eval request. Raises FlyError naming the argument and its fix.

    nth: how many requests came before it with the same document and prompt (repeats).
    """
    context, gen_kwargs = instance.args
    where = place_of(instance)
    check_gen_kwargs(gen_kwargs, f"gen_kwargs, {where}")
    kwargs: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, lm.max_gen_toks))
    settings = sampling(kwargs, gen_kwargs, lm, where)
    _refuse_unsupported(kwargs, settings, where)
    budget = kwargs["max_gen_toks"]
    room = lm.max_length - budget
    if room < 1:
        raise FlyError(
            f"max_gen_toks={budget} ({where}): leaves no room for a prompt in the target's "
            f"context of {lm.max_length} tokens: lower it, or raise max_length"
        )
    # an empty prompt becomes the prefix token, as in lm-eval's loglikelihood
    prompt = (lm.encode_prompt(context, room) if context else []) or [lm.prefix_token_id]
    if "max_length" in kwargs:  # transformers' prompt + generation; max_gen_toks is preferred
        if kwargs["max_length"] > lm.max_length:
            _say_once(
                f"max_length={kwargs['max_length']} of gen_kwargs is more than the target's context"
                f": outputs end at {lm.max_length} tokens"
            )
        budget = min(kwargs["max_length"], lm.max_length) - len(prompt)
        if budget < 1:
            raise FlyError(
                f"max_length={kwargs['max_length']} of gen_kwargs ({where}): it counts the prompt, "
                f"too, which has {len(prompt)} tokens: raise it, or set max_gen_toks instead"
            )
    if lm.fly_config.total_gen_tok is not None:
        budget = min(budget, lm.fly_config.total_gen_tok)
    stops = handle_stop_sequences(list(kwargs["until"]), eos=None)
    return Request(
        tuple(prompt), budget, tuple(stops), instance, settings, _seed(instance, lm, nth), nth
    )


def place_of(instance: Instance) -> str:
    """Names the document in errors."""
    return f"task {instance.task_name}, doc {instance.doc_id}"


@functools.cache
def _say_once(text: str) -> None:
    logger.warning(text)


def identity(request: Request) -> dict[str, Any]:
    """Which request it is, and all that decides its text beside models and configuration.

    The hashes are those of lm-eval's samples. The seed is not in it: it follows from the rest and
    the run's, and without one every process draws its own.
    """
    instance = request.tag
    doc = json.dumps(instance.doc, indent=2, default=handle_non_serializable, ensure_ascii=False)
    return {
        "task": instance.task_name,
        "doc_id": instance.doc_id,
        "idx": instance.idx,
        "repeat": request.repeat,
        "doc_hash": hash_string(doc),
        "prompt_hash": hash_string(instance.args[0]),
        "prompt_tokens": len(request.prompt),
        "decoding": {
            "budget": request.budget,
            "stops": list(request.stops),
            **asdict(request.sampling),
        },
    }


def sampling(kwargs: dict[str, Any], given: dict[str, Any], lm: Asked, where: str) -> Sampling:
    """The task's gen_kwargs, else the configuration's keys, else the target's generation_config.

    The last is what lm-eval's hf does through transformers' generate, whose top_k is 50 when
    sampling and nobody says otherwise.
    """
    config, of_model = lm.fly_config, lm.generation_config
    temperature = kwargs.get("temperature") or 0.0  # 0 if the task says do_sample: false
    if "temperature" not in given and "do_sample" not in given:
        temperature = config.temperature
    elif kwargs["do_sample"] and "temperature" not in given:
        temperature = config.temperature or getattr(of_model, "temperature", None) or 1.0
    elif kwargs["do_sample"] and temperature == 0:
        raise FlyError(
            f"temperature=0 with do_sample=True ({where}): set do_sample=False for greedy "
            "decoding, or a temperature above 0"
        )

    def setting(name: str, off: float, default: float) -> Any:
        if name in given:
            return off if given[name] is None else given[name]
        for value in (getattr(config, name), getattr(of_model, name, None)):
            if value is not None:
                return value
        return default

    values = {"repetition_penalty": setting("repetition_penalty", 1.0, 1.0)}
    if temperature:
        values["top_k"] = setting("top_k", 0, 50)
        values["top_p"] = setting("top_p", 1.0, 1.0)
        values["min_p"] = setting("min_p", 0.0, 0.0)
    values["temperature"] = temperature
    try:
        return Sampling(**values)
    except ValueError as error:
        raise FlyError(f"{error} ({where})") from None


def _seed(instance: Instance, lm: Asked, nth: int) -> int:
    """Where the request's random numbers start: the run's seed and what the request is."""
    seed = torch.initial_seed() if lm.fly_config.seed is None else lm.fly_config.seed
    name = f"{seed}|{instance.task_name}|{instance.doc_id}|{instance.idx}|{nth}|{instance.args[0]}"
    return _number(name)


def seed_after(seed: int, outputs: tuple[tuple[int, ...], ...]) -> int:
    """A seed that these outputs tell nothing of, though `seed` may have made them."""
    return _number(f"{seed}|{outputs}")


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def check_decoding(requests: list[Request], lm: Asked) -> None:
    """Say what is easily overlooked; raise FlyError where lm-eval would score the wrong texts."""
    sampled = [request for request in requests if not request.sampling.is_greedy]
    if missing := _unapplied(lm.generation_config, bool(sampled)):
        logger.warning(
            "the target's generation_config sets %s, which lm-eval's hf applies and fly does not: "
            "compare with fly's own target-only run",
            ", ".join(missing),
        )
    if lm.fly_config.drafter_name is not None:
        rule = rule_of(lm.fly_config, lm.tokenizer)
        for sampling in {request.sampling for request in requests}:
            rule.check(sampling)
    temperature = lm.fly_config.temperature
    greedy_tasks = {r.tag.task_name for r in requests if r.sampling.is_greedy}
    if temperature > 0 and greedy_tasks:
        logger.warning(
            "temperature=%s is overridden by gen_kwargs of %s: pass --gen_kwargs "
            "do_sample=True,temperature=%s",
            temperature,
            ", ".join(sorted(map(str, greedy_tasks))),
            temperature,
        )
    for request in sampled:
        # lm-eval's cache is not asked for requests that say do_sample, and for no others
        if lm.is_cached and not request.tag.args[1].get("do_sample"):
            raise FlyError(
                f"--use_cache with temperature={request.sampling.temperature}: lm-eval would give "
                "all repeats one text: add --gen_kwargs do_sample=True, or leave --use_cache out"
            )


def _unapplied(generation_config: Any, is_sampling: bool) -> list[str]:
    """`name=value` of what the model's generation_config asks for and fly does not apply."""
    inert = {**_UNAPPLIED, **(_UNAPPLIED_SAMPLING if is_sampling else {})}
    values = {name: getattr(generation_config, name, None) for name in inert}
    return [
        f"{name}={value}"
        for name, value in values.items()
        if value not in (None, [], {}, *inert[name])
    ]


def _refuse_unsupported(kwargs: dict[str, Any], settings: Sampling, where: str) -> None:
    ignored = (*_KNOWN, "typical_p") if settings.is_greedy else _KNOWN
    for key, value in kwargs.items():
        if key not in ignored and value not in _INERT.get(key, ()) and value is not None:
            raise FlyError(
                f"gen_kwargs {key}={value!r} ({where}): fly does not apply it: remove it, "
                "or run lm-eval's hf (leave out config_path)"
            )


def response_text(record: RequestRecord, lm: Asked) -> str:
    """The text lm-eval scores: special tokens skipped, thinking and stop strings cut off."""
    think_end, tokens = lm.think_end_token, record.tokens
    if isinstance(think_end, int) and think_end in tokens:
        last = len(tokens) - 1 - tokens[::-1].index(think_end)
        tokens = tokens[last + 1 :]
    text = record.text
    if text is None:
        text = lm.tokenizer.decode(tokens, skip_special_tokens=True)
    if isinstance(think_end, int):
        text = text.lstrip()
    eos = None
    if lm.eot_token_id is not None:  # not every tokenizer has one
        eos = lm.tokenizer.decode(lm.eot_token_id, skip_special_tokens=False)
    return postprocess_generated_text(
        generation=text,
        stop=handle_stop_sequences(list(record.request.stops), eos=eos),
        think_end_token=think_end if isinstance(think_end, str) else None,
    )
