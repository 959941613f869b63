"""Real runs: a loaded pair through lm-eval under one configuration after another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, Field

from fly import config as fly_config
from fly.analysis import scores
from fly.analysis.scores import Measured, Task
from fly.config import FlyConfig
from fly.harness import evaluate
from fly.harness.hf import FlyLM
from fly.models import fingerprint
from fly.runs import reader
from fly.runs.environment import models_of
from fly.runs.jsonl import JsonLines
from fly.runs.records import DECODING, Counts, RequestRecord, rates

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance


@dataclass(frozen=True)
class Workload:
    """What is run: lm-eval's arguments."""

    tasks: tuple[str, ...]
    limit: int
    available: dict[str, int]  # how many documents each task has
    chat: bool = False
    max_gen_toks: int | None = None
    num_fewshot: int | None = None
    include_path: str | None = None
    confirm_run_unsafe_code: bool = False
    samples: dict[str, list[int]] | None = None  # the documents of a run, by task


class RunResult(BaseModel):
    """A configuration on some documents."""

    counts: Counts  # sums over the requests
    seconds: dict[str, float]  # sums over the requests, by phase
    requests: int
    measured: Measured  # the scores
    # by task and document; empty for runs that were kept by an earlier tune
    decode_seconds: dict[tuple[str, int], float] = Field(default={}, exclude=True)

    @property
    def seconds_of_decoding(self) -> float:
        return sum(self.seconds[phase] for phase in DECODING)

    @property
    def stats(self) -> dict[str, Any]:
        """Names as in `config.fly.stats` of a results file."""
        return {
            "requests": self.requests,
            **self.counts.as_dict(),
            **rates(self.counts, self.seconds),
            "seconds": {phase: round(value, 3) for phase, value in self.seconds.items()},
        }

    @property
    def tok_s(self) -> float:
        return float(self.stats["decode_tok_s"] or 0.0)

    @property
    def changed(self) -> float:
        """Share of emitted tokens that are deferrals that stood, so not the target's own."""
        return self.counts.deferred_accepted / max(1, self.counts.emitted)

    @property
    def scores(self) -> dict[str, dict[int, float]]:
        """By task, metric and filter (docs/compare.md: those that are means); by document."""
        return {
            f"{name} {metric.label}": metric.scores
            for name, task in self.measured.tasks.items()
            for metric in task.metrics
        }


def join(parts: Sequence[RunResult]) -> RunResult:
    """One configuration's runs on different documents of the same tasks, as one run."""
    counts = Counts()
    for part in parts:
        counts.add(part.counts)
    first = parts[0]
    tasks = {
        name: _join_task([part.measured.tasks[name] for part in parts])
        for name in first.measured.tasks
    }
    notes = [*dict.fromkeys(note for part in parts for note in part.measured.notes)]
    return RunResult(
        counts=counts,
        seconds={phase: sum(part.seconds[phase] for part in parts) for phase in first.seconds},
        requests=sum(part.requests for part in parts),
        measured=first.measured.model_copy(update={"tasks": tasks, "notes": notes}),
        decode_seconds={key: value for part in parts for key, value in part.decode_seconds.items()},
    )


def _join_task(parts: Sequence[Task]) -> Task:
    metrics = []
    for label in dict.fromkeys(metric.label for part in parts for metric in part.metrics):
        found = [metric for part in parts if (metric := part.metric(label))]
        left_out = "" if len(found) == len(parts) else "has no number for some documents"
        left_out = next((metric.left_out for metric in found if metric.left_out), left_out)
        all_scores = {i: score for metric in found for i, score in metric.scores.items()}
        metrics.append(found[0].model_copy(update={"scores": all_scores, "left_out": left_out}))
    documents = {i: hashes for part in parts for i, hashes in part.documents.items()}
    texts = {i: text for part in parts for i, text in part.texts.items()}
    changed = {"documents": documents, "metrics": metrics, "texts": texts}
    return parts[0].model_copy(update=changed)


class _TimedLM(FlyLM):
    """The pair under one configuration; keeps the seconds of each document's decoding."""

    def begin(self, config: FlyConfig) -> _TimedLM:
        """The same pair under another configuration, with nothing decoded yet."""
        lm = self.with_config(config)
        lm.seconds = defaultdict[tuple[str, int], float](float)
        lm.texts = dict[tuple[Any, ...], str]()
        lm.in_turns, lm.done = (), lambda documents: None
        return lm

    def keep(self, instance: Instance, text: str, record: RequestRecord, log: JsonLines) -> None:
        document = str(instance.task_name), int(record.request.tag.doc_id)
        self.seconds[document] += sum(record.seconds[phase] for phase in DECODING)
        super().keep(instance, text, record, log)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """With others `in_turns` every document is decoded by all, whoever is asked; which is the
        first changes from document to document."""
        if not self.in_turns:
            return super().generate_until(requests, disable_tqdm)
        texts = []
        for instance in requests:
            key = (instance.task_name, instance.doc_id, instance.idx, instance.args[0])
            if key not in self.texts:
                first = len(self.texts) % len(self.in_turns)
                for lm in (*self.in_turns[first:], *self.in_turns[:first]):
                    (lm.texts[key],) = FlyLM.generate_until(lm, [instance], disable_tqdm=True)
                self.done(len(self.in_turns))
            texts.append(self.texts[key])
        return texts

    def evaluate(self, workload: Workload) -> RunResult:
        """The workload through lm-eval."""
        budget = workload.max_gen_toks
        found = evaluate.run_tasks(
            self,
            workload.tasks,
            samples=workload.samples,
            chat=workload.chat,
            gen_kwargs=None if budget is None else f"max_gen_toks={budget}",
            num_fewshot=workload.num_fewshot,
            include_path=workload.include_path,
            confirm_run_unsafe_code=workload.confirm_run_unsafe_code,
        )
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        measured = scores.measure(reader.of_results(found, self.fly_config.mode))
        return RunResult(
            counts=self.stats.counts,
            seconds=self.stats.seconds,
            requests=self.stats.requests,
            measured=measured,
            decode_seconds=dict(self.seconds),
        )


class TunedPair:
    """A loaded pair that runs workloads under one configuration after another.

    given: the configuration that it was loaded with; alone: the target alone.
    """

    def __init__(self, config_path: str, model_args: dict[str, Any]) -> None:
        self.lm = _TimedLM(config_path=config_path, batch_size=1, **model_args)
        self._model_args = model_args
        self.given = given = self.lm.fly_config
        if given.draft_runs:
            # settings are for runs that have no earlier outputs to draft from, by the rule and the
            # drafter that are in force with them
            fixed = {"verification": given.rule, "drafter": given.drafter_name}
            self.given = given.model_copy(update={"draft_runs": None, **fixed})
        self.alone = self.given.model_copy(update={"use_sd": False})

    def identity(self) -> dict[str, Any]:
        """What the models are, beside the configuration: their files, HFLM's arguments."""
        _, hf_args = fly_config.split_model_args(self._model_args)
        hf_args.pop("device", None)  # where it runs is noted as what was found
        hashed = fingerprint.hash_json(hf_args)  # they may hold a token
        return {"models": models_of(self.given, hf_args), "model_args": hashed}

    def run(self, workload: Workload, config: FlyConfig) -> RunResult:
        """The workload under a configuration, through lm-eval."""
        return self.lm.begin(config).evaluate(workload)

    def run_in_turns(
        self, workload: Workload, configs: Sequence[FlyConfig], done: Callable[[int], object]
    ) -> list[RunResult]:
        """The workload under several configurations, each document by all of them in turn. done: is
        told how many documents more were decoded."""
        lms = tuple(self.lm.begin(config) for config in configs)
        for lm in lms:
            lm.in_turns, lm.done = lms, done
        return [lm.evaluate(workload) for lm in lms]
