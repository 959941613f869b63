"""Whole-run generation throughput of fly, lm-eval's hf, transformers' own methods, vLLM and
llama.cpp.

    python benchmarks/throughput.py --config qwen2.5-coder.json --limit 12 --max_gen_toks 160

lm-eval builds the prompts once; every peer decodes the same ones under the same token budget, each
peer, batch size and round in a process of its own, with the rounds interleaved and rotated so that
a machine's drift hits all alike. Speed is the tokens that count (up to EOS, stop string or budget,
by one rule for all) over the seconds of prefill and decoding; loading, one short warm-up and
compilation are reported apart. X/Y@1 compares batch size 1, @best each one's best batch size, @same
the best common batch size above 1. The last line printed is one JSON object with the ratios of
medians; raw records, logs and the prompts go to --output.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from exported import as_folder
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences
from lm_eval.tasks import TaskManager
from peers import DEFAULT, LEVERS, LLAMA_CPP, PEERS, VLLM, Fly, Prompt, Spec
from provenance import commit
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from fly import config as fly_config
from fly.errors import FlyError
from fly.execution.device import device_facts
from fly.models.sources import resolve_source
from fly.models.tokenizers import eos_token_ids
from fly.paths import data_dir
from fly.runs import environment

Run = tuple[str, int]  # peer, batch size

# ------------------------------------------------------------------------------ prompts


class Recorder(HFLM):
    """An HFLM of the target without weights: lm-eval's prompts, encoded as HFLM encodes them."""

    def __init__(self, path: str) -> None:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        try:
            model.generation_config = GenerationConfig.from_pretrained(path)
        except OSError:
            pass  # a checkpoint need not have one
        tokenizer = AutoTokenizer.from_pretrained(path)
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=1)
        self.prompts: list[Prompt] = []

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        self.prompts = [
            self.prompt(index, *instance.args) for index, instance in enumerate(requests)
        ]
        return [""] * len(requests)

    def prompt(self, index: int, text: str, gen_kwargs: dict[str, Any]) -> Prompt:
        budget = gen_kwargs["max_gen_toks"]
        ids, _ = self.tok_batch_encode(
            [text], left_truncate_len=self.max_length - budget, truncation=self.truncation
        )
        stops = handle_stop_sequences(gen_kwargs.get("until"), eos=None)
        return Prompt(index, text, ids[0].tolist(), gen_kwargs, stops, budget)

    def warm_up(self) -> Prompt:
        """8 tokens after the first prompt, which opens otherwise: no peer may keep its prefix."""
        first = self.prompts[0]
        return self.prompt(-1, f"Warm-up. {first.text}", {**first.gen_kwargs, "max_gen_toks": 8})


def record_prompts(recorder: Recorder, args: argparse.Namespace) -> None:
    simple_evaluate(
        model=recorder,
        tasks=[args.task],
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        task_manager=TaskManager(include_path=str(data_dir("lm_eval_tasks"))),
        apply_chat_template=args.chat,
        fewshot_as_multiturn=args.chat,
        gen_kwargs={"max_gen_toks": args.max_gen_toks, "do_sample": False},
        predict_only=True,
        confirm_run_unsafe_code=True,  # nothing is scored, so nothing is run
        bootstrap_iters=0,
    )
    if not recorder.prompts:
        sys.exit(f"--task {args.task}: it generates nothing: choose a generate_until task")


# ------------------------------------------------------------------------------ counting


@dataclass(frozen=True)
class Counted:
    """The tokens of an output that count, and their text without EOS and stop string."""

    ids: list[int]
    text: str
    finish_reason: str


def count(
    ids: list[int], prompt: Prompt, eos_ids: frozenset[int], decode: Callable[[list[int]], str]
) -> Counted:
    """Cut an output at the budget, after the first EOS, and after the first stop string.

    One rule for every peer: padding and what a peer decoded past its end do not count.
    """
    ids = ids[: prompt.budget]
    reason = "length" if len(ids) == prompt.budget else "unfinished"
    end = next((index for index, token in enumerate(ids) if token in eos_ids), None)
    if end is not None:
        ids, reason = ids[: end + 1], "eos"
    body = ids[:-1] if reason == "eos" else ids
    text = decode(body)
    if any(stop in text for stop in prompt.stops):
        kept = next(
            size
            for size in range(1, len(body) + 1)
            if any(stop in decode(body[:size]) for stop in prompt.stops)
        )
        ids, reason = body[:kept], "stop"
        text = min((text.split(stop)[0] for stop in prompt.stops), key=len)
    return Counted(ids, text, reason)


# ------------------------------------------------------------------------------ running


@dataclass
class Bench:
    """Runs the workers and keeps their records; knows what all of them share."""

    args: argparse.Namespace
    specs: dict[Run, Spec]
    prompts: list[Prompt]
    eos_ids: frozenset[int]
    decode: Callable[[list[int]], str]
    records: dict[Run, list[dict[str, Any]]] = field(default_factory=dict)
    failures: dict[Run, str] = field(default_factory=dict)

    def run_all(self) -> None:
        """Interleaved rounds. A peer that failed is not started again."""
        runs = list(self.specs)
        for turn in range(self.args.rounds):
            shift = turn * -(-len(runs) // self.args.rounds)
            for run in runs[shift:] + runs[:shift]:
                if run not in self.failures:
                    self.one(run, turn + 1)

    def one(self, run: Run, turn: int) -> None:
        peer, batch_size = run
        result = self.spawn(run, turn)
        record: dict[str, Any] = {"peer": peer, "batch_size": batch_size, "round": turn}
        label = f"round {turn}/{self.args.rounds}, {peer}@{batch_size}"
        if "error" in result:
            record["error"] = self.failures[run] = result["error"]
            print(f"{label}: failed: {result['error']}", flush=True)
        else:
            record |= self.judge(result)
            self.records.setdefault(run, []).append(record)
            print(
                f"{label}: {record['tok_s']:.2f} tok/s ({record['tokens']} tokens in "
                f"{record['seconds']:.1f} s; loaded in {record['load_seconds']:.0f} s)",
                flush=True,
            )
        with open(self.args.output / "records.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def spawn(self, run: Run, turn: int) -> dict[str, Any]:
        """The worker's result, or {"error": one line}."""
        name = f"{run[0]}@{run[1]}-round{turn}"
        log = self.args.output / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        own = Path(__file__).parent
        script: list[str | Path] = [sys.executable, own / "peers.py"]
        if run[0] in VLLM:
            script = [self.args.with_vllm, own / "vllm_peer.py"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.args.threads)}
        with tempfile.TemporaryDirectory() as folder, open(log, "w", encoding="utf-8") as output:
            spec, result = Path(folder, "spec.json"), Path(folder, "result.json")
            values = {**asdict(self.specs[run]), "result": str(result)}
            spec.write_text(json.dumps(values), encoding="utf-8")
            process = subprocess.Popen(
                [*script, spec],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                code = process.wait(self.args.timeout)
            except subprocess.TimeoutExpired:
                return {"error": f"not done after --timeout {self.args.timeout} s"}
            finally:
                _end(process)
            if result.is_file():
                return json.loads(result.read_text(encoding="utf-8"))
        return {"error": f"exit code {code}, no result: see logs/{log.name}"}

    def judge(self, result: dict[str, Any]) -> dict[str, Any]:
        """A worker's result with its tokens counted."""
        requests = []
        for prompt, output in zip(self.prompts, result.pop("outputs")):
            counted = count(output["ids"], prompt, self.eos_ids, self.decode)
            requests.append(
                {
                    "index": prompt.index,
                    "prompt_tokens": len(prompt.ids),
                    "tokens": len(counted.ids),
                    "returned_tokens": len(output["ids"]),
                    "finish_reason": counted.finish_reason,
                    "seconds": output["seconds"],
                    **({"facts": output["facts"]} if output["facts"] else {}),
                    "ids": counted.ids,
                    "text": counted.text,
                }
            )
        tokens = sum(request["tokens"] for request in requests)
        compiling = result.get("stats", {}).get("seconds", {}).get("compile", 0.0)
        seconds = result["seconds"] - compiling
        decodes = "decode_seconds" in result
        return {
            **result,
            "tokens": tokens,
            **({"decode_tok_s": tokens / result["decode_seconds"]} if decodes else {}),
            "seconds": seconds,
            "compile_seconds": compiling + result.get("prepare_seconds", 0.0),
            "tok_s": tokens / seconds,
            "requests": requests,
        }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of a worker behind: vLLM starts processes of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(10)
        except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            continue


# ------------------------------------------------------------------------------ results

# `vllm` here is the better of vllm and vllm_draft, `llama_cpp` the best of its settings.
_GROUPS = {"vllm": ("vllm", "vllm_draft"), "llama_cpp": tuple(LLAMA_CPP)}


def pairs() -> list[tuple[str, str]]:
    others = ("assisted", "prompt_lookup", "target_only", "vllm", "llama_cpp")
    hidden = {"hf", *(name for group in _GROUPS.values() for name in group)} - {*_GROUPS}
    return [
        *((name, "hf") for name in (*PEERS, *_GROUPS) if name not in hidden),
        ("target_only", "llama_cpp"),
        *((name, other) for name in ("fly", "fly_across", "exact") for other in others),
        *((name, "hf_float32") for name in ("target_only", "exact", "fly", "fly_across")),
        *(("fly", lever) for lever in LEVERS),
        *(("fly_vllm", name) for name in ("vllm", "vllm_draft")),
    ]


def speed_at(speeds: dict[Run, float], name: str, batch_size: int) -> float | None:
    found = [speeds.get((peer, batch_size)) for peer in _GROUPS.get(name, (name,))]
    return max((speed for speed in found if speed is not None), default=None)


def best_speed(speeds: dict[Run, float], failed: set[Run], name: str) -> float | None:
    """Over the batch sizes run; None if one of them failed: it might have been the best."""
    broken = {peer for peer, _ in failed}
    wanted = {peer for peer in _GROUPS.get(name, (name,)) if peer not in broken}
    return max((speed for (peer, _), speed in speeds.items() if peer in wanted), default=None)


def ratios(speeds: dict[Run, float], failed: set[Run]) -> dict[str, float]:
    """X/Y@1, X/Y@best, and fly/target_only@same, where both sides were measured."""
    found: dict[str, float] = {}

    def add(name: str, above: float | None, below: float | None) -> None:
        if above is not None and below is not None:
            found[name] = round(above / below, 3)

    for above, below in dict.fromkeys(pairs()):
        add(f"{above}/{below}@1", speed_at(speeds, above, 1), speed_at(speeds, below, 1))
        add(
            f"{above}/{below}@best",
            best_speed(speeds, failed, above),
            best_speed(speeds, failed, below),
        )
    common = [
        speeds["fly", size] / speeds["target_only", size]
        for peer, size in speeds
        if peer == "fly" and size > 1 and ("target_only", size) in speeds
    ]
    add("fly/target_only@same", max(common, default=None), 1.0)
    return found


def time_ratios(done: dict[Run, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Seconds of hf, and of fly's target-only, over those of each peer, for the same documents at
    the same batch size; `decode`: without prefill, of fly's own modes."""
    seconds = {
        run: statistics.median(r["seconds"] for r in records) for run, records in done.items()
    }
    decode = {
        run: statistics.median(r["decode_seconds"] for r in records)
        for run, records in done.items()
        if all("decode_seconds" in r for r in records)
    }
    found: dict[str, dict[str, float]] = {}
    for peer, size in done:
        row = found[f"{peer}@{size}"] = {}
        for other in ("hf", "hf_float32", "target_only"):
            if (other, size) in seconds:
                row[other] = round(seconds[other, size] / seconds[peer, size], 3)
        if (peer, size) in decode and ("target_only", size) in decode:
            row["target_only decode"] = round(decode["target_only", size] / decode[peer, size], 3)
    return found


def decode_ratios(done: dict[Run, list[dict[str, Any]]]) -> dict[str, float]:
    """Tokens per second of decoding, without prefill, of fly's modes over llama.cpp's best."""
    speeds = {
        run: statistics.median(r["decode_tok_s"] for r in records)
        for run, records in done.items()
        if all("decode_tok_s" in r for r in records)
    }
    best = speed_at(speeds, "llama_cpp", 1)
    return {
        f"{peer}/llama_cpp@1 decode": round(speed / best, 3)
        for (peer, size), speed in speeds.items()
        if best is not None and size == 1 and peer not in LLAMA_CPP
    }


def _spread(records: list[dict[str, Any]], key: str) -> dict[str, float]:
    values = [record[key] for record in records]
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in found.items()}


def _texts(record: dict[str, Any]) -> list[str]:
    return [request["text"] for request in record["requests"]]


def summarize(bench: Bench, facts: dict[str, Any]) -> dict[str, Any]:
    """What summary.json holds; `facts` come first in it."""
    done = {run: bench.records[run] for run in bench.specs if run in bench.records}
    alone = sorted(run for run in done if run[0] == "target_only")
    reference = _texts(done[alone[0]][0]) if alone else None
    peers: dict[str, Any] = {}
    for (peer, size), records in done.items():
        last = records[-1]
        same = None
        if reference is not None:
            same = sum(text == other for text, other in zip(_texts(last), reference))
        peers[f"{peer}@{size}"] = {
            "rounds": len(records),
            "tok_s": _spread(records, "tok_s"),
            "decode_tok_s": _spread(records, "decode_tok_s") if "decode_tok_s" in last else None,
            "seconds": _spread(records, "seconds"),
            "load_seconds": _spread(records, "load_seconds"),
            "compile_seconds": _spread(records, "compile_seconds"),
            "tokens": last["tokens"],
            "finish_reasons": dict(Counter(r["finish_reason"] for r in last["requests"])),
            "tau": last.get("stats", {}).get("tau"),
            "texts_equal_to_target_only": same,
            "dtype": last.get("dtype"),
            "threads": last["threads"],
        }
    versions = dict(environment.versions())
    for records in done.values():
        versions |= {key: value for key, value in records[0]["versions"].items() if key == "vllm"}
    speeds = {
        run: statistics.median(record["tok_s"] for record in records)
        for run, records in done.items()
        if run not in bench.failures
    }
    return {
        **facts,
        "versions": versions,
        "peers": peers,
        "failures": {f"{peer}@{size}": why for (peer, size), why in bench.failures.items()},
        "ratios": ratios(speeds, set(bench.failures))
        | decode_ratios({run: row for run, row in done.items() if run not in bench.failures}),
        "time_ratios": time_ratios(done),
    }


def print_table(summary: dict[str, Any]) -> None:
    peers, problems = summary["peers"], summary["problems"]
    base = peers.get("hf@1", {}).get("tok_s", {}).get("median")
    print(f"\n{'peer@batch':22} {'tok/s':>7}  {'min-max':15} {'x hf@1':>6} {'tau':>5}", end=" ")
    print(f"{'tokens':>6} {'same text':>9}  ended by")
    for name, row in peers.items():
        speed, tau, same = row["tok_s"], row["tau"], row["texts_equal_to_target_only"]
        times = f"{speed['median'] / base:.2f}" if base else "-"
        spread = f"{speed['min']:.2f}-{speed['max']:.2f}"
        ends = ", ".join(f"{key} {value}" for key, value in sorted(row["finish_reasons"].items()))
        print(
            f"{name:22} {speed['median']:7.2f}  {spread:15} {times:>6} "
            f"{'-' if tau is None else f'{tau:.2f}':>5} {row['tokens']:6} "
            f"{'-' if same is None else f'{same}/{problems}':>9}  {ends}"
        )
    for name, why in summary["failures"].items():
        print(f"{name:22} failed: {why}")
    print("\ntime x, the same documents: seconds of ... over the peer's")
    for name, times in summary["time_ratios"].items():
        print(f"{name:22} " + ", ".join(f"{other} {value:.2f}" for other, value in times.items()))
    print()
    for name, value in summary["ratios"].items():
        print(f"{name:34} {value:.2f}")


# ------------------------------------------------------------------------------ command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0] if __doc__ else None,
        epilog=f"peers: {', '.join(PEERS)}",
    )
    parser.add_argument("--config", default="qwen2.5-coder.json", help="the pair's JSON")
    parser.add_argument("--task", default="humaneval_instruct", help="e.g. gsm8k_cot")
    parser.add_argument("--num_fewshot", type=int, help="default: the task's own")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="apply the chat template; default: if the task's name says instruct",
    )
    parser.add_argument("--limit", type=int, default=12, help="problems")
    parser.add_argument("--max_gen_toks", type=int, default=160, help="budget per request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 6])
    parser.add_argument(
        "--peers", nargs="+", choices=list(PEERS), metavar="PEER", help=f"of {', '.join(PEERS)}"
    )
    parser.add_argument(
        "--levers",
        nargs="*",
        choices=list(LEVERS),
        metavar="LEVER",
        help=f"also fly with one lever off; all if none is named: {', '.join(LEVERS)}",
    )
    parser.add_argument(
        "--with-vllm", metavar="PYTHON", help="also vLLM, through its venv's interpreter"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="default: the checkpoint's")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--timeout", type=float, default=7200, help="seconds per process")
    parser.add_argument("--output", type=Path, help="folder of the raw records")
    args = parser.parse_args(argv)
    if args.chat is None:
        args.chat = "instruct" in args.task
    if args.output is None:
        stamp = time.strftime("%Y-%m-%d-%H%M%S")
        args.output = Path(__file__).parent / "results" / f"{stamp}-throughput-{args.task}"
    for name in ("limit", "max_gen_toks", "rounds", "threads", "batch_sizes"):
        value = getattr(args, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            parser.error(f"--{name} {value}: must be at least 1")
    args.peers = chosen_peers(args)
    return args


def chosen_peers(args: argparse.Namespace) -> list[str]:
    """The peers to run, in the registry's order; refuses what cannot run."""
    wanted = set(args.peers or DEFAULT)
    if args.levers is not None:
        wanted |= set(args.levers or LEVERS)
    if args.with_vllm and not wanted & set(VLLM):
        wanted |= set(VLLM)
    if wanted & set(VLLM) and not args.with_vllm:
        sys.exit("--peers vllm: give --with-vllm the path of the Python that has vLLM installed")
    if wanted & set(LLAMA_CPP) and not os.environ.get("LLAMA_SERVER"):
        sys.exit("--peers llama_cpp: set LLAMA_SERVER=$(.ci/llama_cpp.sh)")
    known = fly_config.FlyConfig.model_fields
    for name in PEERS:
        for key in PEERS[name].overrides:
            if name in wanted and key not in known:
                sys.exit(f"{name}: this fly's configuration has no key {key!r}: leave it out")
    return [name for name in PEERS if name in wanted]


def prepare(args: argparse.Namespace, config: fly_config.FlyConfig) -> Bench:
    """Prompts built and written, and one spec per peer and batch size."""
    sources = {"target": resolve_source(config.target_model_path, "target_model_path")}
    if config.draft_model_path is not None:
        sources["draft"] = resolve_source(config.draft_model_path, "draft_model_path")
    ours = {name for name in PEERS if PEERS[name].load is Fly} | set(LLAMA_CPP)
    with_weights = not ours.issuperset(args.peers)
    folders = {role: as_folder(source, with_weights) for role, source in sources.items()}
    recorder = Recorder(folders["target"])
    record_prompts(recorder, args)
    eos_ids = eos_token_ids(recorder.model, recorder.tokenizer)
    if (args.output / "records.jsonl").exists():
        sys.exit(f"--output {args.output}: holds the records of a run: choose another folder")
    args.output.mkdir(parents=True, exist_ok=True)
    prompts = args.output / "prompts.json"
    data = {
        "warm_up": asdict(recorder.warm_up()),
        "prompts": [asdict(prompt) for prompt in recorder.prompts],
    }
    prompts.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    specs = {
        (name, size): Spec(
            peer=name,
            batch_size=size,
            config=args.config,
            overrides=PEERS[name].overrides,
            target=folders["target"],
            draft=folders.get("draft"),
            gguf={role: str(source.file) for role, source in sources.items() if source.file},
            dtype=PEERS[name].dtype or args.dtype,
            device=args.device,
            threads=args.threads,
            eos_ids=sorted(eos_ids),
            prompts=str(prompts.resolve()),
            result="",
        )
        for name in args.peers
        for size in sorted(set(args.batch_sizes))
        if size == 1 or PEERS[name].batches
    }
    tokenizer: Any = recorder.tokenizer
    decode: Callable[[list[int]], str] = tokenizer.decode
    return Bench(args, specs, recorder.prompts, eos_ids, decode)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    try:
        config = fly_config.load(args.config)
        bench = prepare(args, config)
    except FlyError as error:
        sys.exit(str(error))
    arguments = {key: value for key, value in vars(args).items() if key != "output"}
    facts = {
        "task": args.task,
        "problems": len(bench.prompts),
        "prompt_tokens": sum(len(prompt.ids) for prompt in bench.prompts),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": commit(),
        "arguments": {**arguments, "with_vllm": bool(args.with_vllm)},
        "config": config.model_dump(),
        "device": device_facts(torch.device(args.device)),
    }
    try:
        bench.run_all()
    except KeyboardInterrupt:
        print("interrupted: the finished records count", flush=True)
    summary = summarize(bench, facts)
    text = json.dumps(summary, indent=1, ensure_ascii=False)
    (args.output / "summary.json").write_text(text + "\n", encoding="utf-8")
    print_table(summary)
    print(f"\nrecords: {args.output}")
    print(json.dumps({key: summary[key] for key in ("ratios", "time_ratios")}))


if __name__ == "__main__":
    main()
