"""Real runs: a loaded pair through lm-eval under one configuration after another."""

from __future__ import annotations

import gc
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fly import config as fly_config
from fly.analysis import scores as measured
from fly.analysis.scores import Measured
from fly.config import FlyConfig
from fly.errors import FlyError
from fly.execution import weights
from fly.execution.model_runner import ModelRunner
from fly.harness import evaluate
from fly.harness.hf import FlyLM
from fly.models import fingerprint, loading, sources
from fly.runs import context as session
from fly.runs import reader, resume
from fly.runs.records import DECODING, TIMED, RequestRecord, RunStats
from fly.speculation.sequence import Request
from fly.tuning.recorder import Document

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workload:
    """What is run: lm-eval's arguments. samples: documents by task, not the first `limit`."""

    tasks: tuple[str, ...]
    limit: int
    chat: bool = False
    max_gen_toks: int | None = None
    num_fewshot: int | None = None
    include_path: str | None = None
    confirm_run_unsafe_code: bool = False
    samples: dict[str, list[int]] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Outcome:
    """One run. measured: its scores; documents: in the order in which they were decoded.

    available: how many documents each task has. decode_seconds: by task and document.
    """

    stats: dict[str, Any]
    measured: Measured = field(repr=False)
    documents: list[Document] = field(default_factory=list, repr=False)
    available: dict[str, int] = field(default_factory=dict, repr=False)
    decode_seconds: dict[tuple[str, int], float] = field(default_factory=dict, repr=False)

    @property
    def seconds_of_decoding(self) -> float:
        return float(sum(self.stats["seconds"][phase] for phase in DECODING))

    @property
    def tok_s(self) -> float:
        return float(self.stats["decode_tok_s"] or 0.0)

    @property
    def scores(self) -> dict[str, dict[int, float]]:
        """By task, metric and filter (docs/compare.md: those that are means); by document."""
        return {
            f"{name} {metric.label}": metric.scores
            for name, task in self.measured.tasks.items()
            for metric in task.metrics
        }

    @property
    def seconds(self) -> float:
        """Decoding and prefill."""
        return float(sum(self.stats["seconds"][phase] for phase in TIMED))


class TunedLM(FlyLM):
    """A pair whose configuration and draft weights can be changed between runs."""

    def __init__(self, config_path: str, model_args: dict[str, Any]) -> None:
        self.records: list[RequestRecord] = []
        self._turns: _Turns | None = None
        self._drafts: dict[str, Any] = {}
        super().__init__(config_path=config_path, batch_size=1, **model_args)
        if self.draft_model is None:
            raise FlyError(f"config_path={config_path}: names no draft model: nothing to tune")
        self._model_args = model_args
        # every K is tried: the run's own choice would only hide what a K costs
        self.given = self.fly_config = self.fly_config.model_copy(update={"draft_policy": "fixed"})
        self._in_use = self.fly_config.draft_quantization

    def _build(self, instances: list[Instance]) -> list[Request]:
        wanted = super()._build(instances)
        for request in wanted:  # refused before the first is decoded
            if not request.sampling.is_plain:
                raise FlyError(
                    f"task {request.tag.task_name}: samples, or has a repetition penalty: fly tune "
                    "predicts greedy decoding only: choose another task, or temperature=0"
                )
        return wanted

    def _keep(
        self, instance: Instance, text: str, record: RequestRecord, log: session.JsonLines
    ) -> None:
        self.records.append(record)
        super()._keep(instance, text, record, log)

    def identity(self) -> dict[str, Any]:
        """What the models are, beside the configuration: their files, HFLM's arguments."""
        _, hf_args = fly_config.split_model_args(self._model_args)
        hf_args.pop("device", None)  # where it runs is noted as what was found
        hashed = fingerprint.of_value(hf_args)  # they may hold a token
        return {"models": resume.models_of(self.given, hf_args), "model_args": hashed}

    def quantizations(self) -> list[str]:
        """What draft_quantization can be here, the one in use first."""
        fresh = self._fresh_draft()
        kinds = [str(kind) for kind in weights.quantizations(fresh, self.given)]
        del fresh
        gc.collect()
        in_use = self.quantization
        return sorted(kinds, key=lambda kind: kind != in_use)

    @property
    def quantization(self) -> str:
        """That of the draft in use, by its own name where the configuration says auto."""
        if self._in_use != "auto":
            return self._in_use
        done = str(self.preparation.draft).split()[-1]
        return done if done in ("int4", "int8", "fp8") else "none"

    def use(self, config: FlyConfig) -> None:
        """Decode by this configuration from now on; loads the draft again if it has to."""
        if config.draft_quantization in self._drafts:
            self.draft_model = self._drafts[config.draft_quantization]
            self._in_use = config.draft_quantization
        elif config.draft_quantization not in (self._in_use, self.quantization):
            self.draft_model = None  # before the next one is loaded
            gc.collect()
            draft = self._fresh_draft()
            loading.check_cache_agrees(draft, "pretrained")
            weights.prepare_draft(draft, config)
            self.draft_model, self._in_use = draft, config.draft_quantization
            if self._turns is not None:  # it will be needed again
                self._drafts[self._in_use] = draft
        self.fly_config = config

    def _fresh_draft(self) -> Any:
        _, source = sources.sources(self.fly_config)
        assert source is not None
        return self._load_draft(source, self._model_args)

    def runners(self, slots: int) -> tuple[ModelRunner, ModelRunner]:
        """Target and draft with so many slots each, in eager passes."""
        size = self.model.config.get_text_config().vocab_size
        assert self.draft_model is not None
        context = self._context_of(self.draft_model)
        return (
            ModelRunner(self.model, slots, self.max_length, vocabulary=size),
            ModelRunner(self.draft_model, slots, context, vocabulary=size),
        )

    def timed_runners(self) -> tuple[ModelRunner, ModelRunner]:
        """Target and draft as the engine has them for one row."""
        assert self.draft_model is not None
        context = self._context_of(self.draft_model)
        return (
            self._runner(self.model, 1, self.max_length),
            self._runner(self.draft_model, 1, context),
        )

    def run(self, workload: Workload, config: FlyConfig) -> Outcome:
        """The workload under a configuration, through lm-eval."""
        self.use(config)
        self.stats, self.records = RunStats(), []
        result = self._evaluate(workload)
        return _outcome(result, config.mode, self.stats, self.records)

    def run_in_turns(
        self,
        workload: Workload,
        configs: Sequence[FlyConfig],
        done: Callable[[int, int], None] = lambda count, total: None,
    ) -> list[Outcome]:
        """The workload under several configurations, each document by all of them in turn; which
        is the first changes from document to document."""
        turns = self._turns = _Turns(configs, done)
        self._drafts[self._in_use] = self._drafts[self.quantization] = self.draft_model
        outcomes = []
        try:
            for number, config in enumerate(configs):
                turns.wanted = number  # decoded at the first call, looked up at the others
                result = self._evaluate(workload)
                outcomes.append(
                    _outcome(result, config.mode, turns.stats[number], turns.records[number])
                )
        finally:
            self._turns = None
            self._drafts = {}
        return outcomes

    def _generate(self, requests: list[Instance], disable_tqdm: bool) -> list[str]:
        turns = self._turns
        if turns is None:
            return super()._generate(requests, disable_tqdm)
        texts = []
        for count, instance in enumerate(requests):
            key = (instance.task_name, instance.doc_id, instance.idx, instance.args[0])
            if key not in turns.texts:
                turns.texts[key] = self._by_all(instance, turns)
                turns.done(count + 1, len(requests))
            texts.append(turns.texts[key][turns.wanted])
        return texts

    def _by_all(self, instance: Instance, turns: _Turns) -> list[str]:
        """One document's text under every configuration."""
        numbers = range(len(turns.configs))
        first = len(turns.texts) % len(numbers)
        texts: dict[int, str] = {}
        for number in [*numbers[first:], *numbers[:first]]:
            self.use(turns.configs[number])
            self.stats, self.records = turns.stats[number], turns.records[number]
            (texts[number],) = super()._generate([instance], disable_tqdm=True)
        return [texts[number] for number in numbers]

    def _evaluate(self, workload: Workload) -> dict[str, Any]:
        budget = workload.max_gen_toks
        result = evaluate.run_tasks(
            self,
            workload.tasks,
            limit=None if workload.samples else workload.limit,
            samples=workload.samples,
            chat=workload.chat,
            gen_kwargs=None if budget is None else f"max_gen_toks={budget}",
            num_fewshot=workload.num_fewshot,
            include_path=workload.include_path,
            confirm_run_unsafe_code=workload.confirm_run_unsafe_code,
        )
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return result


@dataclass
class _Turns:
    """configs: in turn. wanted: whose texts lm-eval gets now. texts: by request, of all."""

    configs: Sequence[FlyConfig]
    done: Callable[[int, int], None]
    wanted: int = 0
    texts: dict[tuple[Any, ...], list[str]] = field(default_factory=dict)
    stats: list[RunStats] = field(init=False)
    records: list[list[RequestRecord]] = field(init=False)

    def __post_init__(self) -> None:
        self.stats = [RunStats() for _ in self.configs]
        self.records = [[] for _ in self.configs]


def _outcome(
    result: dict[str, Any], mode: str, stats: RunStats, records: list[RequestRecord]
) -> Outcome:
    seconds: dict[tuple[str, int], float] = defaultdict(float)
    for record in records:
        tag = record.request.tag
        took = sum(record.seconds[phase] for phase in DECODING)
        seconds[str(tag.task_name), int(tag.doc_id)] += took
    return Outcome(
        stats.as_dict(),
        measured.measure(reader.of_results(result, mode)),
        [_document(record) for record in records],
        {name: int(found["original"]) for name, found in result.get("n-samples", {}).items()},
        dict(seconds),
    )


def _document(record: RequestRecord) -> Document:
    instance = record.request.tag
    return Document(
        task=str(instance.task_name),
        doc_id=int(instance.doc_id),
        prompt=record.request.prompt,
        budget=record.request.budget,
        tokens=tuple(record.tokens),
        finish=record.finish_reason,
    )
