"""The stages of `fly tune`, in order."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

from fly.config import FlyConfig
from fly.errors import FlyError
from fly.execution.device import device_facts
from fly.models import fingerprint
from fly.runs.environment import versions
from fly.tuning import baseline, fidelity, pass_seconds
from fly.tuning.confirm import Confirmation, confirm
from fly.tuning.fidelity import Recovery
from fly.tuning.pass_seconds import PassSeconds
from fly.tuning.progress import Plan
from fly.tuning.real_runs import RunResult, TunedLM, Workload
from fly.tuning.recorder import Recorder, Recording
from fly.tuning.search import Grid, Machine, Prediction, choose, gates_of, predict, predict_one

_SWEEPS = 7
_ANCHORS = 5  # passes timed before and after a real run
_NARROW = 4  # sequences and tokens of one pass that int4 weights serve as int4


@dataclass(frozen=True)
class Options:
    """quantizations: of the draft, to try; the one in use first. candidates: real runs beside the
    given configuration's. max_changed: see search.choose. min_recovery: the least share of the
    target's score that a configuration must keep."""

    output: Path
    quantizations: list[str]
    candidates: int = 3
    max_changed: float = 0.03
    min_recovery: float = 0.99

    @property
    def baseline_file(self) -> Path:
        return self.output.with_suffix(".baseline.json")


@dataclass(frozen=True)
class RealRun:
    """A configuration run for real. predicted: None where no recording tells. pace: how slow the
    machine was then, by anchor passes; 1 is as when passes were timed. recoveries: empty until the
    run is judged."""

    config: FlyConfig
    predicted: Prediction | None
    result: RunResult
    pace: float
    is_given: bool
    recoveries: list[Recovery] = field(default_factory=list)

    @property
    def error(self) -> float | None:
        """Predicted over measured tokens per second, minus 1."""
        if self.predicted is None or not self.result.tok_s:
            return None
        return self.predicted.tok_s / self.result.tok_s - 1

    @property
    def seconds(self) -> float:
        """Of decoding: what is ranked by, as a configuration that talks more takes longer."""
        return self.result.seconds_of_decoding

    def held(self, least: float) -> bool:
        return fidelity.held(self.recoveries, least)


@dataclass
class Tuning:
    """All that was measured and predicted. planned: how many real runs there will be.
    confirmation: of `fastest`, where that is not the given configuration."""

    given: FlyConfig
    baseline: RunResult
    reused_baseline: bool
    machine: Machine
    recordings: dict[str, list[Recording]] = field(repr=False)
    predictions: list[Prediction] = field(repr=False)
    planned: int = 0
    runs: list[RealRun] = field(default_factory=list)
    confirmation: Confirmation | None = None

    def fastest(self, least: float) -> RealRun | None:
        """That of the least time whose scores held in the search; none that decoded nothing."""
        held = [run for run in self.runs if run.held(least) and run.result.tok_s]
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


class Tuner:
    """Runs the stages on a loaded pair. keep: gets what there is, whenever a real run is added."""

    def __init__(
        self,
        lm: TunedLM,
        workload: Workload,
        options: Options,
        keep: Callable[[Tuning], None] = lambda tuning: None,
    ) -> None:
        self._lm, self._workload, self._options, self._keep = lm, workload, options, keep
        self._given = lm.given.model_copy(update={"draft_quantization": lm.quantization})
        self._grid = Grid().around(self._given)
        self._real = [f"real run {number}" for number in range(1, options.candidates + 2)]
        self._plan = Plan(
            [
                "the target alone",
                *[
                    f"{what}, draft weights: {quantization}"
                    for quantization in options.quantizations
                    for what in ("pass times", "recording")
                ],
                "search",
                *self._real,
                "confirmation",
            ]
        )
        self._target_seconds: PassSeconds | None = None
        self._anchor: pass_seconds.Anchor | None = None

    def run(self) -> Tuning:
        """Everything from the baseline to the real runs. Raises FlyError if nothing can be told."""
        first, reused = self._baseline()
        self._check(first)
        self._expect(first)
        drafts: dict[str, PassSeconds] = {}
        pass_cost: dict[str, Callable[[int], float]] = {}
        recordings: dict[str, list[Recording]] = {}
        for quantization in self._options.quantizations:
            self._plan.start(f"pass times, draft weights: {quantization}")
            self._lm.use(self._given.model_copy(update={"draft_quantization": quantization}))
            drafts[quantization], pass_cost[quantization] = self._time_passes(first)
            self._plan.start(f"recording, draft weights: {quantization}")
            recordings[quantization] = self._record(quantization, first)
            gc.collect()
        assert self._target_seconds is not None
        overhead = first.stats["seconds"]["other"] / max(1, first.stats["rounds"])
        machine = Machine(self._target_seconds, overhead, drafts, pass_cost)
        self._plan.start("search")
        predictions = predict(
            self._given, self._grid, recordings, machine, self._lm.text_of, self._plan.step
        )
        tuning = Tuning(self._given, first, reused, machine, recordings, predictions)
        self._run_candidates(tuning)
        self._confirm(tuning)
        self._plan.end()
        return tuning

    # ------------------------------------------------------------------------ the target alone

    def _baseline(self) -> tuple[RunResult, bool]:
        """(the target's run, whether an earlier tune has kept it)."""
        self._plan.start("the target alone")
        path = self._options.baseline_file
        key = {
            "workload": asdict(self._workload),
            "config": {**self._given.model_dump(), "draft_quantization": None},
            "versions": versions(),
            "device": device_facts(self._lm.device),
            "dtype": str(self._lm.model.dtype),
            "files": fingerprint.of_files(
                Path(self._workload.include_path or os.devnull).resolve()
            ),
            **self._lm.identity(),
        }
        if (kept := baseline.load(path, key)) is not None:
            print(f"the target alone: kept by an earlier run ({path}); remove it to measure anew")
            return kept, True
        found = self._lm.run(self._workload, self._given.model_copy(update={"use_sd": False}))
        baseline.save(path, key, found)
        return found, False

    def _check(self, first: RunResult) -> None:
        """Refuse what the rest could not make use of."""
        if not first.tok_s:
            raise FlyError(
                f"--tasks {' '.join(self._workload.tasks)}: the target alone decoded no token: "
                "raise --limit, or choose other tasks"
            )
        for note in fidelity.check_judgeable(first.measured, self._options.min_recovery):
            print(f"note: {note}")

    def _expect(self, first: RunResult) -> None:
        """Rough lengths of what follows, to be corrected by what the first of a kind takes."""
        for quantization in self._options.quantizations:
            self._plan.expect(f"pass times, draft weights: {quantization}", 20)
            self._plan.expect(f"recording, draft weights: {quantization}", 0.3 * first.seconds)
        self._plan.expect("search", 30 + 0.2 * first.stats["emitted"] / 10)
        for stage in self._real:
            self._plan.expect(stage, 0.6 * first.seconds)
        self._plan.expect("confirmation", 2.2 * first.seconds)

    # -------------------------------------------------------------------- what is predicted from

    def _time_passes(self, first: RunResult) -> tuple[PassSeconds, Callable[[int], float]]:
        """The draft's pass times and relative costs; the first time the target's, too."""
        target, draft = self._lm.runners(1)
        widest = max(*self._grid.spd_k, self._grid.longest_guess + 1) + 1
        most = draft.max_length - widest
        if most < 1:
            raise FlyError(
                f"the context of {draft.max_length} tokens has no room for passes of "
                f"{widest}: nothing to tune: use models with a longer one"
            )
        contexts = pass_seconds.typical_contexts(
            [(len(answer.prompt), len(answer.tokens)) for answer in first.answers]
        )
        contexts = (min(contexts[0], most), min(contexts[1], most))
        text = max(([*answer.prompt, *answer.tokens] for answer in first.answers), key=len)
        if self._target_seconds is None:
            verify = pass_seconds.target_pass(target, text, contexts[1] + widest)
            widths = [1, *(k + 1 for k in self._grid.spd_k)]
            self._target_seconds = self._timed(verify, widths, contexts)
            self._anchor = pass_seconds.Anchor(
                lambda: verify(1, contexts[0]), self._target_seconds.anchor
            )
        run = pass_seconds.draft_pass(draft, text, contexts[1] + widest)
        widths = [*range(1, self._grid.longest_guess + 3)]
        return self._timed(run, widths, contexts), draft.relative_cost

    def _timed(
        self, run: pass_seconds.TimedPass, widths: Sequence[int], contexts: Sequence[int]
    ) -> PassSeconds:
        return pass_seconds.measure(
            run,
            widths,
            contexts,
            sweeps=_SWEEPS,
            anchor=self._anchor,
            done=lambda sweep: self._plan.step(sweep, _SWEEPS),
        )

    def _record(self, quantization: str, first: RunResult) -> list[Recording]:
        narrow = quantization == "int4"
        target, draft = self._lm.runners((_NARROW if narrow else 8) + 1, eager=True)
        configs = [self._given, *(each[0] for each in self._grid.configs(self._given, "none"))]
        recorder = Recorder(
            target,
            draft,
            self._lm.eos_ids,
            gates_of(configs),
            length=max(self._grid.spd_k) + max(self._grid.win_len),
            **({"width": _NARROW} if narrow else {}),
        )
        recordings = []
        for answer in first.answers:
            recordings.append(recorder.record(answer))
            self._plan.step(len(recordings), len(first.answers))
        return recordings

    # ------------------------------------------------------------------------------- real runs

    def _run_candidates(self, tuning: Tuning) -> None:
        """The given configuration and the best predicted ones."""
        recorded = tuning.recordings[self._given.draft_quantization]
        given = predict_one(self._given, recorded, tuning.machine, self._lm.text_of)
        chosen = choose(tuning.predictions, self._options.candidates, self._options.max_changed)
        todo: list[tuple[FlyConfig, Prediction | None]] = [(self._given, given)]
        todo += [(found.config, found) for found in chosen if found.config != self._given]
        loaded = self._lm.quantization  # what is loaded goes first: one load less
        todo.sort(key=lambda item: item[0].draft_quantization != loaded)
        for stage in self._real[len(todo) :]:
            self._plan.skip(stage)
        prefill = 1.5 * float(tuning.baseline.stats["seconds"]["prefill"])
        for stage, (_, predicted) in zip(self._real, todo):
            seconds = tuning.baseline.seconds if predicted is None else predicted.seconds
            self._plan.expect(stage, prefill + seconds)
        tuning.planned = len(todo)
        self._keep(tuning)
        for stage, (config, predicted) in zip(self._real, todo):
            self._plan.start(stage)
            run = self._run_one(tuning, config, predicted)
            tuning.runs.append(run)
            self._keep(tuning)  # before it is judged, which may end the tune
            tuning.runs[-1] = replace(run, recoveries=self._judged(tuning, run.result))
            self._keep(tuning)

    def _run_one(self, tuning: Tuning, config: FlyConfig, predicted: Prediction | None) -> RealRun:
        assert self._anchor is not None
        self._lm.use(config)
        seconds = pass_seconds.timed(self._anchor.run, _ANCHORS)
        result = self._lm.run(self._workload, config)
        seconds += pass_seconds.timed(self._anchor.run, _ANCHORS)
        pace = median(seconds) / self._anchor.seconds
        return RealRun(config, predicted, result, pace, is_given=config == self._given)

    def _judged(self, tuning: Tuning, result: RunResult) -> list[Recovery]:
        baseline.check_same_documents(tuning.baseline, result, self._options.baseline_file)
        least = self._options.min_recovery
        return fidelity.recoveries(tuning.baseline.measured, result.measured, least)

    def _confirm(self, tuning: Tuning) -> None:
        """The fastest beside the given one, if that is another."""
        least = self._options.min_recovery
        best = tuning.fastest(least)
        if best is None or best.is_given:
            self._plan.skip("confirmation")
            return
        self._plan.start("confirmation")
        tuning.confirmation = confirm(
            self._lm,
            self._workload,
            tuning.baseline,
            self._given,
            best.config,
            least,
            self._plan.step,
        )
        self._keep(tuning)
