"""vLLM as a peer of throughput.py: `VLLM_PYTHON vllm_peer.py SPEC.json`, in vLLM's own venv.

Imports vLLM and the standard library, for the peer fly_vllm fly too. Same contract as peers.py:
load, one short warm-up, all prompts against the clock, one JSON result with the token ids. Those of
vLLM's variables that the environment sets stay as they are.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def prepare_environment(spec: dict[str, Any]) -> None:
    """vLLM on a CPU with as many threads as the other peers; before vLLM is imported.

    By default vLLM keeps one core for its scheduler process, half of a two-core machine. In one
    process it needs none, and its threads are OpenMP's.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["OMP_NUM_THREADS"] = str(spec["threads"])
    if spec["device"] == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


class FlyOnVLLM:
    """`fly --model vllm`, exact: what fly adds to vLLM with a draft model."""

    def __init__(self, spec: dict[str, Any], longest: int) -> None:
        from fly.harness.vllm import FlyVLLM

        kept = self.kept = {}

        class Keeping(FlyVLLM):
            def keep(self, instance: Any, text: str, record: Any, log: Any) -> None:
                kept[instance.doc_id] = record

        self.lm = Keeping(
            config_path=spec["config"],
            dtype=spec["dtype"] or "auto",
            batch_size=spec["batch_size"],
            max_model_len=longest,
            target_model_path=spec["target"],
            pretrained=spec["draft"],
            **spec["overrides"],
        )

    def generate(self, prompts: list[dict[str, Any]]) -> list[list[int]]:
        from lm_eval.api.instance import Instance

        requests = [
            Instance(
                request_type="generate_until",
                doc={},
                arguments=(prompt["text"], dict(prompt["gen_kwargs"])),
                idx=0,
                metadata=("throughput", prompt["index"], 1),
            )
            for prompt in prompts
        ]
        self.lm.generate_until(requests, disable_tqdm=True)
        return [list(self.kept[prompt["index"]].tokens) for prompt in prompts]


def load(spec: dict[str, Any], prompts: list[dict[str, Any]]) -> Any:
    longest = max(len(prompt["ids"]) + prompt["budget"] for prompt in prompts)
    longest = 64 * (longest // 64 + 2)  # room for the last drafts
    if spec["peer"] == "fly_vllm":
        return FlyOnVLLM(spec, longest)
    from vllm import LLM

    extra: dict[str, Any] = {}
    if spec["peer"] == "vllm_draft":
        if spec["draft"] is None:
            raise ValueError("the configuration names no draft model")
        extra["speculative_config"] = {
            "method": "draft_model",
            "model": spec["draft"],
            "num_speculative_tokens": 5,
        }
    return LLM(
        model=spec["target"],
        dtype=spec["dtype"] or "auto",
        max_num_seqs=spec["batch_size"],
        max_model_len=longest,
        **extra,
    )


def generate(llm: Any, prompts: list[dict[str, Any]], eos_ids: list[int]) -> list[list[int]]:
    if isinstance(llm, FlyOnVLLM):
        return llm.generate(prompts)
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            temperature=0.0,
            max_tokens=prompt["budget"],
            stop=prompt["stops"],
            stop_token_ids=eos_ids,
        )
        for prompt in prompts
    ]
    inputs = [{"prompt_token_ids": prompt["ids"]} for prompt in prompts]
    return [list(r.outputs[0].token_ids) for r in llm.generate(inputs, sampling, use_tqdm=False)]


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    prepare_environment(spec)
    environment = {key: value for key, value in os.environ.items() if key.startswith("VLLM_")}
    import vllm

    data = json.loads(Path(spec["prompts"]).read_text(encoding="utf-8"))
    start = time.perf_counter()
    llm = load(spec, [data["warm_up"], *data["prompts"]])
    loaded = time.perf_counter()
    generate(llm, [data["warm_up"]], spec["eos_ids"])
    warm = time.perf_counter()
    rows = generate(llm, data["prompts"], spec["eos_ids"])
    seconds = time.perf_counter() - warm
    return {
        "seconds": seconds,
        "load_seconds": loaded - start,
        "warm_up_seconds": warm - loaded,
        "outputs": [{"ids": row, "seconds": None, "facts": {}} for row in rows],
        "threads": spec["threads"],
        "versions": {"vllm": vllm.__version__, "python": sys.version.split()[0]},
        "environment": environment,
    }


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        result = measure(spec)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        failure = {"error": f"{type(error).__name__}: {lines[0][:300]}"}
        Path(spec["result"]).write_text(json.dumps(failure), encoding="utf-8")
        raise
    Path(spec["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
