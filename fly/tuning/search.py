"""A speed predicted for every configuration of a grid, and the few worth running."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from fly import config as fly_config
from fly.config import FlyConfig
from fly.errors import FlyError
from fly.harness.engine_factory import rule_of
from fly.runs.records import Counts
from fly.settings import DrafterSettings
from fly.speculation.drafters.ngram import ngram_sizes
from fly.speculation.rules.gates import Gate
from fly.speculation.stop_strings import Decode
from fly.tuning.pass_seconds import PassSeconds
from fly.tuning.recorder import Recording
from fly.tuning.simulate import CascadeCounter, DraftCounter, walk

Keys = dict[str, Any]

# What a candidate sets, whatever the given configuration says of it.
_PLAIN: Keys = {
    "use_sd": True, "verification": None, "window_rule": "paper", "abla_no_window": False,
    "margin_thre": None, "draft_policy": "fixed", "drafter": None,
}  # fmt: skip
_GATE_KEYS = ("entropy_thre", "draft_ratio_thre", "draft_rank_max")
_NGRAM_KEYS = ("min_ngram_size", "max_ngram_size", "num_ngram_pred_tokens")


@dataclass(frozen=True)
class Grid:
    """The values tried. gates: of `_GATE_KEYS` together. ngrams: of `_NGRAM_KEYS` together; None is
    the draft model alone.
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
        ngram = ngram_sizes(base.part(DrafterSettings))
        return Grid(
            spd_k=tuple(sorted({*self.spd_k, base.spd_k} - {0})),
            win_len=tuple(sorted({*self.win_len, base.win_len} - {0})),
            gates=tuple(dict.fromkeys([gates, *self.gates])),
            ngrams=tuple(dict.fromkeys([*self.ngrams, ngram])),
        )

    @property
    def longest_guess(self) -> int:
        return max(ngram[2] for ngram in self.ngrams if ngram is not None)

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
                    **dict(zip(_GATE_KEYS, gate)),
                }

    def configs(self, base: FlyConfig, quantization: str) -> Iterator[list[FlyConfig]]:
        """All configurations; those that differ in their n-grams alone are together."""
        for rule in self.rules():
            values = {**base.model_dump(), **_PLAIN, **rule, "draft_quantization": quantization}
            yield [
                fly_config.build(
                    {
                        **values,
                        "use_ngram": ngram is not None,
                        **dict(zip(_NGRAM_KEYS, ngram or ())),
                    },
                    "tune",
                )
                for ngram in self.ngrams
            ]


def gates_of(configs: Iterable[FlyConfig]) -> frozenset[Gate]:
    """Those of their rules: what has to be recorded."""
    return frozenset(gate for config in configs for gate in rule_of(config).gates or ())


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
    recordings: Mapping[str, list[Recording]],
    machine: Machine,
    decode: Decode,
    done: Callable[[int, int], None] = lambda count, total: None,
) -> list[Prediction]:
    """Every configuration of the grid, the fastest first. `done(count, total)`: walks done.

    recordings: by quantisation of the draft, the same documents each. decode: see simulate.walk.
    """
    total = len(recordings) * len(list(grid.rules()))
    found: list[Prediction] = []
    count = 0
    for quantization, recorded in recordings.items():
        for configs in grid.configs(base, quantization):
            found += _predict(configs, recorded, machine, decode)
            count += 1
            done(count, total)
    return sorted(found, key=lambda prediction: prediction.seconds)


def predict_one(
    config: FlyConfig,
    recordings: list[Recording],
    machine: Machine,
    decode: Decode,
) -> Prediction | None:
    """The given configuration's own speed; None if it does what no recording can tell.

    `draft_quantization` must be named, not auto.
    """
    if config.draft_policy != "fixed" or config.rule not in ("exact", "fly"):
        return None
    return _predict([config], recordings, machine, decode)[0]


def _predict(
    configs: list[FlyConfig],
    recordings: list[Recording],
    machine: Machine,
    decode: Decode,
) -> list[Prediction]:
    """One walk serves every drafter: n-grams change what drafting costs, not what is drafted."""
    first, quantization = configs[0], configs[0].draft_quantization
    counters = [_counter_for(config, machine.pass_cost[quantization]) for config in configs]
    walked = walk(recordings, first.spd_k, rule_of(first), decode, counters)
    return [
        Prediction(
            config,
            walked.counts,
            draft_seconds=machine.draft[quantization].total(counter.passes),
            verify_seconds=machine.target.total(walked.verify),
            other_seconds=machine.overhead * walked.counts.rounds,
        )
        for config, counter in zip(configs, counters)
    ]


def _counter_for(config: FlyConfig, pass_cost: Callable[[int], float]) -> DraftCounter:
    if config.drafter_name == "cascade" and "own" in config.text_sources:
        return CascadeCounter(*ngram_sizes(config.part(DrafterSettings)), pass_cost)
    return DraftCounter()


def choose(predictions: Sequence[Prediction], count: int, max_changed: float) -> list[Prediction]:
    """`count` candidates, fastest first: the best of each kind of rule, then the next best.

    predictions: fastest first. No two share rule and K. Raises FlyError if none is faithful enough.
    """
    faithful = [p for p in predictions if p.changed <= max_changed]
    if not faithful:
        raise FlyError(
            f"--max_changed {max_changed}: no configuration changes so few tokens: raise it"
        )
    of_kind: dict[str, Prediction] = {}
    for prediction in faithful:
        of_kind.setdefault(kind(prediction.config), prediction)
    # exact verification keeps the scores, so it stays among few, whatever its place
    best = sorted(of_kind.values(), key=lambda p: (kind(p.config) != "exact", p.seconds))[:count]
    for prediction in faithful:
        if len(best) < count and all(_rule(prediction) != _rule(other) for other in best):
            best.append(prediction)
    return sorted(best, key=lambda p: p.seconds)


def _rule(prediction: Prediction) -> tuple[Any, ...]:
    config = prediction.config
    rule = (kind(config), config.spd_k)
    if config.rule == "exact":
        return rule
    return (*rule, config.win_len, *(getattr(config, key) for key in _GATE_KEYS))
