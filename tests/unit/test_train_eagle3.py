"""benchmarks/train_eagle3.py: what it trains and saves is a head that drafts."""

import pytest
import torch

from fly.execution.heads.eagle3 import Eagle3Head, Eagle3Runner
from fly.models.heads.checkpoint import TargetShape, read
from fly.models.sources import ModelSource
from tests import benchmark_scripts, heads, tiny


@pytest.fixture(scope="module")
def bench():
    return benchmark_scripts.load("train_eagle3")


@pytest.fixture(scope="module")
def target():
    return heads.perfect()[0]


def trainer(bench, target, drafted, steps=3):
    torch.manual_seed(0)
    config, head = bench.fresh(target, bench.last_weights(target), (1, 2), drafted)
    return config, bench.Trainer(target, head, steps, width=48)


def test_steps_are_those_of_drafting(bench, target):
    """The k-th step's predictions in training are the k-th draft's of a chain whose tokens are the
    text's, so that what is learnt is what is run."""
    _, training = trainer(bench, target, torch.arange(64))
    text = tiny.prompts()[3]
    predicted = []
    head = training.head
    plain = head.predict
    head.predict = lambda hidden: predicted.append(plain(hidden)) or predicted[-1]
    with torch.no_grad():
        training.play([text])
        _, features, _, _ = training.seen([text])
    head.predict = plain
    runner = Eagle3Runner(head, target, 1, 64)
    for end in (2, 9, 20):  # pairs with true features
        runner.truncate(0, 0)
        tokens, states = text[1 : end + 1], runner.project(features[0, :end])
        for step in range(3):
            logits, fed_back = runner.extend([tokens], [states])
            torch.testing.assert_close(
                logits[0], predicted[step][0][0, end - 1], atol=1e-4, rtol=1e-3
            )
            tokens, states = [text[end + 1 + step]], fed_back


@pytest.mark.slow
def test_a_trained_head_drafts_what_the_target_says(bench, target, tmp_path):
    prompts = [[a, b] for a in range(3, 64, 2) for b in (7, 21)]
    texts = bench.write_texts(target, prompts, 1, 30, frozenset({tiny.EOS}))
    assert sorted(text[:2] for text in texts) == sorted(prompts)
    drafted = bench.draft_vocabulary(texts, 48, 64)
    assert len(drafted.unique()) == 48
    config, training = trainer(bench, target, drafted)
    reports = list(bench.train(training, texts, 3e-3, 16, 60.0, most=100))
    assert [update for update, *_ in reports] == [50, 100]
    assert reports[1][1] < reports[0][1]
    bench.save(training.head, config, "some/target", 3, tmp_path)
    checkpoint = read(ModelSource(str(tmp_path)), "trained", {})
    head = Eagle3Head.from_checkpoint(checkpoint, TargetShape.of(target.config), None).eval()
    assert head.vocabulary.to_target_D.tolist() == drafted.tolist()
    shares = []
    for one in (head, trainer(bench, target, drafted)[1].head.eval()):
        engine = tiny.engine(target, heads.drafter(target, one), 3)
        records = tiny.decode_all(engine, prompts[:8], 30)
        shares.append(tiny.total(records, "native_accepted") / tiny.total(records, "drafted"))
    assert shares[0] > 2 * shares[1]
