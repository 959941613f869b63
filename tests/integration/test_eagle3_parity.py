"""Drafts and logits of EAGLE-3 heads against speculators' own model, step by step.

Golden values: tests/fixtures/eagle3, made by make.py there from speculators' forward over whole
texts. Here the drafter plays the same rounds with its cache: prefill, then three rounds in which it
is told what was accepted.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fly.execution.heads.eagle3 import Eagle3Head, Eagle3Runner
from fly.models.heads.checkpoint import TargetShape, read
from fly.models.sources import ModelSource
from fly.speculation.drafters.eagle3 import Eagle3Drafter
from fly.speculation.sequence import Request, Sequence
from fly.speculation.stop_strings import StopMatcher
from tests import tiny

FIXTURES = Path(__file__).parents[1] / "fixtures" / "eagle3"
ROUNDS, K = 3, 4
HEADS = ["llama", "qwen3"]


class Recording(Eagle3Runner):
    """Keeps the logits of every drafting pass."""

    def extend(self, tokens, states):
        logits, fed_back = super().extend(tokens, states)
        self.passes.append(logits.clone())
        return logits, fed_back

    def extend_ids(self, *args):
        logits, fed_back = super().extend_ids(*args)
        self.passes.append(logits.clone())
        return logits, fed_back


def load(name):
    """(drafter's runner, the golden values of three sequences)."""
    folder = FIXTURES / name
    golden = load_file(folder.with_suffix(".safetensors"))
    head = Eagle3Head.from_checkpoint(
        read(ModelSource(str(folder)), name, {}), TargetShape(32, 64, 8), None
    ).eval()
    assert head.layers_read == (2, 4, 5)
    target = tiny.model(0)  # its embeddings are not used: the head has its own
    sequences = [
        {key: golden[f"{number}.{key}"] for key in ("tokens", "features", "drafts", "logits")}
        for number in range(3)
    ]
    return Recording(head.float(), target, 3, 512), sequences


def lengths(golden):
    """How many tokens a text has before each round and at the end: by what was accepted."""
    tokens = golden["tokens"].tolist()
    for first in range(1, len(tokens)):
        found = [first]
        for draft in golden["drafts"].tolist():
            start = found[-1]
            accepted = next(
                (i for i in range(K) if tokens[start + i : start + i + 1] != draft[i : i + 1]), K
            )
            found.append(start + accepted + 1)
        if found[-1] == len(tokens):
            return found
    raise AssertionError


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", HEADS)
def test_drafts_and_logits_are_speculators(name, slots):
    runner, golden = load(name)
    for group in [golden] if slots == 3 else [[one] for one in golden]:
        drafter = Eagle3Drafter(runner, frozenset())
        ends = [lengths(one) for one in group]
        assert any(len(set(map(int, torch.tensor(end).diff()))) > 1 for end in ends)
        running = []
        for slot, (one, end) in enumerate(zip(group, ends)):
            request = Request(tuple(one["tokens"][: end[0]].tolist()), 100)
            running.append(Sequence(request, frozenset(), StopMatcher((), str)))
            features = one["features"][None, : end[0] - 1].float()
            drafter.admit(slot, running[slot], features)
        for round_ in range(ROUNDS):
            runner.passes = []
            draft = drafter.propose(running, [K] * len(group))
            told = torch.full((len(group), K + 1, 96), 1e3)  # what was rejected is never read
            for slot, (one, end) in enumerate(zip(group, ends)):
                assert draft.on_host().tokens[slot] == one["drafts"][round_].tolist()
                logits_KD = torch.stack([logits_BD[slot] for logits_BD in runner.passes])
                torch.testing.assert_close(logits_KD, one["logits"][round_], atol=2e-5, rtol=2e-5)
                before, after = end[round_], end[round_ + 1]
                running[slot].tokens = one["tokens"][:after].tolist()
                told[slot, : after - before] = one["features"][before - 1 : after - 1].float()
            drafter.commit(running, [], told)
