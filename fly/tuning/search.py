"""A speed predicted for every configuration of a grid, and the few worth running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from fly import config as fly_config
from fly.config import FlyConfig
from fly.errors import FlyError
from fly.runs.records import Counts
from fly.speculation.rules import configured as rules
from fly.tuning.pass_seconds import PassSeconds
from fly.tuning.recorder import Replay
from fly.tuning.simulate import CascadeCounter, DraftCounter, StepCounter, Walk, walk

Keys = dict[str, Any]

# What a candidate sets, whatever the given configuration says of it.
_PLAIN: Keys = {
    "use_sd": True, "verification": None, "window_rule": "paper", "abla_no_window": False,
    "margin_thre": None, "draft_policy": "fixed", "drafter": None,
}  # fmt: skip
_NGRAM_KEYS = ("min_ngram_size", "max_ngram_size", "num_ngram_pred_tokens")


@dataclass(frozen=True)
class Grid:
    """The values tried. ngrams: (min, max, tokens), None is the draft model alone.

    gates: (entropy_thre, draft_ratio_thre, draft_rank_max) together.
    """

    spd_k: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
    win_len: tuple[int, ...] = (2, 4, 6, 8)
    gates: tuple[tuple[float | None, float | None, int | None], ...] = (
        (0.1, None, None), (0.3, None, None), (0.6, None, None), (0.9, None, None),
        (0.3, 0.3, 2), (None, 0.6, 2), (None, 0.8, 2),
    )  # fmt: skip
    ngrams: tuple[tuple[int, int, int] | None, ...] = (
        None, (1, 4, 3), (1, 4, 6), (2, 4, 6), (2, 4, 10),
    )  # fmt: skip

    def around(self, base: FlyConfig) -> Grid:
        """With the values of the given configuration among them."""
        gates = (base.entropy_thre, base.draft_ratio_thre, base.draft_rank_max)
        ngram = (base.min_ngram_size, base.max_ngram_size, base.num_ngram_pred_tokens)
        return Grid(
            spd_k=tuple(sorted({*self.spd_k, base.spd_k} - {0})),
            win_len=tuple(sorted({*self.win_len, base.win_len} - {0})),
            gates=tuple(dict.fromkeys([gates, *self.gates])),
            ngrams=tuple(dict.fromkeys([*self.ngrams, ngram])),
        )

    def rules(self) -> Iterator[Keys]:
        """Keys of every verification rule and K; those that fly itself refuses are left out."""
        for k in self.spd_k:
            yield {"spd_k": k, "enable_fly": False, "defer_across_rounds": False}
        for across, k, window, gate in product((False, True), self.spd_k, self.win_len, self.gates):
            if across or window < k:
                yield {
                    "spd_k": k,
                    "enable_fly": True,
                    "defer_across_rounds": across,
                    "win_len": window,
                    **dict(zip(("entropy_thre", "draft_ratio_thre", "draft_rank_max"), gate)),
                }

    @staticmethod
    def drafter_keys(ngram: tuple[int, int, int] | None) -> Keys:
        if ngram is None:
            return {"use_ngram": False}
        return {"use_ngram": True, **dict(zip(_NGRAM_KEYS, ngram))}


@dataclass(frozen=True)
class Machine:
    """What was measured here. overhead: seconds of a round beside the passes.

    draft: by quantisation. pass_cost: the same draft's rule by which n-gram guesses are cut.
    """

    target: PassSeconds
    overhead: float
    draft: dict[str, PassSeconds] = field(default_factory=dict)
    pass_cost: dict[str, Callable[[int], float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Prediction:
    """A configuration and what the walk makes of it. changed: share of emitted tokens that are
    deferrals that stood, so not the target's own."""

    config: FlyConfig
    counts: Counts
    draft_seconds: float
    verify_seconds: float
    other_seconds: float

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.other_seconds

    @property
    def tok_s(self) -> float:
        return self.counts.emitted / self.seconds

    @property
    def tau(self) -> float:
        return self.counts.emitted / self.counts.rounds

    @property
    def changed(self) -> float:
        return self.counts.deferred_accepted / self.counts.emitted

    def as_dict(self, base: FlyConfig) -> dict[str, Any]:
        return {
            "changes": changes(base, self.config),
            "decode_tok_s": round(self.tok_s, 4),
            "tau": round(self.tau, 4),
            "changed": round(self.changed, 5),
            "seconds": {
                "draft": round(self.draft_seconds, 4),
                "verify": round(self.verify_seconds, 4),
                "other": round(self.other_seconds, 4),
            },
            **self.counts.as_dict(),
        }


def changes(base: FlyConfig, config: FlyConfig) -> Keys:
    """The keys in which a configuration differs from the given one."""
    old, new = base.model_dump(), config.model_dump()
    return {key: new[key] for key in new if new[key] != old[key]}


def kind(config: FlyConfig) -> str:
    """The class of rule: candidates of each are run."""
    if config.rule != "fly":
        return config.rule
    return "fly across rounds" if config.defer_across_rounds else "fly within a round"


def predict(
    base: FlyConfig,
    grid: Grid,
    replays: dict[str, list[Replay]],
    machine: Machine,
    eos_ids: frozenset[int],
    done: Callable[[int, int], None] = lambda count, total: None,
) -> list[Prediction]:
    """Every configuration of the grid, the fastest first. `done(count, total)`: walks done.

    replays: by quantisation of the draft, the same documents each.
    """
    todo = [(quantization, rule) for quantization in replays for rule in grid.rules()]
    found = []
    for count, (quantization, rule) in enumerate(todo, start=1):
        found += _predict_rule(
            base, rule, grid, quantization, replays[quantization], machine, eos_ids
        )
        done(count, len(todo))
    return sorted(found, key=lambda prediction: prediction.seconds)


def _predict_rule(
    base: FlyConfig,
    rule: Keys,
    grid: Grid,
    quantization: str,
    replays: list[Replay],
    machine: Machine,
    eos_ids: frozenset[int],
) -> list[Prediction]:
    """One walk serves every drafter: n-grams change what drafting costs, not what is drafted."""
    values = {**base.model_dump(), **_PLAIN, **rule, "draft_quantization": quantization}
    configs = [fly_config.build({**values, **grid.drafter_keys(n)}, "tune") for n in grid.ngrams]
    counters = [counter_for(config, machine.pass_cost[quantization]) for config in configs]
    walked = walk(replays, configs[0].spd_k, rules.relaxation(configs[0]), eos_ids, counters)
    pairs = zip(configs, counters)
    return [_prediction(c, walked, n, machine, machine.draft[quantization]) for c, n in pairs]


def predict_one(
    config: FlyConfig,
    replays: list[Replay],
    machine: Machine,
    eos_ids: frozenset[int],
) -> Prediction | None:
    """The given configuration's own speed; None if it does what no replay can tell.

    `draft_quantization` must be named, not auto.
    """
    if config.draft_policy != "fixed" or config.rule not in ("exact", "fly"):
        return None
    counter = counter_for(config, machine.pass_cost[config.draft_quantization])
    walked = walk(replays, config.spd_k, rules.relaxation(config), eos_ids, [counter])
    return _prediction(config, walked, counter, machine, machine.draft[config.draft_quantization])


def counter_for(config: FlyConfig, pass_cost: Callable[[int], float]) -> DraftCounter:
    if config.drafter_name == "cascade":
        sizes = (config.min_ngram_size, config.max_ngram_size, config.num_ngram_pred_tokens)
        return CascadeCounter(*sizes, pass_cost)
    return StepCounter()


def _prediction(
    config: FlyConfig, walked: Walk, counter: DraftCounter, machine: Machine, draft: PassSeconds
) -> Prediction:
    return Prediction(
        config,
        walked.counts,
        draft_seconds=draft.total(counter.passes),
        verify_seconds=machine.target.total(walked.verify),
        other_seconds=machine.overhead * walked.counts.rounds,
    )


def choose(predictions: Sequence[Prediction], count: int, max_changed: float) -> list[Prediction]:
    """`count` candidates, fastest first: the best of each kind of rule, then the next best.

    predictions: fastest first. No two share rule and K. Raises FlyError if none is faithful enough.
    """
    faithful = [p for p in predictions if p.changed <= max_changed]
    if not faithful:
        raise FlyError(
            f"--max_changed {max_changed}: no configuration changes so few tokens: raise it"
        )
    best: list[Prediction] = []
    for prediction in faithful:
        if all(kind(prediction.config) != kind(other.config) for other in best):
            best.append(prediction)
    # exact verification keeps the scores, so it stays among few, whatever its place
    best.sort(key=lambda p: (kind(p.config) != "exact", p.seconds))
    best = best[:count]
    for prediction in faithful:
        if len(best) >= count:
            break
        if all(_rule(prediction) != _rule(other) for other in best):
            best.append(prediction)
    return sorted(best, key=lambda p: p.seconds)


def _rule(prediction: Prediction) -> tuple[Any, ...]:
    config = prediction.config
    rule = (kind(config), config.spd_k)
    if config.rule == "exact":
        return rule
    gates = (config.entropy_thre, config.draft_ratio_thre, config.draft_rank_max)
    return (*rule, config.win_len, *gates)
