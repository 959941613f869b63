"""fly's rules inside vLLM against fly's own engine: texts, counts and times of the same settings.

    python benchmarks/vllm_verification.py vllm --output out    # in the environment of .ci/vllm.sh
    python benchmarks/vllm_verification.py hf --output out
    python benchmarks/vllm_verification.py compare --output out

vLLM's prefill gives an output's first token, and its rounds begin behind it; fly's engine begins
with a round. So `hf` decodes from each prompt and vLLM's first token: then both draft from the same
places, and in float32 all tokens and counts must agree. `exact by vLLM` is vLLM's own sampler in
the same process; `mutant` is the guarded rule that ignores exact_first_tokens, and must differ.
Each engine loads the models once. The lines in --output have the seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from fly import config as fly_config
from fly.paths import data_dir
from fly.speculation.sequence import Request

COUNTS = ("rounds", "drafted", "native_accepted", "deferred_accepted", "deferred_rolled_back",
          "corrections", "bonus", "emitted")  # fmt: skip


def settings(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Keys beside the pair's, by setting."""
    guarded = fly_config.read_file(args.guarded)
    keys = ("win_len", "entropy_thre", "draft_ratio_thre", "draft_rank_max", "exact_first_tokens",
            "exact_pattern")  # fmt: skip
    guarded = {key: guarded[key] for key in keys if key in guarded}
    return {
        "exact": {"enable_fly": False, "vllm_verification": "fly"},
        "exact by vLLM": {"enable_fly": False},
        "fly": {},
        "guarded": guarded,
        "mutant": {**guarded, "exact_first_tokens": 0},
    }


def load(args: argparse.Namespace) -> Any:
    """The engine, made to keep its records."""
    keys = {"use_ngram": False, "draft_policy": "fixed", "draft_quantization": "none",
            "spd_k": args.spd_k}  # fmt: skip
    of_engine: dict[str, Any] = {"batch_size": args.batch_size, "dtype": args.dtype}
    if args.engine == "vllm":
        from fly.harness.vllm import FlyVLLM as Engine

        of_engine |= {"max_model_len": args.max_model_len, "enforce_eager": args.eager,
                      "gpu_memory_utilization": args.memory}  # fmt: skip
    else:
        from fly.harness.hf import FlyLM as Engine

    class Keeping(Engine):  # type: ignore[misc, valid-type]
        kept: dict[int, Any]
        firsts: dict[int, int] | None = None

        def keep(self, instance: Any, text: str, record: Any, log: Any) -> None:
            self.kept[instance.doc_id] = record

        def build_requests(self, instances: Any) -> list[Request]:
            wanted: list[Request] = super().build_requests(instances)
            if self.firsts is None:
                return wanted
            return [
                replace(w, prompt=(*w.prompt, self.firsts[w.tag.doc_id]), budget=w.budget - 1)
                for w in wanted
            ]

    return Keeping(config_path=args.config, **keys, **of_engine)


def use_rule(lm: Any, config: fly_config.FlyConfig) -> None:
    """Give vLLM's worker the rule of another setting; None of its other state depends on it."""
    from fly.models.tokenizers import Texts
    from fly.speculation.rules import rule_of
    from fly.vllm_plugin.verifier import Verifier

    core = lm.model.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    if not hasattr(type(lm), "of_fly"):
        type(lm).of_fly = runner.rejection_sampler
    lm.by_fly = config.rule != "exact" or config.vllm_verification == "fly"
    runner.rejection_sampler = lm.of_fly if lm.by_fly else lm.of_fly._own
    lm.of_fly._verifier = Verifier(rule_of(config), Texts(lm.tokenizer), keeps_rounds=True)
    core.model_executor.driver_worker.worker.take_fly_rounds = lm.of_fly._verifier.take_rounds


def run(args: argparse.Namespace) -> None:
    lm = load(args)
    own = lm.fly_config.model_dump(exclude_defaults=True)
    for name in args.settings or settings(args):
        if args.engine == "hf" and name == "exact by vLLM":
            continue
        keys = settings(args)[name]
        if args.engine == "hf" and not args.from_prompts and "exact_first_tokens" in keys:
            # vLLM's first token is one of them, and here the prompt's last
            keys["exact_first_tokens"] = max(0, keys["exact_first_tokens"] - 1)
        config = fly_config.build({**own, **keys}, name)
        other = lm.with_config(config)
        if args.engine == "vllm":
            use_rule(other, config)
        elif not args.from_prompts:
            lines = (args.output / f"vllm-{name.replace(' ', '-')}.jsonl").read_text().splitlines()
            firsts = {line["doc_id"]: line["tokens"][0] for line in map(json.loads, lines)}
            type(other).firsts = firsts
        other.kept = {}
        start = time.perf_counter()
        simple_evaluate(
            model=other,
            tasks=[args.task],
            limit=args.limit,
            task_manager=TaskManager(include_path=str(data_dir("lm_eval_tasks"))),
            apply_chat_template=True,
            gen_kwargs={"max_gen_toks": args.max_gen_toks, "do_sample": False},
            predict_only=True,
            confirm_run_unsafe_code=True,  # nothing is scored, so nothing is run
            bootstrap_iters=0,
        )
        wall = time.perf_counter() - start
        engine = f"{args.engine}-from-prompts" if args.from_prompts else args.engine
        path = args.output / f"{engine}-{name.replace(' ', '-')}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for doc_id, record in sorted(other.kept.items()):
                line = {"doc_id": doc_id, "tokens": record.tokens, **record.as_dict()}
                file.write(json.dumps(line) + "\n")
        stats = other.stats.as_dict()
        print(json.dumps({"setting": name, "wall": round(wall, 1), "tau": stats["tau"],
                          "seconds": stats["seconds"],
                          **{key: stats[key] for key in COUNTS}}), flush=True)  # fmt: skip


def compare(args: argparse.Namespace) -> None:
    for path in sorted(args.output.glob("hf*.jsonl")):
        name = path.stem.removeprefix("hf-").removeprefix("from-prompts-")
        of_vllm = args.output / f"vllm-{name}.jsonl"
        if not of_vllm.is_file():
            continue
        ours, theirs = (
            {line["doc_id"]: line for line in map(json.loads, file.read_text().splitlines())}
            for file in (path, of_vllm)
        )
        skip = 0 if "from-prompts" in path.stem else 1
        pairs = [(ours[key], theirs[key]) for key in ours]
        equal = sum(our["tokens"] == their["tokens"][skip:] for our, their in pairs)
        sums = {
            key: (sum(our[key] for our, _ in pairs), sum(their[key] for _, their in pairs))
            for key in COUNTS
        }
        print(f"{path.stem}: {equal} of {len(pairs)} texts equal;", json.dumps(sums))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=("vllm", "hf", "compare"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--config", default="qwen2.5-coder.json")
    parser.add_argument("--guarded", default="qwen2.5-coder-guarded.json")
    parser.add_argument("--settings", nargs="*")
    parser.add_argument("--task", default="humaneval_instruct")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max_gen_toks", type=int, default=160)
    parser.add_argument("--spd_k", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max_model_len", type=int, default=1024)
    parser.add_argument("--memory", type=float, default=0.7, help="vllm: share of it")
    parser.add_argument("--eager", action="store_true", help="vllm: nothing is compiled")
    parser.add_argument(
        "--from_prompts", action="store_true", help="hf: from the prompts alone, as --model hf"
    )
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    compare(args) if args.engine == "compare" else run(args)


if __name__ == "__main__":
    main()
