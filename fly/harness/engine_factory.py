"""From loaded models and a configuration to an engine, with its drafter and draft length."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from fly import registry
from fly.config import FlyConfig
from fly.execution import pass_costs
from fly.execution.batch_size import SequenceWork, sequences_that_fit
from fly.execution.calibration import calibrate
from fly.execution.heads.base import Head
from fly.execution.model_runner import ModelRunner, context_of
from fly.execution.pass_costs import PairCosts
from fly.execution.weights import PackedWeights, passes_for
from fly.models import tokenizers
from fly.models.token_intersection import TokenIntersection
from fly.runs.records import Observer
from fly.settings import TextSourceName
from fly.speculation.draft_length import AdaptiveLength, DraftLength, pays
from fly.speculation.drafters.base import Drafter, DrafterContext, NoDrafter
from fly.speculation.engine import Engine
from fly.speculation.rules import rule_of
from fly.speculation.sequence import Request

logger = logging.getLogger(__name__)

_WIDE = 63  # draft tokens from texts that memory is kept for
_LOSSY_ACCEPTANCE = 0.87  # of draft tokens, assumed where no count of the run may decide


def captures_graphs(config: FlyConfig, model: PreTrainedModel) -> bool:
    """Whether a model's passes are captured as CUDA graphs."""
    # a CPU's model is packed by now, perhaps to float32, which would not be packed again
    on_gpu = model.device.type == "cuda"
    return on_gpu and passes_for(model, config)[0] in ("graphs", "inductor")


@dataclass(frozen=True)
class LoadedPair:
    """Both models as they decode: checked, packed, and the draft quantised."""

    target: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizer: Any
    eos_ids: frozenset[int]
    max_length: int  # of the target's context, in tokens
    packed: PackedWeights
    # what the draft shares with a target of another tokenizer
    intersection: TokenIntersection | None = None


@dataclass
class EngineFactory:
    """Makes engines of one pair."""

    pair: LoadedPair
    batch_size: int | str  # sequences that run together; `auto`: as many as memory holds
    max_batch_size: int  # the most for `auto`
    # for the results: how that of the last engine was decided
    draft_length: dict[str, Any] | None = field(default=None, init=False)

    def engine(
        self,
        config: FlyConfig,
        missing: list[Request],
        wanted: list[Request],
        observer: Observer,
        *,
        requests: int | None,
    ) -> Engine:
        """For `missing`, which of all `wanted` requests are not there yet.

        requests: how many the run has, in all its processes; None where lm-eval's cache answers
        some, and nobody knows.
        """
        slots = max(1, min(self._running_sequences(config, missing), len(missing)))
        target = self.target_runner(config, slots)
        draft = self.draft_runner(config, slots) if config.needs_draft_model else None
        costs = self._costs(config, wanted, target, draft)
        planned = self._planned(requests)
        drafter = self._drafter(config, planned, wanted, draft, costs)
        texts = tokenizers.Texts(self.pair.tokenizer)
        return Engine(
            target,
            drafter,
            rule_of(config, self.pair.tokenizer),
            draft_length=self._draft_length(config, planned, wanted, costs),
            spd_k=config.spd_k if config.drafter_name else 0,
            eos_ids=self.pair.eos_ids,
            decode=texts.decode,
            observer=observer,
            reuse_prefixes=config.prefix_reuse,
            trace_entropy=config.entropy_kind if config.trace else None,
            decode_lines=texts.decode_lines,
        )

    def target_runner(self, config: FlyConfig, slots: int) -> ModelRunner:
        return self._runner(config, self.pair.target, slots, self.pair.max_length)

    def draft_runner(self, config: FlyConfig, slots: int) -> Any:
        """A ModelRunner, or a head's own."""
        assert self.pair.draft is not None
        if isinstance(self.pair.draft, Head):
            return self.pair.draft.runner(self.pair.target, slots, self.pair.max_length)
        context = context_of(self.pair.draft, self.pair.max_length)
        return self._runner(config, self.pair.draft, slots, context, self.pair.intersection)

    def _runner(
        self,
        config: FlyConfig,
        model: PreTrainedModel,
        slots: int,
        max_length: int,
        intersection: TokenIntersection | None = None,
    ) -> ModelRunner:
        runner = ModelRunner(
            model,
            slots,
            max_length,
            reuse_prefixes=config.prefix_reuse,
            vocabulary=self.pair.target.config.get_text_config().vocab_size,
            intersection=intersection,
        )
        captures = captures_graphs(config, model)
        role = "target" if model is self.pair.target else "draft"
        on_failure = partial(self.pair.packed.eager.__setitem__, role)
        if self.pair.packed.uniform and role == "target":
            runner.use_uniform_passes(capture=captures or None, on_failure=on_failure)
        elif captures:
            compiles = config.compile == "inductor"
            runner.use_static_passes(capture=True, compiles=compiles, on_failure=on_failure)
        return runner

    def _drafter(
        self,
        config: FlyConfig,
        planned: int,
        wanted: list[Request],
        draft: Any,
        costs: PairCosts,
    ) -> Drafter:
        if config.drafter_name is None:
            return NoDrafter()
        kind = registry.load(registry.DRAFTERS[config.drafter_name].where)
        drafter: Drafter = kind.create(
            DrafterContext(
                planned,
                config,
                self.pair.eos_ids,
                draft,
                costs,
                _drafts_change_texts(config, wanted),
                _text_sources(config, wanted),
            )
        )
        return drafter

    def _running_sequences(self, config: FlyConfig, requests: list[Request]) -> int:
        """`--batch_size`; for auto, as many as fit into memory at their longest."""
        if not requests:
            return 1
        if isinstance(self.batch_size, int):
            return self.batch_size
        width = 1
        if config.drafter_name is not None:
            width += max(config.spd_k, _widest_from_texts(config, requests))
        sampled = any(not request.sampling.is_greedy for request in requests)
        target = ModelRunner(self.pair.target, 1, self.pair.max_length)
        # p, q, what is left of them and its sums: on a CPU of one sequence after the other
        kept = 5 * width if sampled and target.device.type != "cpu" else 0
        works: list[SequenceWork | Head] = [SequenceWork(target, width, kept)]
        if isinstance(self.pair.draft, Head):
            works.append(self.pair.draft)
        elif self.pair.draft is not None:
            runner = ModelRunner(
                self.pair.draft, 1, self.pair.max_length, intersection=self.pair.intersection
            )
            kept = config.spd_k if sampled else 0
            works.append(SequenceWork(runner, config.num_ngram_pred_tokens + 2, kept))
        count = sequences_that_fit(
            works,
            max(len(request.prompt) + request.budget for request in requests),
            at_most=min(len(requests), self.max_batch_size),
        )
        logger.info("batch_size=auto: %d running sequences", count)
        return count

    def _costs(
        self,
        config: FlyConfig,
        wanted: list[Request],
        target: ModelRunner,
        draft: Any,
    ) -> PairCosts:
        """Of both models' passes. Calibrated where texts do not depend on what they decide; else by
        a rule that is the same on every machine of a kind."""
        adapts = config.drafter_name is not None and config.draft_policy == "auto"
        timed = self._may_adapt and not isinstance(
            self.pair.draft, Head
        )  # it reads what no timing has
        if timed and adapts and not _drafts_change_texts(config, wanted):
            return calibrate(target, draft, self._deciding_costs(config))
        if draft is None:
            return pass_costs.by_rule(target.way, None, 0.0)
        costs = pass_costs.by_rule(target.way, draft.way, self.pair.packed.draft_weight)
        return replace(costs, block=draft.block)

    def _draft_length(
        self, config: FlyConfig, planned: int, wanted: list[Request], costs: PairCosts
    ) -> DraftLength:
        """`draft_policy`: by calibrated costs and counts where texts do not depend on it; else
        spd_k or nothing for the whole run.

        All requests decide, not those that are left: a resumed run decides as it did before.
        """
        fixed = config.draft_policy == "fixed" or config.drafter_name is None
        if fixed or not self._may_adapt:
            self.draft_length = {"policy": "fixed", "spd_k": config.spd_k}
            return DraftLength(config.spd_k)
        facts = {"spd_k": config.spd_k, **costs.as_dict()}
        if not _drafts_change_texts(config, wanted):
            # without a draft model texts alone are drafted from, as far as each of them is worth it
            policy = "adaptive" if config.needs_draft_model else "texts"
            self.draft_length = {"policy": policy, **facts}
            return AdaptiveLength(config.spd_k, costs)
        drafts = pays(config.spd_k, planned, _LOSSY_ACCEPTANCE, costs)
        length = config.spd_k if drafts else 0
        self.draft_length = {"policy": "rule", **facts, "spd_k": length}
        if not drafts:
            logger.warning(
                "drafting %d tokens (running sequences: %d) would be slower than the target alone "
                "(%s passes), so nothing is drafted: lower --batch_size or spd_k, or "
                "set draft_policy=fixed to draft all the same",
                config.spd_k,
                planned,
                self.pair.packed.target,
            )
        return DraftLength(length)

    @property
    def _may_adapt(self) -> bool:
        """Whether costs of passes are known: on a CPU."""
        return self.pair.target.device.type == "cpu"

    def _planned(self, requests: int | None) -> int:
        """How many sequences one process would run at most, if the run were its own. Not what
        memory has room for now, nor this process's share, nor what a cache leaves over: a run that
        is resumed, elsewhere or by another number of processes, must decide alike."""
        most = self.batch_size if isinstance(self.batch_size, int) else self.max_batch_size
        return max(1, most if requests is None else min(most, requests))

    def _deciding_costs(self, config: FlyConfig) -> dict[str, Any]:
        """What pass costs depend on, beside the machine."""
        models = [model for model in (self.pair.target, self.pair.draft) if model is not None]
        return {
            "models": [model.config.get_text_config().to_diff_dict() for model in models],
            "passes": (self.pair.packed.target, self.pair.packed.draft),
            "drafter": config.drafter_name,
        }


def _drafts_change_texts(config: FlyConfig, wanted: list[Request]) -> bool:
    """Whether a text may depend on what is drafted: under lossy rules, and where tokens are drawn
    from a draft model, whose random numbers decide with the target's."""
    sampled = any(not request.sampling.is_greedy for request in wanted)
    return config.rule != "exact" or (sampled and config.needs_draft_model)


def _text_sources(config: FlyConfig, wanted: list[Request]) -> tuple[TextSourceName, ...]:
    """The texts that there will be to draft from."""
    has_earlier = any(request.earlier for request in wanted)
    return tuple(name for name in config.text_sources if name != "runs" or has_earlier)


def _widest_from_texts(config: FlyConfig, wanted: list[Request]) -> int:
    """Draft tokens from texts that memory is kept for; own text proposes but a few."""
    name = config.drafter_name
    wide = "runs" in _text_sources(config, wanted)
    if name is None or not registry.DRAFTERS[name].from_texts or not wide:
        return 0
    return min(_WIDE, config.longest_lookup)
