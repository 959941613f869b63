"""Verification rules side by side on one pair: answers kept, tau, tokens per draft token, time x.

    python benchmarks/verification.py --config qwen2.5-coder.json --limit 60 --batch_size 8 \\
        --output benchmarks/results/verification

Documents run in chunks, every setting on each chunk in rotated order, in one process. Records are
appended to --output after each chunk, so a run that is cut short goes on with the same command.
Speed is only compared over chunks that both settings ran. `--report` prints the table of what
is there and runs nothing. The last line printed is one JSON object.

Settings named bits_* are exact verification under `batch_invariant`, to be compared text by text:

    python benchmarks/verification.py --settings bits_target_only bits_cascade_k8_at1 \\
        --baseline bits_target_only --limit 164 --tasks humaneval_instruct --output FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provenance import commit

SAMPLED = "do_sample=True,temperature=1.0,top_k=0"
ACROSS = {"defer_across_rounds": True}
NO_ENTROPY = {"entropy_thre": None}
# exp(-1/8): logits between 16 and 32 lie 1/8 apart in bfloat16, so that the target's own arithmetic
# does not tell such tokens apart
ONE_STEP = {**ACROSS, **NO_ENTROPY, "draft_ratio_thre": 0.88, "draft_rank_max": 2}
NEAR = {**ACROSS, **NO_ENTROPY, "draft_ratio_thre": 0.3, "draft_rank_max": 2}
TIE = {**NEAR, "draft_ratio_thre": 0.6}
SETTINGS: dict[str, dict[str, Any]] = {
    "target_only": {"use_sd": False},
    "exact_k5": {"spd_k": 5, "enable_fly": False},
    "exact_k8": {"spd_k": 8, "enable_fly": False},
    "fly_k8": {"spd_k": 8},
    "fly_k15": {"spd_k": 15},
    "across_k4": {"spd_k": 4, **ACROSS},
    "across_k6": {"spd_k": 6, **ACROSS},
    "across_k8": {"spd_k": 8, **ACROSS},
    "margin_k8": {"spd_k": 8, **ACROSS, **NO_ENTROPY, "margin_thre": 0.2},
    "ratio_k8": {"spd_k": 8, **NEAR},
    "typical": {"spd_k": 8, "verification": "typical"},
    "one_step_k5": {"spd_k": 5, **ONE_STEP},
    "tie_k5": {"spd_k": 5, **TIE},
    "tie_k8": {"spd_k": 8, **TIE},
    "top_k": {"spd_k": 8, "verification": "top_k"},
    "target_only_t1": {"use_sd": False, "gen_kwargs": SAMPLED},
    "exact_k8_t1": {"spd_k": 8, "enable_fly": False, "gen_kwargs": SAMPLED},
    "accept_all": {"spd_k": 8, "verification": "accept_all"},
}
# lossless, so each must write bits_target_only's texts; a setting's batch_size is --batch_size's
_BITS = {"batch_invariant": True, "enable_fly": False, "draft_policy": "fixed"}
_DRAFTERS = {"model": {"use_ngram": False}, "ngram": {"drafter": "ngram"}, "cascade": {}}
BITS: dict[str, dict[str, Any]] = {
    "bits_target_only": {"use_sd": False, "batch_invariant": True},
    "bits_target_only_at1": {"use_sd": False, "batch_invariant": True, "batch_size": 1},
    **{
        f"bits_{drafter}_k{k}_at{sequences}": {
            **_BITS,
            **keys,
            "spd_k": k,
            **({"num_ngram_pred_tokens": k} if drafter == "ngram" else {}),
            "batch_size": sequences,
        }
        for drafter, keys in _DRAFTERS.items()
        for k in (4, 8)
        for sequences in (1, 8)
    },
}
# what rounding alone changes: the target alone, in passes of one token and of eight
ROUNDING: dict[str, dict[str, Any]] = {
    f"rounding_at{sequences}": {
        "use_sd": False,
        "batch_invariant": False,
        "batch_size": sequences,
    }
    for sequences in (1, 8)
}
# what qwen2.5-coder-guarded.json was chosen from
GUARDED = {"exact_first_tokens": 16, "exact_pattern": "numbers"}
FENCED = {**GUARDED, "exact_pattern": ["numbers", "code_fences"]}
SYMBOLS = {**GUARDED, "exact_pattern": ["numbers", "code_fences", r"[+*/=<>$%\\-]"]}
SECOND = {**SYMBOLS, **NEAR, "draft_ratio_thre": 0.15}
# 64 tokens, by which an answer of GSM8K has said how it will go on
PLANNED = {"exact_first_tokens": 64, "win_len": 2}
OPEN = {**ACROSS, **NO_ENTROPY, "draft_ratio_thre": 0.05, "draft_rank_max": 3}
SEARCH: dict[str, dict[str, Any]] = {
    "first4_k8": {"spd_k": 8, "exact_first_tokens": 4, **ACROSS},
    "first16_k8": {"spd_k": 8, "exact_first_tokens": 16, **ACROSS},
    "first64_k8": {"spd_k": 8, "exact_first_tokens": 64, **ACROSS},
    "guarded_k8": {"spd_k": 8, **GUARDED, **ACROSS},
    "ratio_guarded_k8": {"spd_k": 8, **GUARDED, **NEAR},
    "fenced_k8": {"spd_k": 8, **FENCED, **ACROSS},
    "fenced_k8_w4": {"spd_k": 8, "win_len": 4, **FENCED, **ACROSS},
    "symbols_k8": {"spd_k": 8, **SYMBOLS, **ACROSS},
    "tie_symbols_k8": {"spd_k": 8, **SYMBOLS, **TIE},
    "ratio_symbols_k8": {"spd_k": 8, **SYMBOLS, **NEAR},
    "ratio_symbols_k8_w4": {"spd_k": 8, "win_len": 4, **SYMBOLS, **NEAR},
    "ratio_symbols_k10_w4": {"spd_k": 10, "win_len": 4, **SYMBOLS, **NEAR},
    "ratio_symbols_k8_w2": {"spd_k": 8, "win_len": 2, **SYMBOLS, **NEAR},
    "ratio15_symbols_k8_w4": {"spd_k": 8, "win_len": 4, **SECOND},
    "ratio15_symbols_k8_w2": {"spd_k": 8, "win_len": 2, **SECOND},
    "planned_k8_w2": {"spd_k": 8, **SECOND, **PLANNED},
    "planned_entropy_k8_w2": {"spd_k": 8, **GUARDED, **ACROSS, **PLANNED},
    "planned_open_k8_w2": {"spd_k": 8, **GUARDED, **OPEN, **PLANNED},
}
KNOWN = {**SETTINGS, **BITS, **ROUNDING, **SEARCH}
TASKS: dict[str, dict[str, Any]] = {
    "humaneval_instruct": {"metric": "pass@1", "filter": None},
    "gsm8k_cot": {"metric": "exact_match", "filter": "flexible-extract", "num_fewshot": 0},
    "mbpp_instruct": {"metric": "pass_at_1", "filter": "extract_code"},
}
DEFAULT_TASKS = ["humaneval_instruct", "gsm8k_cot"]  # MBPP needs a file that few have
_RENAMED = {"gsm8k": "gsm8k_cot"}  # records of an earlier fly
DECODING = ("draft", "verify", "other")


@dataclass
class Tally:
    """One setting on one task. correct: by document. chunks: statistics by documents."""

    correct: dict[int, float] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    chunks: dict[frozenset[int], dict[str, Any]] = field(default_factory=dict)

    def add(self, record: dict[str, Any]) -> None:
        """A record of more documents takes the place of earlier ones of some of them."""
        chunk = frozenset(document["doc_id"] for document in record["documents"])
        others = {known: stats for known, stats in self.chunks.items() if not known <= chunk}
        self.chunks = {**others, chunk: record["stats"]}
        for document in record["documents"]:
            self.correct[document["doc_id"]] = document["correct"]
            self.texts[document["doc_id"]] = document["text"]

    def total(self, name: str) -> float:
        return sum(stats[name] for stats in self.chunks.values())

    def emitted(self, chunks: set[frozenset[int]]) -> float:
        return sum(self.chunks[chunk]["emitted"] for chunk in chunks)

    def seconds(self, chunks: set[frozenset[int]]) -> float:
        """Of decoding, over the given chunks."""
        of_chunks = [self.chunks[chunk]["seconds"] for chunk in chunks]
        return sum(seconds[phase] for seconds in of_chunks for phase in DECODING)

    def predicted(self, chunks: set[frozenset[int]], passes: list[float]) -> float:
        """Milliseconds of the given chunks' rounds and drafted tokens, one sequence at a time."""
        target, draft = passes
        return sum(
            self.chunks[chunk]["rounds"] * target + self.chunks[chunk]["drafted"] * draft
            for chunk in chunks
        )


Tallies = dict[tuple[str, str], Tally]


def read(path: Path, limit: int | None = None) -> Tallies:
    """What earlier runs appended, by (setting, task); a torn line is dropped.

    limit: only records that lie within the first so many documents.
    """
    tallies: Tallies = defaultdict(Tally)
    if not path.exists():
        return tallies
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        record["task"] = _RENAMED.get(record["task"], record["task"])
        if limit is None or record["documents"][-1]["doc_id"] < limit:
            tallies[record["setting"], record["task"]].add(record)
    return tallies


def turns(
    first: int, limit: int, chunk: int, settings: list[str]
) -> Iterator[tuple[str, str, list[int]]]:
    """(setting, task, documents) in the order of the run: documents `first` to `limit` - 1."""
    for turn, start in enumerate(range(first, limit, chunk)):
        documents = list(range(start, min(start + chunk, limit)))
        shift = turn % len(settings)
        for setting in settings[shift:] + settings[:shift]:
            for task in TASKS:
                yield setting, task, documents


def check_same_experiment(path: Path, args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Records of other models, budgets or settings must not be taken for this run's."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        now = {
            "pair": args.config,
            "max_gen_toks": args.max_gen_toks,
            "config": settings.get(record["setting"], record["config"]),
            "batch_size": record["config"].get("batch_size", args.batch_size),
        }
        for name, value in now.items():
            if record.get(name) != value:
                sys.exit(
                    f"--output {args.output}: holds {record['setting']} with {name}="
                    f"{record.get(name)!r}, this run has {value!r}: choose another folder"
                )
    if text and not text.endswith("\n"):  # a run was cut short in the middle of a line
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n")


def run(args: argparse.Namespace, settings: dict[str, dict[str, Any]], path: Path) -> None:
    from fly import config as fly_config
    from fly.harness.evaluate import evaluate
    from fly.harness.hf import FlyLM
    from fly.runs.records import RunStats

    invariant = {own.get("batch_invariant", "auto") for own in settings.values()}
    if len(invariant) > 1:
        sys.exit("--settings: a model is loaded with or without batch_invariant: run bits_* alone")
    lm = FlyLM(
        config_path=args.config,
        device=args.device,
        batch_size=args.batch_size,
        batch_invariant=invariant.pop(),
        draft_policy="fixed",  # rules are compared, not what pays for so many sequences here
    )
    base = lm.fly_config.model_dump()
    done = read(path)
    for setting, task, documents in turns(args.first, args.limit, args.chunk, list(settings)):
        # what is done in chunks of another size must not count twice
        documents = [d for d in documents if d not in done[setting, task].correct]
        if task not in args.tasks or not documents:
            continue
        own = dict(settings[setting])
        sampled = own.pop("gen_kwargs", None)
        lm.batch_size_per_gpu = own.pop("batch_size", args.batch_size)
        lm.fly_config = fly_config.build({**base, **own}, setting)
        lm.stats = RunStats()
        how = TASKS[task]
        samples = evaluate(
            lm,
            task,
            documents,
            gen_kwargs=",".join(filter(None, (f"max_gen_toks={args.max_gen_toks}", sampled))),
            num_fewshot=how.get("num_fewshot"),
        )
        kept = [s for s in samples if how["filter"] in (None, s["filter"])]
        record = {
            "setting": setting,
            "task": task,
            "pair": args.config,
            "config": settings[setting],
            "batch_size": lm.batch_size,
            "max_gen_toks": args.max_gen_toks,
            "commit": commit(),
            "stats": lm.stats.as_dict(),
            "documents": [
                {"doc_id": s["doc_id"], "correct": s[how["metric"]], "text": s["resps"][0][0]}
                for s in kept
            ],
        }
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        print(f"{documents[0]}..{documents[-1]} {task} {setting}", flush=True)


def row(
    tallies: Tallies, setting: str, task: str, baseline: str, passes: list[float] | None = None
) -> dict[str, Any]:
    """One line of the table. Answers against `baseline`, time of decoding against exact_k8.

    passes: milliseconds of a pass of the target and of the draft model over one sequence, from
    which `predicted_x` counts what exact_k8's rounds and drafts take over this setting's.
    """
    from fly.analysis.statistics import Comparison, compare_tasks

    own, target = tallies[setting, task], tallies[baseline, task]
    exact = tallies["exact_k8", task]
    both = sorted(set(own.correct) & set(target.correct))
    chunks = set(own.chunks) & set(exact.chunks)
    drafted = own.total("drafted")
    scores = [[tally.correct[d] for d in both] for tally in (target, own)]
    compared = compare_tasks([(scores[0], scores[1])]) if both else Comparison(0, 0.0)
    return {
        "setting": setting,
        "task": task,
        "documents": len(both),
        "correct": sum(scores[1]),
        "target_only_correct": sum(scores[0]),
        "recovery": compared.recovery,
        "recovery_interval": compared.interval and [compared.interval.low, compared.interval.high],
        "lost": compared.lost,
        "won": compared.won,
        "mcnemar_p": compared.p,
        "same_text": sum(own.texts[d] == target.texts[d] for d in both),
        "tau": own.total("emitted") / own.total("rounds"),
        "emitted_per_drafted": own.total("emitted") / drafted if drafted else None,
        "discarded_share": own.total("discarded") / own.total("emitted"),
        "time_x_over_exact": exact.seconds(chunks) / own.seconds(chunks) if chunks else None,
        "predicted_x": exact.predicted(chunks, passes) / own.predicted(chunks, passes)
        if chunks and passes
        else None,
        "tokens_over_exact": own.emitted(chunks) / exact.emitted(chunks) if chunks else None,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        "| setting | task | correct | target-only | recovery | lost / won | McNemar p | same text "
        "| tau | emitted / drafted | dropped | time x over exact | predicted x | tokens x |\n"
        + "|---" * 14
        + "|"
    )
    for r in rows:
        per_draft, time_x, predicted, tokens, recovery = (
            "-" if r[key] is None else f"{r[key]:.2f}"
            for key in (
                "emitted_per_drafted", "time_x_over_exact", "predicted_x", "tokens_over_exact",
                "recovery",
            )
        )  # fmt: skip
        if r["recovery_interval"]:
            recovery += " [{:.2f}, {:.2f}]".format(*r["recovery_interval"])
        print(
            f"| {r['setting']} | {r['task']} | {r['correct']:.0f}/{r['documents']} "
            f"| {r['target_only_correct']:.0f} | {recovery} | {r['lost']} / {r['won']} "
            f"| {r['mcnemar_p']:.2f} | {r['same_text']} | {r['tau']:.2f} | {per_draft} "
            f"| {r['discarded_share']:.1%} | {time_x} | {predicted} | {tokens} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="qwen2.5-coder.json")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(KNOWN))
    parser.add_argument("--baseline", default="target_only", choices=list(KNOWN))
    parser.add_argument(
        "--add", action="append", default=[], help='further settings, NAME={"key": value, ...}'
    )
    parser.add_argument("--tasks", nargs="+", default=DEFAULT_TASKS, choices=list(TASKS))
    parser.add_argument("--first", type=int, default=0, help="leave out so many documents")
    parser.add_argument("--limit", type=int, default=60, help="up to which document of a task")
    parser.add_argument("--chunk", type=int, default=12, help="documents per setting and turn")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--max_gen_toks", type=int, default=384)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="folder of the raw records")
    parser.add_argument(
        "--passes", type=float, nargs=2, metavar=("TARGET_MS", "DRAFT_MS"),
        help="predict times of one sequence from these",
    )  # fmt: skip
    parser.add_argument("--report", action="store_true", help="print the table, run nothing")
    args = parser.parse_args()
    settings = {name: KNOWN[name] for name in args.settings}
    settings |= {n: json.loads(v) for n, _, v in (item.partition("=") for item in args.add)}
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "records.jsonl"
    if not args.report:
        check_same_experiment(path, args, settings)
        run(args, settings, path)
    tallies = read(path, args.limit)
    rows = [
        row(tallies, *key, args.baseline, args.passes)
        for key in list(tallies)
        if tallies[key].correct
    ]
    print_table(rows)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
