"""How often gates on tau and time x are right, on simulated runs that just reach them.

    python benchmarks/gates.py --output benchmarks/results/<date>-gates

Both verdicts are errors there; documents differ in length, acceptance and speed, and their seconds
vary from run to run by themselves.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from provenance import commit

from fly.analysis import gates, statistics
from fly.analysis.gates import Gate, Kind
from fly.analysis.scores import Work

SIZES = (20, 60, 200)
TAU, TIME_X = 3.0, 1.5


def draw(rng: np.random.Generator, documents: int) -> list[tuple[Work, Work]]:
    """(baseline's, run's) of documents whose expected tau and time x are TAU and TIME_X."""
    found = []
    for _ in range(documents):
        tokens = int(rng.lognormal(5, 0.7)) + 8
        noise = rng.lognormal(-0.005, 0.1, 3)  # of mean 1
        rounds = max(1, round(tokens / TAU * rng.gamma(20, 1 / 20)))
        base = tokens * 0.1 * noise[0]
        # the run's seconds follow its rounds, whose mean is tokens / TAU
        own = rounds * TAU * 0.1 / TIME_X * noise[1]
        found.append(
            (Work(tokens=tokens, rounds=tokens, decode=base, end_to_end=base),
             Work(tokens=tokens, rounds=rounds, decode=own, end_to_end=own))
        )  # fmt: skip
    return found


def simulate(kind: Kind, documents: int, runs: int, seed: int = 0) -> dict[str, Any]:
    """Shares of runs that a gate at their true value holds and fails."""
    rng, found = np.random.default_rng(seed), Counter[str]()
    gate, before = Gate(kind, TAU if kind == "tau" else TIME_X), statistics.RESAMPLES
    statistics.RESAMPLES = 999
    for _ in range(runs):
        pairs = draw(rng, documents)
        base, own = ({i: pair[side] for i, pair in enumerate(pairs)} for side in (0, 1))
        found[gates.judge(gate, base, own, "", 0.95, 1).verdict] += 1
    statistics.RESAMPLES = before
    return {
        "gate": kind, "documents": documents, "runs": runs,
        "held": found["held"] / runs, "fell": found["fell"] / runs,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=4000)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    measured = commit()
    args.output.mkdir(parents=True, exist_ok=True)
    kinds: tuple[Kind, ...] = ("tau", "time x")
    with (args.output / "records.jsonl").open("w") as file:
        for kind in kinds:
            for documents in SIZES:
                record = simulate(kind, documents, args.runs) | {"commit": measured}
                line = json.dumps(record)
                file.write(line + "\n")
                print(line, flush=True)


if __name__ == "__main__":
    main()
