"""The stages of `fly tune`, in order."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from fly import config as fly_config
from fly.config import FlyConfig
from fly.errors import FlyError
from fly.harness import summary
from fly.models import fingerprint
from fly.tuning import baseline, fidelity, pass_seconds
from fly.tuning.confirm import Confirmation, confirm
from fly.tuning.fidelity import Recovery
from fly.tuning.pass_seconds import PassSeconds
from fly.tuning.progress import Plan
from fly.tuning.real_runs import Outcome, TunedLM, Workload
from fly.tuning.recorder import Recorder, Replay, record_all
from fly.tuning.search import Grid, Machine, Prediction, choose, predict, predict_one

_SWEEPS = 7
_ANCHORS = 5  # passes timed before and after a real run
_OF_DRAFT = ("costs", "replay")
_NARROW = 4  # rows and tokens of one pass that int4 weights serve as int4


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


@dataclass(frozen=True)
class Run:
    """A configuration run for real. predicted: None where no replay tells. pace: how slow the
    machine was then, by anchor passes; 1 is as when costs were measured. recoveries: empty until
    the run is judged."""

    config: FlyConfig
    predicted: Prediction | None
    outcome: Outcome
    pace: float
    is_given: bool
    recoveries: list[Recovery] = field(default_factory=list)

    @property
    def error(self) -> float | None:
        """Predicted over measured tokens per second, minus 1."""
        if self.predicted is None or not self.outcome.tok_s:
            return None
        return self.predicted.tok_s / self.outcome.tok_s - 1

    @property
    def seconds(self) -> float:
        """Of decoding: what is ranked by, as a configuration that talks more takes longer."""
        return self.outcome.seconds_of_decoding

    def held(self, least: float) -> bool:
        return fidelity.held(self.recoveries, least)


@dataclass
class Tuning:
    """All that was measured and predicted. planned: how many real runs there will be.
    confirmation: of `fastest`, where that is not the given configuration."""

    given: FlyConfig
    baseline: Outcome
    reused_baseline: bool
    machine: Machine
    replays: dict[str, list[Replay]] = field(repr=False)
    predictions: list[Prediction] = field(repr=False)
    planned: int = 0
    runs: list[Run] = field(default_factory=list)
    confirmation: Confirmation | None = None

    def fastest(self, least: float) -> Run | None:
        """That of the least time whose scores held in the search; none that decoded nothing."""
        held = [run for run in self.runs if run.held(least) and run.outcome.tok_s]
        return min(held, key=lambda run: run.seconds, default=None)

    def choice(self, least: float) -> tuple[Run | None, str]:
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
        # the search's documents have chosen among the others, and told of the given one by luck
        given_holds = (
            given is not None and found.given_held(least) and (found.fresh or given.held(least))
        )
        if not found.is_judged:
            none = "the target alone has no score on the documents of the confirmation"
            if given is not None and given.held(least):
                return given, f"the given configuration stays: {none}"
            return None, none
        if not found.held(least):
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
        self._kinds = options.quantizations
        self._given = fly_config.build(
            {**lm.given.model_dump(), "draft_quantization": lm.quantization}, "tune"
        )
        self._grid = Grid().around(self._given)
        self._plan = Plan(
            [
                "the target alone",
                *[f"{what}, draft weights: {kind}" for kind in self._kinds for what in _OF_DRAFT],
                "search",
                *[f"real run {number}" for number in range(1, options.candidates + 2)],
                "confirmation",
            ]
        )
        self._target_costs: PassSeconds | None = None
        self._anchor: pass_seconds.Anchor | None = None

    def run(self) -> Tuning:
        """Everything from the baseline to the real runs. Raises FlyError if nothing can be told."""
        first, reused = self._baseline()
        self._check(first)
        self._expect(first)
        drafts: dict[str, PassSeconds] = {}
        pass_cost: dict[str, Callable[[int], float]] = {}
        replays: dict[str, list[Replay]] = {}
        for quantization in self._kinds:
            self._plan.start(f"costs, draft weights: {quantization}")
            self._lm.use(self._with(quantization))
            drafts[quantization], pass_cost[quantization] = self._measure(first)
            self._plan.start(f"replay, draft weights: {quantization}")
            replays[quantization] = self._replay(quantization, first)
            gc.collect()
        assert self._target_costs is not None
        stats = first.stats
        overhead = stats["seconds"]["other"] / max(1, stats["rounds"])
        machine = Machine(self._target_costs, overhead, drafts, pass_cost)
        self._plan.start("search")
        predictions = predict(
            self._given, self._grid, replays, machine, self._lm.eos_ids, self._plan.step
        )
        tuning = Tuning(self._given, first, reused, machine, replays, predictions)
        self._live(tuning)
        self._confirm(tuning)
        self._plan.end()
        return tuning

    def _confirm(self, tuning: Tuning) -> None:
        """The fastest beside the given one, if that is another."""
        best = tuning.fastest(self._options.min_recovery)
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
            self._options.min_recovery,
            self._plan.step,
        )
        self._keep(tuning)

    def _check(self, first: Outcome) -> None:
        """Refuse what the rest could not make use of."""
        what = f"--tasks {' '.join(self._workload.tasks)}"
        if not first.documents:
            raise FlyError(
                f"{what}: no request generates text, so there is nothing to decode faster: choose "
                "generation tasks"
            )
        if not first.tok_s:
            raise FlyError(
                f"{what}: the target alone decoded no token: raise --limit, or choose other tasks"
            )
        for note in fidelity.check_judgeable(first.measured, self._options.min_recovery):
            print(f"note: {note}")

    def _baseline(self) -> tuple[Outcome, bool]:
        self._plan.start("the target alone")
        path = self._options.output.with_suffix(".baseline.json")
        key = {
            "workload": self._workload.as_dict(),
            "config": {**self._given.model_dump(), "draft_quantization": None},
            "versions": summary.versions(),
            "device": summary.device_facts(self._lm.device),
            "dtype": str(self._lm.model.dtype),
            "files": fingerprint.of_files(
                Path(self._workload.include_path or os.devnull).resolve()
            ),
            **self._lm.identity(),
        }
        if (kept := baseline.load(path, key)) is not None:
            print(f"the target alone: kept by an earlier run ({path}); remove it to measure anew")
            return kept, True
        alone = fly_config.build({**self._given.model_dump(), "use_sd": False}, "tune")
        outcome = self._lm.run(self._workload, alone)
        baseline.save(path, key, outcome)
        return outcome, False

    def _expect(self, first: Outcome) -> None:
        """Rough lengths of what follows, to be corrected by what the first of a kind takes."""
        for quantization in self._kinds:
            self._plan.expect(f"costs, draft weights: {quantization}", 20)
            self._plan.expect(f"replay, draft weights: {quantization}", 0.3 * first.seconds)
        self._plan.expect("search", 30 + 0.2 * first.stats["emitted"] / 10)
        for number in range(1, self._options.candidates + 2):
            self._plan.expect(f"real run {number}", 0.6 * first.seconds)
        self._plan.expect("confirmation", 2.2 * first.seconds)

    def _with(self, quantization: str) -> FlyConfig:
        return fly_config.build(
            {**self._given.model_dump(), "draft_quantization": quantization}, "tune"
        )

    def _measure(self, first: Outcome) -> tuple[PassSeconds, Callable[[int], float]]:
        """The draft's costs, and once the target's."""
        target, draft = self._lm.timed_runners()
        contexts = pass_seconds.typical_contexts(
            [(len(d.prompt), len(d.tokens)) for d in first.documents]
        )
        longest = max(first.documents, key=lambda d: len(d.prompt) + len(d.tokens))
        text = [*longest.prompt, *longest.tokens]
        widest = max(self._grid.spd_k) + 1
        guess = max(ngram[2] for ngram in self._grid.ngrams if ngram is not None)
        most = draft.max_length - max(widest, guess + 2)
        if most < 1:
            raise FlyError(
                f"the context of {draft.max_length} tokens has no room for passes of "
                f"{max(widest, guess + 2)}: nothing to tune: use models with a longer one"
            )
        contexts = (min(contexts[0], most), min(contexts[1], most))
        room = contexts[1] + max(widest, guess + 2)
        if self._target_costs is None:
            verify = pass_seconds.target_pass(target, text, room)
            widths = [1, *(k + 1 for k in self._grid.spd_k)]
            self._target_costs = self._timed(verify, widths, contexts)
            self._anchor = pass_seconds.Anchor(
                lambda: verify(1, contexts[0]), self._target_costs.anchor
            )
        run = pass_seconds.draft_pass(draft, text, room)
        return self._timed(run, range(1, guess + 3), contexts), draft.relative_cost

    def _timed(
        self, run: pass_seconds.Run, widths: Sequence[int], contexts: Sequence[int]
    ) -> PassSeconds:
        return pass_seconds.measure(
            run,
            widths,
            contexts,
            sweeps=_SWEEPS,
            anchor=self._anchor,
            done=lambda n: self._plan.step(n, _SWEEPS),
        )

    def _replay(self, quantization: str, first: Outcome) -> list[Replay]:
        narrow = quantization == "int4"
        rows = _NARROW if narrow else 8
        target, draft = self._lm.runners(rows + 1)
        recorder = Recorder(
            target,
            draft,
            self._lm.eos_ids,
            length=max(self._grid.spd_k) + max(self._grid.win_len),
            **({"width": _NARROW} if narrow else {}),
        )
        total = len(first.documents)
        return record_all(recorder, first.documents, lambda done: self._plan.step(done, total))

    def _live(self, tuning: Tuning) -> None:
        given = predict_one(
            self._given, tuning.replays[self._lm_kind()], tuning.machine, self._lm.eos_ids
        )
        chosen = choose(tuning.predictions, self._options.candidates, self._options.max_changed)
        others = [p for p in chosen if p.config != self._given]
        todo: list[tuple[FlyConfig, Prediction | None]] = [(self._given, given)]
        todo += [(p.config, p) for p in others]
        loaded = self._lm.quantization  # what is loaded goes first: one load less
        todo.sort(key=lambda item: item[0].draft_quantization != loaded)
        for number in range(len(todo) + 1, self._options.candidates + 2):
            self._plan.skip(f"real run {number}")
        for number, (_, predicted) in enumerate(todo, start=1):
            self._plan.expect(f"real run {number}", self._expected_seconds(tuning, predicted))
        tuning.planned = len(todo)
        self._keep(tuning)
        for number, (config, predicted) in enumerate(todo, start=1):
            self._plan.start(f"real run {number}")
            tuning.runs.append(self._run_one(tuning, config, predicted))
            self._keep(tuning)  # before it is judged, which may end the tune
            tuning.runs[-1] = self._judged(tuning, tuning.runs[-1])
            self._keep(tuning)

    def _lm_kind(self) -> str:
        return str(self._given.draft_quantization)

    def _expected_seconds(self, tuning: Tuning, predicted: Prediction | None) -> float:
        prefill = 1.5 * float(tuning.baseline.stats["seconds"]["prefill"])
        return prefill + (predicted.seconds if predicted else tuning.baseline.seconds)

    def _run_one(self, tuning: Tuning, config: FlyConfig, predicted: Prediction | None) -> Run:
        self._lm.use(config)
        before = self._anchor_seconds()
        outcome = self._lm.run(self._workload, config)
        after = self._anchor_seconds()
        return Run(
            config,
            predicted,
            outcome,
            pace=median([*before, *after]) / tuning.machine.target.anchor,
            is_given=config == self._given,
        )

    def _judged(self, tuning: Tuning, run: Run) -> Run:
        path = self._options.output.with_suffix(".baseline.json")
        baseline.check_same_documents(tuning.baseline, run.outcome, path)
        least = self._options.min_recovery
        found = fidelity.recoveries(tuning.baseline.measured, run.outcome.measured, least)
        return replace(run, recoveries=found)

    def _anchor_seconds(self) -> list[float]:
        assert self._anchor is not None
        return pass_seconds.timed(self._anchor.run, _ANCHORS)
