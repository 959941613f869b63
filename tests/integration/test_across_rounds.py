"""Deferral across rounds on real caches: after a rollback both models see the text as it is.

The oracle's target is a script without K/V; here every round is held against fresh whole passes.
"""

import pytest
import torch

from fly.execution.model_runner import ModelRunner
from fly.speculation.drafters.draft_model import ModelDrafter
from tests import tiny


def own_tokens(model, tokens):
    """The model's own token after each prefix of the text, from one pass without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].argmax(-1).tolist()


def watch(engine, target, draft_model):
    """Count the target's tokens, and the draft's, that a fresh pass would not give."""
    seen = {"targets": 0, "wrong targets": 0, "drafted": 0, "wrong drafts": 0}
    verify = engine._verify

    def checked(running, draft):
        before = [list(sequence.tokens) for sequence in running]
        verdicts, logits = verify(running, draft)
        for tokens, verdict in zip(before, verdicts):
            text, start = tokens + verdict.draft, len(tokens) - 1
            targets = own_tokens(target, text)[start:]
            drafted = own_tokens(draft_model, text)[start:-1]
            seen["targets"] += len(targets)
            seen["wrong targets"] += sum(a != b for a, b in zip(targets, verdict.target_tokens))
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
    ids=["one sequence", "several", "static passes"],
)
@pytest.mark.parametrize("name", ["model", "cascade"])
def test_both_models_see_the_text_as_it_is(target, draft, name, slots, window, capture):
    seen = decode(target, draft, name, slots, window, capture)
    assert seen["targets"] > seen["drafted"] > 100
    assert (seen["wrong targets"], seen["wrong drafts"]) == (0, 0)


def test_mutant_a_cache_that_never_grows_shorter(target, draft, monkeypatch):
    """Dropped tokens stay in the target's cache: what follows is decoded after another text."""
    honest = ModelRunner.commit

    def commit_all(self, slot, tokens, length):
        longest = max(length, self.lengths[slot]) if self.model is target else length
        honest(self, slot, tokens, longest)

    monkeypatch.setattr(ModelRunner, "commit", commit_all)
    assert decode(target, draft, "model", 3, 4)["wrong targets"] > 0


def test_mutant_a_draft_that_does_not_see_what_took_a_tokens_place(target, draft, monkeypatch):
    """After a rollback the draft model goes on from the token that was dropped."""
    unseen = ModelDrafter._unseen
    shown = {}

    def stale(self, slot, sequence):
        tokens = unseen(self, slot, sequence)
        at = self.runner.lengths[slot]
        for place, token in enumerate(tokens, start=at):
            shown.setdefault((sequence.request.tag, place), token)
        return [shown[sequence.request.tag, place] for place in range(at, at + len(tokens))]

    monkeypatch.setattr(ModelDrafter, "_unseen", stale)
    assert decode(target, draft, "model", 3, 4)["wrong drafts"] > 0
