"""Deferral across rounds on real caches: after a rollback target and draft see the row as it is.

The oracle's target is a script without K/V; here every round is held against fresh whole passes.
"""

import pytest
import torch

from fly.execution.model_runner import ModelRunner
from fly.speculation.drafters.draft_model import ModelDrafter
from tests import tiny


def own_choices(model, tokens):
    """The model's choice after each prefix of the row, from one pass without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].argmax(-1).tolist()


def watch(engine, target, draft_model):
    """Count the engine's choices, and the draft's tokens, that a fresh pass would not make."""
    seen = {"choices": 0, "wrong choices": 0, "drafted": 0, "wrong drafts": 0}
    verify = engine._verify

    def checked(rows, draft):
        before = [list(row.tokens) for row in rows]
        verdicts, logits = verify(rows, draft)
        for tokens, verdict in zip(before, verdicts):
            row, start = tokens + verdict.draft, len(tokens) - 1
            choices = own_choices(target, row)[start:]
            drafted = own_choices(draft_model, row)[start:-1]
            seen["choices"] += len(choices)
            seen["wrong choices"] += sum(a != b for a, b in zip(choices, verdict.choice))
            seen["drafted"] += len(drafted)
            seen["wrong drafts"] += sum(a != b for a, b in zip(drafted, verdict.draft))
        return verdicts, logits

    engine._verify = checked
    return seen


def decode(target, draft, name, slots, window, capture=None):
    runner = tiny.runner(target, slots, capture)
    drafter = tiny.drafter(name, slots, draft, capture=capture)
    engine = tiny.engine(runner, drafter, 3, tiny.relaxed(window, 0.1, across=True), slots)
    seen = watch(engine, target, draft)
    records = tiny.decode_all(engine, tiny.prompts(), 40, stops=("41, 7",))
    assert tiny.total(records, "discarded") > 0
    assert tiny.total(records, "deferred_rolled_back") > 0
    return seen


@pytest.mark.parametrize(
    ("slots", "window", "capture"),
    [(1, 4, None), (3, 6, None), (3, 4, False)],
    ids=["one row", "rows", "static passes"],
)
@pytest.mark.parametrize("name", ["model", "cascade"])
def test_both_models_see_the_row_as_it_is(target, draft, name, slots, window, capture):
    seen = decode(target, draft, name, slots, window, capture)
    assert seen["choices"] > seen["drafted"] > 100
    assert (seen["wrong choices"], seen["wrong drafts"]) == (0, 0)


def test_mutant_a_cache_that_never_grows_shorter(target, draft, monkeypatch):
    """Dropped tokens stay in the target's cache: what follows is decoded after another text."""
    settle = ModelRunner.settle

    def keep_all(self, slot, tokens, length):
        kept = max(length, self.lengths[slot]) if self.model is target else length
        settle(self, slot, tokens, kept)

    monkeypatch.setattr(ModelRunner, "settle", keep_all)
    assert decode(target, draft, "model", 3, 4)["wrong choices"] > 0


def test_mutant_a_draft_that_does_not_see_what_took_a_tokens_place(target, draft, monkeypatch):
    """After a rollback the draft model goes on from the token that was dropped."""
    unseen = ModelDrafter._unseen
    shown = {}

    def stale(self, slot, row):
        tokens = unseen(self, slot, row)
        at = self.runner.lengths[slot]
        for place, token in enumerate(tokens, start=at):
            shown.setdefault((row.request.tag, place), token)
        return [shown[row.request.tag, place] for place in range(at, at + len(tokens))]

    monkeypatch.setattr(ModelDrafter, "_unseen", stale)
    assert decode(target, draft, "model", 3, 4)["wrong drafts"] > 0
