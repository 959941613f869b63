"""How often `fly history` reports a decline, and when, on simulated series of nightly runs.

    python benchmarks/histories.py --output benchmarks/results/<date>-histories

Every series is tested after every night, as a nightly job would; a report is the first night on
which its verdict is `fell`. Documents are right or wrong, and change in two ways: some are near the
edge and flip by themselves from night to night, others change once and stay so (`churn`, of every
document, a night, as often for better as for worse). A decline loses documents for good.
"""

from __future__ import annotations

import argparse
import json
import statistics
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from provenance import commit

from fly.analysis import history

NIGHTS, DOCUMENTS, SOLVED = 60, 200, 0.6
NEAR_EDGE, FLIPS = 0.1, 0.3  # share of documents that flip, and how often
STEP_AT = 20
# share of the documents lost: (at night STEP_AT, a night)
DECLINES = {"none": (0.0, 0.0), "step of 2 %": (0.02, 0.0), "step of 10 %": (0.1, 0.0),
            "0.2 % a night": (0.0, 0.002)}  # fmt: skip
CHURN = {"flips": 0.0, "flips and churn": 0.002}
Scores = np.ndarray


def draw(rng: np.random.Generator, decline: str, churn: float, documents: int) -> Scores:
    """Scores by night and document."""
    step, drift = DECLINES[decline]
    now = rng.random(documents) < SOLVED
    edge = rng.random(documents) < NEAR_EDGE
    nights = []
    for night in range(NIGHTS):
        if night:
            # as many are won as lost, whatever share is solved
            rates = np.where(now, churn / 2 / SOLVED, churn / 2 / (1 - SOLVED))
            now = now ^ (rng.random(documents) < rates)
            lost = (drift + step * (night == STEP_AT)) / SOLVED  # of those that are solved
            now = now & (rng.random(documents) >= lost)
        nights.append(now ^ (edge & (rng.random(documents) < FLIPS)))
    return np.array(nights, float)


def simulate(
    decline: str, changes: str, runs: int, documents: int = DOCUMENTS, seed: int = 0
) -> dict[str, Any]:
    """How many series were reported, and the nights, counted from 1."""
    rng = np.random.default_rng([seed, zlib.crc32(f"{decline} {changes}".encode())])
    reported, early = list[int](), 0
    for _ in range(runs):
        scores = draw(rng, decline, CHURN[changes], documents)
        nights = range(1, NIGHTS + 1)
        first = next((n for n in nights if history.find_trend(scores[:n]).verdict == "fell"), None)
        if first is not None:
            reported.append(first)
            early += "step" in decline and first <= STEP_AT
    return {
        "decline": decline, "changes": changes, "nights": NIGHTS, "documents": documents,
        "series": runs, "reported": len(reported) / runs, "before_the_step": early / runs,
        "median_night": statistics.median(reported) if reported else None,
        "quartiles": [float(q) for q in np.quantile(reported, (0.25, 0.75))] if reported else None,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    measured = commit()
    args.output.mkdir(parents=True, exist_ok=True)
    with (args.output / "records.jsonl").open("w") as file:
        for documents in (DOCUMENTS, 1000):
            for decline in DECLINES:
                for changes in CHURN:
                    record = simulate(decline, changes, args.runs, documents)
                    line = json.dumps(record | {"commit": measured})
                    file.write(line + "\n")
                    print(line, flush=True)


if __name__ == "__main__":
    main()
