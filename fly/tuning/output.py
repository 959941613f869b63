"""What a tune leaves: the configuration with its evidence, the full record, the table."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import fly
from fly import config as fly_config
from fly.analysis.compare_table import interval_text
from fly.analysis.statistics import Ratio
from fly.execution.device import device_facts
from fly.paths import write_output
from fly.runs.environment import versions
from fly.tuning.fidelity import Recovery
from fly.tuning.real_runs import TunedLM, Workload
from fly.tuning.search import changes, kind
from fly.tuning.tune import Options, RealRun, Tuning

_UNSTEADY = 0.5  # of pace; the short passes that tell it differ by a third on an idle machine, too
_NOT_WRITTEN = ("trace", "draft_runs")  # switched off for the time of tuning


def summary(tuning: Tuning, least: float) -> list[dict[str, Any]]:
    """Of every real run: what was predicted and measured, and what became of the scores."""
    return [
        {
            "kind": kind(run.config),
            "given": run.is_given,
            "changes": changes(tuning.given, run.config),
            "decode_seconds": round(run.seconds, 3),
            "predicted_decode_tok_s": run.predicted and round(run.predicted.tok_s, 3),
            "measured_decode_tok_s": run.result.tok_s,
            "error": None if run.error is None else round(run.error, 4),
            "predicted_tau": run.predicted and round(run.predicted.tau, 3),
            "measured_tau": run.result.stats["tau"],
            "predicted_changed": run.predicted and round(run.predicted.changed, 4),
            "measured_changed": round(run.result.changed, 4),
            "pace": round(run.pace, 3),
            "recoveries": [recovery.as_dict() for recovery in run.recoveries],
            "held": run.held(least),
        }
        for run in tuning.runs
    ]


def write_record(
    path: Path, tuning: Tuning, lm: TunedLM, workload: Workload, options: Options
) -> None:
    """Everything measured and predicted so far, to check the choice by or to choose anew."""
    least, machine, confirmation = options.min_recovery, tuning.machine, tuning.confirmation
    record = {
        "fly": versions(),
        "device": device_facts(lm.device),
        "dtype": str(lm.model.dtype),
        "workload": asdict(workload),
        "min_recovery": least,
        "max_changed": options.max_changed,
        "given": tuning.given.model_dump(),
        "target_alone": {
            "reused": tuning.reused_baseline,
            "stats": tuning.baseline.stats,
            "scores": tuning.baseline.scores,
        },
        "costs": {
            "target": asdict(machine.target),
            "draft": {name: asdict(found) for name, found in machine.draft.items()},
            "round_overhead": machine.overhead,
        },
        "replays": {
            quantization: [
                {
                    "task": recording.answer.task,
                    "doc_id": recording.answer.doc_id,
                    "tokens": len(recording.answer.tokens),
                    "mismatches": recording.mismatches,
                    "ties": recording.ties,
                    "states": len(recording.tree.target),
                }
                for recording in recordings
            ]
            for quantization, recordings in tuning.recordings.items()
        },
        "runs_planned": tuning.planned,
        "runs": [
            {**line, "stats": run.result.stats, "scores": run.result.scores}
            for line, run in zip(summary(tuning, least), tuning.runs)
        ],
        "confirmation": confirmation and confirmation.as_dict(least),
        "predictions": [found.as_dict(tuning.given) for found in tuning.predictions],
    }
    write_output(path, json.dumps(record, ensure_ascii=False) + "\n", "--output")


def write_config(
    path: Path,
    given_path: str,
    best: RealRun,
    tuning: Tuning,
    workload: Workload,
    options: Options,
    record: Path,
) -> None:
    """The given file with the best run's keys, its evidence under "$comment"."""
    values = fly_config.read_file(given_path)
    before = fly_config.build(values, given_path)
    values |= {k: v for k, v in changes(before, best.config).items() if k not in _NOT_WRITTEN}
    if values.get("draft_runs"):  # by default its rule would be exact
        values["verification"] = best.config.rule
    if path.resolve().parent != fly_config.find_config_file(given_path).resolve().parent:
        values.pop("$schema", None)  # a relative path that leads nowhere from here
    values.pop("$comment", None)
    values = {"$comment": _evidence(best, tuning, workload, options, record), **values}
    fly_config.build(values, str(path))
    write_output(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n", "--output")


def _evidence(
    best: RealRun, tuning: Tuning, workload: Workload, options: Options, record: Path
) -> dict[str, Any]:
    lines = summary(tuning, options.min_recovery)
    chosen = lines[tuning.runs.index(best)]
    confirmation = tuning.confirmation
    return {
        "by": f"fly tune {fly.__version__}",
        "record": record.name,
        "choice": tuning.choice(options.min_recovery)[1],
        "documents": f"searched on the first {workload.limit} of {', '.join(workload.tasks)}",
        "max_gen_toks": workload.max_gen_toks,
        "target_alone_decode_seconds": round(tuning.baseline.seconds_of_decoding, 3),
        "confirmation": confirmation and confirmation.as_dict(options.min_recovery),
        "chosen": chosen,
        "others": [line for line in lines if line is not chosen],
    }


# ------------------------------------------------------------------------------------- the table


def print_table(tuning: Tuning, least: float) -> None:
    """Predicted against measured, the fastest first; the target alone last. Then what was found
    when the fastest was run once more."""
    table = Table(title="fly tune: predicted and measured decoding", title_justify="left")
    for name in ("rule", "K", "W", "gates", "n-gram", "draft"):
        table.add_column(name)
    numbers = ("time x", "tok/s: predicted", "measured", "error", "tau", "changed", "recovery")
    for name in (*numbers, "held"):
        table.add_column(name, justify="right")
    alone = tuning.baseline
    for run in sorted(tuning.runs, key=lambda run: run.seconds):
        over = _number(alone.seconds_of_decoding / run.seconds if run.seconds else None)
        table.add_row(*_setting(run), over, *_numbers(run), *_scores(run, least))
    table.add_row(
        "the target alone", *[""] * 5, "1", "-", f"{alone.tok_s:.2f}", "-", "1.00", "-", "1", ""
    )
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    for line in _confirmation(tuning, least):
        print(line)
    for run in tuning.runs:
        if abs(run.pace - 1) > _UNSTEADY:
            print(
                f"note: beside {_name(run)}, passes took {run.pace:.2f} times as long as when "
                "they were timed: the machine was busy with something else in one of the two"
            )


def _confirmation(tuning: Tuning, least: float) -> list[str]:
    found, best = tuning.confirmation, tuning.fastest(least)
    if found is None or best is None:
        return []
    documents = sum(map(len, found.documents.values()))
    which = (
        "that the search had not used" if found.fresh else "(too few that the search had not used)"
    )
    lines = [
        f"run again beside the given configuration on {documents} documents {which}: "
        f"{_name(best)}: time x {_time_x(found.over_given)} over the given one, "
        f"{_time_x(found.over_target)} over the target alone"
    ]
    for name, recoveries in (("it", found.recoveries), ("the given one", found.given_recoveries)):
        parts = [f"{r.name} {_recovery(r, '.3f')}" for r in _decisive(recoveries)]
        lines.append(f"  recovery of {name}: {', '.join(parts) or 'nothing to judge by'}")
    return lines


def _time_x(ratio: Ratio | None) -> str:
    if ratio is None:
        return "unknown"
    return f"{ratio.value:.2f}{interval_text(ratio.interval, 2) or ' (no interval)'}"


def _name(run: RealRun) -> str:
    return f"{kind(run.config)}, K={run.config.spd_k}" + (" (given)" if run.is_given else "")


def _setting(run: RealRun) -> tuple[str, ...]:
    config = run.config
    is_fly = config.rule == "fly"
    gates = {
        "theta": config.entropy_thre, "margin": config.margin_thre,
        "ratio": config.draft_ratio_thre, "rank": config.draft_rank_max,
    }  # fmt: skip
    ngram = f"{config.min_ngram_size}-{config.max_ngram_size}, {config.num_ngram_pred_tokens}"
    return (
        kind(config) + (" (given)" if run.is_given else ""),
        str(config.spd_k),
        str(config.window) if is_fly else "-",
        " ".join(f"{k} {v}" for k, v in gates.items() if v is not None) if is_fly else "-",
        ngram if config.drafter_name == "cascade" else "-",
        str(config.draft_quantization),
    )


def _numbers(run: RealRun) -> tuple[str, ...]:
    stats, found = run.result.stats, run.predicted
    tok_s, tau, changed = (found.tok_s, found.tau, found.changed) if found else (None, None, None)
    return (
        _number(tok_s),
        _number(stats["decode_tok_s"]),
        _number(run.error, "+.1%"),
        f"{_number(tau)} / {_number(stats['tau'])}",
        f"{_number(changed, '.1%')} / {run.result.changed:.1%}",
    )


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _scores(run: RealRun, least: float) -> tuple[str, str]:
    """Recovery per judged metric with the documents lost and won, and whether all of them held."""
    judged = _decisive(run.recoveries)
    name = len(judged) > 1
    parts = [f"{r.name} {_recovery(r)}" if name else _recovery(r) for r in judged]
    return "\n".join(parts), "yes" if run.held(least) else "no"


def _decisive(recoveries: list[Recovery]) -> list[Recovery]:
    return [recovery for recovery in recoveries if recovery.is_judged or recovery.scores.lost]


def _recovery(recovery: Recovery, form: str = ".2f") -> str:
    scores = recovery.scores
    return f"{_number(scores.recovery, form)} (-{scores.lost} +{scores.won})"
