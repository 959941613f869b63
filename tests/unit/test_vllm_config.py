"""What a pair's file means to vLLM, key by key, and vLLM's account of a request. No vLLM here."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fly import config as fly_config
from fly import registry
from fly.cli.config import engines_of
from fly.errors import FlyError
from fly.harness.arguments import check_model_args
from fly.harness.vllm_config import (
    Installed,
    counts,
    shares,
    speculative_config,
    verifies_by_fly,
    without_cascade,
)

METHODS = ("draft_model", "ngram", "eagle3", "dflash", "dspark", "mtp", "suffix")
OF_0_32 = Installed("0.32.0", ["method", "model", "use_heterogeneous_vocab"], METHODS)
OF_0_33 = Installed("0.33.0", [*OF_0_32.fields, "fly_window_size"], METHODS)
OF_0_34 = Installed("0.34.0", OF_0_33.fields, METHODS)  # the plugin does not know it
BY_VLLM = {"vllm_verification": "vllm"}
PAIR = {"target_model_path": "t", "draft_model_path": "d", "spd_k": 8, "win_len": 5}


def mapped(installed=OF_0_33, head=None, **keys):
    config = fly_config.build({**PAIR, **keys}, "test")
    return speculative_config(config, "d", installed, head)


def test_every_rule_and_drafter_that_vllm_has():
    model = {"method": "draft_model", "model": "d", "num_speculative_tokens": 8}
    fly = {
        "rejection_sample_method": "fly",
        "fly_window_size": 5,
        "fly_entropy_threshold": 0.3,
        "fly_entropy_top_k": 3,
    }
    assert mapped(**BY_VLLM) == {**model, **fly}
    assert mapped(**BY_VLLM, entropy_thre=None)["fly_entropy_threshold"] == 0.0
    assert mapped(enable_fly=False) == model  # vLLM's own default is the standard rule
    assert mapped(enable_fly=False, draft_revision="abc") == {**model, "revision": "abc"}
    assert mapped(enable_fly=False, dual_tok=True) == {**model, "use_heterogeneous_vocab": True}
    assert mapped(verification="exact", drafter="ngram", num_ngram_pred_tokens=6) == {
        "method": "ngram",
        "num_speculative_tokens": 6,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    }
    assert mapped(use_sd=False, margin_thre=0.1) is None
    assert mapped(spd_k=0, win_len=5, enable_fly=False) is None


def test_heads_go_by_their_own_methods():
    head = {"model": "d", "num_speculative_tokens": 8}
    assert mapped(enable_fly=False, drafter="eagle3") == {"method": "eagle3", **head}
    for kind in ("dflash", "dspark"):
        found = mapped(enable_fly=False, drafter="block", head=kind)
        assert found == {"method": kind, **head}
    # before the head's files are read
    assert mapped(enable_fly=False, drafter="block") == head
    assert mapped(drafter="eagle3", **BY_VLLM)["fly_window_size"] == 5
    # a head has no tokenizer of its own
    assert mapped(enable_fly=False, drafter="eagle3", dual_tok=True) == {"method": "eagle3", **head}
    for own in ("mtp", "suffix"):  # without a draft model
        found = mapped(drafter=own, draft_model_path=None)
        assert found == {"method": own, "num_speculative_tokens": 8}
    old = Installed("0.12.0", OF_0_33.fields, METHODS[:3])
    with pytest.raises(FlyError, match=r"drafter=block: vLLM 0.12.0 has no method dspark: upgrade"):
        mapped(old, head="dspark", drafter="block")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"drafter": "cascade"}, "drafter=cascade: vLLM 0.33.0 has no such drafter"),
        ({"verification": "typical"}, "verification=typical: .*set verification to exact or fly"),
        ({"verification": "top_k"}, "verification=top_k"),
        ({"verification": "accept_all"}, "verification=accept_all"),
        ({"entropy_kind": "full"}, "entropy_kind=full: .* set it to top3"),
        ({"margin_thre": 0.2}, "margin_thre=0.2"),
        ({"draft_ratio_thre": 0.2}, "draft_ratio_thre=0.2"),
        ({"draft_rank_max": 2}, "draft_rank_max=2"),
        ({"defer_across_rounds": True, "win_len": 9}, "defer_across_rounds=True"),
        ({"window_rule": "reference"}, "window_rule=reference"),
        ({"abla_no_window": True}, "abla_no_window=True"),
        ({"win_len": 0}, "win_len=0: .* a window of 1 to 7 for drafts of 8 tokens"),
        ({"drafter": "ngram", "win_len": 6}, "win_len=6: .* a window of 1 to 5 for drafts of 6"),
        (
            {"spd_k": 1, "win_len": 0},
            "^spd_k=1: .* needs drafts of two tokens or more for FLy: raise",
        ),
        (
            {"drafter": "ngram", "num_ngram_pred_tokens": 1, "win_len": 0},
            "^num_ngram_pred_tokens=1: .* two tokens or more",
        ),
        ({"draft_quantization": "int8"}, "draft_quantization=int8: .* set it to auto or none"),
        ({"drafter": "eagle3", "head_layer_ids": [1, 2, 3]}, "head_layer_ids=.*set it to None"),
        ({"drafter": "block", "confidence_thre": 0.5}, "confidence_thre=0.5"),
        ({"draft_dtype": "float16"}, "draft_dtype=float16"),
        ({"draft_device": "cuda:1"}, "draft_device=cuda:1"),
        ({"draft_sources": ["own"], "drafter": "ngram"}, "draft_sources="),
        ({"execution": "eager"}, "execution=eager"),
        ({"threads": 2, "use_sd": False}, "threads=2"),
        ({"trace": True}, "trace=True"),
    ],
)
def test_what_vllm_cannot_do_is_refused_in_one_line(keys, said):
    with pytest.raises(FlyError, match=said) as caught:
        mapped(**BY_VLLM, **keys)
    text = str(caught.value)
    assert text.endswith("or use --model hf")
    assert "vLLM 0.33.0" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"verification": "typical"},
        {"verification": "top_k"},
        {"verification": "accept_all"},
        {"draft_rank_max": 2, "entropy_kind": "full", "exact_pattern": ["numbers"]},
        {"win_len": 0, "window_rule": "reference", "exact_first_tokens": 9},
        {"trace": True},
        {"enable_fly": False, "vllm_verification": "fly"},
    ],
)
def test_the_plugin_verifies_by_any_rule(keys):
    """And vLLM only drafts: its own sampler is the default one."""
    for installed in (OF_0_32, OF_0_33):
        assert verifies_by_fly(fly_config.build({**PAIR, **keys}, "test"), installed)
        assert mapped(installed, **keys) == mapped(installed, enable_fly=False)


def test_where_the_plugin_does_not_verify():
    exact = fly_config.build({**PAIR, "enable_fly": False}, "test")
    assert not verifies_by_fly(exact, OF_0_33)
    own = fly_config.build({**PAIR, **BY_VLLM}, "test")
    assert not verifies_by_fly(own, OF_0_33)
    alone = fly_config.build({**PAIR, "use_sd": False, "vllm_verification": "fly"}, "test")
    assert not verifies_by_fly(alone, OF_0_33)
    assert mapped(OF_0_34)["rejection_sample_method"] == "fly"
    assert mapped(head="dspark", drafter="block")["rejection_sample_method"] == "fly"
    wanted = "vllm_verification=fly: vLLM 0.34.0 is not one that fly's plugin knows: leave the key"
    with pytest.raises(FlyError, match=wanted):
        mapped(OF_0_34, vllm_verification="fly")
    with pytest.raises(FlyError, match=r"exact_first_tokens=3: vLLM 0.34.0 cannot do that"):
        mapped(OF_0_34, exact_first_tokens=3)
    with pytest.raises(FlyError, match="defer_across_rounds=True: vLLM gives tokens away"):
        mapped(defer_across_rounds=True)


def test_the_cascade_is_dropped():
    config = fly_config.build({**PAIR, "use_ngram": True}, "test")
    found = without_cascade(config)
    assert (found.drafter_name, found.use_ngram) == ("model", False)
    assert without_cascade(found) is found
    asked = fly_config.build({**PAIR, "drafter": "cascade"}, "test")
    assert without_cascade(asked) is asked


def test_drafters_of_vllm_are_refused_by_flys_engine():
    config = fly_config.build({**PAIR, "drafter": "mtp"}, "test")
    with pytest.raises(FlyError, match="drafter=mtp: only vLLM has it: use --model vllm"):
        check_model_args(config, {})


def test_config_check_says_which_engine_takes_a_pair():
    def said(**keys):
        return [*engines_of(fly_config.build({**PAIR, **keys}, "test"))]

    assert said() == [
        "--model hf: takes these keys",
        "--model vllm: takes these keys (verification by fly's rules)",
    ]
    assert said(drafter="mtp")[0] == "--model hf: no: only vLLM has drafter=mtp"
    by = "--model vllm: takes these keys (verification by vLLM's own; use_ngram is dropped)"
    assert said(enable_fly=False, use_ngram=True)[1] == by
    assert said(use_sd=False)[1] == "--model vllm: takes these keys (no draft)"
    assert "no: defer_across_rounds=True" in said(defer_across_rounds=True)[1]


def test_draft_runs_are_refused():
    with pytest.raises(FlyError, match="draft_runs="):
        mapped(draft_runs=["a"], drafter="ngram")


def test_a_vllm_without_fly():
    wanted = "verification=fly: vLLM 0.32.0 has no FLy: upgrade it to 0.33 or later, set "
    with pytest.raises(FlyError, match=re.escape(wanted)):
        mapped(OF_0_32, **BY_VLLM)
    assert mapped(OF_0_32, enable_fly=False)["method"] == "draft_model"
    old = Installed("0.9.0", ["method"], METHODS)
    with pytest.raises(FlyError, match=r"dual_tok=True: .* needs one vocabulary"):
        mapped(old, enable_fly=False, dual_tok=True)


def test_keys_of_fly_do_not_matter_to_exact_verification():
    """`fly compare` makes the exact run with the pair's other keys as they are."""
    mapped(enable_fly=False, entropy_kind="full", margin_thre=0.2, defer_across_rounds=True)


def test_which_engine_a_model_means():
    of_pair = {"config_path": "pair.json"}
    assert registry.engine_of("hf", of_pair) == "fly"
    assert registry.engine_of("vllm", of_pair) == "fly_vllm"
    assert registry.engine_of("hf", {}) is None
    assert registry.engine_of("vllm", {}) is None
    assert registry.engine_of("fly", {}) == "fly"


def test_without_vllm_one_line_says_what_to_install(monkeypatch):
    def load(where):
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")

    monkeypatch.setattr(registry, "load", load)
    with pytest.raises(FlyError, match=r"--model vllm: .*pip install vllm"):
        registry.load_engine("fly_vllm")


def test_a_request_counted_by_hand():
    # the prefill's token, then 3 of 4 and the correction, a pass without a draft, 4 of 4 and the
    # bonus token, and 4 of 4 of which the output's end leaves 2
    found, positions = counts(4 + 1 + 5 + 2, rounds=4, drafts=[(4, 3), (4, 4), (4, 4)])
    assert (found.rounds, found.emitted, found.drafted) == (4, 12, 12)
    assert (found.native_accepted, found.corrections, found.bonus) == (9, 1, 2)
    assert positions.drafted == [3, 3, 3, 3]
    assert positions.accepted == [3, 3, 2, 1]
    assert counts(0, rounds=0, drafts=[])[0].emitted == 0


@given(
    st.lists(st.integers(1, 8).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))),
    st.integers(0, 5),
    st.integers(0, 8),
)
def test_counts_add_up(drafts, plain, cut):
    """As docs/compare.md has it: emitted = matches + deferred + recovered + bonus tokens."""
    last = drafts[-1][1] if drafts else 0
    emitted = plain + sum(accepted + 1 for _, accepted in drafts) - min(cut, last)
    found, positions = counts(emitted, plain + len(drafts), drafts)
    assert found.emitted == found.native_accepted + found.corrections + found.bonus == emitted
    assert found.native_accepted == sum(positions.accepted) <= found.drafted
    assert min(found.corrections, found.bonus) >= 0


def test_a_pass_is_shared_by_what_it_computed():
    assert shares(6.0, [100, 50, 0, 149]) == pytest.approx([2.0, 1.0, 0.02, 2.98])
