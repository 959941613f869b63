"""Real runs: a loaded pair through lm-eval under one configuration after another."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from fly import config as fly_config
from fly.analysis import scores
from fly.analysis.scores import Measured
from fly.config import FlyConfig
from fly.errors import FlyError
from fly.execution import weights
from fly.execution.model_runner import ModelRunner
from fly.execution.self_check import check_cache_agrees
from fly.harness import evaluate
from fly.harness.hf import FlyLM
from fly.models import fingerprint, sources
from fly.runs import reader
from fly.runs.environment import models_of
from fly.runs.jsonl import JsonLines
from fly.runs.records import DECODING, TIMED, RequestRecord, RunStats
from fly.settings import ExecutionSettings
from fly.speculation.sequence import Request
from fly.tuning.recorder import Answer

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance


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


@dataclass
class RunResult:
    """One run. measured: its scores; answers: in the order in which they were decoded.

    available: how many documents each task has. decode_seconds: by task and document.
    """

    stats: dict[str, Any]
    measured: Measured = field(repr=False)
    answers: list[Answer] = field(default_factory=list, repr=False)
    available: dict[str, int] = field(default_factory=dict, repr=False)
    decode_seconds: dict[tuple[str, int], float] = field(default_factory=dict, repr=False)

    @property
    def seconds_of_decoding(self) -> float:
        return float(sum(self.stats["seconds"][phase] for phase in DECODING))

    @property
    def seconds(self) -> float:
        """Decoding and prefill."""
        return float(sum(self.stats["seconds"][phase] for phase in TIMED))

    @property
    def tok_s(self) -> float:
        return float(self.stats["decode_tok_s"] or 0.0)

    @property
    def changed(self) -> float:
        """Share of emitted tokens that are deferrals that stood, so not the target's own."""
        return float(self.stats["deferred_accepted"] / max(1, self.stats["emitted"]))

    @property
    def scores(self) -> dict[str, dict[int, float]]:
        """By task, metric and filter (docs/compare.md: those that are means); by document."""
        return {
            f"{name} {metric.label}": metric.scores
            for name, task in self.measured.tasks.items()
            for metric in task.metrics
        }


@dataclass
class _Decoded:
    """What a configuration's requests leave in a run."""

    config: FlyConfig
    stats: RunStats = field(default_factory=RunStats)
    records: list[RequestRecord] = field(default_factory=list)

    def result(self, found: dict[str, Any]) -> RunResult:
        """With what lm-eval found."""
        seconds: dict[tuple[str, int], float] = defaultdict(float)
        answers = []
        for record in self.records:
            request, tokens = record.request, tuple(record.tokens)
            document = str(request.tag.task_name), int(request.tag.doc_id)
            seconds[document] += sum(record.seconds[phase] for phase in DECODING)
            answers.append(
                Answer(*document, request.prompt, request.budget, tokens, record.finish_reason)
            )
        return RunResult(
            self.stats.as_dict(),
            scores.measure(reader.of_results(found, self.config.mode)),
            answers,
            {name: int(each["original"]) for name, each in found.get("n-samples", {}).items()},
            dict(seconds),
        )


@dataclass
class _Turns:
    """Several configurations in turn. wanted: whose texts lm-eval gets now. texts: by request, of
    all."""

    decoded: list[_Decoded]
    done: Callable[[int, int], None]
    wanted: int = 0
    texts: dict[tuple[Any, ...], list[str]] = field(default_factory=dict)


class TunedLM(FlyLM):
    """A pair whose configuration and draft weights can be changed between runs."""

    def __init__(self, config_path: str, model_args: dict[str, Any]) -> None:
        self._records: list[RequestRecord] = []
        self._turns: _Turns | None = None
        self._drafts: dict[str, Any] = {}  # while several are in turn, by quantisation
        super().__init__(config_path=config_path, batch_size=1, **model_args)
        if self.draft_model is None:
            raise FlyError(f"config_path={config_path}: names no draft model: nothing to tune")
        self._model_args = model_args
        # every K is tried: the run's own choice would only hide what a K costs; and settings are
        # for runs that have no earlier outputs to draft from, by the rule that is theirs with them
        fixed: dict[str, Any] = {"draft_policy": "fixed"}
        if self.fly_config.draft_runs:
            fixed |= {"draft_runs": None, "verification": self.fly_config.rule}
            fixed["drafter"] = self.fly_config.drafter_name
        self.given = self.fly_config = self.fly_config.model_copy(update=fixed)
        self.earlier = None
        self._in_use: str = self.fly_config.draft_quantization
        # the walks of a grid ask for the same few tokens' text again and again
        self._text_of = lru_cache(maxsize=1 << 16)(self.engines.decode_lines)

    def text_of(self, ids: Sequence[int]) -> str:
        """Line breaks in place of special tokens."""
        return self._text_of(tuple(ids))

    def identity(self) -> dict[str, Any]:
        """What the models are, beside the configuration: their files, HFLM's arguments."""
        _, hf_args = fly_config.split_model_args(self._model_args)
        hf_args.pop("device", None)  # where it runs is noted as what was found
        hashed = fingerprint.of_value(hf_args)  # they may hold a token
        return {"models": models_of(self.given, hf_args), "model_args": hashed}

    def quantizations(self) -> list[str]:
        """What draft_quantization can be here, the one in use first."""
        kinds = weights.quantizations(self._fresh_draft(), self.given.part(ExecutionSettings))
        gc.collect()
        return sorted(kinds, key=lambda kind: kind != self.quantization)

    @property
    def quantization(self) -> str:
        """That of the draft in use, by its own name where the configuration says auto."""
        if self._in_use != "auto":
            return self._in_use
        done = str(self.packed.draft).split()[-1]
        return done if done in ("int4", "int8", "fp8") else "none"

    def use(self, config: FlyConfig) -> None:
        """Decode by this configuration from now on; loads the draft again if it has to."""
        wanted = config.draft_quantization
        if wanted in self._drafts:
            self.engines.draft, self._in_use = self._drafts[wanted], wanted
        elif wanted not in (self._in_use, self.quantization):
            self.engines.draft = None  # before the next one is loaded
            gc.collect()
            draft = self._fresh_draft()
            check_cache_agrees(draft, "pretrained")
            weights.pack_draft(draft, config.part(ExecutionSettings))
            self.engines.draft, self._in_use = draft, wanted
            if self._turns is not None:  # it will be needed again
                self._drafts[wanted] = draft
        self.fly_config = config

    def _fresh_draft(self) -> Any:
        _, source = sources.sources(self.fly_config)
        assert source is not None
        draft, _ = self.load_draft(source, self._model_args)
        return draft

    def runners(self, slots: int, *, eager: bool = False) -> tuple[ModelRunner, ModelRunner]:
        """Target and draft with so many slots each, as the engine has them or in eager passes."""
        config = self.fly_config
        if eager:
            config = config.model_copy(update={"compile": "off", "prefix_reuse": True})
        return self.engines.target_runner(config, slots), self.engines.draft_runner(config, slots)

    def run(self, workload: Workload, config: FlyConfig) -> RunResult:
        """The workload under a configuration, through lm-eval."""
        decoded = _Decoded(config)
        self._decode_for(decoded)
        return decoded.result(self._evaluate(workload))

    def _decode_for(self, decoded: _Decoded) -> None:
        """From now on."""
        self.use(decoded.config)
        self.stats, self._records = decoded.stats, decoded.records

    def run_in_turns(
        self,
        workload: Workload,
        configs: Sequence[FlyConfig],
        done: Callable[[int, int], None] = lambda count, total: None,
    ) -> list[RunResult]:
        """The workload under several configurations, each document by all of them in turn; which
        is the first changes from document to document."""
        turns = self._turns = _Turns([_Decoded(config) for config in configs], done)
        self._drafts[self._in_use] = self._drafts[self.quantization] = self.draft_model
        results = []
        try:
            for number, decoded in enumerate(turns.decoded):
                turns.wanted = number  # decoded at the first call, looked up at the others
                results.append(decoded.result(self._evaluate(workload)))
        finally:
            self._turns = None
            self._drafts = {}
        return results

    def _evaluate(self, workload: Workload) -> dict[str, Any]:
        budget = workload.max_gen_toks
        found = evaluate.run_tasks(
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
        return found

    # ------------------------------------------------- what lm-eval's requests come through

    def build_requests(self, instances: list[Instance]) -> list[Request]:
        """Refuses what cannot be predicted, before the first is decoded."""
        wanted = super().build_requests(instances)
        for request in wanted:
            if not request.sampling.is_plain:
                raise FlyError(
                    f"task {request.tag.task_name}: samples, or has a repetition penalty: fly tune "
                    "predicts greedy decoding only: choose another task, or temperature=0"
                )
        return wanted

    def keep(self, instance: Instance, text: str, record: RequestRecord, log: JsonLines) -> None:
        self._records.append(record)
        super().keep(instance, text, record, log)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        turns = self._turns
        if turns is None:
            return super().generate_until(requests, disable_tqdm)
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
        numbers = range(len(turns.decoded))
        first = len(turns.texts) % len(numbers)
        texts: dict[int, str] = {}
        for number in [*numbers[first:], *numbers[:first]]:
            self._decode_for(turns.decoded[number])
            (texts[number],) = super().generate_until([instance], disable_tqdm=True)
        return [texts[number] for number in numbers]
