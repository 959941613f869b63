"""What a tune leaves: the configuration with its evidence, the full record, the table."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fly import config as fly_config
from fly.analysis.tables import Table, print_tables, ratio_text
from fly.config import FlyConfig
from fly.execution.device import device_facts
from fly.paths import write_output
from fly.runs.environment import versions
from fly.runs.run_settings import rule_in_words
from fly.tuning.candidates import changes, kind
from fly.tuning.fidelity import Recovery
from fly.tuning.real_runs import TunedPair
from fly.tuning.tune import RealRun, Tuning
from fly.version import VERSION

_COLUMNS = ("rule", "K", "settings", "time x", "tok/s", "tau", "changed", "recovery", "held")
_NOT_WRITTEN = ("trace", "draft_runs")  # switched off for the time of tuning


def describe_run(run: RealRun, given: FlyConfig) -> dict[str, Any]:
    """What was measured of a configuration, and what became of the scores."""
    return {
        "kind": kind(run.config),
        "given": run.is_given,
        "changes": changes(given, run.config),
        "documents": sum(len(task.documents) for task in run.result.measured.tasks.values()),
        "decode_seconds": round(run.seconds, 3),
        "decode_tok_s": run.result.tok_s,
        "tau": run.result.stats["tau"],
        "changed": round(run.result.changed, 4),
        "recoveries": [recovery.as_dict() for recovery in run.recoveries],
        "held": run.is_held,
    }


def write_record(path: Path, tuning: Tuning, pair: TunedPair) -> None:
    """Everything measured so far, to check the choice by or to choose anew."""
    given, confirmation = tuning.given, tuning.confirmation
    record = {
        "fly": versions(),
        "device": device_facts(pair.lm.device),
        "dtype": str(pair.lm.model.dtype),
        "workload": asdict(tuning.workload),
        "min_recovery": tuning.min_recovery,
        "given": given.model_dump(),
        "target_alone": {"stats": tuning.baseline.stats, "scores": tuning.baseline.scores},
        "candidates": [changes(given, run.config) for run in tuning.runs],
        "runs": [
            {**describe_run(run, given), "stats": run.result.stats, "scores": run.result.scores}
            for run in tuning.measured_runs
        ],
        "confirmation": confirmation and confirmation.as_dict(),
    }
    write_output(path, json.dumps(record, ensure_ascii=False) + "\n", "--output")


def write_config(path: Path, given_path: str, best: RealRun, tuning: Tuning, record: Path) -> None:
    """The given file with the best run's keys, its evidence under "$comment"."""
    values = fly_config.read_file(given_path)
    before = fly_config.build(values, given_path)
    values |= {k: v for k, v in changes(before, best.config).items() if k not in _NOT_WRITTEN}
    if values.get("draft_runs"):  # by default its rule would be exact
        values["verification"] = best.config.rule
    if path.resolve().parent != fly_config.find_config_file(given_path).resolve().parent:
        values.pop("$schema", None)  # a relative path that leads nowhere from here
    values.pop("$comment", None)
    values = {"$comment": _evidence(best, tuning, record), **values}
    fly_config.build(values, str(path))
    write_output(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n", "--output")


def _evidence(best: RealRun, tuning: Tuning, record: Path) -> dict[str, Any]:
    workload, given, confirmation = tuning.workload, tuning.given, tuning.confirmation
    return {
        "by": f"fly tune {VERSION}",
        "record": record.name,
        "choice": tuning.choose()[1],
        "documents": f"searched on the first {workload.limit} of {', '.join(workload.tasks)}",
        "max_gen_toks": workload.max_gen_toks,
        "target_alone_decode_seconds": round(tuning.baseline.seconds_of_decoding, 3),
        "confirmation": confirmation and confirmation.as_dict(),
        "chosen": describe_run(best, given),
        "others": [describe_run(run, given) for run in tuning.measured_runs if run is not best],
    }


# ------------------------------------------------------------------------------------- the table


def print_table(tuning: Tuning) -> None:
    """What was run on all documents, the fastest first; the target alone last. Then what was found
    when the fastest was run once more."""
    alone, rows = tuning.baseline, list[list[str]]()
    for run in sorted(tuning.finished, key=lambda run: run.seconds):
        config, stats, over = run.config, run.result.stats, None
        if run.seconds:
            over = alone.seconds_of_decoding / run.seconds
        words = ", ".join(rule_in_words(config.rule, config.model_dump()))
        numbers = map(_number, (over, stats["decode_tok_s"], stats["tau"]))
        changed = f"{run.result.changed:.1%}"
        rows.append([_kind(run), str(config.spd_k), words, *numbers, changed, *_scores(run)])
    rows.append(["the target alone", "", "", "1", f"{alone.tok_s:.2f}", "1.00", "-", "1", ""])
    dropped = len(tuning.measured_runs) - len(tuning.finished)
    more = f"{dropped} more configurations were dropped on fewer documents: the record has them"
    table = Table("fly tune: measured decoding", _COLUMNS, rows)
    print_tables([table], [more, *_confirmation(tuning)], width=160)


def _confirmation(tuning: Tuning) -> list[str]:
    found, best = tuning.confirmation, tuning.fastest
    if found is None or best is None:
        return []
    documents = sum(map(len, found.documents.values()))
    which = (
        "that the search had not used" if found.fresh else "(too few that the search had not used)"
    )
    lines = [
        f"run again beside the given configuration on {documents} documents {which}: "
        f"{_kind(best)}, K={best.config.spd_k}: time x {ratio_text(found.over_given)} over the "
        f"given one, {ratio_text(found.over_target)} over the target alone"
    ]
    for name, recoveries in (("it", found.recoveries), ("the given one", found.given_recoveries)):
        parts = [f"{r.name} {_recovery(r, '.3f')}" for r in _decisive(recoveries)]
        lines.append(f"  recovery of {name}: {', '.join(parts) or 'nothing to judge by'}")
    return lines


def _kind(run: RealRun) -> str:
    return kind(run.config) + (" (given)" if run.is_given else "")


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _scores(run: RealRun) -> tuple[str, str]:
    """Recovery per judged metric with the documents lost and won, and whether all of them held."""
    judged = _decisive(run.recoveries)
    name = len(judged) > 1
    parts = [f"{r.name} {_recovery(r)}" if name else _recovery(r) for r in judged]
    return "\n".join(parts), "yes" if run.is_held else "no"


def _decisive(recoveries: list[Recovery]) -> list[Recovery]:
    return [recovery for recovery in recoveries if recovery.is_judged or recovery.scores.lost]


def _recovery(recovery: Recovery, form: str = ".2f") -> str:
    scores = recovery.scores
    return f"{_number(scores.recovery, form)} (-{scores.lost} +{scores.won})"
