"""Whole runs with an EAGLE-3 head: from files to texts, several sequences, broken and resumed."""

import json
import shutil

import pytest
import torch

from fly import config
from fly.cli import tune
from fly.errors import FlyError
from tests import heads, killing, tiny
from tests.integration.test_lm import fly_lm, instances

CONFIG = {
    **heads.SHAPE,
    "vocab_size": tiny.TOKENIZER_VOCAB,
    "eagle_aux_hidden_state_layer_ids": [2, 0, 2],
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a tiny target and, as `draft`, a random head of it that drafts every other id."""
    root = tiny.save_pair(tmp_path_factory.mktemp("pair"))
    shutil.rmtree(root / "draft")
    drafted = torch.arange(0, tiny.TOKENIZER_VOCAB, 2)
    heads.save(root / "draft", CONFIG, heads.tensors(0, drafted, vocab=tiny.TOKENIZER_VOCAB))
    return root


@pytest.fixture(scope="module")
def alone(pair):
    return fly_lm(pair, use_sd=False).generate_until(instances({"max_gen_toks": 30}))


@pytest.mark.parametrize("keys", [
    {},
    {"batch_size": 8},
    {"batch_size": "auto", "max_batch_size": 3},
    *map(tiny.slow, ({"head_layer_ids": "[0,1,2]"}, {"draft_policy": "auto"})),
    {"draft_dtype": "bfloat16"},
])  # fmt: skip
def test_texts_are_the_targets(pair, alone, keys):
    lm = fly_lm(pair, drafter="eagle3", **keys)
    assert lm.generate_until(instances({"max_gen_toks": 30})) == alone
    assert lm.stats.counts.drafted > 0 or "draft_policy" in keys
    assert lm.get_model_info()["fly"]["draft_dtype"] is not None


@pytest.mark.parametrize("execution", ["eager", "auto"])
def test_a_head_in_bfloat16_keeps_the_frequencies_of_rope(pair, execution):
    """In bfloat16 they would be wrong by a radian after some hundred tokens."""
    lm = fly_lm(pair, drafter="eagle3", dtype="bfloat16", execution=execution)
    assert lm.pair.draft.rotary.inv_freq.dtype == torch.float32
    exact = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    assert torch.allclose(lm.pair.draft.rotary.inv_freq.double(), exact, rtol=1e-6)
    assert len(lm.generate_until(instances({"max_gen_toks": 10}))) > 0


def test_a_head_that_does_not_fit_is_named(pair, tmp_path):
    folder = heads.save(tmp_path, {**CONFIG, "hidden_size": 64}, heads.tensors())
    with pytest.raises(FlyError, match=r"pretrained=.*hidden size 64, and the target's is 32"):
        fly_lm(pair, drafter="eagle3", pretrained=str(folder))


@pytest.mark.parametrize(("keys", "message"), [
    ({"win_len": 6, "enable_fly": True}, "win_len=6 needs spd_k >= 7, got 4"),
    ({"head_layer_ids": [0, 1]}, "the head reads 3 hidden states"),
    ({"head_layer_ids": [0, 1, 3]}, "the target has 0 to 2"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_named(pair, keys, message):
    with pytest.raises(FlyError, match=message):
        fly_lm(pair, drafter="eagle3", **keys)


def test_what_knows_no_heads_says_so(pair):
    paths = {"target_model_path": str(pair / "target"), "draft_model_path": str(pair / "draft")}
    found = config.build({**paths, "drafter": "eagle3"}, "pair.json")
    with pytest.raises(FlyError, match="drafter=eagle3"):
        tune._check_tunable(found, "pair.json")


@pytest.mark.slow
def test_a_run_of_eight_sequences_is_killed_and_resumed(pair, tmp_path):
    """FLy, greedy and sampled; the resumed run's records and rounds are the unbroken one's."""
    place = killing.make_place(tmp_path, pair)
    values = json.loads((place / "pair.json").read_text())
    (place / "pair.json").write_text(json.dumps({**values, "drafter": "eagle3"}))
    unbroken, broken = (
        killing.arguments(name, "--batch_size", "8", tasks="tiny_greedy,tiny_sampled")
        for name in ("unbroken", "broken")
    )
    status, output = killing.Run(unbroken, place).end()
    assert status == 0, output[-2000:]
    run = killing.Run(broken, place)
    assert run.kill_when(lambda: killing.count(place / "broken") >= 9)
    status, output = killing.Run(["--resume", place / "broken"], place).end()
    assert status == 0, output[-2000:]
    assert killing.records(place / "broken") == killing.records(place / "unbroken")
    assert len(killing.records(place / "broken")) == killing.REQUESTS
