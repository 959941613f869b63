"""FlyVLLM: the engine that hands a pair's requests to vLLM (docs/vllm.md).

lm-eval's vllm class loads the model and scores loglikelihoods; generate_until is Backend's, on
vLLM's engine, one pass after the other, so that each response is kept when it ends.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import os
import time
from collections.abc import Iterator
from importlib.metadata import version
from itertools import pairwise
from typing import Any, get_args

import torch
import transformers
from lm_eval.api.registry import register_model
from vllm.platforms import current_platform

if current_platform.is_cpu():
    # By default a process of its own schedules and keeps a core to itself, half of a small machine.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # else vLLM takes one

from lm_eval.models.vllm_causallms import VLLM
from vllm import SamplingParams, TokensPrompt
from vllm.config import SpeculativeConfig
from vllm.config.speculative import SpeculativeMethod
from vllm.engine.arg_utils import EngineArgs

from fly import config as fly_config
from fly import reading
from fly.config import FlyConfig
from fly.errors import FlyError, reason_of
from fly.harness.backend import Backend
from fly.harness.requests import place_of
from fly.harness.vllm_config import (
    METHODS,
    Installed,
    counts,
    shares,
    speculative_config,
    verifies_by_fly,
    without_cascade,
)
from fly.models import sources, tokenizers
from fly.models.heads.block import kind_of
from fly.models.heads.checkpoint import read_config
from fly.models.tokenizers import Texts
from fly.runs.records import Observer, RequestRecord, zero_seconds
from fly.speculation.sequence import Request, Sequence
from fly.speculation.stop_strings import StopMatcher
from fly.vllm_plugin import options
from fly.vllm_plugin.register import register
from fly.vllm_plugin.verifier import replay

logger = logging.getLogger(__name__)

_COUNTERS = "vllm:spec_decode_"
_MADE_BY_FLY = ("speculative_config", "additional_config", "per_request_spec_decode_metrics")


def _installed() -> Installed:
    fields = [field.name for field in dataclasses.fields(SpeculativeConfig)]
    return Installed(version("vllm"), fields, get_args(SpeculativeMethod))


@dataclasses.dataclass
class _Running:
    """A request in vLLM's engine."""

    request: Request
    seconds: dict[str, float] = dataclasses.field(default_factory=zero_seconds)
    # of its output, after each pass that gave it tokens, its prefill's included
    lengths: list[int] = dataclasses.field(default_factory=list)
    prefilled_at: float = 0.0


@register_model("fly_vllm")
class FlyVLLM(Backend, VLLM):
    """`fly --model vllm` with a pair's file.

    pretrained: the **draft** model. config_path: the pair's JSON, which names the target; every key
    of it may also be given here. All other arguments are those of lm-eval's vllm class and apply to
    the target. --batch_size is vLLM's max_num_seqs.
    """

    engine_name = "vllm"
    generation_config: Any = None

    def __init__(
        self,
        config_path: str | None = None,
        model: str | None = None,
        batch_size: Any = "auto",
        max_batch_size: int | None = None,
        device: str | None = None,
        **kwargs: Any,
    ) -> None:
        own, vllm_args = fly_config.split_model_args(kwargs)
        given = fly_config.resolve(config_path, own)
        config = without_cascade(given)
        if config is not given:
            logger.warning("use_ngram=true: vLLM has no such cascade: the draft model drafts alone")
        self.check(config, vllm_args)
        self.use_config(config)
        target, draft = sources.sources(config, config_path)
        if draft is not None and config.head_class is None and not config.dual_tok:
            self._check_vocabularies(target.path, draft.path, vllm_args)
        head = self._block_head(config, draft)
        self.speculative_config = speculative_config(
            config, draft.path if draft else None, _installed(), head
        )
        self.by_fly = verifies_by_fly(config, _installed(), head)
        register()  # vLLM's other processes find it by its entry point
        if str(batch_size).isdecimal():
            max_batch_size = int(batch_size)
        try:
            super().__init__(
                pretrained=target.path,
                max_batch_size=max_batch_size,
                **self._engine_arguments(config),
                **vllm_args,
            )
        except FlyError:
            raise
        except Exception as error:  # vLLM's own, of many kinds
            raise FlyError(
                f"--model vllm: target_model_path={config.target_model_path} cannot be loaded: "
                f"{reason_of(error)}"
            ) from error
        self.generation_config = self._generation_config(target.path, vllm_args)
        self.eos_ids = tokenizers.eos_token_ids(self, self.tokenizer)
        self.join_run(vllm_args)

    @classmethod
    def check(cls, config: FlyConfig, model_args: dict[str, Any]) -> None:
        """Refuse what this vLLM cannot do, before anything loads. Raises FlyError."""
        installed = _installed()
        speculative_config(without_cascade(config), config.draft_model_path, installed)
        known = {*inspect.signature(VLLM.__init__).parameters}
        known |= {field.name for field in dataclasses.fields(EngineArgs)}
        for key in model_args:
            if key in _MADE_BY_FLY:
                raise FlyError(f"model_args {key}: fly makes it from the pair's file: leave it out")
            if key not in known:
                hint = reading.hint(key, [*FlyConfig.model_fields, *known], "remove it")
                raise FlyError(
                    f"unknown model_args key {key!r}: neither fly nor vLLM {installed.version} "
                    f"has it: {hint}"
                )
        copies = model_args.get("data_parallel_size")
        if copies not in (None, 1):  # lm-eval's Ray workers, whose responses come all at once
            raise FlyError(
                f"data_parallel_size={copies}: fly drives one engine: leave it out and start a run "
                "per share of the tasks, or ask a server with so many copies (--model server)"
            )
        for field in ("target_model_path", "draft_model_path"):
            name = getattr(config, field)
            if name and sources.resolve_source(name, field).gguf_file:
                raise FlyError(
                    f"{field}={name}: vLLM is given models' folders and hub ids: use --model hf "
                    f"for GGUF files, or make a folder of it: `fly pair export {name} FOLDER`"
                )

    def _engine_arguments(self, config: FlyConfig) -> dict[str, Any]:
        arguments: dict[str, Any] = {"disable_log_stats": False}  # vLLM counts only if it logs
        if self.speculative_config is not None:
            arguments["speculative_config"] = dict(self.speculative_config)
            arguments["per_request_spec_decode_metrics"] = "detailed"
        if self.by_fly:
            keys = config.model_dump(mode="json", exclude_defaults=True)
            arguments["additional_config"] = {options.KEY: keys, options.RECORD_KEY: True}
        if config.compile == "off":
            arguments["enforce_eager"] = True
        if not config.prefix_reuse:
            arguments["enable_prefix_caching"] = False
        return arguments

    def _block_head(self, config: FlyConfig, draft: sources.ModelSource | None) -> str | None:
        """Which kind of block head the pair has, by its files; None without one."""
        if draft is None or config.drafter_name != "block":
            return None
        hub = {"revision": config.draft_revision}
        return kind_of(read_config(draft, str(config.draft_model_path), hub).config)

    def _check_vocabularies(self, target: str, draft: str, vllm_args: dict[str, Any]) -> None:
        trust = {"trust_remote_code": vllm_args.get("trust_remote_code", False)}
        revisions = (vllm_args.get("revision"), self.fly_config.draft_revision)
        of_target, of_draft = (
            transformers.AutoTokenizer.from_pretrained(path, revision=revision or "main", **trust)
            for path, revision in zip((target, draft), revisions)
        )
        tokenizers.check_same_vocabulary(of_target, of_draft)

    def _generation_config(self, path: str, vllm_args: dict[str, Any]) -> Any:
        try:
            return transformers.GenerationConfig.from_pretrained(
                path, revision=vllm_args.get("revision") or "main"
            )
        except OSError:  # without one, transformers takes what the model's config says
            return transformers.GenerationConfig.from_model_config(self._config)

    # ---------------------------------------------------------------- what requests are made of

    def encode_prompt(self, text: str, room: int) -> list[int]:
        return self.tok_encode(text)[-room:]

    @property
    def device(self) -> torch.device:
        return torch.device(current_platform.device_type)

    @property
    def target_dtype(self) -> str:
        return str(self.model.llm_engine.model_config.dtype)

    # ---------------------------------------------------------------- decoding

    def decode(
        self, missing: list[Request], wanted: list[Request], observer: Observer
    ) -> Iterator[RequestRecord]:
        """Raises FlyError for what vLLM refuses."""
        engine = self.model.llm_engine
        running: dict[str, _Running] = {}
        try:
            for number, request in enumerate(missing):
                engine.add_request(
                    str(number),
                    TokensPrompt(prompt_token_ids=list(request.prompt)),
                    self._sampling_params(request),
                    lora_request=self.lora_request,
                )
                running[str(number)] = _Running(request)
            before = time.perf_counter()
            while engine.has_unfinished_requests():
                outputs = engine.step()
                if not outputs:  # prompts are computed in chunks: their seconds go to the next one
                    continue
                now = time.perf_counter()
                self._divide(running, outputs, now - before, now)
                before = now
                for output in outputs:
                    if output.finished:
                        state = running.pop(output.request_id)
                        rounds = self._take_rounds(output.request_id)
                        yield self._record(state, output, now, rounds, observer)
                before = time.perf_counter()  # keeping responses is no decoding
        except ValueError as error:
            raise FlyError(f"--model vllm: {reason_of(error)}") from error
        finally:
            if running:
                engine.abort_request(list(running))

    def _divide(
        self, running: dict[str, _Running], outputs: list[Any], elapsed: float, now: float
    ) -> None:
        """Divide a pass's seconds among the requests that it gave tokens to."""
        config = self.speculative_config or {}
        width = 1 + config.get("num_speculative_tokens", 0)
        states = [running[output.request_id] for output in outputs]
        tokens = [
            width if state.lengths else len(state.request.prompt) - (output.num_cached_tokens or 0)
            for state, output in zip(states, outputs)
        ]
        for state, output, seconds in zip(states, outputs, shares(elapsed, tokens)):
            state.seconds["verify" if state.lengths else "prefill"] += seconds
            state.prefilled_at = state.prefilled_at if state.lengths else now
            state.lengths.append(len(output.outputs[0].token_ids))

    def _sampling_params(self, request: Request) -> SamplingParams:
        """Stop strings are looked for with special tokens, which may be a part of them."""
        sampling = request.sampling
        return SamplingParams(
            **dataclasses.asdict(sampling),
            seed=None if sampling.is_greedy else request.seed,
            max_tokens=request.budget,
            stop=[*filter(None, self._stops(request))],  # vLLM takes no empty ones; `_record` cuts
            stop_token_ids=sorted(self.eos_ids),
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
        )

    def _take_rounds(self, name: str) -> list[Any] | None:
        """What fly's plugin has noted of a finished request; None where vLLM verifies."""
        if not self.by_fly:
            return None
        try:
            found = self.model.collective_rpc("take_fly_rounds", args=(name,))
        except Exception as error:  # of a worker, in vLLM's words
            raise FlyError(
                "--model vllm: vLLM's workers have not loaded fly's plugin: install fly there, and "
                "let VLLM_PLUGINS, if it is set, name fly"
            ) from error
        return next(filter(None, found), [])

    def _record(
        self,
        state: _Running,
        output: Any,
        now: float,
        rounds: list[Any] | None,
        observer: Observer,
    ) -> RequestRecord:
        request, completion = state.request, output.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            raise FlyError(
                f"--model vllm: {place_of(request.tag)}: vLLM ended it with "
                f"{completion.finish_reason!r}"
            )
        tokens, ended = list(completion.token_ids), completion.finish_reason
        matcher = StopMatcher(self._stops(request), Texts(self.tokenizer).decode)
        if rounds is not None:
            sequence = Sequence(request, self.eos_ids, matcher)
            sequence.seconds, sequence.prefilled_at = state.seconds, state.prefilled_at
            sequence.prompt_tokens_reused = output.num_cached_tokens or 0
            by_text = (self.speculative_config or {}).get("method") in ("ngram", "suffix")
            replay(sequence, tokens, rounds, "n" if by_text else "d", observer)
            return sequence.record(now)
        end = matcher.tokens_until_match([], tokens)
        if end is not None:  # a pass may give tokens past the stop string
            tokens, ended = tokens[:end], "stop"
        elif ended == "stop" and tokens and tokens[-1] in self.eos_ids:
            ended = "eos"
        found, positions = counts(
            len(tokens) - 1, len(state.lengths) - 1, self._drafts(state, output)
        )
        return RequestRecord(
            request,
            tokens,
            ended,
            prompt_tokens=len(request.prompt),
            prompt_tokens_reused=output.num_cached_tokens or 0,
            counts=found,
            seconds=state.seconds,
            positions=positions,
            wall_seconds=now - state.prefilled_at,
        )

    def _stops(self, request: Request) -> tuple[str, ...]:
        """As lm-eval's vllm class: thoughts are not searched for stop strings."""
        return () if self.think_end_token else request.stops

    def _drafts(self, state: _Running, output: Any) -> list[tuple[int, int]]:
        """(drafted, accepted) of a finished request's passes with a draft.

        vLLM gives no account of requests that a stop string ended. Drafts of a draft model or a
        head are of one length; of n-grams only what was accepted is known then.
        """
        config, metrics = self.speculative_config, output.outputs[0].spec_decode_metrics
        if config is None:
            return []
        if metrics is not None:
            return list(zip(metrics.per_step_drafted, metrics.per_step_accepted))
        accepted = [after - before - 1 for before, after in pairwise(state.lengths)]
        if config["method"] == METHODS["ngram"]:
            return [(count, count) for count in accepted if count]
        return [(config["num_speculative_tokens"], count) for count in accepted]

    # ---------------------------------------------------------------- reporting

    def engine_facts(self) -> dict[str, Any]:
        parallel = ("tensor_parallel_size", "pipeline_parallel_size")
        sizes = {name: int(self.model_args.get(name) or 1) for name in parallel}
        return {
            **super().engine_facts(),
            "devices": math.prod(sizes.values()),
            "vllm": {
                "version": _installed().version,
                "speculative_config": self.speculative_config,
                **sizes,
                "max_num_seqs": self.model.llm_engine.vllm_config.scheduler_config.max_num_seqs,
                "counters": self._counters(),
            },
        }

    def _counters(self) -> dict[str, Any]:
        """vLLM's own counts of speculation in this process, by the names it gives them."""
        if self.speculative_config is None:
            return {}
        return {
            metric.name.removeprefix(_COUNTERS): getattr(metric, "values", None)
            or getattr(metric, "value", None)
            for metric in self.model.get_metrics()
            if metric.name.startswith(_COUNTERS)
        }
