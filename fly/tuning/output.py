"""What a tune leaves: the configuration with its evidence, the full record, the table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import fly
from fly import config as fly_config
from fly.analysis.statistics import Ratio
from fly.config import FlyConfig
from fly.harness import summary as report
from fly.tuning.baseline import write_json
from fly.tuning.real_runs import TunedLM, Workload
from fly.tuning.search import kind
from fly.tuning.tune import Options, Run, Tuning

_UNSTEADY = 0.5  # of pace; the short passes that tell it differ by a third on an idle machine, too
_NOT_WRITTEN = ("trace",)  # switched off for the time of tuning


def summary(tuning: Tuning, least: float) -> list[dict[str, Any]]:
    """Of every real run: what was predicted and measured, and what became of the scores."""
    return [
        {
            "kind": kind(run.config),
            "given": run.is_given,
            "changes": {
                key: value
                for key, value in run.config.model_dump().items()
                if value != getattr(tuning.given, key)
            },
            "decode_seconds": round(run.seconds, 3),
            "predicted_decode_tok_s": run.predicted and round(run.predicted.tok_s, 3),
            "measured_decode_tok_s": run.outcome.tok_s,
            "error": None if run.error is None else round(run.error, 4),
            "predicted_tau": run.predicted and round(run.predicted.tau, 3),
            "measured_tau": run.outcome.stats["tau"],
            "predicted_changed": run.predicted and round(run.predicted.changed, 4),
            "measured_changed": round(
                run.outcome.stats["deferred_accepted"] / max(1, run.outcome.stats["emitted"]), 4
            ),
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
    replays = {
        kind: [
            {
                "task": replay.document.task,
                "doc_id": replay.document.doc_id,
                "tokens": len(replay.document.tokens),
                "mismatches": replay.mismatches,
                "ties": replay.ties,
                "states": len(replay.tree.own),
            }
            for replay in found
        ]
        for kind, found in tuning.replays.items()
    }
    machine = tuning.machine
    write_json(
        path,
        {
            "fly": report.versions(),
            "device": report.device_facts(lm.device),
            "dtype": str(lm.model.dtype),
            "workload": workload.as_dict(),
            "min_recovery": options.min_recovery,
            "max_changed": options.max_changed,
            "given": tuning.given.model_dump(),
            "target_alone": {
                "reused": tuning.reused_baseline,
                "stats": tuning.baseline.stats,
                "scores": tuning.baseline.scores,
            },
            "costs": {
                "target": machine.target.as_dict(),
                "draft": {kind: found.as_dict() for kind, found in machine.draft.items()},
                "round_overhead": machine.overhead,
            },
            "replays": replays,
            "runs_planned": tuning.planned,
            "runs": [
                {**line, "stats": run.outcome.stats, "scores": run.outcome.scores}
                for line, run in zip(summary(tuning, options.min_recovery), tuning.runs)
            ],
            "confirmation": (
                None
                if tuning.confirmation is None
                else tuning.confirmation.as_dict(options.min_recovery)
            ),
            "predictions": [found.as_dict(tuning.given) for found in tuning.predictions],
        },
        indent=None,
    )


def write_config(
    path: Path,
    given_path: str,
    best: Run,
    tuning: Tuning,
    workload: Workload,
    options: Options,
    record: Path,
) -> FlyConfig:
    """The given file with the best run's keys, its evidence under "$comment"; what it means."""
    values = fly_config.read_file(given_path)
    before = fly_config.build(values, given_path)
    new = best.config.model_dump()
    for key, value in before.model_dump().items():
        if new[key] != value and key not in _NOT_WRITTEN:
            values[key] = new[key]
    if path.resolve().parent != fly_config.find_config_file(given_path).resolve().parent:
        values.pop("$schema", None)  # a relative path that leads nowhere from here
    evidence = _evidence(best, tuning, workload, options, record)
    values = {"$comment": evidence, **{k: v for k, v in values.items() if k != "$comment"}}
    result = fly_config.build(values, str(path))
    write_json(path, values)
    return result


def _evidence(
    best: Run, tuning: Tuning, workload: Workload, options: Options, record: Path
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
                "costs were measured: the machine was busy with something else in one of the two"
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
        f"{_name(best)}: time x {_interval(found.over_given)} over the given one, "
        f"{_interval(found.over_target)} over the target alone"
    ]
    for name, recoveries in (("it", found.recoveries), ("the given one", found.given_recoveries)):
        judged = [r for r in recoveries if r.is_judged or r.lost]
        parts = [f"{r.name} {_number(r.value, '.3f')} (-{r.lost} +{r.won})" for r in judged]
        lines.append(f"  recovery of {name}: {', '.join(parts) or 'nothing to judge by'}")
    return lines


def _interval(ratio: Ratio | None) -> str:
    if ratio is None:
        return "unknown"
    if ratio.interval is None:
        return f"{ratio.value:.2f} (no interval)"
    return f"{ratio.value:.2f} [{ratio.interval.low:.2f}, {ratio.interval.high:.2f}]"


def _name(run: Run) -> str:
    return f"{kind(run.config)}, K={run.config.spd_k}" + (" (given)" if run.is_given else "")


def _setting(run: Run) -> tuple[str, ...]:
    config = run.config
    relaxed = config.rule == "fly"
    gates = {
        "theta": config.entropy_thre, "margin": config.margin_thre,
        "ratio": config.draft_ratio_thre, "rank": config.draft_rank_max,
    }  # fmt: skip
    ngram = f"{config.min_ngram_size}-{config.max_ngram_size}, {config.num_ngram_pred_tokens}"
    return (
        kind(config) + (" (given)" if run.is_given else ""),
        str(config.spd_k),
        str(config.window) if relaxed else "-",
        " ".join(f"{k} {v}" for k, v in gates.items() if v is not None) if relaxed else "-",
        ngram if config.drafter_name == "cascade" else "-",
        str(config.draft_quantization),
    )


def _numbers(run: Run) -> tuple[str, ...]:
    stats, predicted = run.outcome.stats, run.predicted
    changed = stats["deferred_accepted"] / max(1, stats["emitted"])
    tok_s, tau, share = (
        (predicted.tok_s, predicted.tau, predicted.changed) if predicted else (None, None, None)
    )
    return (
        _number(tok_s),
        _number(stats["decode_tok_s"]),
        _number(run.error, "+.1%"),
        f"{_number(tau)} / {_number(stats['tau'])}",
        f"{_number(share, '.1%')} / {changed:.1%}",
    )


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _scores(run: Run, least: float) -> tuple[str, str]:
    """Recovery per judged metric with the documents lost and won, and whether all of them held."""
    judged = [r for r in run.recoveries if r.is_judged or r.lost]
    parts = [f"{_number(r.value)} (-{r.lost} +{r.won})" for r in judged]
    if len(judged) > 1:
        parts = [f"{r.name} {part}" for r, part in zip(judged, parts)]
    return "\n".join(parts), "yes" if run.held(least) else "no"
