"""Runs with texts, records and traces of the test's choice, as lm-eval and fly write them."""

import json
from pathlib import Path

from tests.written_runs import DATE, STARTED, sample, write_lines

TASK = "sums"

# One request: an n-gram token and a draft token that stand, a deferral with its window of two, a
# correction; a deferral that is rolled back; a character in two tokens; a wholly accepted draft.
VOCABULARY = {
    1: " alpha", 2: " beta", 3: " gamma", 4: " delta", 5: " epsilon", 6: "\n",
    7: b"\xc3", 8: b"\xa9", 9: "<b id=pwned>bold</b>", 10: " eta",
}  # fmt: skip
ROUNDS = [
    {"start": 0, "draft": [1, 2, 3, 4, 5, 1], "by": "nddddd", "native": "110110",
     "choice": [1, 2, 9, 4, 5, 6, 2], "entropy": [0.1, 0.2, 0.9, 0.1, 0.1, 0.8, 0.1],
     "deferred": [2], "rolled_back": None, "open": None, "length": 6, "finish": None},
    {"start": 6, "draft": [7, 3, 4, 2], "by": "dddd", "native": "1010",
     "choice": [7, 8, 4, 3, 5], "entropy": [0.1, 0.7, 0.2, 0.9, 0.1],
     "deferred": [], "rolled_back": 7, "open": None, "length": 8, "finish": None},
    {"start": 8, "draft": [9], "by": "n", "native": "1", "choice": [9, 10],
     "entropy": [0.1, 0.2], "deferred": [], "rolled_back": None, "open": None, "length": 10,
     "finish": "eos"},
]  # fmt: skip
# The same, drafted from texts: an earlier run, a sibling, another document and the own text.
FROM_TEXTS = [{**ROUNDS[0], "by": "esdodd"}, *ROUNDS[1:]]


def lines(doc_id=0, request=0, rounds=ROUNDS, task=TASK):
    return [
        {"task_name": task, "doc_id": doc_id, "request": request, "round": number, **line}
        for number, line in enumerate(rounds, 1)
    ]


def vocabulary():
    return {i: t.encode() if isinstance(t, str) else t for i, t in VOCABULARY.items()}


def write(
    folder: Path,
    mode="fly",
    scores=(1, 0),
    texts=None,
    *,
    traced=(),
    seconds=1.0,
    prompt="How many",
    rounds=ROUNDS,
    sources=None,
    stats=None,
) -> Path:
    """Write one run and return its folder. traced: the documents that get the trace `rounds`.

    mode `hf` is lm-eval's own backend, without records. sources: of the statistics; None for a run
    of before they were there. stats: further ones.
    """
    folder.mkdir(parents=True)
    texts = texts or [f"{mode} says {doc_id}" for doc_id in range(len(scores))]
    samples = [
        sample(i, {"exact_match": float(s)}, f"{prompt} {i}?", target="a target", response=t)
        for i, (s, t) in enumerate(zip(scores, texts))
    ]
    write_lines(folder / f"samples_{TASK}_{DATE}.jsonl", samples)
    config = {"model": "hf", "model_args": {"pretrained": "a model"}, "model_dtype": "float32"}
    if mode != "hf":
        records = [_record(i, seconds) for i in range(len(scores))]
        write_lines(folder / f"fly_requests_{STARTED}.jsonl", records)
        config["fly"] = _entry(mode, records)
        if sources is not None:
            config["fly"]["stats"]["sources"] = sources
        config["fly"]["stats"] |= stats or {}
    if traced:
        trace = [line for number, i in enumerate(traced) for line in lines(i, number, rounds)]
        write_lines(folder / f"fly_trace_{STARTED}.jsonl", trace)
        known = [
            {"id": i, "text": t} if isinstance(t, str) else {"id": i, "bytes": t.hex()}
            for i, t in VOCABULARY.items()
        ]
        write_lines(folder / f"fly_vocabulary_{STARTED}.jsonl", known)
    whole = {
        "results": {TASK: {"exact_match,none": sum(scores) / len(scores)}},
        "configs": {TASK: {}},
        "versions": {TASK: 1},
        "n-shot": {TASK: 0},
        "higher_is_better": {TASK: {"exact_match": True}},
        "config": config,
    }
    (folder / f"results_{DATE}.json").write_text(json.dumps(whole))
    return folder


def _entry(mode, records):
    total = {key: sum(r[key] for r in records) for key in ("emitted", "rounds")}
    seconds = {phase: sum(r["seconds"][phase] for r in records) for phase in records[0]["seconds"]}
    decode = seconds["draft"] + seconds["verify"] + seconds["other"]
    return {
        "started": STARTED,
        "mode": mode,
        "drafter": None if mode == "target-only" else "cascade",
        "dtype": "torch.float32",
        "config_hash": "abc",
        "sampling": [{"temperature": 0.0}],
        "config": {
            "target_model_path": "a target", "draft_model_path": "a draft", "spd_k": 6,
            "win_len": 2, "entropy_thre": 0.3, "total_gen_tok": None, "seed": None,
            "use_sd": mode != "target-only",
        },
        "stats": {
            "requests": len(records),
            **total,
            "tau": total["emitted"] / total["rounds"],
            "decode_tok_s": total["emitted"] / decode,
            "end_to_end_tok_s": total["emitted"] / (decode + seconds["prefill"]),
            "peak_memory_bytes": 2**30,
            "seconds": seconds,
        },
    }  # fmt: skip


def _record(doc_id, seconds):
    part = {"prefill": 0.1, "draft": 0.3, "verify": 0.5, "other": 0.1, "compile": 0.5}
    return {
        "task": TASK,
        "doc_id": doc_id,
        "emitted": 10 + doc_id,
        "rounds": 3,
        "seconds": {phase: share * seconds for phase, share in part.items()},
    }
