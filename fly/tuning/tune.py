"""The stages of `fly tune`, in order: successive halving over growing sets of documents."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import ceil
from pathlib import Path

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

    @property
    def is_held(self) -> bool:
        return fidelity.held(self.recoveries)

    @property
    def rank(self) -> tuple[bool, float]:
        """Least first: those whose scores held by their seconds, then the others."""
        is_good = self.is_held and self.result.counts.emitted > 0
        return not is_good, self.seconds


@dataclass
class Tuning:
    """What is tuned, and all that was measured."""

    given: FlyConfig
    workload: Workload
    min_recovery: float  # least share of the target's score that a configuration must keep
    # the target alone on each set of documents
    target: list[RunResult] = field(default_factory=list)
    # of every configuration, those that were dropped early with fewer documents
    runs: list[RealRun] = field(default_factory=list)
    # of `fastest`, where that is not the given configuration
    confirmation: Confirmation | None = None

    @cached_property
    def baseline(self) -> RunResult:
        """The target alone on all documents."""
        return join(self.target)

    @property
    def measured_runs(self) -> list[RealRun]:
        """The configurations that were run on some documents at least."""
        return [run for run in self.runs if run.parts]

    @property
    def finished(self) -> list[RealRun]:
        """The configurations that were run on all documents."""
        return [run for run in self.runs if len(run.parts) == len(self.target)]

    @property
    def fastest(self) -> RealRun | None:
        """That of the least time whose scores held in the search; none that decoded nothing."""
        held = [run for run in self.finished if run.is_held and run.result.tok_s]
        return min(held, key=lambda run: run.seconds, default=None)

    def choose(self) -> tuple[RealRun | None, str]:
        """(what to use from now on, why in a clause). None if no configuration kept the scores."""
        best = self.fastest
        if best is None:
            kept = f"{self.min_recovery:g} of the target's score"
            return None, f"no configuration kept {kept} on these documents"
        if best.is_given:
            return best, "the given configuration stays: no other was faster and kept the scores"
        given = next(run for run in self.runs if run.is_given)
        found = self.confirmation
        assert found is not None  # it follows every search that another than the given one won
        if not found.is_judged:
            none = "the target alone has no score on the documents of the confirmation"
            if given.is_held:
                return given, f"the given configuration stays: {none}"
            return None, none
        # the search's documents have chosen among the others, and told of the given one by luck
        given_holds = fidelity.held(found.given_recoveries) and (found.fresh or given.is_held)
        if not fidelity.held(found.recoveries):
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


def survivors(runs: list[RealRun], count: int) -> list[RealRun]:
    """The `count` best, beside the given configuration and the best of exact verification, which
    keeps the scores."""
    ranked = sorted((run for run in runs if not run.is_given), key=lambda run: run.rank)
    exact = [run for run in ranked if run.config.rule == "exact"][:1]
    staying = [*ranked[:count], *exact]
    return [run for run in runs if run.is_given or any(run is other for other in staying)]


class Tuner:
    """Runs the stages of a tune on a loaded pair.

    finalists: how many candidates are run on all documents, beside the given configuration and
    exact verification. kept_runs: a folder with a file for each finished run; a tune that is
    started again does not decode them anew. keep: is called whenever a run is added.
    """

    def __init__(
        self,
        pair: TunedPair,
        tuning: Tuning,
        finalists: int,
        kept_runs: Path,
        keep: Callable[[], None],
    ) -> None:
        self._pair, self._tuning, self._workload = pair, tuning, tuning.workload
        self._finalists, self._kept_runs, self._keep = finalists, kept_runs, keep
        self._sets = growing_sets(self._workload.available, self._workload.limit)
        include_path = Path(self._workload.include_path or os.devnull).resolve()
        self._common = {  # what all runs depend on
            "versions": versions(),
            "device": device_facts(pair.lm.device),
            "dtype": str(pair.lm.model.dtype),
            "files": fingerprint.hash_files(include_path),
            **pair.identity(),
        }

    def run(self) -> None:
        """Everything from the target alone to the confirmation. Raises FlyError if nothing can be
        told."""
        tuning, pair = self._tuning, self._pair
        with tqdm(
            desc="the target alone",
            unit="doc",
            total=sum(map(_documents, self._sets)),
            mininterval=1.0 if sys.stderr.isatty() else 20.0,
        ) as self._bar:
            tuning.target = [self._run_on(pair.alone, number) for number in range(len(self._sets))]
            self._check(tuning.baseline)
            tuning.runs = [RealRun(pair.given, is_given=True)]
            tuning.runs += [RealRun(config, is_given=False) for config in candidates(pair.given)]
            self._keep()
            counts = self._plan(len(tuning.runs) - 1)
            running = tuning.runs
            for number in range(len(self._sets)):
                self._bar.set_description(f"search, {number + 1} of {len(self._sets)}")
                if number:
                    running = survivors(running, counts[number])
                for run in running:
                    self._advance(run, number)
            self._confirm()

    def _plan(self, first: int) -> list[int]:
        """How many candidates each set of documents is run by, in equal ratios from all to those
        that are left at the end."""
        last, steps = min(self._finalists, first), max(1, len(self._sets) - 1)
        counts = [round(first * (last / first) ** (n / steps)) for n in range(len(self._sets))]
        sizes = [_documents(each) for each in self._sets]
        # beside them the given configuration, and exact verification; three in the confirmation
        left = sum(size * (count + 2) for size, count in zip(sizes, counts)) + 3 * sum(sizes)
        self._bar.total = self._bar.n + left
        return counts

    def _run_on(self, config: FlyConfig, number: int) -> RunResult:
        """On a set of documents, unless an earlier tune has."""
        workload = replace(self._workload, samples=self._sets[number])
        key = {**self._common, "workload": asdict(workload), "config": config.model_dump()}
        path = self._kept_runs / f"{fingerprint.hash_json(key)}.json"
        found = None
        with suppress(OSError, ValueError):  # not there, or not ours
            found = RunResult.model_validate_json(path.read_bytes())
        if found is None:
            found = self._pair.run(workload, config)
            kept = {"key": key, **found.model_dump(mode="json")}
            write_output(path, json.dumps(kept) + "\n", "--output")
        self._bar.update(_documents(self._sets[number]))
        return found

    def _check(self, target: RunResult) -> None:
        """Refuse what the rest could not make use of."""
        if not target.tok_s:
            raise FlyError(
                f"--tasks {' '.join(self._workload.tasks)}: the target alone decoded no token: "
                "raise --limit, or choose other tasks"
            )
        for note in fidelity.check_judgeable(target.measured, self._tuning.min_recovery):
            self._bar.write(f"note: {note}")

    def _advance(self, run: RealRun, number: int) -> None:
        run.recoveries = []
        run.parts.append(self._run_on(run.config, number))
        self._keep()  # before it is judged, which may end the tune
        target = join(self._tuning.target[: number + 1]).measured
        try:
            run.recoveries = fidelity.recoveries(
                target, run.result.measured, self._tuning.min_recovery
            )
        except FlyError as error:  # a task's file changed in between
            raise FlyError(
                f"{self._kept_runs}: holds other documents than this run has ({error}): remove it "
                "and run again"
            ) from None
        self._keep()

    def _confirm(self) -> None:
        """The fastest beside the given one, if that is another."""
        tuning, best = self._tuning, self._tuning.fastest
        if best is None or best.is_given:
            return
        self._bar.set_description("confirmation")
        tuning.confirmation = confirm(
            self._pair, self._workload, best.config, tuning.min_recovery, self._bar.update
        )
        self._keep()
