"""fly on vLLM's own engine, with tiny random models: pytest in the environment of .ci/vllm.sh."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: .ci/vllm.sh makes an environment")
pytestmark = pytest.mark.vllm

# A pass of the tiny models takes no time; what takes time is what vLLM does once.
OF_VLLM = "enforce_eager=True,max_model_len=256"
ENVIRONMENT = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


def fly(place, *args, model="vllm", more="", given="", fails=False):
    of_engine = OF_VLLM if model == "vllm" else "draft_policy=fixed"
    command = [
        *(sys.executable, "-m", "fly", *args, "--model", model, "--model_args"),
        f"pretrained={place / 'draft'},config_path={place / 'pair.json'},dtype=float32,{of_engine}"
        + more,
        *("--tasks", "tiny_task", "--include_path", str(place / "tasks"), *given.split()),
    ]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert bool(done.returncode) == fails, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def records(folder):
    (path,) = folder.rglob("fly_requests_*.jsonl")
    found = {line["doc_id"]: line for line in map(json.loads, path.open())}
    return dict(sorted(found.items()))


def entry(folder):
    (path,) = folder.rglob("results_*.json")
    return json.loads(path.read_text())["config"]["fly"]


@pytest.fixture(scope="module")
def compared(place):
    """Target-only and exact on vLLM, made and compared by one command; and fly's own engine."""
    printed = fly(
        place,
        "compare",
        "--modes",
        "target-only",
        "exact",
        "fly",
        "--output_path",
        str(place / "runs"),
    )
    fly(place, "run", "--log_samples", "--output_path", str(place / "hf"), model="hf",
        more=",use_sd=False")  # fmt: skip
    return printed


def test_texts_and_records_are_those_of_flys_own_engine(place, compared):
    ours = records(place / "hf")
    for mode in ("target-only", "exact"):
        theirs = records(place / "runs" / mode)
        assert theirs.keys() == ours.keys()
        for doc_id, line in theirs.items():
            for key in ("text", "output", "finish_reason", "prompt_tokens", "decoding"):
                assert line[key] == ours[doc_id][key], (mode, doc_id, key)
    assert {line["finish_reason"] for line in ours.values()} >= {"stop"}


def test_counts_are_vllms_own(place, compared):
    found = entry(place / "runs" / "exact")
    counters, stats = found["vllm"]["counters"], found["stats"]
    assert found["engine"] == "vllm"
    assert found["mode"] == "exact"
    assert stats["drafted"] == counters["num_draft_tokens"] > 0
    # vLLM counts what it accepted past an output's end
    assert 0 < stats["native_accepted"] <= counters["num_accepted_tokens"]
    assert stats["rounds"] == counters["num_drafts"]
    assert sum(counters["num_accepted_tokens_per_pos"]) == counters["num_accepted_tokens"]
    assert stats["tau"] > 1
    alone = entry(place / "runs" / "target-only")
    assert alone["stats"]["tau"] == 1
    assert alone["vllm"]["speculative_config"] is None
    for line in records(place / "runs" / "exact").values():
        assert line["emitted"] == line["native_accepted"] + line["corrections"] + line["bonus"]
        assert line["wall_seconds"] >= 0
        assert line["seconds"]["prefill"] > 0


def test_fly_verifies_by_its_plugin(place, compared):
    """With the pair's window and a theta of 0.3, counts as in fly's own engine."""
    found = entry(place / "runs" / "fly")
    stats = found["stats"]
    assert found["mode"] == "fly"
    assert "rejection_sample_method" not in found["vllm"]["speculative_config"]
    assert stats["deferred_rolled_back"] > 0
    for line in records(place / "runs" / "fly").values():
        accepted = line["native_accepted"] + line["deferred_accepted"]
        assert line["emitted"] == accepted + line["corrections"] + line["bonus"]
        assert sum(line["positions"]["accepted"]) == accepted
        assert line["sources"].get("draft_model", {}).get("accepted", 0) == accepted


def test_compare_says_that_it_compares_engines(place, compared):
    assert "exact" in compared
    assert "compares engines" not in compared
    command = [sys.executable, "-m", "fly", "compare", f"hf={place / 'hf'}"]
    command.append(f"vllm={place / 'runs' / 'target-only'}")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "vllm against hf compares engines (engine: fly and vLLM " in done.stdout


def test_fly_is_refused_by_a_vllm_that_has_none(place):
    from vllm.config import SpeculativeConfig

    if hasattr(SpeculativeConfig, "fly_window_size"):
        pytest.skip("this vLLM has FLy")
    said = fly(place, "run", more=",vllm_verification=vllm", fails=True)
    assert said.splitlines()[-1].startswith("fly: error: verification=fly: vLLM ")
    assert "has no FLy: upgrade it to 0.33 or later" in said


def test_what_nobody_knows_is_refused(place):
    said = fly(place, "run", more=",tensor_paralel_size=2,use_sd=False", fails=True)
    assert "unknown model_args key 'tensor_paralel_size'" in said
    assert "did you mean 'tensor_parallel_size'" in said
    said = fly(place, "run", more=",data_parallel_size=2,use_sd=False", fails=True)
    assert "data_parallel_size=2: fly drives one engine" in said


@pytest.mark.slow
def test_a_run_cut_short_goes_on(place, compared):
    """The last record is taken away, as after a kill: only its request is decoded again."""
    out = place / "resumed"
    given = f"--log_samples --output_path {out}"
    fly(place, "run", more=",use_sd=False", given=given)
    whole = records(out)
    (path,) = out.rglob("fly_requests_*.jsonl")
    (manifest,) = out.rglob("fly_run_*.json")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    state = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**state, "finished": False, "results": None}))
    for file in [*out.rglob("results_*.json"), *out.rglob("samples_*.jsonl")]:
        file.unlink()
    command = [sys.executable, "-m", "fly", "run", "--resume", str(out)]
    subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert entry(out)["resumed"]["requests"] == len(whole) - 1
    again = records(out)
    assert [line["text"] for line in again.values()] == [line["text"] for line in whole.values()]


@pytest.mark.slow
def test_sampling_repeats_with_the_seed(place):
    """Its own random numbers, but the same ones in every run of the target alone."""
    texts = []
    for number in range(2):
        out = place / f"sampled-{number}"
        sampled = "--gen_kwargs do_sample=True,temperature=1.0,top_k=0"
        given = f"--log_samples --output_path {out} {sampled}"
        fly(place, "run", more=",use_sd=False", given=given)
        texts.append([line["text"] for line in records(out).values()])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


@pytest.mark.slow
def test_loglikelihoods_are_vllms(place, compared):
    from tests.killing import CHOICE

    (place / "tasks" / "tiny_choice.yaml").write_text(CHOICE)
    said = fly(place, "run", more=",use_sd=False", given="--tasks tiny_choice")
    assert "tiny_choice" in said
