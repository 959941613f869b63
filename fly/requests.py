"""From lm-eval's requests to the engine's, and from tokens back to lm-eval's text.

lm-eval's per-request semantics (0.4.13, HFLM.generate_until) hold: until, max_gen_toks and its
aliases, left truncation, think_end_token, stop strings cut from the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)

from fly.decoding.sequence import Request
from fly.errors import FlyError

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from fly.lm import FlyLM

# Values under which a transformers generation argument changes nothing in greedy decoding.
_INERT: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "repetition_penalty": (1, 1.0),
    "no_repeat_ngram_size": (0,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "num_return_sequences": (1,),
    "use_cache": (True,),
}
_SAMPLING_ONLY = ("temperature", "top_p", "top_k", "min_p", "do_sample", "typical_p")
_KNOWN = ("until", "max_gen_toks", "max_length", "max_new_tokens", *_SAMPLING_ONLY)


def build_request(instance: Instance, lm: FlyLM) -> Request:
    """Tokenize and check one lm-eval request. Raises FlyError naming the argument and its fix."""
    context, gen_kwargs = instance.args
    where = f"task {instance.task_name}, doc {instance.doc_id}"
    kwargs: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, lm.max_gen_toks))
    _refuse_unsupported(kwargs, lm, gen_kwargs, where)
    budget = kwargs["max_gen_toks"]
    if budget < 1:
        raise FlyError(f"max_gen_toks={budget} ({where}): must be at least 1")
    room = lm.max_length - budget
    if room < 1:
        raise FlyError(
            f"max_gen_toks={budget} ({where}): leaves no room for a prompt in the target's "
            f"context of {lm.max_length} tokens: lower it, or raise max_length"
        )
    prompt = encode_prompt(context, lm, room)
    if "max_length" in kwargs:  # transformers' prompt + generation; max_gen_toks is preferred
        budget = max(1, kwargs["max_length"] - len(prompt))
    if lm.fly_config.total_gen_tok is not None:
        budget = min(budget, lm.fly_config.total_gen_tok)
    stops = handle_stop_sequences(list(kwargs["until"]), eos=None)
    return Request(tuple(prompt), budget, tuple(stops), tag=instance)


def encode_prompt(context: str, lm: FlyLM, room: int) -> list[int]:
    """Token ids, truncated on the left to `room` as lm-eval does (it warns).

    An empty prompt becomes the prefix token (BOS, else EOS), as in lm-eval's loglikelihood.
    """
    if not context:
        return [lm.prefix_token_id]
    ids, _ = lm.tok_batch_encode([context], left_truncate_len=room, truncation=lm.truncation)
    return ids[0].tolist() or [lm.prefix_token_id]


def _refuse_unsupported(
    kwargs: dict[str, Any], lm: FlyLM, given: dict[str, Any], where: str
) -> None:
    temperature = kwargs.get("temperature", 0.0)  # 0 if the task says do_sample: false
    if "temperature" not in given and "do_sample" not in given:
        temperature = lm.fly_config.temperature
    if temperature > 0:
        raise FlyError(
            f"temperature={temperature} ({where}): sampling is not built yet: "
            "decode greedily with --gen_kwargs do_sample=False,temperature=0"
        )
    for key, value in kwargs.items():
        if key not in _KNOWN and value not in _INERT.get(key, ()) and value is not None:
            raise FlyError(
                f"gen_kwargs {key}={value!r} ({where}): fly does not apply it: remove it, "
                "or run lm-eval's hf (leave out config_path)"
            )


def response_text(tokens: list[int], request: Request, lm: FlyLM) -> str:
    """The text lm-eval scores: special tokens skipped, thinking and stop strings cut off."""
    think_end = lm.think_end_token
    if isinstance(think_end, int) and think_end in tokens:
        last = len(tokens) - 1 - tokens[::-1].index(think_end)
        tokens = tokens[last + 1 :]
    text = lm.tok_decode(tokens)
    if isinstance(think_end, int):
        text = text.lstrip()
    eos = lm.tok_decode(lm.eot_token_id, skip_special_tokens=False)
    return postprocess_generated_text(
        generation=text,
        stop=handle_stop_sequences(list(request.stops), eos=eos),
        think_end_token=think_end if isinstance(think_end, str) else None,
    )
