"""Families of runs in one matrix: drafters by verification rules, for every target by itself.

A run is compared with the run of its own target alone, as `fly compare` compares two runs. The
p-values are corrected together, over all cells. docs/compare.md defines the matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fly import registry
from fly.analysis import compare
from fly.analysis.comparability import check_comparable, explain
from fly.analysis.compare import ScoreRow, Speed, find_speed
from fly.analysis.scores import Measured
from fly.analysis.statistics import holm
from fly.errors import FlyError
from fly.runs import run_settings
from fly.runs.reader import Run

Scored = tuple[Run, Measured]  # a run and its scores, under a name that no other run has
_OF_SCORES = ("recovery", "interval", "bound", "lost", "won", "test")
_NAMED = ("drafter", "target_model_path", "draft_model_path")  # whether they differ or not


@dataclass(frozen=True)
class Cell:
    """One run on one task (or `overall`), against its target alone."""

    target: str  # the cell's place, with drafter and rule
    drafter: str
    rule: str
    run: str
    baseline: str  # the run of its target alone
    row: ScoreRow
    speed: Speed | None  # the run's pace; None without records
    alone: Speed | None  # its target's pace; None without records
    p: float | None = None  # of equal scores, corrected for all cells; None without a test

    @property
    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, by the keys that docs/compare.md lists."""
        scores = asdict(self.row.scores)
        return {
            **{key: getattr(self, key) for key in ("target", "drafter", "rule", "run", "baseline")},
            **{key: getattr(self.row, key) for key in ("task", "metric", "higher_is_better")},
            "documents": scores["documents"],
            "score": scores["other"],
            "baseline_score": scores["baseline"],
            **{key: scores[key] for key in _OF_SCORES},
            "p_uncorrected": scores["p"],
            "p": self.p,
            "reason": "" if _is_tested(self) else scores["reason"],
            "speed": asdict(self.speed) if self.speed else None,
            "baseline_speed": asdict(self.alone) if self.alone else None,
        }


@dataclass(frozen=True)
class Matrix:
    """All cells, and what they have in common."""

    cells: list[Cell]
    tests: int  # how many p-values were corrected together
    notes: list[str]  # what a reader has to know

    @property
    def tables(self) -> dict[tuple[str, str], list[Cell]]:
        """The cells by task and metric."""
        found: dict[tuple[str, str], list[Cell]] = {}
        for cell in self.cells:
            found.setdefault((cell.row.task, cell.row.metric), []).append(cell)
        return found

    @property
    def as_dict(self) -> dict[str, Any]:
        cells = [cell.as_dict for cell in self.cells]
        return {"tests": self.tests, "cells": cells, "notes": self.notes}


@dataclass
class _Family:
    """A target's own run, and the runs that are compared with it."""

    alone: Scored
    runs: list[Scored] = field(default_factory=list)


def build(runs: Sequence[Scored], metrics: Sequence[str] | None = None) -> Matrix:
    """The matrix of these runs: `relate`, then `arrange`."""
    return arrange(*relate(runs, metrics))


def relate(
    runs: Sequence[Scored],
    metrics: Sequence[str] | None = None,
    left_out: list[str] | None = None,
) -> tuple[list[Cell], list[str]]:
    """(every run against its own target's, notes), before p-values are corrected. metrics: only
    these, by name or `name,filter`; None for each task's first by which its target alone scores
    anything. left_out: takes a line for every run that cannot be related, instead of an error.

    Raises FlyError for runs that cannot be related: of another backend, without a target-only run
    of their target or with several, of other questions; and as `compare.compare`.
    """
    families = _families(runs, left_out)
    targets, drafters, rules = _targets(families), _drafters(families), _rules(families)
    cells: list[Cell] = []
    notes: list[str] = []
    for family in families:
        base = family.alone[1]
        result = compare.compare(base, [measured for _, measured in family.runs], metrics=metrics)
        for found in result.others:
            place = (targets[base.name], drafters[found.name], rules[found.name], found.name)
            for row in found.all_rows:
                if metrics or row.primary or row is found.overall:
                    speed = find_speed(found.speeds, row.task)
                    alone = find_speed(result.baseline_speeds, row.task)
                    cells.append(Cell(*place, base.name, row, speed, alone))
        notes += result.notes
    return cells, list(dict.fromkeys(notes))


def arrange(cells: list[Cell], notes: list[str]) -> Matrix:
    """The cells, their p-values corrected together. Raises FlyError if two runs share a place."""
    _check_places(cells)
    p_values = iter(holm([cell.row.scores.p for cell in cells if _is_tested(cell)]))
    cells = [replace(cell, p=next(p_values)) if _is_tested(cell) else cell for cell in cells]
    return Matrix(cells, sum(map(_is_tested, cells)), notes)


def _is_tested(cell: Cell) -> bool:
    return cell.row.scores.other is not None


def _check_places(cells: Iterable[Cell]) -> None:
    taken: dict[tuple[str, ...], str] = {}
    for cell in cells:
        place = (cell.row.task, cell.row.metric, cell.target, cell.drafter, cell.rule)
        other = taken.setdefault(place, cell.run)
        if other != cell.run:
            raise FlyError(
                f"{other} and {cell.run} belong in one cell of the matrix ({cell.target}; "
                f"{cell.drafter}; {cell.rule}): leave one of them out"
            )


# ----------------------------------------------------------------------------------- families


def _families(runs: Sequence[Scored], left_out: list[str] | None) -> list[_Family]:
    """Every run beside its target's own; targets without other runs are left out."""
    for run, measured in runs:
        if run.entry is None:
            raise FlyError(
                f"{measured.name}: a matrix is of fly's runs, and this is one of {run.engine}: "
                "leave it out"
            )
    families = [_Family(each) for each in runs if each[0].mode == "target-only"]
    for each in runs:
        if each[0].mode == "target-only":
            continue
        try:
            family = _family_of(each, families)
            check_comparable(family.alone[1], each[1])
            family.runs.append(each)
        except FlyError as error:
            if left_out is None:
                raise
            left_out.append(f"left out: {error}")
    found = [family for family in families if family.runs]
    if not found and not left_out:
        raise FlyError("a matrix needs runs that draft, besides those of the targets alone")
    return found


def _family_of(each: Scored, families: list[_Family]) -> _Family:
    """By target, dtype, engine and tasks; of several such, by all that seconds and texts depend on.

    Raises FlyError unless there is just one.
    """
    run, measured = each
    fitting = [
        family
        for family in families
        if family.alone[0].engine == run.engine
        and family.alone[1].tasks.keys() == measured.tasks.keys()
        and not explain(family.alone[1], measured, "target")
    ]
    alike = [
        family
        for family in fitting
        if not explain(family.alone[1], measured, "target", "decoding", "machine", "method")
    ]
    closest = alike or fitting
    if len(closest) == 1:
        return closest[0]
    what = f"target-only run of {measured.target['name']} ({measured.target['dtype']}, {run.engine}"
    what += f"; {', '.join(measured.tasks)})"
    if not closest:
        raise FlyError(f"{measured.name}: no {what} is among the runs: add one (use_sd=false)")
    names = " and ".join(family.alone[1].name for family in closest)
    raise FlyError(f"{measured.name}: {names} could each be its {what}: give only one of them")


# ------------------------------------------------------------------------------------- labels


def _targets(families: list[_Family]) -> dict[str, str]:
    """By the name of a target's own run: the target, and in what the targets' own runs differ."""
    alone = [family.alone for family in families]
    models = _short(str(measured.target["name"]) for _, measured in alone)
    several_engines = len({run.engine for run, _ in alone}) > 1
    labels = []
    apart = run_settings.distinctions([run_settings.in_force(run) for run, _ in alone])
    for (run, measured), words in zip(alone, apart):
        parts = [models[str(measured.target["name"])]] + [run.engine] * several_engines
        parts += [text for key, text in words.items() if key not in _NAMED]
        labels.append(", ".join(parts))
    counts = Counter(labels)
    return {
        measured.name: label if counts[label] == 1 else f"{label} ({measured.name})"
        for (_, measured), label in zip(alone, labels)
    }


def _drafters(families: list[_Family]) -> dict[str, str]:
    """By the name of a run: its drafter, draft model, and the settings besides the rule's in which
    runs differ, unless they are those of its target's own run, whose label says them."""
    runs = [(each, family.alone[0]) for family in families for each in family.runs]
    in_force = [run_settings.in_force(run) for (run, _), _ in runs]
    models = _short(str(own.get("draft_model_path")) for own in in_force)
    labels = {}
    for ((run, measured), alone), own, words in zip(
        runs, in_force, run_settings.distinctions(in_force)
    ):
        known = registry.DRAFTERS.get(str(own.get("drafter")))
        parts = [str(own.get("drafter"))]
        if known is None or known.needs_draft_model:
            parts.append(models[str(own.get("draft_model_path"))])
        base, left_out = run_settings.in_force(alone), {*_NAMED, *run_settings.of_rule(run)}
        parts += [
            text for key, text in words.items() if key not in left_out and own[key] != base.get(key)
        ]
        labels[measured.name] = ", ".join(parts)
    return labels


def _rules(families: list[_Family]) -> dict[str, str]:
    """By the name of a run: its rule, and the rule's settings in which runs differ."""
    runs = [each for family in families for each in family.runs]
    apart = run_settings.distinctions([run_settings.of_rule(run) for run, _ in runs])
    return {
        measured.name: ", ".join([run_settings.name_mode(run), *found.values()])
        for (run, measured), found in zip(runs, apart)
    }


def _short(models: Iterable[str]) -> dict[str, str]:
    """Models by the last two parts of their paths; whole where two end alike."""
    ends = {model: "/".join(model.rstrip("/").split("/")[-2:]) for model in models}
    counts = Counter(ends.values())
    return {model: end if counts[end] == 1 else model for model, end in ends.items()}
