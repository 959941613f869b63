"""Whether a head reads the hidden states that it was trained on.

Producers number layers by two conventions that differ by one (fly/models/heads/eagle3.py). A head
that is given the neighbour of each state still drafts, only worse, and no text shows it.
"""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from fly.execution.heads.base import Head
from fly.execution.model_runner import ModelRunner

logger = logging.getLogger(__name__)

TEXT = """The city council met on Tuesday to discuss the new library. Most members were in favour of
the plan, but some asked how much it would cost, and who would pay for it. "We have waited for ten
years," said the mayor, "and we can wait for another two." The vote was postponed until the end of
the month, when the results of the survey will be known.

def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)
"""
_FEWEST = 16  # tokens of the text that say anything
_MARGIN, _LEAST = 1.2, 4  # a shift must win by a fifth of what agrees, and by so many tokens


@torch.inference_mode()
def agreements(head: Head, target: PreTrainedModel, tokens: list[int]) -> dict[int, int]:
    """By shift of the layers read (0, 1 and -1, where there are such): at how many of the places
    the head's next token is the target's own."""
    count = int(target.config.get_text_config().num_hidden_layers)
    read = head.layers_read
    shifts = [s for s in (0, 1, -1) if all(0 <= layer + s <= count for layer in read)]
    runner = ModelRunner(target, 1, len(tokens), reuse_prefixes=False)
    runner.hidden_layers = tuple(layer + s for s in shifts for layer in read)
    own = runner.extend([tokens])[0].argmax(dim=-1).tolist()
    features = runner.take_hidden()
    assert features is not None
    found = {}
    for shift, features_1NF in zip(shifts, features.chunk(len(shifts), dim=-1)):
        drafted = head.next_tokens(target, tokens, features_1NF)
        found[shift] = sum(own[at] == token for at, token in drafted.items())
    return found


def warn_if_layers_are_shifted(head: Head, target: PreTrainedModel, tokens: list[int]) -> None:
    """Log a warning if the neighbours of the states that the head reads serve it better, on a short
    text."""
    if len(tokens) < _FEWEST:
        return
    found = agreements(head, target, tokens)
    best = max(found, key=lambda shift: found[shift])
    if found[best] > max(_MARGIN * found[0], found[0] + _LEAST):
        better = [layer + best for layer in head.layers_read]
        logger.warning(
            "the head reads hidden states %s of the target, and agrees with it at %d tokens of a "
            "text; with %s it agrees at %d: its files number layers in another way, set "
            "head_layer_ids=%s",
            list(head.layers_read), found[0], better, found[best], better,
        )  # fmt: skip
