"""How often verdicts and intervals of `fly compare` are right, on simulated scores.

    python benchmarks/verdicts.py --output benchmarks/results/<date>-verdicts

Every scenario draws pairs of runs whose true recovery is known: at the demand, above it, where
`fell` is an error, and below it, where `held` is one. Every run has a posterior of fewer draws than
the command's and of another seed, so that the error of the draws is not the same in all runs.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from provenance import commit

from fly.analysis import posterior, statistics
from fly.analysis.statistics import Demand

DEMAND = Demand(min_recovery=0.95)
RECOVERIES = {"at": 0.95, "above": 1.0, "below": 0.9}
SIZES = {60: ["at"], 200: ["at", "above", "below"]}  # documents of the first task
CLUSTERS = {400: 10, 1500: 5}  # documents by cluster
Generator = np.random.Generator
Scores = tuple[np.ndarray, np.ndarray]  # baseline, other


def binary(rng: Generator, n: int, recovery: float, won: float = 0.02) -> Scores:
    """Solved 0.6; losses besides wins of 2 % of the documents."""
    lost = won + 0.6 * (1 - recovery)
    kinds = rng.choice(4, size=n, p=[0.6 - lost, lost, won, 0.4 - won])
    return np.isin(kinds, (0, 1)) * 1.0, np.isin(kinds, (0, 2)) * 1.0


def rare(rng: Generator, n: int, recovery: float) -> Scores:
    """Right or wrong, with losses alone."""
    return binary(rng, n, recovery, won=0.0)


def graded(rng: Generator, n: int, recovery: float) -> Scores:
    """Every document changes a little."""
    base = rng.beta(2, 3, n)
    return base, base * (recovery + rng.uniform(-0.1, 0.1, n))


def uniform_loss(rng: Generator, n: int, recovery: float) -> Scores:
    """Every document changes alike, within 2 points."""
    base = rng.beta(2, 3, n)
    return base, base * (recovery + rng.uniform(-0.02, 0.02, n))


def few_change(rng: Generator, n: int, recovery: float) -> Scores:
    """One document of five changes, by any amount."""
    base, changes = rng.beta(2, 3, n), rng.random(n) < 0.2
    return base, base * np.where(changes, 1 - 10 * (1 - recovery) * rng.random(n), 1.0)


def astray(rng: Generator, n: int, recovery: float) -> Scores:
    """Every document changes a little, and a few lose everything."""
    base = rng.beta(2, 3, n)
    factor = 1 + rng.uniform(-0.05, 0.05, n)
    return base, base * np.where(rng.random(n) < 1 - recovery, 0.0, factor)


def heavy(rng: Generator, n: int, recovery: float) -> Scores:
    """Lognormal scores, and changes in proportion."""
    base = rng.lognormal(0, 1, n)
    return base, base * recovery * rng.lognormal(-0.02, 0.2, n)


def lower(rng: Generator, n: int, recovery: float) -> Scores:
    """Where lower is better, such as a perplexity by document."""
    base = rng.lognormal(0, 0.7, n)
    return base, base / recovery * rng.lognormal(-0.02, 0.2, n)


TASKS: dict[str, list[Callable[..., Scores]]] = {
    "0/1": [binary],
    "0/1, losses alone": [rare],
    "graded": [graded],
    "graded, all alike": [uniform_loss],
    "graded, one in five changes": [few_change],
    "graded, a few lose all": [astray],
    "heavy-tailed": [heavy],
    "lower is better": [lower],
    "mixed: 0/1, graded, a few lose all": [binary, graded, astray],
}


def clustered(rng: Generator, n: int, recovery: float) -> tuple[Scores, np.ndarray]:
    """Right or wrong; a few of the clusters lose what they solve, all of it."""
    labels = np.arange(n) // CLUSTERS[n]
    base = (rng.random(n) < 0.6) * 1.0
    worse = (rng.random(labels[-1] + 1) < 1 - recovery)[labels]
    return (base, base * ~worse), labels


def chance_of_deciding(
    name: str, size: int, recovery: float, runs: int, draws: int
) -> dict[str, Any]:
    """How often the number of documents that would decide does, if they are like the first ones."""
    rng = np.random.default_rng(zlib.crc32(f"decides {name} {size}".encode()))
    first = [draw(rng, size // (1 + i), recovery) for i, draw in enumerate(TASKS[name])]
    options: dict[str, Any] = {"higher_is_better": name != "lower is better", "resamples": 499}
    found = statistics.compare_tasks(first, DEMAND, **options)
    record = {"scenario": name, "documents": size, "verdict": found.verdict}
    if found.decides is None or found.decides > 3000:  # so many take long to simulate
        return record | {"decides": found.decides}
    times, decided = found.decides / found.documents, 0
    for seed in range(runs):
        prepare(name, seed, draws)
        tasks = []
        for base, other in first:
            index = rng.integers(len(base), size=round(times * len(base)))
            tasks.append((base[index], other[index]))
        verdict = statistics.compare_tasks(tasks, DEMAND, **options).verdict
        decided += verdict in ("held", "fell")
    return record | {"decides": found.decides, "decided": decided / runs, "runs": runs}


def prepare(name: str, seed: int, draws: int) -> None:
    """Draws of the posterior: eight times as many where four kinds of documents share them."""
    posterior._SEED = seed
    posterior._DRAWS = draws * (8 if name.startswith(("0/1", "clusters")) else 1)


def run(name: str, size: int, where: str, runs: int, draws: int) -> dict[str, Any]:
    """Verdicts and coverage over so many pairs of runs."""
    rng = np.random.default_rng(zlib.crc32(f"{name} {size} {where}".encode()))
    recovery, found, covered, started = RECOVERIES[where], Counter[str](), 0, time.monotonic()
    for seed in range(runs):
        prepare(name, seed, draws)
        clusters = None
        if name.startswith("clusters"):
            scores, labels = clustered(rng, size, recovery)
            tasks, clusters = [scores], [labels] if name == "clusters, given" else None
        else:
            tasks = [draw(rng, size // (1 + i), recovery) for i, draw in enumerate(TASKS[name])]
        compared = statistics.compare_tasks(
            tasks, DEMAND, higher_is_better=name != "lower is better", clusters=clusters,
            resamples=499,
        )  # fmt: skip
        found[compared.verdict] += 1
        interval = compared.interval
        covered += interval is not None and interval.low <= recovery <= interval.high
    return {
        "scenario": name,
        "documents": size,
        "demand": DEMAND.min_recovery,
        "recovery": recovery,
        "runs": runs,
        "held": found["held"] / runs,
        "fell": found["fell"] / runs,
        "covered": covered / runs,
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--draws", type=int, default=500, help="of the posterior")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    measured = commit()
    args.output.mkdir(parents=True, exist_ok=True)
    cases = [(name, size, at) for name in TASKS for size in SIZES for at in SIZES[size]]
    names = ("clusters, not given", "clusters, given")
    cases += [(name, size, at) for name in names for size in CLUSTERS for at in RECOVERIES]
    with (args.output / "records.jsonl").open("w") as file:

        def keep(record: dict[str, Any]) -> None:
            line = json.dumps(record | {"commit": measured})
            file.write(line + "\n")
            file.flush()
            print(line, flush=True)

        for name in TASKS:
            for size, recovery in ((60, 0.97), (200, 0.93)):
                keep(chance_of_deciding(name, size, recovery, args.runs // 5, args.draws))
        statistics.documents_that_decide = lambda *_: None  # no verdict needs it
        for case in cases:
            keep(run(*case, args.runs, args.draws))


if __name__ == "__main__":
    main()
