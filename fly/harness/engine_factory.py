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


def captures_graphs(config: FlyConfig, model: PreTrainedModel) -> bool | None:
    """True if a model's passes are captured as CUDA graphs, else None, as passes' `capture`."""
    # a CPU's model is packed by now, perhaps to float32, which would not be packed again
    on_gpu = model.device.type == "cuda"
    return (on_gpu and passes_for(model, config)[0] in ("graphs", "inductor")) or None


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
    """Makes the engine for `missing`, which of all `wanted` requests are not there yet."""

    pair: LoadedPair
    config: FlyConfig
    missing: list[Request]
    wanted: list[Request]
    # how many the run has, in all its processes; None where lm-eval's cache answers some, and
    # nobody knows
    requests: int | None
    batch_size: int | str  # sequences that run together; `auto`: as many as memory holds
    max_batch_size: int  # the most for `auto`
    # for the results: how that of the engine was decided
    draft_length: dict[str, Any] | None = field(default=None, init=False)

    def engine(self, observer: Observer) -> Engine:
        config, pair = self.config, self.pair
        slots = max(1, min(self._running_sequences(), len(self.missing)))
        target = self._runner(pair.target, slots, pair.max_length)
        draft = self._draft_runner(slots) if config.needs_draft_model else None
        costs = self._costs(target, draft)
        texts = tokenizers.Texts(pair.tokenizer)
        return Engine(
            target,
            self._drafter(draft, costs),
            rule_of(config, pair.tokenizer),
            draft_length=self._draft_length(costs),
            spd_k=config.spd_k if config.drafter_name else 0,
            eos_ids=pair.eos_ids,
            decode=texts.decode,
            observer=observer,
            reuse_prefixes=config.prefix_reuse,
            trace_entropy=config.entropy_kind if config.trace else None,
            decode_lines=texts.decode_lines,
        )

    def _draft_runner(self, slots: int) -> Any:
        """A ModelRunner, or a head's own."""
        draft = self.pair.draft
        assert draft is not None
        if isinstance(draft, Head):
            return draft.runner(self.pair.target, slots, self.pair.max_length)
        context = context_of(draft, self.pair.max_length)
        return self._runner(draft, slots, context, self.pair.intersection)

    def _runner(
        self,
        model: PreTrainedModel,
        slots: int,
        max_length: int,
        intersection: TokenIntersection | None = None,
    ) -> ModelRunner:
        config = self.config
        runner = ModelRunner(
            model,
            slots,
            max_length,
            reuse_prefixes=config.prefix_reuse,
            vocabulary=self.pair.target.config.get_text_config().vocab_size,
            intersection=intersection,
        )
        capture = captures_graphs(config, model)
        role = "target" if model is self.pair.target else "draft"
        on_failure = partial(self.pair.packed.eager.__setitem__, role)
        if self.pair.packed.uniform and role == "target":
            runner.use_uniform_passes(capture=capture, on_failure=on_failure)
        elif capture:
            compiles = config.compile == "inductor"
            runner.use_static_passes(capture=capture, compiles=compiles, on_failure=on_failure)
        return runner

    def _drafter(self, draft: Any, costs: PairCosts) -> Drafter:
        if self.config.drafter_name is None:
            return NoDrafter()
        kind = registry.load(registry.DRAFTERS[self.config.drafter_name].where)
        return kind.create(
            DrafterContext(
                self._planned(),
                self.config,
                self.pair.eos_ids,
                draft,
                costs,
                self._changes_texts,
                self._text_sources(self.wanted),
            )
        )

    def _running_sequences(self) -> int:
        """`--batch_size`; for auto, as many as fit into memory at their longest."""
        config, pair, requests = self.config, self.pair, self.missing
        if not requests:
            return 1
        if isinstance(self.batch_size, int):
            return self.batch_size
        width = 1
        if config.drafter_name is not None:
            width += max(config.spd_k, self._widest_from_texts())
        sampled = any(not request.sampling.is_greedy for request in requests)
        target = ModelRunner(pair.target, 1, pair.max_length)
        # p, q, what is left of them and its sums: on a CPU of one sequence after the other
        kept = 5 * width if sampled and target.device.type != "cpu" else 0
        works: list[SequenceWork | Head] = [SequenceWork(target, width, kept)]
        if isinstance(pair.draft, Head):
            works.append(pair.draft)
        elif pair.draft is not None:
            runner = ModelRunner(pair.draft, 1, pair.max_length, intersection=pair.intersection)
            kept = config.spd_k if sampled else 0
            works.append(SequenceWork(runner, config.num_ngram_pred_tokens + 2, kept))
        count = sequences_that_fit(
            works,
            max(len(request.prompt) + request.budget for request in requests),
            at_most=min(len(requests), self.max_batch_size),
        )
        logger.info("batch_size=auto: %d running sequences", count)
        return count

    def _widest_from_texts(self) -> int:
        """Draft tokens from texts that memory is kept for; own text proposes but a few."""
        drafts = registry.DRAFTERS[str(self.config.drafter_name)].from_texts
        wide = drafts and "runs" in self._text_sources(self.missing)
        return min(_WIDE, self.config.longest_lookup) if wide else 0

    def _text_sources(self, requests: list[Request]) -> tuple[TextSourceName, ...]:
        """The texts that there will be to draft from."""
        has_earlier = any(request.earlier for request in requests)
        return tuple(name for name in self.config.text_sources if name != "runs" or has_earlier)

    def _costs(self, target: ModelRunner, draft: Any) -> PairCosts:
        """Of both models' passes. Calibrated where texts do not depend on what they decide; else by
        a rule that is the same on every machine of a kind."""
        pair, packed = self.pair, self.pair.packed
        if self._adapts and self._can_be_timed:
            models = [model for model in (pair.target, pair.draft) if model is not None]
            deciding = {  # what they depend on, beside the machine
                "models": [model.config.get_text_config().to_diff_dict() for model in models],
                "passes": (packed.target, packed.draft, packed.uniform),
                "drafter": self.config.drafter_name,
            }
            return calibrate(target, draft, deciding)
        if draft is None:
            return pass_costs.by_rule(target.way, None, 0.0)
        costs = pass_costs.by_rule(target.way, draft.way, packed.draft_weight)
        return replace(costs, block=draft.block)

    def _draft_length(self, costs: PairCosts) -> DraftLength:
        """`draft_policy`: by calibrated costs and counts where texts do not depend on it; else
        spd_k or nothing for the whole run.

        All requests decide, not those that are left: a resumed run decides as it did before.
        """
        spd_k = self.config.spd_k
        if not self._adapts:
            self.draft_length = {"policy": "fixed", "spd_k": spd_k}
            return DraftLength(spd_k)
        facts = {"spd_k": spd_k, **costs.as_dict()}
        if not self._changes_texts:
            # without a draft model texts alone are drafted from, as far as each of them is worth it
            policy = "adaptive" if self.config.needs_draft_model else "texts"
            self.draft_length = {"policy": policy, **facts}
            is_captured = bool(captures_graphs(self.config, self.pair.target))
            return AdaptiveLength(spd_k, costs, is_coarse=is_captured)
        planned = self._planned()
        length = spd_k if pays(spd_k, planned, _LOSSY_ACCEPTANCE, costs) else 0
        self.draft_length = {"policy": "rule", **facts, "spd_k": length}
        if not length:
            logger.warning(
                "drafting %d tokens (running sequences: %d) would be slower than the target alone "
                "(%s passes), so nothing is drafted: lower --batch_size or spd_k, or "
                "set draft_policy=fixed to draft all the same",
                spd_k,
                planned,
                self.pair.packed.target,
            )
        return DraftLength(length)

    @property
    def _adapts(self) -> bool:
        """Whether costs of passes decide how much is drafted. On a GPU they have to be timed, and
        are of a draft model, unless every further length of drafts would be compiled."""
        if self.config.draft_policy != "auto" or self.config.drafter_name is None:
            return False
        if self.pair.target.device.type == "cpu":
            return True
        is_compiled = self.pair.packed.target.startswith("inductor")
        return self.pair.draft is not None and self._can_be_timed and not is_compiled

    @property
    def _can_be_timed(self) -> bool:
        """Whether timed passes may decide: texts do not depend on it, and no head drafts, which
        reads what a timed pass has not."""
        return not self._changes_texts and not isinstance(self.pair.draft, Head)

    @property
    def _changes_texts(self) -> bool:
        """Whether a text may depend on what is drafted: under lossy rules, and where tokens are
        drawn from a draft model, whose random numbers decide with the target's."""
        sampled = any(not request.sampling.is_greedy for request in self.wanted)
        return self.config.rule != "exact" or (sampled and self.config.needs_draft_model)

    def _planned(self) -> int:
        """How many sequences one process would run at most, if the run were its own. Not what
        memory has room for now, nor this process's share, nor what a cache leaves over: a run that
        is resumed, elsewhere or by another number of processes, must decide alike."""
        most = self.batch_size if isinstance(self.batch_size, int) else self.max_batch_size
        return max(1, most if self.requests is None else min(most, self.requests))
