"""The passes of block heads, against their publishers' own code.

tests/fixtures/block_heads/make_golden.py ran z-lab's and DeepSpec's decode loops on tiny random
heads: a prefill and rounds of different acceptance, for two sequences. Here both go through fly's
head side by side, each at its own length.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fly.execution.heads.block import BlockHead, BlockRunner
from fly.models.heads import checkpoint
from fly.models.heads.checkpoint import TargetShape
from fly.models.sources import ModelSource
from tests import tiny

FIXTURES = Path(__file__).parents[1] / "fixtures" / "block_heads"
SHAPE = TargetShape(hidden_size=16, vocabulary=40, layers=6)
SEQUENCES = ("long", "short")
ROUNDS = 3  # verified ones; one more drafts


def golden(kind):
    return load_file(FIXTURES / f"{kind}.safetensors")


def head_of(kind):
    found = checkpoint.read(ModelSource(str(FIXTURES / kind)), kind, {})
    return BlockHead.from_checkpoint(found, SHAPE).eval()


def runner(kind, slots):
    """Of the target only the embedding and the output head are asked for."""
    target = tiny.model(0, vocab=SHAPE.vocabulary, hidden_size=SHAPE.hidden_size)
    tables = golden(kind)
    target.get_input_embeddings().weight.data = tables["embed_tokens"]
    target.lm_head.weight.data = tables["lm_head"]
    return BlockRunner(head_of(kind), target, slots)


def drafted(runner, last_B):
    """(tokens, logits, confidence), [B, K] each, greedy."""
    states = runner.draft(last_B.tolist())
    logits, previous, found = runner.logits(states), last_B, []
    for at in range(states.shape[1]):
        sure = torch.zeros(len(last_B))
        if runner.spec.confidence is not None:
            sure = runner.confidence(states[:, at], previous)
        own = runner.after(logits[:, at], previous)
        previous = own.argmax(-1)
        found.append((previous, own, sure))
    return [torch.stack(parts, dim=1) for parts in zip(*found)]


def close(actual, wanted):
    torch.testing.assert_close(actual, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("sequences", [("long",), ("short",), SEQUENCES], ids=str)
def test_every_pass_is_the_publishers(kind, sequences):
    tables, own = golden(kind), runner(kind, len(sequences))
    lengths = []
    for slot, name in enumerate(sequences):
        prompt = tables[f"{name}.0.features"]
        own.extend(slot, prompt[None], [len(prompt)])
        lengths.append(len(prompt))
    for number in range(ROUNDS + 1):
        if number:
            given = [tables[f"{name}.{number}.features"] for name in sequences]
            padded = torch.nn.utils.rnn.pad_sequence(given, batch_first=True, padding_value=9.0)
            own.extend(0, padded, [len(features) for features in given])
        last_B = torch.stack([tables[f"{name}.{number}.last"] for name in sequences])
        tokens, logits, confidence = drafted(own, last_B)
        for slot, name in enumerate(sequences):
            wanted = {key: tables.get(f"{name}.{number}.{key}") for key in ("draft", "logits")}
            assert tokens[slot].tolist() == wanted["draft"].tolist()
            close(logits[slot], wanted["logits"])
            if kind == "dspark":
                close(confidence[slot], tables[f"{name}.{number}.confidence"])
    counts = {len(tables[f"{name}.{n}.features"]) for name in SEQUENCES for n in range(1, 4)}
    assert counts >= {1, 2, own.spec.most_drafts + 1}  # nothing accepted, one token, all


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_layers_are_those_that_the_publishers_code_reads(kind):
    tables, layers = golden(kind), head_of(kind).spec.layers
    for name in SEQUENCES:
        hidden_LND = tables[f"{name}.hidden"]
        close(torch.cat([hidden_LND[i] for i in layers], -1), tables[f"{name}.0.features"])
