"""Gates on speed and acceptance: least mean acceptance lengths and times x, judged as scores are.

Their intervals hold what varies between documents, not between runs of a noisy machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fly.analysis.scores import Work
from fly.analysis.statistics import Ratio, Verdict, compare_rates
from fly.errors import FlyError

Kind = Literal["tau", "time x", "decoding x"]
_FEWEST = 10  # documents: the interval of fewer covers too little
Works = Mapping[Any, Work]  # by task and document
FLAGS: dict[Kind, str] = {
    "tau": "--min-tau", "time x": "--min-time-x", "decoding x": "--min-decoding-x",
}  # fmt: skip


@dataclass(frozen=True)
class Gate:
    """What a run must reach, in all tasks together or in one."""

    kind: Kind
    least: float
    is_share: bool = False  # of the baseline's own tau, not tau itself
    task: str | None = None

    @property
    def label(self) -> str:
        least = f"{self.least:.4g}" if not self.is_share else f"{self.least:.4g} of the baseline's"
        return f"{self.kind} at least {least}"


@dataclass(frozen=True)
class GateRow:
    """A gate's answer for one run."""

    gate: Gate
    value: Ratio | None  # None where it is not known
    verdict: Verdict
    reason: str = ""


def parse(kind: Kind, text: str) -> Gate:
    """The gate that a word means: VALUE or TASK=VALUE; a tau may be a share of the baseline's."""
    task, _, number = text.rpartition("=")
    is_share = number.endswith("%")
    try:
        value = float(number.removesuffix("%")) / (100 if is_share else 1)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf or (is_share and kind != "tau"):
        raise FlyError(
            f"{FLAGS[kind]} {text}: give a number above 0, or TASK=NUMBER"
            + ("; with a % it is a share of the baseline's tau" if kind == "tau" else "")
        )
    return Gate(kind, value, is_share, task or None)


def judge(
    gate: Gate, baseline: Works, run: Works, withheld: str, confidence: float, verdicts: int
) -> GateRow:
    """withheld: why seconds do not compare; empty if they do. verdicts: how many are reached
    together, any of which may fail a job, as in `statistics.compare_tasks`."""
    if gate.kind == "tau" and not gate.is_share:
        baseline = run
    elif gate.kind != "tau" and withheld:
        return GateRow(gate, None, "not enough evidence", f"withheld: {withheld}")
    if not run or baseline.keys() != run.keys():
        why = "the runs have no records of the same documents"
        return GateRow(gate, None, "not enough evidence", why)
    pairs = [(baseline[key], run[key]) for key in run]
    tails = 1 - confidence, 1 - (1 - confidence) / verdicts
    if gate.kind == "tau":
        own = [(ours.tokens, ours.rounds) for _, ours in pairs]
        base = [(theirs.tokens, theirs.rounds) for theirs, _ in pairs] if gate.is_share else None
        value = compare_rates(own, base, tails=tails)
    else:
        name = "decode" if gate.kind == "decoding x" else "end_to_end"
        seconds = [(getattr(theirs, name), getattr(ours, name)) for theirs, ours in pairs]
        value = compare_rates(seconds, tails=tails)
    if len(pairs) < _FEWEST:
        why = f"{len(pairs)} of at least {_FEWEST} documents with records"
        return GateRow(gate, value, "not enough evidence", why)
    if value is None or value.interval is None:
        return GateRow(gate, value, "not enough evidence", "the records do not tell it")
    if value.interval.low >= gate.least:
        return GateRow(gate, value, "held")
    if value.interval.high < gate.least:
        return GateRow(gate, value, "fell")
    return GateRow(gate, value, "not enough evidence", "the documents do not tell")
