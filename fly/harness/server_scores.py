"""Log-likelihoods from a server: a prompt of token ids is echoed with the log-probability of each.

Not every server that takes `echo` answers rightly: some leave tokens out, some give those of their
own continuation. So a probe scores a text whole and in part before the first document.
"""

from __future__ import annotations

from itertools import pairwise

from openai import AsyncOpenAI

from fly.errors import FlyError
from fly.harness.server_client import Endpoint

PROBE_TEXT = "Water boils at 100 degrees. The sun rises in the east, and sets in the west."
_PARTS = (0.4, 0.7)  # of its tokens: where the probe ends a shorter prompt
# nats that one token's score may differ by, as prompts of two lengths round otherwise in bfloat16
_ROUNDING = 0.25

Score = tuple[float, bool]  # a token's log-probability, whether it is the likeliest there


async def ask_scores(
    server: Endpoint, client: AsyncOpenAI, ids: list[int], where: str
) -> list[Score]:
    """Of every token but the first. Raises FlyError where the server does not tell them."""
    payload = {"prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    answer = await server.ask(client, payload, where, stream=False)
    told = answer.logprobs or {}
    scores, best = told.get("token_logprobs") or [], told.get("top_logprobs") or []
    if min(len(scores), len(best)) < len(ids) or None in scores[1 : len(ids)]:
        raise FlyError(
            f"{where}: {server.base_url} gives no log-probabilities of a prompt's tokens (echo "
            "with logprobs): use --model hf or vllm for tasks of log-likelihoods"
        )
    pairs = zip(scores[1 : len(ids)], best[1 : len(ids)])
    return [(score, score >= max(top.values(), default=score)) for score, top in pairs]


async def probe_scores(server: Endpoint, client: AsyncOpenAI, ids: list[int]) -> None:
    """Raise FlyError if a token's score depends on where the prompt ends. ids: of PROBE_TEXT."""
    lengths = [*(max(2, int(part * len(ids))) for part in _PARTS), len(ids)]
    found = [await ask_scores(server, client, ids[:length], "probe") for length in lengths]
    for short, whole in pairwise(found):
        worst = max(abs(one - other) for (one, _), (other, _) in zip(short, whole))
        if worst > _ROUNDING:
            raise FlyError(
                f"probe: {server.base_url} gives a token's log-probability as {worst:.2g} nats "
                "more or less when more text follows: use --model hf or vllm for tasks of "
                "log-likelihoods"
            )
