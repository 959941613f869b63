"""fly's rules inside vLLM's CPU build against fly's own engine: the same tokens and counts.

vLLM's prefill gives an output's first token, fly's gives none: fly's engine decodes from the prompt
and that token, so that both draft from the same places.
"""

import json
import subprocess
import sys

import pytest
import torch

from fly import config as fly_config
from fly.models.tokenizers import Texts
from fly.speculation.rules import rule_of
from fly.speculation.sequence import Request, Sequence
from fly.speculation.stop_strings import StopMatcher
from fly.vllm_plugin.verifier import replay
from tests import tiny
from tests.vllm.test_vllm_engine import ENVIRONMENT

pytest.importorskip("vllm", reason="vLLM is not installed here: .ci/vllm.sh makes an environment")
pytestmark = pytest.mark.vllm

K, BUDGET, EOS = 5, 40, 257
NOISE = 0.012
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
SHAPE = {"hidden_size": 128, "vocab": tiny.TOKENIZER_VOCAB}
PROMPTS = tiny.prompts(5, vocab=250)
CASES = {
    "exact": {"enable_fly": False},
    "fly": {"win_len": 1, "entropy_thre": 0.1},
    "no gate": {"win_len": 2, "entropy_thre": None},
    "no window": {"win_len": 0, "entropy_thre": 0.5, "entropy_kind": "full"},
    "guarded": {
        "win_len": 1,
        "entropy_thre": None,
        "draft_ratio_thre": 0.02,
        "draft_rank_max": 5,
        "exact_first_tokens": 4,
        "exact_pattern": ["numbers", "[a-f+*/=]"],
    },
    "first places stay exact": {"win_len": 0, "entropy_thre": None, "exact_first_tokens": 20},
    "margin": {"win_len": 1, "entropy_thre": None, "margin_thre": 0.5},
    "typical": {"verification": "typical"},
    "top_k": {"verification": "top_k", "relaxed_top_k": 3},
    "accept_all": {"verification": "accept_all"},
}
# One vLLM for all cases: another rule is another verifier of its worker.
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams, TokensPrompt
from fly.models.tokenizers import Texts
from fly.speculation.rules import rule_of
from fly.vllm_plugin import options
from fly.vllm_plugin.verifier import Verifier
asked = json.load(sys.stdin)
root, k = asked["root"], asked["k"]
first = next(iter(asked["cases"].values()))
llm = LLM(f"{root}/target", dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=3,
          additional_config={"fly": {**first, "spd_k": k}, "fly_record": True},
          speculative_config={"method": "draft_model", "model": f"{root}/draft",
                              "num_speculative_tokens": k, **asked.get("drafting", {})})
runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
tokenizer = llm.get_tokenizer()
assert type(runner.rejection_sampler).__name__ == "FlySampler"
assert not runner.use_async_scheduling
for name, keys in asked["cases"].items():
    config = options.read({"fly": keys}, "t", k, "0.32.0")
    verifier = Verifier(rule_of(config), Texts(tokenizer), keeps_rounds=True)
    runner.rejection_sampler._verifier = verifier
    usual = {"temperature": 0, "max_tokens": asked["budget"], "detokenize": False}
    usual |= asked.get("sampling", {})
    params = [SamplingParams(**usual, seed=i, stop_token_ids=[257])
              for i in range(len(asked["prompts"]))]
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in asked["prompts"]]
    for output in llm.generate(prompts, params, use_tqdm=False):
        completion = output.outputs[0]
        logprobs = [list(of)[:1] for of in completion.logprobs or []]
        print("=" + json.dumps([name, list(completion.token_ids),
                                verifier.take_rounds(output.request_id), logprobs]))
"""


def pair(noise):
    target = tiny.model(seed=1, **SHAPE)
    return target, tiny.noisy_copy(target, noise)


def ask(root, cases, **more):
    asked = {"root": str(root), "k": K, "budget": BUDGET, "prompts": PROMPTS, "cases": cases}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps({**asked, **more}),
        env={**ENVIRONMENT, **ONE_PROCESS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("="):
            name, *of_request = json.loads(line[1:])
            found.setdefault(name, []).append(of_request)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    for name, model in zip(("target", "draft"), pair(NOISE)):
        model.to(torch.float32).save_pretrained(root / name)
        tiny.byte_tokenizer().save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def by_vllm(place):
    return ask(place, CASES)


def by_engine(rule, firsts, prompts=PROMPTS):
    """Records of fly's own engine, which go on from the first token of vLLM's outputs."""
    target, draft = pair(NOISE)
    texts = Texts(tiny.byte_tokenizer())
    engine = tiny.engine(
        target, tiny.drafter("model", 3, draft, eos=frozenset({EOS})), K, rule, slots=3,
        eos=frozenset({EOS}), decode=texts.decode, decode_lines=texts.decode_lines,
    )  # fmt: skip
    longer = [[*prompt, first] for prompt, first in zip(prompts, firsts)]
    return tiny.decode_all(engine, longer, budget=BUDGET - 1)


def rule(**keys):
    if "exact_first_tokens" in keys:  # one of them is in the prompt
        keys["exact_first_tokens"] -= 1
    pair_ = {"target_model_path": "t", "spd_k": K}
    return rule_of(fly_config.build({**pair_, **keys}, "test"))


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_counts_are_those_of_flys_own_engine(by_vllm, name):
    found = by_vllm[name]
    ours = by_engine(rule(**CASES[name]), [output[0] for output, *_ in found])
    texts = Texts(tiny.byte_tokenizer())
    for (output, rounds, _), record, prompt in zip(found, ours, PROMPTS):
        assert output[1:] == record.tokens
        request = Request(tuple(prompt), BUDGET)
        sequence = Sequence(request, frozenset({EOS}), StopMatcher((), texts.decode))
        replay(sequence, output, rounds, "d", lambda record: None)
        assert sequence.record(0.0).counts == record.counts
        assert sequence.record(0.0).positions == record.positions
    assert 0 < tiny.total(ours, "native_accepted") < tiny.total(ours, "drafted")
    if name == "exact":
        assert tiny.total(ours, "deferred_accepted") == 0
    else:
        assert tiny.total(ours, "deferred_accepted") > 0


def test_a_rule_that_ignores_the_exact_places_is_seen(by_vllm):
    """The mutant: the same keys without exact_first_tokens or exact_pattern."""
    left_out_by = {"guarded": "exact_pattern", "first places stay exact": "exact_first_tokens"}
    for name, left_out in left_out_by.items():
        keys = {key: value for key, value in CASES[name].items() if key != left_out}
        mutants = by_engine(rule(**keys), [output[0] for output, *_ in by_vllm[name]])
        outputs = [output[1:] for output, *_ in by_vllm[name]]
        assert outputs != [record.tokens for record in mutants]


@pytest.mark.slow
@pytest.mark.parametrize("drafting", ["greedy", "probabilistic"])
def test_sampled_requests_repeat_with_their_seeds(place, drafting):
    """vLLM 0.32's own sampler on CPUs does not repeat them, and fails on top_k."""
    exact = {"enable_fly": False}
    cases = {"exact": exact, "again": exact, "fly": {"win_len": 1, "entropy_thre": None}}
    sampling = {"temperature": 1.0, "top_k": 30, "logprobs": 1}
    found = ask(place, cases, sampling=sampling, drafting={"draft_sample_method": drafting})
    outputs = {name: [output for output, *_ in of] for name, of in found.items()}
    if drafting == "greedy":  # vLLM draws its drafts without the seeds
        assert outputs["exact"] == outputs["again"]
    assert outputs["exact"] != outputs["fly"]
    for output, rounds, logprobs in found["exact"]:
        assert len(logprobs) == len(output)
        assert any(match for line in rounds for match in line[2])
        assert not all(match for line in rounds for match in line[2])
