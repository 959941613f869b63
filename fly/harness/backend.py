"""What every engine of fly shares as an lm-eval model: from generate_until to records and results.

An engine says how requests are decoded (`decode`); here they are built and checked, finished ones
of a resumed run are taken from its records, each response is kept the moment it is there, and the
results entry is made. So resume, compare and report do not care which engine it was.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import hash_string
from typing_extensions import Self

from fly.config import FlyConfig
from fly.errors import FlyError, reason_of
from fly.execution.device import device_facts, peak_memory_bytes, timing_facts
from fly.harness import progress, registration, sandbox, turns
from fly.harness.arguments import check_model_args
from fly.harness.ranks import Ranks
from fly.harness.requests import (
    build_request,
    check_decoding,
    identity,
    response_text,
    seed_after,
)
from fly.models.tokenizers import Texts
from fly.runs import context, earlier_outputs, manifest, output_ids, resume
from fly.runs.earlier_outputs import MATCHES, EarlierOutputs, Matcher
from fly.runs.environment import models_of, versions
from fly.runs.jsonl import JsonLines
from fly.runs.records import Observer, RequestRecord, RoundRecord, RunStats
from fly.runs.trace_writer import Trace
from fly.speculation.rules.places import Places
from fly.speculation.sampling import Sampling
from fly.speculation.sequence import Request

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

logger = logging.getLogger(__name__)


class Backend(TemplateLM):
    """Mix it in before one of lm-eval's model classes that has a tokenizer, as HFLM.

    An engine calls `use_config` before it loads models and `join_run` after that. processes: all of
    the run.
    """

    fly_config: FlyConfig
    eos_ids: frozenset[int]
    engine_name = "fly"
    processes = Ranks()
    _same_target: bool | None = None  # whether the earlier runs are of this target; None: not known

    def use_config(self, config: FlyConfig) -> None:
        """Start with this configuration. Raises FlyError if a trace has no folder, and for earlier
        runs that cannot be read."""
        registration.extend_evaluate()
        self.fly_config = config
        self.run_context = run = context.unreported()  # lm-eval makes the model: it cannot be given
        self.earlier: EarlierOutputs | None = None
        if config.earlier_runs:  # a run is not its own draft
            own = (run.output_dir, run.started) if run.output_dir is not None else None
            self.earlier = EarlierOutputs.read(config.earlier_runs, own)
        self._matched = Counter[str]()  # requests, by what earlier runs have for them
        self._unshared_matched = Counter[str]()
        self.samplings: set[Sampling] = set()
        self.stats = RunStats()
        self._unshared = RunStats()  # counts that the other processes do not know of yet
        if config.trace and run.output_dir is None:
            raise FlyError(
                "trace=true: traces are written beside the samples: add --output_path DIR"
            )

    def with_config(self, config: FlyConfig) -> Self:
        """The same loaded models under another configuration, with statistics of their own."""
        other = copy.copy(self)
        other._same_target = None
        other.use_config(config)
        return other

    def join_run(self, model_args: dict[str, Any]) -> None:
        """Take part in the run: what decides its texts is noted, or is as it was."""
        run = self.run_context
        self._meet(run)
        if self.processes.rank == 0:
            run.results_entry = self.results_entry
        if run.manifest is not None:
            resume.check_models(run.manifest, self.fly_config, model_args, loaded=True)
            for name, fact in self.deciding_facts().items():
                run.manifest.agree(name, fact)
        if self.earlier is not None:
            own = earlier_outputs.target_of(models_of(self.fly_config, model_args))
            self._same_target = self.earlier.same_target(own)
        if run.finished_requests is not None and self.processes.rank == 0:
            self.stats.merge(run.finished_requests.stats)

    def _meet(self, run: context.RunContext) -> None:
        """All processes go on with the run as the first one began or resumed it. Raises FlyError
        if they do not see one folder."""
        of_run = (run.started, run.is_resumable, run.finished_requests)
        run.join_first(*self.processes.broadcast(of_run))
        folder = run.output_dir
        if run.is_resumable and folder and not manifest.path_in(folder, run.started).is_file():
            raise FlyError(
                f"output_path={folder}: what the first process wrote there is not seen by rank "
                f"{self.processes.rank}: give a folder that all machines share"
            )

    # ---------------------------------------------------------------- what an engine overrides

    @classmethod
    def check(cls, config: FlyConfig, model_args: dict[str, Any]) -> None:
        """Refuse what the engine cannot do, before models load. model_args: those that are not
        fly's. Raises FlyError."""
        check_model_args(config, model_args)

    @property
    def target_dtype(self) -> str:
        return str(self.model.dtype)

    @property
    def generation_config(self) -> Any:
        """The target's defaults for generation (transformers.GenerationConfig)."""
        return self.model.generation_config

    def encode_prompt(self, text: str, room: int) -> list[int]:
        """A prompt's token ids, truncated on the left to `room` as lm-eval does (it warns)."""
        ids, _ = self.tok_batch_encode([text], left_truncate_len=room, truncation=self.truncation)
        return ids[0].tolist()

    def decode(
        self, missing: list[Request], wanted: list[Request], observer: Observer
    ) -> Iterator[RequestRecord]:
        """Decode `missing`, the part of all `wanted` requests that is not there yet.

        Yields each request's record as soon as it ends, in any order; calls `observer` per round.
        """
        raise NotImplementedError

    def deciding_facts(self) -> dict[str, Any]:
        """What a resumed run must agree in, beside its configuration and models."""
        facts: dict[str, Any] = {
            "device": timing_facts(self.device),
            "dtype": self.target_dtype,
        }
        if self.earlier is not None:  # their outputs may decide texts, as drafts of lossy rules do
            facts["earlier_outputs"] = self.earlier.digest()
        return facts

    def engine_facts(self) -> dict[str, Any]:
        """Further keys of the results entry."""
        return {
            "devices": 1,
            "draft_dtype": None,
            "draft_num_parameters": None,
            "draft_vocabulary_share": None,
            "preparation": None,
            "draft_length": None,
        }

    # ---------------------------------------------------------------- generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """One text per request, in order, of all its turns together. All first turns are checked
        before one is decoded."""
        further = max((len(turns.further(request)) for request in requests), default=0)
        most = max(self.processes.exchange(further))
        if most and self.is_cached:
            raise FlyError(
                "--use_cache: it would give a document's first answer for all its turns: leave the "
                "flag out"
            )
        if most and self.run_context.has_kept_prompts:
            raise FlyError(
                "--cache_requests: further turns need the chat that the first prompt was made of: "
                "leave the flag out"
            )
        generate = partial(self._generate, disable_tqdm=disable_tqdm)
        return turns.answer_all(requests, generate, self._render, most)

    @cached_property
    def _system_of(self) -> dict[str, list[dict[str, str]]]:
        """The system messages of the chats that lm-eval made prompts of, by the prompt's hash."""
        return {}

    def _render(self, first: str, messages: list[dict[str, str]]) -> str | None:
        """The prompt of a chat behind the system message of its first prompt; None if lm-eval
        applied no chat template to that."""
        system = self._system_of.get(hash_string(first))
        return None if system is None else self.apply_chat_template([*system, *messages])

    def _generate(self, requests: list[Instance], disable_tqdm: bool) -> list[str]:
        """One text per request, in order. All requests are checked before the first is decoded."""
        if self.run_context.is_reported and self.processes.size == 1:
            self.use_config(self.fly_config)  # each evaluation has statistics of its own
        wanted = self.build_requests(requests)
        order = {id(request): index for index, request in enumerate(wanted)}
        texts = self._finished_texts(wanted)
        missing = [request for index, request in enumerate(wanted) if index not in texts]
        finished = len(texts)
        log = JsonLines(self.run_context, "fly_requests", self.rank)
        traces = None
        if self.fly_config.trace:
            traces = Trace(self.run_context, self.tokenizer, self.rank, self.world_size)
        bar = progress.Progress(
            len(wanted),
            enabled=not disable_tqdm and self.processes.rank == 0,
            log=self.fly_config.verbose,
            done=finished,
        )
        observers = [bar.on_round, *([traces.on_round] if traces else [])]

        def observe(record: RoundRecord) -> None:
            for observer in observers:
                observer(record)

        local = RunStats()
        places = Places.of(self.fly_config, self.tokenizer)  # of all modes, to be compared
        decode, thoughts = Texts(self.tokenizer).decode, set()
        try:
            for record in self.decode(missing, wanted, observe):
                index = order[id(record.request)]
                texts[index] = response_text(record, self)
                if places.relax_in != "everywhere" and record.text is None:
                    tokens = [*record.request.prompt, *record.tokens]
                    thoughts.add(thought := places.thought_in(tokens, decode))
                    record.unclosed_thinking = thought == "open"
                self.keep(requests[index], texts[index], record, log)
                local.add_request(record)
                bar.on_request(record)
        except BaseException:
            _report_interruption(log, len(wanted), finished, self.run_context.resume_hint)
            raise
        finally:
            bar.close()
            log.close()
            if traces is not None:
                traces.close()
        relaxes = self.fly_config.rule_settings if self.fly_config.drafter_name else None
        if thoughts == {"none"} and getattr(relaxes, "relax_in", None) == "thinking":
            logger.warning(
                "relax_in=thinking: no answer opens a thought with %r, so that all were verified "
                "exactly: set think_tokens to the target's",
                places.think_tokens[0],
            )
        local.peak_memory_bytes = peak_memory_bytes(self.device)
        self._unshared.merge(local)
        if self.world_size == 1:
            self._share()
        return [texts[index] for index in range(len(wanted))]

    @property
    def is_cached(self) -> bool:
        """Whether lm-eval answers requests from its cache (--use_cache), and asks for the rest."""
        return getattr(self.cache_hook, "dbdict", None) is not None

    def requests_of_run(self, wanted: list[Request]) -> int | None:
        """How many all processes together are asked for; None if lm-eval's cache answers some. All
        must call it, as all have documents of every task."""
        if self.is_cached:
            return None
        return sum(self.processes.exchange(len(wanted)))

    def note_system(self, history: list[dict[str, str]], prompt: str) -> None:
        """Further turns of this prompt stand behind the system message of its chat."""
        system = [message for message in history if message["role"] == "system"]
        self._system_of[hash_string(prompt)] = system

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Raises FlyError if there is none."""
        try:
            prompt = super().apply_chat_template(chat_history, add_generation_prompt)
            self.note_system(chat_history, prompt)
            return prompt
        except ValueError as error:
            if getattr(self.tokenizer, "chat_template", None) is not None:
                raise
            raise FlyError(
                f"--apply_chat_template: target_model_path={self.fly_config.target_model_path} has "
                f"no chat template ({reason_of(error)}): leave the flag out"
            ) from None

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Raises FlyError for a name that the target has no template of; lm-eval takes another."""
        templates = getattr(self.tokenizer, "chat_template", None)
        names = [*templates] if isinstance(templates, dict) else ["default"] * bool(templates)
        if isinstance(chat_template, str) and chat_template not in names:
            raise FlyError(
                f"--apply_chat_template {chat_template}: the target's chat templates are: "
                f"{', '.join(names) or 'none'}"
            )
        return super().chat_template(chat_template)

    def build_requests(self, instances: list[Instance]) -> list[Request]:
        """All requests, checked, under their documents' own numbers; equal ones (repeats of a
        document) get seeds of their own."""
        seen: Counter[tuple[Any, ...]] = Counter()
        wanted = []
        for instance in instances:
            chosen = (self.run_context.samples or {}).get(str(instance.task_name))
            if chosen and instance.doc_id is not None:  # lm-eval counts chosen documents anew
                instance = copy.copy(instance)
                instance.doc_id = chosen[instance.doc_id]
            # no matter the prompt: in a further turn's stand the answers, which are a repeat's own
            key = (instance.task_name, instance.doc_id, instance.idx)
            wanted.append(build_request(instance, self, seen[key]))
            seen[key] += 1
        self.samplings.update(request.sampling for request in wanted)
        check_decoding(wanted, self)
        return wanted if self.earlier is None else self._with_earlier(wanted, self.earlier)

    def _with_earlier(self, wanted: list[Request], earlier: EarlierOutputs) -> list[Request]:
        """The requests with what earlier runs wrote for the same documents and prompts."""
        matcher = Matcher(earlier, self.tokenizer)
        found = []
        for request in wanted:
            instance = request.tag
            prompt = hash_string(instance.args[0])
            outputs = matcher.outputs(instance.task_name, instance.doc_id, prompt, request.budget)
            seed = request.seed
            # these may be drawn with the same numbers, and whether a draft model drafts must not
            # depend on the numbers to come
            if outputs and self.fly_config.needs_draft_model and not request.sampling.is_greedy:
                seed = seed_after(seed, outputs)
            found.append(replace(request, earlier=outputs, seed=seed))
        counts = matcher.counts
        logger.info(
            "draft_runs: earlier outputs for %d of %d requests (%d with another prompt, %d of "
            "documents that are not there, %d that this tokenizer does not give back)",
            counts["matched"],
            counts.total(),
            counts["changed"],
            counts["missing"],
            counts["untokenized"],
        )
        self._unshared_matched.update(counts)
        return found

    def _finished_texts(self, wanted: list[Request]) -> dict[int, str]:
        """By index: the texts that the run's records hold already; lm-eval's cache gets them."""
        finished = self.run_context.finished_requests
        if finished is None:
            return {}
        asked = [identity(request) for request in wanted]
        if not self.is_cached:
            has_turns = any(turns.further(request.tag) for request in wanted)
            finished.note_asked([*chain(*self.processes.exchange(asked))], are_all=not has_turns)
        found = {index: finished.text(item) for index, item in enumerate(asked)}
        self.run_context.begin_resumed()
        texts = {index: text for index, text in found.items() if text is not None}
        for index, text in texts.items():
            self.cache_hook.add_partial("generate_until", wanted[index].tag.args, text)
        if texts:
            logger.info("resumed: %d of %d responses are there already", len(texts), len(wanted))
        return texts

    def keep(self, instance: Instance, text: str, record: RequestRecord, log: JsonLines) -> None:
        """A finished response goes to the per-request file and to lm-eval's cache at once: in this
        order, so that a process that is killed in between leaves no answer without its record."""
        if self.fly_config.enable_statistics:
            line = {**identity(record.request), **record.as_dict(), "text": text}
            if record.text is None:
                ids = output_ids.encode(record.tokens)
                line["output"] = {"ids": ids, "tokenizer": self._tokenizer_hash}
            log.write(line)
        self.cache_hook.add_partial("generate_until", instance.args, text)

    @cached_property
    def _tokenizer_hash(self) -> str:
        return output_ids.tokenizer_hash(self.tokenizer)

    # ---------------------------------------------------------------- several processes

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """As if all had as much to do as this process: else lm-eval evens them out, by asking for a
        document again."""
        return tensor.reshape(-1).repeat(self.world_size)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """In the first process, lm-eval's samples or metrics by task: one share of all documents in
        their order, as lm-eval puts shares one after the other."""
        shares = self.processes.gather(obj)
        if shares is None:
            return None
        return [{task: _in_order([share[task] for share in shares]) for task in obj}]

    def barrier(self) -> None:
        """Where lm-eval has all processes meet: also those that had nothing to decode."""
        self._share()

    def _share(self) -> None:
        """Only the first process gets the others' shares; it writes the results."""
        own, self._unshared = self._unshared, RunStats()
        matched, self._unshared_matched = self._unshared_matched, Counter[str]()
        share = (own, self.samplings, matched)
        for stats, samplings, counts in self.processes.gather(share) or [share]:
            self.stats.merge(stats)
            self.samplings |= samplings
            self._matched.update(counts)

    # ---------------------------------------------------------------- reporting

    def results_entry(self) -> dict[str, Any]:
        """`config.fly` of the results file. Plain Python values: lm-eval drops what json cannot."""
        run = self.run_context
        return {
            "started": run.started,
            "resumed": run.resumed,
            "mode": self.fly_config.mode,
            "drafter": self.fly_config.drafter_name,
            "config": self.fly_config.model_dump(),
            "config_hash": self.fly_config.hash(),
            "versions": versions(),
            "device": device_facts(self.device),
            "processes": self.processes.size,
            "engine": self.engine_name,
            "dtype": self.target_dtype,
            **self.engine_facts(),
            "eos_token_ids": sorted(self.eos_ids),
            "sampling": [asdict(sampling) for sampling in sorted(self.samplings, key=repr)],
            "sandbox": sandbox.used_isolation(),
            "draft_runs": self._draft_runs_entry(),
            "stats": self.stats.as_dict(),
        }

    def _draft_runs_entry(self) -> dict[str, Any] | None:
        """What earlier runs had for this run's requests; None without any."""
        if self.earlier is None:
            return None
        counts = {name: self._matched[name] for name in MATCHES}
        runs = [str(run.source) for run in self.earlier.runs]
        return {"runs": runs, **counts, "same_target": self._same_target}

    def get_model_info(self) -> dict[str, Any]:
        """lm-eval's facts, if its class has any, plus `fly`, the results entry."""
        of_lm_eval: dict[str, Any] = getattr(super(), "get_model_info", dict)()
        self.run_context.is_reported = True
        return {**of_lm_eval, "fly": self.results_entry()}


def _report_interruption(log: JsonLines, total: int, finished: int, resume_hint: str) -> None:
    log.flush()
    if kept := log.kept + finished:
        logger.warning(
            "interrupted: %d of %d responses are kept in %s; %s",
            kept,
            total,
            log.path,
            resume_hint,
        )


def _in_order(shares: list[Any]) -> Any:
    """One task's samples, or its metrics by name, of all processes in the documents' order.

    Process r of n has documents r, r + n, r + 2n, ...; samples come filter by filter.
    """
    if isinstance(shares[0], dict):
        return {name: _interleave([share.get(name, []) for share in shares]) for name in shares[0]}
    filters = dict.fromkeys(sample["filter"] for sample in shares[0])
    of_filter = [
        [[s for s in share if s["filter"] == name] for share in shares] for name in filters
    ]
    return [*chain(*map(_interleave, of_filter))]


def _interleave(hands: list[list[Any]]) -> list[Any]:
    """The first of each, then the second of each, and so on."""
    nothing = object()
    rounds = zip_longest(*hands, fillvalue=nothing)
    return [item for item in chain(*rounds) if item is not nothing]
