"""Ways to the same tokens' logits and K/V, whose bits are to be the same."""

import torch

from fly.execution import token_attention, uniform_passes

TOKENS = torch.randint(3, 96, (70,), generator=torch.Generator().manual_seed(4)).tolist()
PROMPT = 40


def walk(make, slots=1, slot=0, chunk=None, copied=0, widths=(1,) * 30):
    """(logits after every token from the prompt's end on, K/V of all), on one way to them.

    make: a runner of so many slots.
    """
    runner = make(slots)
    others = [other for other in range(slots) if other != slot]
    for other in others:
        runner.prefill(other, TOKENS[: copied or 5 + 3 * other])
    assert runner.prefill(slot, TOKENS[:PROMPT], chunk, reuse=bool(copied)) == copied
    logits, start = [], PROMPT
    for width in widths:
        feed = [TOKENS[other : other + 1 + other % width] for other in range(slots)]
        feed[slot] = TOKENS[start : start + width]
        logits.append(runner.extend(feed)[slot, :width].clone())
        for other in range(slots):
            runner.lengths[other] += len(feed[other])
        start += width
    stored = (*runner.cache._keys, *runner.cache._values)
    return torch.cat(logits), [part[slot, :, :start] for part in stored]


WAYS = [
    {"widths": [9, 4, 17]},  # verification
    {"chunk": 13},  # a prompt in chunks
    {"slots": 3, "slot": 1, "widths": [9, 9, 12]},  # beside other sequences
    {"slots": 8, "slot": 6, "widths": [1, 2, 3, 4, 20]},
    {"slots": 2, "slot": 1, "copied": 25, "widths": [5] * 6},  # a prefix of another's
]


def differing(make):
    """The ways on which some bit is another than in plain decoding."""
    logits, cache = walk(make)
    assert logits.isfinite().all()
    found = []
    for way in WAYS:
        other_logits, other_cache = walk(make, **way)
        equal = torch.equal(logits, other_logits)
        if not equal or not all(map(torch.equal, cache, other_cache)):
            found.append(way)
    return found


def make_small(monkeypatch):
    """Passes of one shape in which a prompt takes several and a context has several blocks."""
    monkeypatch.setattr(uniform_passes, "WIDTH", 24)
    monkeypatch.setattr(token_attention, "BLOCK", 16)
