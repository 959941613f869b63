"""The embedded draft in other ids, and fewer: its acceptance is known from the draft as it is.

`-s` prints it.
"""

import json
import random

import pytest
import transformers
from tokenizers import Tokenizer

from fly.models.draft_vocabulary import NONE
from fly.models.token_intersection import TokenIntersection
from tests import tiny
from tests.real import BUDGET, EOS
from tests.two_tokenizers import speaking

pytestmark = pytest.mark.real
K = 8


def renumbered(tokenizer, kept: int, seed: int = 0):
    """The tokenizer with its ids in a random order, and of its BPE tokens the first `kept` only.

    Later merges are of longer and rarer tokens, and make no earlier token. Added tokens follow the
    others, wherever the file puts them.
    """
    order = random.Random(seed)
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = data["model"], data["added_tokens"]
    pieces = [piece for piece, index in model["vocab"].items() if index < kept]
    model["vocab"] = dict(zip(pieces, order.sample(range(len(pieces)), len(pieces))))
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    model["merges"] = [merge for merge in merges if "".join(merge) in model["vocab"]]
    order.shuffle(added)
    for index, token in enumerate(added, start=len(pieces)):
        token["id"] = index
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(data)), eos_token=tokenizer.eos_token
    )


def shared_with(tokenizer, target, kept):
    other = renumbered(tokenizer, kept)
    return TokenIntersection.from_tokenizers(
        other, tokenizer, draft_size=len(other), target_size=target.config.vocab_size
    )


def decode(pair, prompts, name, shared):
    """(records, by prompt the tokens of it and of all its rounds: drafts and the target's own)"""
    _, target, draft = pair
    model = draft if shared is None else speaking(draft, shared)
    made = tiny.drafter(name, 1, model, EOS, max_length=4096, intersection=shared)
    seen: dict[int, set[int]] = {}

    def observe(record):
        tokens = seen.setdefault(record.request.tag, set(record.request.prompt))
        tokens.update(record.draft, record.target_tokens)

    engine = tiny.engine(target, made, K, eos=EOS, observer=observe)
    records = tiny.decode_all(engine, prompts, BUDGET)
    return records, [seen[number] for number in range(len(prompts))]


def said(records) -> str:
    accepted, drafted, emitted, rounds = (
        tiny.total(records, name) for name in ("native_accepted", "drafted", "emitted", "rounds")
    )
    return f"{accepted} of {drafted} accepted, tau {emitted / rounds:.2f}"


@pytest.fixture(scope="module")
def prompts(prompts):
    """One, as every pass of the target in float32 takes its time."""
    return prompts[:1]


@pytest.fixture(scope="module")
def plain(pair, prompts):
    return decode(pair, prompts, "model", None)


@pytest.mark.parametrize("kept", [151_643, 100_000, 20_000])
def test_acceptance_is_the_plain_drafts_where_no_dropped_token_occurs(
    pair, prompts, expected, plain, kept
):  # fmt: skip
    tokenizer, target, _ = pair
    shared = shared_with(tokenizer, target, kept)
    # the file names the padding of its matrix, too, which no text has
    assert shared.share == pytest.approx((kept + 22) / 151_936, abs=1e-9)
    records, _ = decode(pair, prompts, "model", shared)
    assert [record.tokens for record in records] == expected
    own, seen = plain
    known = [all(shared.to_draft_V[token] != NONE for token in tokens) for tokens in seen]
    print(f"{kept} tokens kept ({100 * shared.share:.1f} %): {said(records)}; plain: {said(own)}; "
          f"{sum(known)} of {len(known)} prompts without a dropped token")  # fmt: skip
    for ours, theirs, is_known in zip(records, own, known):
        assert not is_known or ours.counts == theirs.counts
    assert tiny.total(records, "native_accepted") > 0
    assert kept < 151_643 or all(known)


def test_the_cascade_is_lossless_with_few_tokens(pair, prompts, expected):
    tokenizer, target, _ = pair
    shared = shared_with(tokenizer, target, 20_000)
    records, _ = decode(pair, prompts, "cascade", shared)
    assert [record.tokens for record in records] == expected
    assert 0 < tiny.total(records, "native_accepted") < tiny.total(records, "drafted")
