"""What `fly report` takes for a run of ten thousand documents with traces, and the page to open.

    python benchmarks/report_page.py --output benchmarks/results/<date>-report

Writes a target-only run and a run of FLy with a trace of every document, made up from one seed,
then measures the command as a process of its own, and the page in Chromium (CHROMIUM, else the
system's; needs Playwright).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from provenance import commit

DATE, STARTED = "2026-01-01T00-00-00.000000", "2026-01-01T00-00-00"
TASK, K, TOKENS = "made_up", 6, 150
WORDS = [f" word{number}" for number in range(2000)]
Line = dict[str, Any]


def trace_of(rng: random.Random, doc_id: int, request: int) -> Iterator[Line]:
    """The rounds of one request; at the end, its tokens."""
    start, number, tokens = 0, 0, list[int]()
    while start < TOKENS:
        number += 1
        accepted = min(rng.choice([0, 1, 2, 4, 6, 6]), TOKENS - start - 1)
        deferred = [start] if accepted > 3 and rng.random() < 0.2 else []
        choice = [rng.randrange(len(WORDS)) for _ in range(K + 1)]
        native = "".join("1" if at < accepted else "0" for at in range(K))
        draft = [token if match == "1" else 0 for token, match in zip(choice, native)]
        if deferred:
            native, draft[0] = "0" + native[1:], 1
        length = start + accepted + 1
        tokens += [*draft[:accepted], choice[accepted]]
        yield {
            "task_name": TASK, "doc_id": doc_id, "idx": 0, "repeat": 0, "request": request,
            "round": number, "start": start, "draft": draft, "by": "dddndd", "native": native,
            "choice": choice, "deferred": deferred, "rolled_back": None, "open": None,
            "length": length, "finish": "length" if length >= TOKENS else None,
            "entropy": [round(rng.random(), 3) for _ in range(K + 1)],
        }  # fmt: skip
        start = length


def write_run(folder: Path, mode: str, documents: int) -> Path:
    """One finished run as lm-eval and fly write it; modes other than target-only have a trace."""
    rng, folder = random.Random(mode), folder / mode
    folder.mkdir(parents=True)
    traced = mode != "target-only"
    digest = lambda text: hashlib.sha256(text.encode()).hexdigest()  # noqa: E731
    score_sum, rounds_of = 0, dict[int, int]()
    if traced:
        with (folder / f"fly_trace_{STARTED}.jsonl").open("w") as file:
            for doc_id in range(documents):
                for line in trace_of(rng, doc_id, doc_id):
                    file.write(json.dumps(line) + "\n")
                    rounds_of[doc_id] = line["round"]
        with (folder / f"fly_vocabulary_{STARTED}.jsonl").open("w") as file:
            file.writelines(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(WORDS))
    with (folder / f"samples_{TASK}_{DATE}.jsonl").open("w") as file:
        for doc_id in range(documents):
            question = random.Random(doc_id)
            prompt = "".join(question.choices(WORDS, k=200))
            answer = "".join(question.choices(WORDS, k=TOKENS))
            score = int(question.random() < 0.6)
            if rng.random() < 0.3:
                answer = answer[: len(answer) // 2] + "".join(rng.choices(WORDS, k=TOKENS // 2))
                score = int(rng.random() < 0.6)
            score_sum += score
            line = {
                "doc_id": doc_id, "doc": {"question": prompt}, "target": "42",
                "arguments": {"gen_args_0": {"arg_0": prompt}}, "resps": [[answer]],
                "filtered_resps": [answer[-20:]], "filter": "none", "metrics": ["exact_match"],
                "doc_hash": digest(prompt), "prompt_hash": digest(prompt),
                "target_hash": digest("42"), "exact_match": float(score),
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")
    phases = {"prefill": 0.1, "draft": 0.3, "verify": 0.5, "other": 0.1, "compile": 0.0}
    rounds = sum(rounds_of.values()) or TOKENS * documents
    with (folder / f"fly_requests_{STARTED}.jsonl").open("w") as file:
        for doc_id in range(documents):
            record = {
                "task": TASK, "doc_id": doc_id, "emitted": TOKENS,
                "rounds": rounds_of.get(doc_id, TOKENS), "seconds": phases,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")
    config = {
        "target_model_path": "target", "draft_model_path": "draft", "spd_k": K, "win_len": 2,
        "entropy_thre": 0.3, "total_gen_tok": None, "seed": None, "use_sd": traced,
    }  # fmt: skip
    stats = {
        "requests": documents, "emitted": TOKENS * documents, "rounds": rounds,
        "tau": TOKENS * documents / rounds, "decode_tok_s": TOKENS / 0.9,
        "end_to_end_tok_s": TOKENS / 1.0, "peak_memory_bytes": 2**30,
        "seconds": {name: share * documents for name, share in phases.items()},
    }  # fmt: skip
    entry = {"started": STARTED, "mode": mode, "dtype": "torch.float32", "config": config}
    entry |= {"drafter": "cascade" if traced else None, "stats": stats}
    whole = {
        "results": {TASK: {"exact_match,none": score_sum / documents}},
        "configs": {TASK: {}}, "versions": {TASK: 1}, "n-shot": {TASK: 0},
        "higher_is_better": {TASK: {"exact_match": True}},
        "config": {"model": "hf", "model_args": {"pretrained": "target"}, "fly": entry},
    }  # fmt: skip
    (folder / f"results_{DATE}.json").write_text(json.dumps(whole))
    return folder


def write_page(runs: list[Path], page: Path, options: list[str]) -> dict[str, Any]:
    """Seconds and peak memory of the command, and seconds of the CPU, which count also on a machine
    on which others work; the bytes of what it wrote."""
    command = [sys.executable, "-m", "fly", "report", *runs, "--output", page, *options]
    started, peak, busy = time.monotonic(), 0, 0.0
    process = psutil.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            peak = max(peak, process.memory_info().rss)
            busy = sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            break
        time.sleep(0.02)
    if process.wait():
        raise SystemExit("fly report failed")
    files = [page, *page.with_suffix(".traces").glob("*")]
    return {
        "seconds": round(time.monotonic() - started, 2),
        "cpu_seconds": round(busy, 2),
        "peak_memory_mb": round(peak / 1e6),
        "page_mb": round(page.stat().st_size / 1e6, 1),
        "files": len(files),
        "all_files_mb": round(sum(file.stat().st_size for file in files) / 1e6, 1),
    }


def open_page(page: Path) -> dict[str, float]:
    """Seconds until the page is drawn, and until a search of all texts has answered; best of 3."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    found = list[tuple[float, float]]()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for _ in range(3):
            tab = browser.new_page()
            started = time.monotonic()
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-ready]")
            opened = time.monotonic() - started
            tab.get_by_label("Search").fill("no such word")
            started = time.monotonic()
            tab.get_by_text("No document fits these filters.").wait_for()
            found.append((opened, time.monotonic() - started))
            tab.close()
        browser.close()
    opened, searched = map(min, zip(*found))
    return {"open_seconds": round(opened, 2), "search_seconds": round(searched, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--options", nargs="*", default=[], help="of fly report, without dashes")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = [write_run(folder, mode, args.documents) for mode in ("target-only", "fly")]
        page = folder / "report.html"
        record = {"documents": args.documents, "options": args.options, "commit": commit()}
        record |= {"runs_mb": round(sum(f.stat().st_size for f in folder.rglob("*")) / 1e6)}
        record |= write_page(runs, page, [f"--{option}" for option in args.options])
        record |= open_page(page)
    line = json.dumps(record)
    with (args.output / "records.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
