"""The stages of `fly tune`, in order: successive halving over growing sets of documents."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fly.config import FlyConfig
from fly.errors import FlyError
from fly.execution.device import device_facts
from fly.models import fingerprint
from fly.paths import write_output
from fly.runs.environment import versions
from fly.tuning import fidelity
from fly.tuning.candidates import candidates
from fly.tuning.confirm import Confirmation, confirm
from fly.tuning.fidelity import Recovery
from fly.tuning.real_runs import RunResult, TunedPair, Workload, join

_SETS = 4  # of documents, each half as many as the next


@dataclass(frozen=True)
class Options:
    """What a tune is asked for."""

    output: Path
    # candidates on all documents, beside the given configuration and exact verification
    survivors: int = 3
    min_recovery: float = 0.99  # least share of the target's score that a configuration must keep

    @property
    def kept_runs(self) -> Path:
        return self.output.with_suffix(".runs")


@dataclass
class RealRun:
    """A configuration and what it did."""

    config: FlyConfig
    is_given: bool
    # one run for each set of documents that it was run on
    parts: list[RunResult] = field(default_factory=list)
    # on all of these; empty until they are judged
    recoveries: list[Recovery] = field(default_factory=list)

    @property
    def result(self) -> RunResult:
        return join(self.parts)

    @property
    def seconds(self) -> float:
        """Of decoding: what is ranked by, as a configuration that talks more takes longer."""
        return self.result.seconds_of_decoding

    def held(self, least: float) -> bool:
        return fidelity.held(self.recoveries, least)

    def rank(self, least: float) -> tuple[bool, float]:
        """Least first: those whose scores held by their seconds, then the others."""
        is_good = self.held(least) and self.result.counts.emitted > 0
        return not is_good, self.seconds


@dataclass
class Tuning:
    """All that was measured."""

    given: FlyConfig
    target: list[RunResult]  # the target alone on each set of documents
    # of every configuration, those that were dropped early with fewer documents
    runs: list[RealRun] = field(default_factory=list)
    # of `fastest`, where that is not the given configuration
    confirmation: Confirmation | None = None

    @cached_property
    def baseline(self) -> RunResult:
        """The target alone on all documents."""
        return join(self.target)

    @property
    def finished(self) -> list[RealRun]:
        """The configurations that were run on all documents."""
        return [run for run in self.runs if len(run.parts) == len(self.target)]

    def fastest(self, least: float) -> RealRun | None:
        """That of the least time whose scores held in the search; none that decoded nothing."""
        held = [run for run in self.finished if run.held(least) and run.result.tok_s]
        return min(held, key=lambda run: run.seconds, default=None)

    def choice(self, least: float) -> tuple[RealRun | None, str]:
        """(what to use from now on, why in a clause). None if no configuration kept the scores."""
        best = self.fastest(least)
        given = next((run for run in self.runs if run.is_given), None)
        if best is None:
            return None, f"no configuration kept {least:g} of the target's score on these documents"
        if best.is_given:
            return best, "the given configuration stays: no other was faster and kept the scores"
        found = self.confirmation
        if found is None:
            return None, "the fastest configuration was not confirmed"
        if not found.is_judged:
            none = "the target alone has no score on the documents of the confirmation"
            if given is not None and given.held(least):
                return given, f"the given configuration stays: {none}"
            return None, none
        # the search's documents have chosen among the others, and told of the given one by luck
        given_holds = (
            given is not None
            and fidelity.held(found.given_recoveries, least)
            and (found.fresh or given.held(least))
        )
        if not fidelity.held(found.recoveries, least):
            lost = "the fastest did not keep the scores where that was checked again"
            if given_holds:
                return given, f"the given configuration stays: {lost}"
            return None, f"no configuration is left: {lost}"
        if found.is_faster:
            return best, "a new configuration: it is faster than the given one"
        if given_holds:
            return given, "the given configuration stays: no other is faster beyond the noise"
        return best, "a new configuration: the given one lost scores"


def growing_sets(available: dict[str, int], limit: int) -> list[dict[str, list[int]]]:
    """What each stage of the search adds: documents by task, of the first `limit` of each.

    With all before it a set has half as many documents as the next, at least one more of every
    task; so there are fewer sets where a task has few documents.
    """
    counts = {name: min(limit, have) for name, have in available.items() if have}
    stages = min(_SETS, min(counts.values()).bit_length())
    ends = [
        {name: ceil(count / 2 ** (stages - 1 - stage)) for name, count in counts.items()}
        for stage in range(stages)
    ]
    starts = [dict.fromkeys(counts, 0), *ends]
    return [
        {name: [*range(start[name], end[name])] for name in counts}
        for start, end in zip(starts, ends)
    ]


def _documents(by_task: dict[str, list[int]]) -> int:
    return sum(map(len, by_task.values()))


def survivors(runs: list[RealRun], count: int, least: float) -> list[RealRun]:
    """The `count` best, beside the given configuration and the best of exact verification, which
    keeps the scores."""
    ranked = sorted((run for run in runs if not run.is_given), key=lambda run: run.rank(least))
    exact = [run for run in ranked if run.config.rule == "exact"][:1]
    staying = [*ranked[:count], *exact]
    return [run for run in runs if run.is_given or any(run is other for other in staying)]


class _Kept(RunResult):
    key: dict[str, Any]


@dataclass(frozen=True)
class KeptRuns:
    """Finished runs on disk: a tune that is started again does not decode them anew."""

    folder: Path  # a file for each run
    common: dict[str, Any]  # what all runs of this tune depend on

    def load(self, key: dict[str, Any]) -> RunResult | None:
        """The run that an earlier tune has kept; None without one."""
        whole = self._whole(key)
        try:
            kept = _Kept.model_validate_json(self._path(whole).read_bytes())
        except (OSError, ValueError):
            return None  # not there, or not ours: it is made anew
        return kept if kept.key == whole else None

    def save(self, key: dict[str, Any], run: RunResult) -> None:
        whole = self._whole(key)
        kept = _Kept(key=whole, **dict(run))
        write_output(self._path(whole), kept.model_dump_json() + "\n", "--output")

    def _whole(self, key: dict[str, Any]) -> dict[str, Any]:
        return json.loads(json.dumps({**self.common, **key}))

    def _path(self, whole: dict[str, Any]) -> Path:
        return self.folder / f"{fingerprint.hash_json(whole)[:16]}.json"


class Tuner:
    """Runs the stages on a loaded pair. keep: gets what there is, whenever a run is added."""

    def __init__(
        self,
        pair: TunedPair,
        workload: Workload,
        options: Options,
        keep: Callable[[Tuning], None] = lambda tuning: None,
    ) -> None:
        self._pair, self._workload, self._options, self._keep = pair, workload, options, keep
        self._sets = growing_sets(workload.available, workload.limit)
        common = {
            "versions": versions(),
            "device": device_facts(pair.lm.device),
            "dtype": str(pair.lm.model.dtype),
            "files": fingerprint.hash_files(Path(workload.include_path or os.devnull).resolve()),
            **pair.identity(),
        }
        self._kept = KeptRuns(options.kept_runs, common)

    def run(self) -> Tuning:
        """Everything from the target alone to the confirmation. Raises FlyError if nothing can be
        told."""
        given = self._pair.given
        alone = given.model_copy(update={"use_sd": False})
        with tqdm(
            desc="the target alone",
            unit="doc",
            total=sum(map(_documents, self._sets)),
            mininterval=1.0 if sys.stderr.isatty() else 20.0,
        ) as self._bar:
            target = [self._run_on(alone, number) for number in range(len(self._sets))]
            tuning = Tuning(given, target)
            self._check(tuning.baseline)
            tuning.runs = [RealRun(given, is_given=True)]
            tuning.runs += [RealRun(config, is_given=False) for config in candidates(given)]
            self._keep(tuning)
            counts = self._plan(len(tuning.runs) - 1)
            running = tuning.runs
            for number in range(len(self._sets)):
                self._bar.set_description(f"search, {number + 1} of {len(self._sets)}")
                if number:
                    running = survivors(running, counts[number], self._options.min_recovery)
                for run in running:
                    self._advance(tuning, run, number)
            self._confirm(tuning)
        return tuning

    def _plan(self, first: int) -> list[int]:
        """How many candidates each set of documents is run by, in equal ratios from all to those
        that are left at the end."""
        last, steps = min(self._options.survivors, first), max(1, len(self._sets) - 1)
        counts = [round(first * (last / first) ** (n / steps)) for n in range(len(self._sets))]
        sizes = [_documents(each) for each in self._sets]
        # beside them the given configuration, and exact verification; three in the confirmation
        left = sum(size * (count + 2) for size, count in zip(sizes, counts)) + 3 * sum(sizes)
        self._bar.total = self._bar.n + left
        return counts

    def _run_on(self, config: FlyConfig, number: int) -> RunResult:
        """On a set of documents, unless an earlier tune has."""
        workload = replace(self._workload, samples=self._sets[number])
        key = {"workload": asdict(workload), "config": config.model_dump()}
        if (found := self._kept.load(key)) is None:
            found = self._pair.run(workload, config)
            self._kept.save(key, found)
        self._bar.update(_documents(self._sets[number]))
        return found

    def _check(self, target: RunResult) -> None:
        """Refuse what the rest could not make use of."""
        if not target.tok_s:
            raise FlyError(
                f"--tasks {' '.join(self._workload.tasks)}: the target alone decoded no token: "
                "raise --limit, or choose other tasks"
            )
        for note in fidelity.check_judgeable(target.measured, self._options.min_recovery):
            self._bar.write(f"note: {note}")

    def _advance(self, tuning: Tuning, run: RealRun, number: int) -> None:
        run.recoveries = []
        run.parts.append(self._run_on(run.config, number))
        self._keep(tuning)  # before it is judged, which may end the tune
        target = join(tuning.target[: number + 1]).measured
        try:
            found = fidelity.recoveries(target, run.result.measured, self._options.min_recovery)
        except FlyError as error:  # a task's file changed in between
            folder = self._kept.folder
            raise FlyError(
                f"{folder}: holds other documents than this run has ({error}): remove it and run "
                "again"
            ) from None
        run.recoveries = found
        self._keep(tuning)

    def _confirm(self, tuning: Tuning) -> None:
        """The fastest beside the given one, if that is another."""
        least = self._options.min_recovery
        best = tuning.fastest(least)
        if best is None or best.is_given:
            return
        self._bar.set_description("confirmation")
        tuning.confirmation = confirm(
            self._pair, self._workload, tuning.given, best.config, least, self._bar.update
        )
        self._keep(tuning)
