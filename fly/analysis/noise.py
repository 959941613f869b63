"""The noise floor: what rounding alone changes, and whether a run changes more.

The noise run is the baseline's decoding again, with another number of running sequences, so that
its passes have another width and round otherwise. What differs between the two is no rule's doing.
A run is read against it by the share of documents that differ from the baseline's, not by the net
loss, in which changes for better and worse cancel out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from fly.analysis.comparability import explain
from fly.analysis.scores import Measured, Metric
from fly.errors import FlyError

NAME = "noise"  # of the noise run


@dataclass(frozen=True)
class Changed:
    """Documents that differ from the baseline's."""

    documents: int
    by_rounding: int  # in the noise run
    by_run: int  # in the run
    # chance that the run would differ in so many more if it, too, were rounding (one-sided exact
    # McNemar)
    p: float


@dataclass(frozen=True)
class NoiseRow:
    """One run and task."""

    run: str
    task: str
    metric: str
    scores: Changed  # by the task's first metric
    texts: Changed | None  # None if they are not known


def take_noise(runs: Sequence[Measured]) -> tuple[Measured, list[Measured]]:
    """(the noise run, the others). Raises FlyError if none is called so."""
    found = next((run for run in runs if run.name == NAME), None)
    if found is None:
        raise FlyError(
            f"--noise-floor: no run is called {NAME}: give the baseline's decoding, made again "
            f"with another --batch_size, as {NAME}=RUN"
        )
    return found, [run for run in runs if run is not found]


def check_noise(baseline: Measured, noise: Measured) -> None:
    """Raise FlyError unless the noise run decodes as the baseline does, in other batches."""
    who = f"--noise-floor: {noise.name} is not {baseline.name}'s decoding again"
    if noise.mode != baseline.mode:
        raise FlyError(f"{who}: it has the mode {noise.mode}, {baseline.name} {baseline.mode}")
    if reason := explain(baseline, noise, "target", "decoding"):
        raise FlyError(f"{who}: {reason}")
    if None not in (hashes := {baseline.config_hash, noise.config_hash}) and len(hashes) > 1:
        raise FlyError(f"{who}: its settings differ: make it with the same configuration file")
    if apart := explain(baseline, noise, "engine", "machine"):
        raise FlyError(f"{who}: it was made elsewhere ({apart})")
    if baseline.mode == "server":  # its batches are its own affair
        return
    sizes = [run.machine.get("batch_size") for run in (baseline, noise)]
    if None in sizes:
        raise FlyError(
            f"--noise-floor: the batch size of {baseline.name} or {noise.name} is not known: take "
            "runs of fly's own backend"
        )
    if sizes[0] == sizes[1]:
        raise FlyError(
            f"--noise-floor: {noise.name} and {baseline.name} both have batch size {sizes[0]}: "
            "make the noise run with another one"
        )
    for name, task in baseline.tasks.items():
        if missing := task.work.keys() - noise.tasks[name].work.keys():
            raise FlyError(
                f"--noise-floor: {noise.name} decoded {len(missing)} of {len(task.documents)} "
                f"documents of {name} not itself: make it without --use_cache"
            )


def noise_rows(
    baseline: Measured,
    noise: Measured,
    others: Sequence[Measured],
    primaries: Mapping[str, Metric],
) -> Iterator[NoiseRow]:
    """Every run against rounding alone. primaries: the metric that stands for each task."""
    for run in others:
        for name, metric in primaries.items():
            tasks = [each.tasks[name] for each in (baseline, noise, run)]
            found = [task.metric(metric.label) for task in tasks]
            scores = [each.scores for each in found if each and not each.left_out]
            if len(scores) == len(tasks):
                texts = [task.texts for task in tasks]
                changed = _changed(*texts) if all(texts) else None
                yield NoiseRow(run.name, name, metric.label, _changed(*scores), changed)


def _changed(
    ours: Mapping[int, object], noisy: Mapping[int, object], theirs: Mapping[int, object]
) -> Changed:
    by_rounding = {key for key, value in ours.items() if noisy.get(key) != value}
    by_run = {key for key, value in ours.items() if theirs.get(key) != value}
    more, fewer = len(by_run - by_rounding), len(by_rounding - by_run)
    p = 1.0
    if more + fewer:
        p = float(stats.binomtest(more, more + fewer, alternative="greater").pvalue)
    return Changed(len(ours), len(by_rounding), len(by_run), p)
