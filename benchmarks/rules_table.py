"""Every training-free rule at two or three settings on one pair: one table, Holm over all of it.

    python benchmarks/rules_table.py --training FOLDER --output FOLDER \\
        --passes TARGET_MS VERIFY_MS DRAFT_MS

HumanEval's problems 0 to 39 and GSM8K's training questions 0 to 99 (`--training`: a folder whose
gsm8k_test.jsonl holds them; `--documents` takes other numbers), under batch_invariant, each mode by
`fly compare` into OUTPUT/<task>/<mode>: a run that is cut short goes on with the same command (with
other --jobs all are made anew: their threads are others).
`--temperature` takes the rules that are for sampling instead. At the end OUTPUT has each task's
matrix and records.jsonl (the counts of all runs, each document's score, a hash of its text):
`--report` prints the table of these three files.

Time x is predicted for one sequence from counts and --passes: the milliseconds of a pass of the
target over one token, of one over K + 1, and of a draft step. It is against the target alone. `*`:
no other setting has more of time x and of recovery (the mean of both tasks).

What is tried again on documents that no setting was chosen with, is decided before the table is
known: of the settings whose predicted time x is at least 1.03 times that of exact verification, and
that lost at most one document more than they won over both tasks, the two with the largest time x.
The table's last line but one names them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from provenance import commit

from fly.analysis import scores
from fly.analysis.statistics import holm
from fly.runs import reader

GUARDED = "exact_first_tokens=16,exact_pattern=numbers"
GREEDY = {  # besides exact verification
    "fly-entropy": "verification=fly",
    "fly-guarded": f"verification=fly,defer_across_rounds=true,{GUARDED}",
    "typical": "verification=typical",
    "top-k": "verification=top_k",
    **{f"cascade-{a}": f"verification=cascade,cascade_alpha={a}" for a in (0.1, 0.3, 0.5)},
    **{
        f"ensemble-{w}": f"verification=ensemble,assistant_ensemble_weight={w}"
        for w in (0.9, 0.7, 0.5)
    },
    **{f"mars-{t}": f"verification=mars,mars_theta={t}" for t in (0.98, 0.95, 0.9)},
    **{
        f"asd-{b}-{g}": f"verification=asd,asd_budget={b},asd_gap={g},asd_max_mismatches={m}"
        for b, g, m in ((2, None, 1), (8, 0.25, 2), (12, 0.5, 2))
    },
    **{
        f"fsd-{kind}-{t}": f"verification=fsd,fsd_div_type={kind},fsd_div_threshold={t}"
        for kind, t in (("js_div", 0.05), ("js_div", 0.15), ("kl_div", 0.3), ("tv_div", 0.3))
    },
}
SAMPLED = {
    "block": "verification=block",
    **{f"cactus-{d}": f"verification=cactus,cactus_delta={d}" for d in (0.02, 0.1, 0.3)},
    **{f"entropy-ratio-{a}": f"verification=entropy_ratio,posterior_alpha={a}" for a in (0.4, 1.0)},
    **{
        f"sglang-{t}": f"verification=sglang,speculative_accept_threshold_acc={t}"
        for t in (0.8, 0.5)
    },
    **{f"cascade-{a}": f"verification=cascade,cascade_alpha={a}" for a in (0.1, 0.3)},
    **{f"ensemble-{w}": f"verification=ensemble,assistant_ensemble_weight={w}" for w in (0.9, 0.7)},
}
TASKS = ("humaneval_instruct", "gsm8k_cot")


def compare(args: argparse.Namespace, task: str, modes: dict[str, str], *more: str) -> None:
    """`fly compare` of the target alone, exact verification and these settings on one task."""
    gen = f"max_gen_toks={args.max_gen_toks}"
    if args.temperature:
        gen += f",do_sample=True,temperature={args.temperature},top_k=0"
    common = f"config_path={args.config},batch_invariant=true,draft_policy=fixed,spd_k={args.k}"
    words = [sys.executable, "-m", "fly", "compare", "--force", "--modes", "target-only", "exact"]
    words += ["--model_args", f"{common},seed=1", "--tasks", task]
    limit = str(args.documents[TASKS.index(task)])
    words += ["--gen_kwargs", gen, "--limit", limit, "--apply_chat_template"]
    words += ["--confirm_run_unsafe_code"] if task == "humaneval_instruct" else []
    words += ["--batch_size", str(args.batch_size), "--output_path", str(args.output / task)]
    words += ["--num_fewshot", "0"] if task == "gsm8k_cot" else []
    words += ["--metric", "exact_match,flexible-extract"] if task == "gsm8k_cot" else []
    for name, keys in modes.items():
        words += ["--mode", f"{name}={keys}"]
    environment = {**os.environ, "FLY_DATA_DIR": str(args.training)}
    if args.jobs > 1:
        threads = len(os.sched_getaffinity(0)) // args.jobs
        environment["OMP_NUM_THREADS"] = str(max(1, threads))
    subprocess.run([*words, *more], check=True, env=environment)


def make(args: argparse.Namespace, modes: dict[str, str]) -> None:
    """All runs, then each task's matrix of them.

    With several jobs each setting is a process beside its task's target-only run, which is made
    first; the first settings of all rules come before any second one.
    """
    seen: Counter[str] = Counter()
    turn = {}
    for name, keys in modes.items():
        rule = keys.partition(",")[0]
        turn[name] = seen[rule]
        seen[rule] += 1
    if args.jobs > 1:
        with ThreadPoolExecutor(args.jobs) as pool:
            alone = {task: pool.submit(compare, args, task, {}) for task in TASKS}
            runs = []
            try:
                for task in TASKS:
                    alone[task].result()
                    for name in sorted(turn, key=turn.__getitem__):
                        runs.append(pool.submit(compare, args, task, {name: modes[name]}))
                for run in runs:
                    run.result()
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)
                raise
    for task in TASKS:
        compare(args, task, modes, "--matrix", "--json", str(args.output / f"{task}.json"))
    write_records(args.output, ["target-only", "exact", *modes])


def write_records(output: Path, names: list[str]) -> None:
    """What is kept of the runs: their counts and machine, and of each document the score under the
    matrix's metric and the text's hash."""
    with open(output / "records.jsonl", "w", encoding="utf-8") as file:
        for task in TASKS:
            label = cells_of(output, task)[0]["metric"]
            for name in names:
                file.write(json.dumps(record(output, task, name, label)) + "\n")


def cells_of(output: Path, task: str) -> list[dict[str, Any]]:
    """The cells of a task's matrix."""
    cells = json.loads((output / f"{task}.json").read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["task"] == task]


def record(output: Path, task: str, name: str, label: str) -> dict[str, Any]:
    run = reader.load(output / task / name)
    assert run.entry is not None
    measured = scores.measure(run).tasks[task]
    metric = measured.metric(label)
    assert metric is not None
    documents = [
        {
            "doc_id": i,
            "score": score,
            "text": hashlib.sha256("".join(measured.texts[i]).encode()).hexdigest()[:16],
        }
        for i, score in sorted(metric.scores.items())
    ]
    kept = {key: run.entry.get(key) for key in ("device", "versions", "preparation", "stats")}
    return {"task": task, "run": name, "metric": metric.label, **kept, "documents": documents}


def milliseconds(stats: dict[str, Any], passes: tuple[float, float, float]) -> float:
    """What the counts of a run take, one sequence at a time."""
    alone, verify, draft = passes
    drafted = stats["drafted"]
    return float(stats["rounds"] * (verify if drafted else alone) + drafted * draft)


def collect(args: argparse.Namespace) -> list[dict[str, Any]]:
    lines = (args.output / "records.jsonl").read_text(encoding="utf-8").splitlines()
    stats = {(line["task"], line["run"]): line["stats"] for line in map(json.loads, lines)}
    cells = [cell for task in TASKS for cell in cells_of(args.output, task)]
    for cell, p in zip(cells, holm([cell["p_uncorrected"] for cell in cells])):
        cell["p"] = p
    rows: dict[str, dict[str, Any]] = {}
    for cell in cells:
        row = rows.setdefault(cell["run"], {"run": cell["run"], "rule": cell["rule"]})
        row[cell["task"]] = cell
    for row in rows.values():
        own = [row[task] for task in TASKS]
        row["recovery"] = sum(cell["recovery"] for cell in own) / len(own)
        if args.passes:
            took = [
                sum(milliseconds(stats[t, run], args.passes) for t in TASKS)
                for run in ("target-only", row["run"])
            ]
            row["time_x"] = took[0] / took[1]
    for row in rows.values():
        row["on_frontier"] = "time_x" in row and not any(
            (o["time_x"], o["recovery"]) != (row["time_x"], row["recovery"])
            and o["time_x"] >= row["time_x"]
            and o["recovery"] >= row["recovery"]
            for o in rows.values()
        )
    return sorted(rows.values(), key=lambda row: -row.get("time_x", 0))


def choose(rows: list[dict[str, Any]]) -> list[str]:
    """The settings to confirm, of rows by falling time x; see the module's docstring."""
    exact = next(row for row in rows if row["run"] == "exact")
    lost = {row["run"]: sum(row[t]["lost"] - row[t]["won"] for t in TASKS) for row in rows}
    found = [
        row["run"]
        for row in rows
        if row["time_x"] >= 1.03 * exact["time_x"] and lost[row["run"]] <= 1
    ]
    return found[:2]


def print_table(rows: list[dict[str, Any]]) -> None:
    heads = [f"{task}: {what}" for task in TASKS for what in ("tau", "lost / won", "p")]
    print("| setting | time x | recovery | " + " | ".join(heads) + " |")
    print("|---" * (3 + len(heads)) + "|")
    for row in rows:
        time_x = f"{row['time_x']:.2f}" if "time_x" in row else "-"
        cells = [f"{row['run']}{' *' if row['on_frontier'] else ''}", time_x]
        cells.append(f"{row['recovery']:.3f}")
        for cell in (row[task] for task in TASKS):
            tau = cell["speed"]["pace"]["tau"]
            cells += [f"{tau:.2f}", f"{cell['lost']} / {cell['won']}", f"{cell['p']:.2f}"]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="qwen2.5-coder.json")
    parser.add_argument("--training", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--max_gen_toks", type=int, default=384)
    costs = ("TARGET_MS", "VERIFY_MS", "DRAFT_MS")
    parser.add_argument("--passes", type=float, nargs=3, metavar=costs)
    parser.add_argument("--documents", type=int, nargs=2, default=(40, 100), metavar=("HE", "GSM"))
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at a time, each on its share of the cores"
    )
    parser.add_argument("--only", nargs="+", help="only these settings")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    modes = SAMPLED if args.temperature else GREEDY
    modes = {name: keys for name, keys in modes.items() if not args.only or name in args.only}
    args.output.mkdir(parents=True, exist_ok=True)
    if not args.report:
        make(args, modes)
    rows = collect(args)
    print_table(rows)
    if args.passes:
        print("to confirm:", ", ".join(choose(rows)) or "none")
    facts = {name: str(value) for name, value in vars(args).items()}
    print(json.dumps({"commit": commit(), "arguments": facts, "rows": rows}))


if __name__ == "__main__":
    main()
