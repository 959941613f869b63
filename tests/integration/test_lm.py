"""FlyLM against lm-eval's own hf backend on the target, and its refusals."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from fly.errors import FlyError
from fly.execution import kernels
from fly.harness.engine_factory import EngineFactory
from fly.harness.hf import FlyLM
from fly.models import sources
from fly.runs import context, output_ids
from fly.runs.environment import models_of
from fly.runs.finished_requests import FinishedRequests
from fly.runs.manifest import Manifest
from fly.runs.records import PHASES
from fly.speculation.sampling import Sampling
from tests import tiny

PROMPTS = ["def add(a, b):", "x", "The answer is", "é ü 中", ""]


def instances(kwargs, prompts=PROMPTS):
    return [
        Instance(
            request_type="generate_until",
            doc={},
            arguments=(prompt, dict(kwargs)),
            idx=0,
            metadata=("a_task", index, 1),
        )
        for index, prompt in enumerate(prompts)
    ]


def fly_lm(saved_pair, **kwargs):
    kwargs = {
        "win_len": 1, "spd_k": 4, "draft_policy": "fixed", "enable_fly": False, "dtype": "float32",
        **kwargs,
    }  # fmt: skip
    return FlyLM(
        pretrained=kwargs.pop("pretrained", str(saved_pair / "draft")),
        target_model_path=str(saved_pair / "target"),
        device="cpu",
        **kwargs,
    )


@pytest.fixture(scope="module")
def lm(saved_pair):
    return fly_lm(saved_pair)


@pytest.fixture(scope="module")
def hf(saved_pair):
    return HFLM(pretrained=str(saved_pair / "target"), device="cpu", dtype="float32")


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_gen_toks": 40},
        {"max_gen_toks": 40, "until": ["a", "\n"]},
        {"max_gen_toks": 40, "until": "é"},
        {"max_gen_toks": 40, "until": [""]},
        {"max_gen_toks": 40, "until": ["zzz", ""]},
        {"max_new_tokens": 7, "until": ["</s>", "xyz"]},
        {"max_gen_toks": 30, "do_sample": False, "temperature": 0.7, "until": ["b"]},
        {"max_gen_toks": 1},
    ],
)
def test_texts_equal_hf(lm, hf, kwargs):
    """until, budget and their aliases mean what they mean to lm-eval's hf."""
    prompts = PROMPTS[:-1]  # hf cannot generate from an empty prompt
    assert lm.generate_until(instances(kwargs, prompts)) == hf.generate_until(
        instances(kwargs, prompts)
    )


def test_stop_strings_were_really_met(lm):
    """Catches the test above comparing texts in which no stop string ever occurred."""
    free = lm.generate_until(instances({"max_gen_toks": 40}))
    stop = free[0][5:7]
    assert stop
    cut = lm.generate_until(instances({"max_gen_toks": 40, "until": [stop]}))
    assert cut[0] == free[0].split(stop)[0]
    assert len(cut[0]) < len(free[0])


@pytest.mark.parametrize("think_end", [65, "A"])
def test_think_end_token_equals_hf(saved_pair, think_end):
    ours = fly_lm(saved_pair, think_end_token=think_end)
    theirs = HFLM(
        pretrained=str(saved_pair / "target"),
        device="cpu",
        dtype="float32",
        think_end_token=think_end,
    )
    wanted = {"max_gen_toks": 60, "until": ["zz"]}
    assert ours.generate_until(instances(wanted, PROMPTS[:3])) == theirs.generate_until(
        instances(wanted, PROMPTS[:3])
    )


def test_long_prompts_are_cut_on_the_left_as_hf_does(lm, hf):
    prompts = ["abcdefgh" * 80]
    wanted = {"max_gen_toks": 20}
    assert lm.generate_until(instances(wanted, prompts)) == hf.generate_until(
        instances(wanted, prompts)
    )


def test_loglikelihood_is_bit_for_bit_the_targets(lm, hf):
    pairs = [("Hello wor", "ld"), ("", "x"), ("a b c", " d e f")]
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0) for pair in pairs
    ]
    assert lm.loglikelihood(requests) == hf.loglikelihood(requests)


def test_it_is_the_target_that_lm_eval_sees(lm, hf):
    ours, theirs = lm.get_model_info(), hf.get_model_info()
    assert {key: ours[key] for key in theirs} == theirs
    assert lm.max_length == hf.max_length
    chat = [{"role": "user", "content": "hi"}]
    assert lm.apply_chat_template(chat) == hf.apply_chat_template(chat)


def test_model_info_is_plain_json_with_the_documented_names(saved_pair):
    """lm-eval drops the results file, without an error, if json cannot dump it."""
    lm = fly_lm(saved_pair, enable_fly=True)
    lm.generate_until(instances({"max_gen_toks": 20}))
    entry = json.loads(json.dumps(lm.get_model_info()["fly"]))
    names = "requests rounds drafted native_accepted deferred_accepted deferred_rolled_back"
    names += " corrections bonus emitted discarded tau decode_tok_s end_to_end_tok_s prompt_tokens"
    names += " prompt_tokens_reused peak_memory_bytes seconds sources positions al tasks"
    names += " tau_document_mean al_document_mean ended_at_limit unclosed_thinking"
    assert set(names.split()) == set(entry["stats"])
    assert set(entry["stats"]["seconds"]) == set(PHASES)
    assert entry["stats"]["requests"] == len(PROMPTS)
    assert entry["config"]["spd_k"] == 4
    assert entry["mode"] == "fly"
    stats = entry["stats"]
    assert stats["tau"] == pytest.approx(stats["emitted"] / stats["rounds"], abs=1e-4)


@pytest.mark.parametrize("drafter", ["model", tiny.slow("ngram"), "cascade"])
@pytest.mark.parametrize("batch_size", [tiny.slow(1), 3, "auto"])
def test_drafters_and_batch_sizes_give_the_same_texts(saved_pair, lm, drafter, batch_size):
    other = fly_lm(saved_pair, drafter=drafter, batch_size=batch_size)
    wanted = {"max_gen_toks": 40, "until": ["q"]}
    assert other.generate_until(instances(wanted)) == lm.generate_until(instances(wanted))


def test_ngram_and_target_only_need_no_draft(saved_pair):
    assert fly_lm(saved_pair, pretrained=None, drafter="ngram").pair.draft is None
    assert fly_lm(saved_pair, pretrained=None, use_sd=False).pair.draft is None
    with pytest.raises(FlyError, match="pretrained is missing"):
        fly_lm(saved_pair, pretrained=None)


def test_total_gen_tok_caps_the_budget(saved_pair):
    lm = fly_lm(saved_pair, total_gen_tok=3)
    lm.generate_until(instances({"max_gen_toks": 20}, ["abc"]))
    assert lm.stats.counts.emitted <= 3


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_gen_toks": 0}, r"max_gen_toks=0 \(gen_kwargs, task a_task, doc 0\): .* equal to 1"),
        ({"max_gen_toks": 512}, "leaves no room for a prompt"),
        ({"do_sample": True, "temperature": 0.0}, "temperature=0 with do_sample=True"),
        ({"temperature": 0.8, "top_p": 1.5}, r"top_p=1\.5: must be above 0 and at most 1"),
        ({"temperature": 0.8, "typical_p": 0.9}, r"gen_kwargs typical_p=0\.9"),
        ({"num_beams": 4}, "gen_kwargs num_beams=4"),
        ({"repetition_penalty": -1.0}, r"repetition_penalty=-1\.0: must be above 0"),
    ],
)
def test_bad_requests_are_refused_before_decoding(lm, kwargs, message):
    before = lm.stats.counts.emitted
    with pytest.raises(FlyError, match=message) as caught:
        lm.generate_until(instances(kwargs))
    assert "\n" not in str(caught.value)
    assert lm.stats.counts.emitted == before


def resolved(lm, gen_kwargs):
    lm.samplings.clear()
    lm.generate_until(instances({"max_gen_toks": 2, **gen_kwargs}, ["abc"]))
    (sampling,) = lm.samplings
    return sampling


def test_sampling_settings_by_precedence(saved_pair, monkeypatch):
    """gen_kwargs, then the configuration, then the target's generation_config, as hf would."""
    lm = fly_lm(saved_pair, temperature=0.5, top_p=0.9)
    monkeypatch.setattr(lm.model.generation_config, "repetition_penalty", 1.2)
    monkeypatch.setattr(lm.model.generation_config, "top_k", None)
    assert resolved(lm, {}) == Sampling(0.5, 50, 0.9, 0.0, 1.2)
    assert resolved(lm, {"do_sample": False}) == Sampling(repetition_penalty=1.2)
    assert resolved(lm, {"temperature": 0.7, "top_k": 0}).top_k == 0
    given = {"do_sample": True, "temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.0}
    assert resolved(lm, given) == Sampling(1.0, 50, 0.9, 0.1, 1.0)
    assert resolved(lm, {"do_sample": True}).temperature == 0.5


@pytest.mark.parametrize("of_target", [False, True])
def test_a_repetition_penalty_is_applied_as_hf_applies_it(lm, hf, monkeypatch, of_target):
    """Whether gen_kwargs ask for it or the target's generation_config."""
    asked = {"max_gen_toks": 40}
    prompts = PROMPTS[:-1]  # hf cannot generate from an empty one
    plain = lm.generate_until(instances(asked, prompts))
    if of_target:
        for own in (lm, hf):
            monkeypatch.setattr(own.model.generation_config, "repetition_penalty", 1.3)
    else:
        asked["repetition_penalty"] = 1.3
    texts = lm.generate_until(instances(asked, prompts))
    assert texts == hf.generate_until(instances(asked, prompts))
    assert texts != plain


def test_none_in_gen_kwargs_switches_a_filter_off(saved_pair, monkeypatch):
    lm = fly_lm(saved_pair, top_k=7)
    assert resolved(lm, {"temperature": 1.0, "top_k": None}).top_k == 0
    with pytest.raises(FlyError, match=r"top_p='abc' \(gen_kwargs.*valid number"):
        resolved(lm, {"temperature": 1.0, "top_p": "abc"})


def test_what_the_target_asks_for_and_fly_does_not_apply_is_said(saved_pair, monkeypatch, caplog):
    lm = fly_lm(saved_pair, temperature=0.7)
    monkeypatch.setattr(lm.model.generation_config, "no_repeat_ngram_size", 3)
    resolved(lm, {"do_sample": False})
    assert "generation_config sets no_repeat_ngram_size=3" in caplog.text
    assert "temperature=0.7 is overridden by gen_kwargs of a_task" in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "is_said"),
    [
        ("num_beams", 4, True),
        ("num_beams", 1, False),
        ("min_new_tokens", 1, True),
        ("no_repeat_ngram_size", 1, True),
        ("forced_eos_token_id", 1, True),
        ("guidance_scale", 1.0, False),
    ],
)
def test_a_value_is_without_effect_for_its_own_argument(
    saved_pair, lm, monkeypatch, caplog, name, value, is_said
):
    """1 switches beams off, and a minimum of new tokens on."""
    monkeypatch.setattr(lm.model.generation_config, name, value)
    resolved(lm, {"do_sample": False})
    assert (f"generation_config sets {name}={value}" in caplog.text) == is_said


def test_characters_that_a_stop_string_matched_are_not_cleaned_away(saved_pair, monkeypatch):
    """Else "b ." in one block would hide the stop "b " that one token at a time meets."""
    lm = fly_lm(saved_pair)
    monkeypatch.setattr(lm.tokenizer, "clean_up_tokenization_spaces", True)
    wanted = lm.build_requests(instances({"until": ["b "]}, ["a"]))
    engine = lm.engine(wanted, wanted, lambda record: None)
    assert engine._decode(lm.tok_encode("b .", add_special_tokens=False)) == "b ."


def test_a_cache_that_would_repeat_one_sample_is_refused(saved_pair, monkeypatch):
    """lm-eval's cache skips requests that say do_sample, and no others."""
    lm = fly_lm(saved_pair, temperature=0.7)
    monkeypatch.setattr(lm.cache_hook, "dbdict", {})
    with pytest.raises(FlyError, match=r"--use_cache with temperature=0\.7"):
        lm.generate_until(instances({"max_gen_toks": 4}))


def test_samples_depend_on_the_seed_alone(saved_pair):
    """Repeats of a document differ; batch size and order of arrival change none of them."""
    asked = {"max_gen_toks": 24, "do_sample": True, "temperature": 1.0}
    one = fly_lm(saved_pair, seed=7, drafter="cascade")
    texts = one.generate_until(instances(asked) * 2)
    assert len(set(texts)) > len(PROMPTS)
    many = fly_lm(saved_pair, seed=7, drafter="cascade", batch_size=3)
    shuffled = many.generate_until(instances(asked)[::-1] * 2)
    assert sorted(shuffled) == sorted(texts)
    other = fly_lm(saved_pair, seed=8, drafter="cascade")
    assert other.generate_until(instances(asked) * 2) != texts


def test_different_vocabularies_are_refused(saved_pair, tmp_path):
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_tokens(["extra"])
    tiny.model(seed=2, vocab=260).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(FlyError, match=r"token 259 is 'extra' in the draft"):
        fly_lm(saved_pair, pretrained=str(tmp_path))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"pretrained": "/no/such/folder"}, "pretrained=/no/such/folder: no such folder"),
        ({"pretrained": "./x.gguf"}, r"pretrained=\./x\.gguf: no such file"),
        ({"pretrained": "pair:qwen2.5-coder/x"}, "write pair:NAME/draft"),
        ({"pretrained": "no-org/no-model"}, "pretrained=no-org/no-model: cannot be loaded"),
        ({"spdk": 3}, "unknown model_args key 'spdk': did you mean 'spd_k'"),
        ({"alpha": 0.3}, "argument 'alpha': if model_args give it, `fly config schema` lists"),
        ({"dtype": "float31"}, "dtype=float31: no such dtype"),
    ],
)
def test_bad_model_args_get_one_line(saved_pair, kwargs, message):
    with pytest.raises(FlyError, match=message) as caught:
        fly_lm(saved_pair, **kwargs)
    assert "\n" not in str(caught.value)


def test_no_answer_is_in_the_cache_without_its_record(saved_pair, tmp_path, monkeypatch):
    """A process that was killed between the two lost the record: later the cache answered."""
    context.start(tmp_path)
    lm = fly_lm(saved_pair)
    recorded = []

    def cache(*args):
        recorded.append([len(file.read_text().splitlines()) for file in tmp_path.glob("*.jsonl")])

    monkeypatch.setattr(lm.cache_hook, "add_partial", cache)
    lm.generate_until(instances({"max_gen_toks": 4}))
    assert recorded == [[count] for count in range(1, len(PROMPTS) + 1)]


def test_what_was_finished_survives_ctrl_c(saved_pair, tmp_path, monkeypatch, caplog):
    """Finished responses are on disk and in lm-eval's cache when the run is cut short."""
    context.start(tmp_path)
    lm = fly_lm(saved_pair)
    kept = []
    monkeypatch.setattr(lm.cache_hook, "add_partial", lambda *args: kept.append(args))
    honest = lm.keep

    def interrupt_after_two(*args):
        honest(*args)
        if len(kept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(lm, "keep", interrupt_after_two)
    with pytest.raises(KeyboardInterrupt):
        lm.generate_until(instances({"max_gen_toks": 10}))
    (file,) = tmp_path.glob("*.jsonl")
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({record["doc_id"] for record in written}) == 2
    assert {"task", "prompt_hash", "text", "tau", "finish_reason"} <= set(written[0])
    assert "2 of 5 responses are kept" in caplog.text
    assert "with --use_cache the same command" in caplog.text
    context.start()


def interrupt_after_one(lm, monkeypatch):
    """Ctrl-C once the first response is kept."""
    honest = lm.keep

    def interrupt(*args):
        honest(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(lm, "keep", interrupt)


def test_an_interruption_names_the_way_on(saved_pair, tmp_path, monkeypatch, caplog):
    """With a manifest the run can be resumed, and the message is the command."""
    run = context.start(tmp_path)
    run.join(Manifest.create(tmp_path, {"output_path": str(tmp_path)}), None)
    lm = fly_lm(saved_pair)
    interrupt_after_one(lm, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        lm.generate_until(instances({"max_gen_toks": 10}))
    assert f"1 of 5 responses are kept in {tmp_path}" in caplog.text
    assert f"`fly --resume {tmp_path}` goes on with the rest" in caplog.text
    run.manifest.release()
    context.start()


def test_calls_with_settings_of_their_own_are_resumed_each(saved_pair, tmp_path, monkeypatch):
    """Two tasks, two calls: the first is there, the second is not; nothing is decoded twice."""
    manifest = Manifest.create(tmp_path, {"output_path": str(tmp_path)})
    calls = [instances({"max_gen_toks": 10}), instances({"max_gen_toks": 20, "until": ["q"]})]
    for instance in calls[1]:
        instance.task_name = "b_task"
    whole = fly_lm(saved_pair)
    expected = [whole.generate_until(call) for call in calls]
    context.start(tmp_path).join(manifest, None)
    fly_lm(saved_pair).generate_until(calls[0])
    for decoded in (5, 0):
        context.start(tmp_path).join(manifest, FinishedRequests(tmp_path, manifest.started))
        lm = fly_lm(saved_pair)
        cached = Mock()
        monkeypatch.setattr(lm.cache_hook, "add_partial", cached)
        assert [lm.generate_until(call) for call in calls] == expected
        assert cached.call_count == 10  # lm-eval's cache gets the earlier ones, too
        (file,) = tmp_path.glob("fly_requests_*.jsonl")
        assert len(file.read_text().splitlines()) == 10
        assert lm.stats.requests == 10
        assert lm.get_model_info()["fly"]["resumed"]["requests"] == 10 - decoded
        assert lm.stats.counts == whole.stats.counts
    manifest.release()
    context.start()


def test_without_an_output_path_an_interruption_is_kept_in_fly_home(
    saved_pair, tmp_path, monkeypatch
):
    monkeypatch.setenv("FLY_HOME", str(tmp_path))
    context.start(None)
    lm = fly_lm(saved_pair)
    interrupt_after_one(lm, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        lm.generate_until(instances({"max_gen_toks": 10}))
    assert len(list((tmp_path / "interrupted").glob("*.jsonl"))) == 1


def test_a_draft_dtype_of_its_own(saved_pair):
    # eager: fly's kernels compute a bfloat16 model in float32 where that is faster
    lm = fly_lm(saved_pair, draft_dtype="bfloat16", execution="eager")
    assert lm.model.dtype is torch.float32
    assert lm.pair.draft.dtype is torch.bfloat16


def test_auto_batch_size_is_said_and_bounded_by_memory(saved_pair, lm, monkeypatch, caplog):
    caplog.set_level("INFO", logger="fly")
    auto = fly_lm(saved_pair, batch_size="auto")
    wanted = instances({"max_gen_toks": 10})
    assert auto.generate_until(wanted) == lm.generate_until(wanted)
    assert "batch_size=auto: 5 running sequences" in caplog.text
    monkeypatch.setattr("fly.execution.oom.free_bytes", lambda device: 0)
    auto.generate_until(wanted)
    assert "batch_size=auto: 1 running sequences" in caplog.text


def test_auto_batch_size_knows_which_requests_sample(saved_pair, monkeypatch):
    auto = fly_lm(saved_pair, batch_size="auto")
    kept = []
    monkeypatch.setattr(
        "fly.harness.engine_factory.sequences_that_fit",
        lambda works, *_, **__: kept.append([work.kept for work in works]) or 2,
    )
    auto.generate_until(instances({"max_gen_toks": 4}))
    auto.generate_until(instances({"max_gen_toks": 4, "do_sample": True, "temperature": 1.0}))
    assert kept == [[0, 0], [0, auto.fly_config.spd_k]]


@pytest.mark.skipif(kernels.why_not() is not None, reason="needs fly's kernels")
def test_a_draft_that_is_loaded_again_has_the_checkpoints_dtype(saved_pair, monkeypatch):
    """Packed for AVX2 the target computes, and reports, in float32, a later draft does not."""
    monkeypatch.setattr(kernels, "instructions", lambda: "avx2")
    ready = fly_lm(saved_pair, dtype="bfloat16")
    assert ready.model.dtype == torch.float32
    _, draft = sources.sources(ready.fly_config)
    assert ready.load_draft(draft, {})[0].dtype == torch.bfloat16


@pytest.mark.skipif(kernels.why_not() is not None, reason="needs fly's kernels")
def test_the_weights_dtype_is_recorded_not_that_of_the_passes(saved_pair, monkeypatch):
    """Packed bfloat16 weights were called float32, which made another target of the same model."""
    monkeypatch.setattr(kernels, "instructions", lambda: "avx2")
    lm = fly_lm(saved_pair, dtype="bfloat16")
    info = lm.get_model_info()
    assert (info["fly"]["dtype"], info["fly"]["draft_dtype"]) == ("torch.bfloat16",) * 2
    assert info["model_dtype"] == torch.bfloat16


@pytest.mark.parametrize("batch_size", [2, "auto"])
def test_lossy_drafts_are_all_or_none_whatever_is_left_to_decode(saved_pair, caplog, batch_size):
    """A resumed run has fewer requests left, which must not switch drafting on or off."""
    lm = fly_lm(saved_pair, enable_fly=True, draft_policy="auto", batch_size=batch_size)
    wanted = lm.build_requests(instances({"max_gen_toks": 4}))
    lengths = []
    for missing in (wanted, wanted[:1]):
        lm.engine(missing, wanted, lambda record: None)
        lengths.append(lm.draft_length)
    assert lengths[0] == lengths[1]
    assert lengths[0]["policy"] == "rule"
    # a draft as large as its target never pays, and the log says what to do
    assert lengths[0]["spd_k"] == 0
    assert (
        "nothing is drafted: lower --batch_size or spd_k, or set draft_policy=fixed" in caplog.text
    )


def test_preparation_is_reported_and_does_not_change_the_model_s_size(saved_pair):
    plain = fly_lm(saved_pair, dtype="bfloat16", compile="off", draft_quantization="none")
    ready = fly_lm(saved_pair, dtype="bfloat16")
    assert (
        ready.get_model_info()["model_num_parameters"]
        == plain.get_model_info()["model_num_parameters"]
        == plain.model.num_parameters()
    )
    entry = ready.get_model_info()["fly"]
    assert entry["draft_num_parameters"] == plain.pair.draft.num_parameters()
    assert plain.get_model_info()["fly"]["preparation"]["target"] == "eager"
    if kernels.why_not() is None:
        name = f"kernels-{kernels.instructions()}"
        prepared = entry["preparation"]
        assert (prepared["target"], prepared["draft"]) == (name, f"{name} int8")
        assert entry["stats"]["seconds"]["compile"] > 0
    assert len(ready.generate_until(instances({"max_gen_toks": 10}))) == 5


def test_n_grams_are_looked_up_where_that_pays(saved_pair, caplog):
    """Shipped pairs set it to true, which on a GPU made the host wait at every step."""
    with caplog.at_level("INFO"):
        eager = fly_lm(saved_pair, dtype="bfloat16", compile="off", use_ngram=None)
    assert "use_ngram=null: false for a draft of eager passes" in caplog.text
    assert eager.results_entry()["config"]["use_ngram"] is False
    assert eager.fly_config.drafter_name == "model"
    if kernels.why_not() is None:
        packed = fly_lm(saved_pair, dtype="bfloat16", use_ngram=None)
        assert packed.fly_config.drafter_name == "cascade"
        assert packed.with_config(packed.fly_config).fly_config.use_ngram is True


def test_overrides_reach_the_keys_whose_values_are_words(saved_pair):
    assert fly_lm(saved_pair, draft_quantization="none").fly_config.draft_quantization == "none"
    assert fly_lm(saved_pair, drafter="none").fly_config.drafter is None
    with pytest.raises(FlyError, match="draft_quantization='int3'"):
        fly_lm(saved_pair, draft_quantization="int3")


def test_a_draft_with_a_short_window_serves_a_shorter_context(saved_pair, tmp_path):
    """The refusal's own advice, max_length, must help."""
    from transformers import AutoConfig, AutoTokenizer, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=AutoConfig.from_pretrained(saved_pair / "draft").vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        sliding_window=100,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(saved_pair / "draft").save_pretrained(tmp_path)
    with pytest.raises(FlyError, match=r"sliding window of 100 tokens.*max_length=100"):
        fly_lm(saved_pair, pretrained=str(tmp_path))
    assert fly_lm(saved_pair, pretrained=str(tmp_path), max_length=100).pair.draft is not None


def test_max_length_does_not_reach_past_the_context(saved_pair, caplog):
    """Positions past the context were clamped, and tokens came out wrong without a word."""
    lm = fly_lm(saved_pair, max_length=64)
    (request,) = lm.build_requests(instances({"max_length": 400, "max_gen_toks": 8}, ["abc"]))
    assert len(request.prompt) + request.budget == 64
    assert "max_length=400 of gen_kwargs is more than the target's context" in caplog.text
    (short,) = lm.build_requests(instances({"max_length": 20, "max_gen_toks": 8}, ["abc"]))
    assert len(short.prompt) + short.budget == 20


def test_max_length_that_the_prompt_fills_is_refused(saved_pair):
    """Such documents got an answer of one token, without a word; hf ends with an error."""
    lm = fly_lm(saved_pair)
    (whole,) = lm.build_requests(instances({"max_gen_toks": 8}, ["abc"]))
    count = len(whole.prompt)
    with pytest.raises(FlyError, match=f"max_length={count} of gen_kwargs.*{count} tokens"):
        lm.build_requests(instances({"max_length": count}, ["abc"]))
    (last,) = lm.build_requests(instances({"max_length": count + 1}, ["abc"]))
    assert last.budget == 1


def test_what_a_cache_answers_does_not_decide_what_is_drafted(saved_pair, monkeypatch):
    """A resumed run of six with --use_cache asked for one, and drafted for it alone."""
    lm = fly_lm(saved_pair, enable_fly=True, draft_policy="auto", batch_size=6)
    wanted = lm.build_requests(instances({"max_gen_toks": 8}, [str(n) for n in range(6)]))
    planned = sequences_planned(monkeypatch)
    for cache, asked in ((None, wanted), ({}, wanted[:1])):
        monkeypatch.setattr(lm.cache_hook, "dbdict", cache)
        list(lm.decode(asked, asked, lambda record: None))
        assert {*planned} == {6}
        planned.clear()


def test_a_process_s_share_does_not_decide_what_is_drafted(saved_pair, monkeypatch):
    """Eleven documents in one process drafted nothing, in two processes K tokens; a run of two
    that was resumed in one had texts of both."""
    lm = fly_lm(saved_pair, enable_fly=True, draft_policy="auto", batch_size=8)
    wanted = lm.build_requests(instances({"max_gen_toks": 8}, [str(n) for n in range(6)]))
    planned = sequences_planned(monkeypatch)
    list(lm.decode(wanted, wanted, lambda record: None))
    assert {*planned} == {6}
    planned.clear()
    monkeypatch.setattr(lm, "_world_size", 2)
    monkeypatch.setattr(lm, "processes", SimpleNamespace(exchange=lambda own: [own, 2]))
    list(lm.decode(wanted[:4], wanted[:4], lambda record: None))
    assert {*planned} == {6}


def sequences_planned(monkeypatch):
    """How many sequences the engines that are made from now on are planned for, as often as it is
    asked."""
    planned, plan = [], EngineFactory._planned
    monkeypatch.setattr(
        EngineFactory, "_planned", lambda self: planned.append(plan(self)) or planned[-1]
    )
    return planned


def test_a_target_without_a_chat_template_is_told_in_one_line(saved_pair, monkeypatch):
    lm = fly_lm(saved_pair)
    said = [{"role": "user", "content": "Why?"}]
    assert "Why?" in lm.apply_chat_template(said)
    monkeypatch.setattr(lm.tokenizer, "chat_template", None)
    with pytest.raises(FlyError, match=r"--apply_chat_template: target_model_path=.*no chat templ"):
        lm.apply_chat_template(said)


def test_autocast_is_refused_as_fly_s_passes_have_one_dtype(saved_pair):
    """It was taken and ignored: one text of six was hf's."""
    with pytest.raises(FlyError, match=r"mixed_precision_dtype=bfloat16: .*set dtype=bfloat16"):
        fly_lm(saved_pair, mixed_precision_dtype="bfloat16")


def test_a_token_limit_of_the_generation_config_is_named(saved_pair, monkeypatch, caplog):
    lm = fly_lm(saved_pair)
    monkeypatch.setattr(lm.model.generation_config, "max_new_tokens", 7)
    lm.build_requests(instances({"max_gen_toks": 4}, ["a"]))
    assert "generation_config sets max_new_tokens=7" in caplog.text


def test_the_draft_is_loaded_as_the_target_is(saved_pair, monkeypatch):
    """A draft behind a token, in a cache of one's own or at a revision could not be loaded."""
    seen = []

    def create(self, pretrained, *args, **kwargs):
        seen.append((pretrained, kwargs))
        return HFLM._create_model(self, pretrained, *args, **kwargs)

    monkeypatch.setattr(FlyLM, "_create_model", create)
    fly_lm(saved_pair, token="hf_x", cache_dir="/tmp", draft_revision="v2")
    draft = dict(seen)[str(saved_pair / "draft")]
    assert (draft["token"], draft["cache_dir"], draft["revision"]) == ("hf_x", "/tmp", "v2")


def outputs_of(saved_pair, folder, prompts=PROMPTS):
    """A run of the target alone, with records in the folder; its texts."""
    context.start(folder)
    lm = fly_lm(saved_pair, use_sd=False)
    return lm.generate_until(instances({"max_gen_toks": 20}, prompts))


def test_earlier_outputs_reach_their_requests_and_are_counted(saved_pair, tmp_path):
    """As the ids that were emitted, which texts with broken characters do not give back."""
    texts = outputs_of(saved_pair, tmp_path / "first")
    (file,) = (tmp_path / "first").glob("fly_requests_*")
    records = {record["doc_id"]: record for record in map(json.loads, file.open())}
    context.start(tmp_path / "second")
    lm = fly_lm(saved_pair, drafter="ngram", draft_runs=str(tmp_path / "first"))
    prompts = [*PROMPTS[:-1], "another prompt", "another document"]
    requests = lm.build_requests(instances({"max_gen_toks": 20}, prompts))
    ids = [output_ids.decode(records[doc_id]["output"]["ids"]) for doc_id in range(4)]
    assert [request.earlier for request in requests] == [*((each,) for each in ids), (), ()]
    assert [lm.tok_decode(list(each)) for each in ids] == texts[:4]
    assert [len(each) for each in ids] == [records[doc_id]["emitted"] for doc_id in range(4)]
    assert lm.generate_until(instances({"max_gen_toks": 20}, PROMPTS[:-1])) == texts[:-1]
    lm.barrier()  # as the counts of `build_requests` above have not been shared
    entry = lm.results_entry()["draft_runs"]
    assert entry == {
        "runs": [str(tmp_path / "first")],
        "matched": 8, "changed": 1, "missing": 1, "untokenized": 0, "same_target": None,
    }  # fmt: skip
    assert json.loads(json.dumps(entry)) == entry


def test_the_numbers_that_made_an_earlier_output_do_not_decide_who_drafts(saved_pair, tmp_path):
    """Sampled with a draft model, the choice between it and a text follows the earlier output: were
    that made by the numbers that decide now, the distribution would no longer be the target's."""
    kwargs = {"max_gen_toks": 20, "do_sample": True, "temperature": 0.8}
    context.start(tmp_path / "first")
    fly_lm(saved_pair, seed=7, use_sd=False).generate_until(instances(kwargs, PROMPTS[:2]))
    context.start(tmp_path / "second")

    def seeds(kwargs, **keys):
        lm = fly_lm(saved_pair, seed=7, **keys)
        return [request.seed for request in lm.build_requests(instances(kwargs, PROMPTS[:3]))]

    alone = seeds(kwargs, use_sd=False)
    earlier = {"draft_runs": str(tmp_path / "first")}
    assert seeds(kwargs, drafter="ngram", **earlier) == alone  # the target's very samples
    with_model = seeds(kwargs, drafter="cascade", **earlier)
    assert [ours == theirs for ours, theirs in zip(with_model, alone)] == [False, False, True]
    greedy = {"max_gen_toks": 20}
    assert seeds(greedy, drafter="cascade", **earlier) == seeds(greedy, use_sd=False)


def test_only_runs_that_draft_from_them_read_earlier_outputs(saved_pair, tmp_path):
    """And only these depend on them: a resumed run of another kind needs no fact about them."""
    outputs_of(saved_pair, tmp_path / "first")
    context.start(None)
    given = {"draft_runs": str(tmp_path / "first"), "drafter": "ngram"}
    alone = fly_lm(saved_pair, **given, use_sd=False)
    assert "earlier_outputs" not in alone.deciding_facts()
    assert alone.results_entry()["draft_runs"] is None
    (request,) = alone.build_requests(instances({"max_gen_toks": 20}, PROMPTS[:1]))
    assert request.earlier == ()
    facts = [fly_lm(saved_pair, **given).deciding_facts()["earlier_outputs"]]
    outputs_of(saved_pair, tmp_path / "second", PROMPTS[1:3])
    context.start(None)  # or the second would be this run's own records
    given["draft_runs"] = [str(tmp_path / "first"), str(tmp_path / "second")]
    facts.append(fly_lm(saved_pair, **given).deciding_facts()["earlier_outputs"])
    assert facts[0] != facts[1]


def test_a_changed_target_is_known_by_the_earlier_run_s_manifest(saved_pair, tmp_path):
    """What lies at the earlier target's path now says nothing of what lay there then."""
    outputs_of(saved_pair, folder := tmp_path / "first")
    (records,) = folder.glob("fly_requests_*")
    started = records.stem.removeprefix("fly_requests_")
    manifest = Manifest.create(tmp_path / "other", {"output_path": "x"})
    manifest.release()
    given = {"drafter": "ngram", "draft_runs": str(folder)}
    context.start(None)
    models = models_of(fly_lm(saved_pair, **given).fly_config, {})
    for files, same in ((models["target"]["files"], True), ({"a": "b"}, False)):
        target = {**models["target"], "files": files}
        noted = {**manifest.data, "started": started, "models": {"target": target}}
        (folder / f"fly_run_{started}.json").write_text(json.dumps(noted))
        assert fly_lm(saved_pair, **given).results_entry()["draft_runs"]["same_target"] is same
