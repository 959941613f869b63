"""FlyLM: the target is the model lm-eval sees; the draft is loaded beside it.

loglikelihood, max_length, chat template, tokenizer and reported sizes are HFLM's own, of the
target. Only generate_until is replaced: it feeds the engine's queue.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import transformers
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from fly import config as fly_config
from fly.errors import FlyError
from fly.execution import memory, pass_costs, weights
from fly.execution.argmax import NotFiniteError
from fly.execution.model_runner import ModelRunner
from fly.harness import progress, sandbox, summary
from fly.harness.arguments import check_model_args
from fly.harness.requests import build_request, check_decoding, identity, response_text
from fly.models import loading, sources
from fly.runs import context, resume
from fly.runs.records import RequestRecord, RunStats
from fly.runs.trace_writer import Trace, check_has_folder
from fly.speculation.draft_length import AdaptiveLength, DraftLength, FixedLength, pays
from fly.speculation.drafters.base import Drafter, NoDrafter
from fly.speculation.drafters.draft_model import CascadeDrafter, ModelDrafter
from fly.speculation.drafters.ngram import NgramDrafter
from fly.speculation.engine import Engine, Observer, RoundRecord
from fly.speculation.rules import configured
from fly.speculation.sampling import Sampling
from fly.speculation.sequence import Request

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

logger = logging.getLogger(__name__)

# from_pretrained's arguments that hold for the draft as they do for the target
_OF_THE_HUB = (
    "token", "use_auth_token", "cache_dir", "local_files_only", "force_download", "proxies",
)  # fmt: skip
_OF_MODELS = (*_OF_THE_HUB, "use_safetensors", "attn_implementation")
_LOSSY_ACCEPTANCE = 0.87  # of draft tokens, assumed where no count of the run may decide


@register_model("fly")
class FlyLM(HFLM):
    """lm-eval's model backend that decodes by loosely verified speculative decoding.

    pretrained: the **draft** model (the reference's convention). config_path: the pair's JSON,
    which names the target; every key of it may also be given here. All other arguments are
    HFLM's and apply to the target. `model` only names the run in lm-eval's output path.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        config_path: str | None = None,
        model: str | None = None,
        **kwargs: Any,
    ) -> None:
        given = {**kwargs, **({"pretrained": pretrained} if pretrained is not None else {})}
        own, hf_args = fly_config.split_model_args(given)
        self.fly_config = config = fly_config.resolve(config_path, own)
        check_model_args(config, hf_args)
        if config.trace:
            check_has_folder(context.current())
        if (
            str(hf_args.get("device") or "cuda").startswith("cuda")
            and not torch.cuda.is_available()
        ):
            hf_args["device"] = "cpu"  # lm-eval's default is a CUDA device, present or not
        target, draft = sources.sources(config)
        if target.gguf_file is not None:
            hf_args["gguf_file"] = target.gguf_file
        loading.warn_if_memory_is_short(target, draft, str(hf_args.get("device") or ""))
        self._load("target_model_path", config.target_model_path, pretrained=target.path, **hf_args)
        loading.refuse_unsupported(self.model, "target_model_path", self.max_length)
        self._num_parameters = self.model.num_parameters()
        self._loaded_dtype = str(self.model.dtype).split(".")[-1]  # packing may change what is seen
        self.draft_model = self._load_draft(draft, hf_args) if draft is not None else None
        if self.draft_model is not None:  # before quantisation, whose errors only cost speed
            loading.check_cache_agrees(self.draft_model, "pretrained")
        self.preparation = weights.prepare(self.model, self.draft_model, config)
        loading.check_cache_agrees(self.model, "target_model_path")
        if hasattr(self, "accelerator"):
            self._rank = self.accelerator.process_index  # HFLM takes the local index
        self._share_start(context.current())
        self.eos_ids = loading.eos_token_ids(self.model, self.tokenizer)
        self.stats = RunStats()
        self._unshared = RunStats()  # counts that the other processes do not know of yet
        self.stats.seconds["compile"] = self.preparation.seconds
        self._join(context.current(), hf_args)
        self.samplings: set[Sampling] = set()
        self.draft_length: dict[str, Any] | None = None  # for the results: what it was decided by
        # They see every round, with the target's entropies. Whoever adds one shows the progress.
        self.observers: list[Observer] = []

    def _share_start(self, run: context.Session) -> None:
        """All processes of a run name their files by the first one's clock."""
        if self.world_size > 1:
            started = [run.started]
            torch.distributed.broadcast_object_list(started, src=0)
            run.started = started[0]

    def _join(self, run: context.Session, hf_args: dict[str, Any]) -> None:
        """Take part in the run: what decides its texts is noted, or is as it was."""
        if self.rank == 0:
            run.entry = self.results_entry
        if run.manifest is not None:
            resume.check_models(run.manifest, self.fly_config, hf_args, loaded=True)
            run.manifest.agree("device", summary.timing_facts(self.device))
            run.manifest.agree("dtype", str(self.model.dtype))
        if run.earlier is not None:
            self.stats.merge(run.earlier.stats)

    def _load(self, field: str, name: str, **kwargs: Any) -> None:
        with self._loading(field, name):
            super().__init__(**kwargs)

    @contextmanager
    def _loading(self, field: str, name: str) -> Iterator[None]:
        """What fails meanwhile is a model's: its files, its code, or memory."""
        self._field = field
        try:
            yield
        except FlyError:
            raise
        except Exception as error:  # tokenizers has no other, and a model's code may raise any
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            if name.endswith(".gguf"):
                reason += ": it may be cut short: fetch it again"
            raise FlyError(f"{field}={name}: cannot be loaded: {reason}") from error

    def _load_draft(
        self, source: sources.ModelSource, hf_args: dict[str, Any]
    ) -> transformers.PreTrainedModel:
        """Load the draft with HFLM's own loader, then give the target its place back."""
        target_model: Any = self._model  # type: ignore[has-type]
        shared = {
            "revision": self.fly_config.draft_revision or "main",
            "trust_remote_code": hf_args.get("trust_remote_code", False),
        }
        of_hub, of_models = (
            {key: hf_args[key] for key in keys if key in hf_args}
            for keys in (_OF_THE_HUB, _OF_MODELS)
        )
        try:
            with self._loading("pretrained", str(self.fly_config.draft_model_path)):
                if source.gguf_file is None:  # else a wrong one is told by its vocabulary
                    transformers.AutoConfig.from_pretrained(source.path, **shared, **of_hub)
                tokenizer = transformers.AutoTokenizer.from_pretrained(
                    source.path,
                    **shared,
                    **of_hub,
                    **({"gguf_file": source.gguf_file} if source.gguf_file else {}),
                )
                loading.check_same_vocabulary(self.tokenizer, tokenizer)
                self._create_model(
                    source.path,
                    dtype=self.fly_config.draft_dtype or self._loaded_dtype,
                    gguf_file=source.gguf_file,
                    **shared,
                    **of_models,
                )
                draft: Any = self._model  # type: ignore[has-type]
                draft.eval().to(self.fly_config.draft_device or self.device)
        finally:
            self._model = target_model
        loading.refuse_unsupported(draft, "pretrained", self._context_of(draft))
        return draft

    def _create_model(self, pretrained: str, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("gguf_file") and hasattr(transformers, "GgufConfig"):
            kwargs["quantization_config"] = transformers.GgufConfig(dequantize=True)
        auto_class: Any = self.AUTO_MODEL_CLASS  # type: ignore[has-type]
        self.AUTO_MODEL_CLASS = loading.WithAllTensors(auto_class, self._field)
        try:
            super()._create_model(pretrained, *args, **kwargs)
        finally:
            self.AUTO_MODEL_CLASS = auto_class

    def _context_of(self, model: transformers.PreTrainedModel) -> int:
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        return min(int(limit or self.max_length), self.max_length)

    # ---------------------------------------------------------------- generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """One text per request, in order. All requests are checked before the first is decoded."""
        if self.world_size == 1:
            return self._generate(requests, disable_tqdm)
        # lm-eval evens processes out by asking for a document again: that is no work of the run
        own = _without_padding(requests)
        texts = dict(zip(own, self._generate([requests[index] for index in own], disable_tqdm)))
        of_instance = {id(requests[index]): text for index, text in texts.items()}
        return [
            texts.get(index, of_instance[id(instance)]) for index, instance in enumerate(requests)
        ]

    def _generate(self, requests: list[Instance], disable_tqdm: bool) -> list[str]:
        wanted = self._build(requests)
        order = {id(request): index for index, request in enumerate(wanted)}
        texts = self._finished_earlier(wanted)
        missing = [request for index, request in enumerate(wanted) if index not in texts]
        log = context.JsonLines(context.current(), "fly_requests", self.rank)
        traces = None
        if self.fly_config.trace:
            traces = Trace(context.current(), self.tokenizer, self.rank, self.world_size)
        bar = progress.Progress(
            len(wanted),
            enabled=not disable_tqdm and not self.observers and self.rank == 0,
            log=self.fly_config.verbose,
            done=len(texts),
        )

        def observe(record: RoundRecord) -> None:
            bar.on_round(record)
            if traces is not None:
                traces.on_round(record)
            for observer in self.observers:
                observer(record)

        local = RunStats()
        try:
            for record in self._decoded(missing, observe, wanted):
                index = order[id(record.request)]
                texts[index] = response_text(record.tokens, record.request, self)
                self._keep(requests[index], texts[index], record, log)
                local.add_request(record)
                bar.on_request()
        except BaseException:
            self._report_interruption(log, len(wanted), len(wanted) - len(missing))
            raise
        finally:
            bar.close()
            log.close()
            if traces is not None:
                traces.close()
        local.peak_memory_bytes = summary.peak_memory_bytes(self.device)
        self._unshared.merge(local)
        if self.world_size == 1:
            self._share()
        return [texts[index] for index in range(len(wanted))]

    def _decoded(
        self, missing: list[Request], observe: Observer, wanted: list[Request]
    ) -> Iterator[RequestRecord]:
        """Records as rows end. Raises FlyError where a model's logits are no numbers."""
        try:
            yield from self._engine(missing, observe, wanted).run(missing)
        except NotFiniteError as error:
            config, instance = self.fly_config, error.request.tag
            models = {
                "target": f"target_model_path={config.target_model_path}",
                "draft": f"pretrained={config.draft_model_path}",
            }
            raise FlyError(
                f"{models[error.role]}: its logits are not finite (NaN or infinite) in task "
                f"{instance.task_name}, doc {instance.doc_id}, after {error.at} new tokens: "
                f"{loading.NOT_FINITE}"
            ) from error

    def barrier(self) -> None:
        """Where lm-eval has all processes meet: also those that had nothing to decode."""
        self._share()
        super().barrier()

    def _share(self) -> None:
        """Only the first process gets the others' shares; it writes the results."""
        own, self._unshared = self._unshared, RunStats()
        for stats, samplings in self.gather_object((own, self.samplings)) or [(own, set())]:
            self.stats.merge(stats)
            self.samplings |= samplings

    def _finished_earlier(self, wanted: list[Request]) -> dict[int, str]:
        """By index: the texts that the run's records hold already; lm-eval's cache gets them."""
        earlier = context.current().earlier
        if earlier is None:
            return {}
        asked = [identity(request) for request in wanted]
        if getattr(self.cache_hook, "dbdict", None) is None:  # else lm-eval asks only for the rest
            earlier.note_asked(asked)
        found = {index: earlier.text(item) for index, item in enumerate(asked)}
        context.current().go_on()
        texts = {index: text for index, text in found.items() if text is not None}
        for index, text in texts.items():
            self.cache_hook.add_partial("generate_until", wanted[index].tag.args, text)
        if texts:
            logger.info("resumed: %d of %d responses are there already", len(texts), len(wanted))
        return texts

    def _build(self, instances: list[Instance]) -> list[Request]:
        """All requests, checked; equal ones (repeats of a document) get seeds of their own."""
        seen: Counter[tuple[Any, ...]] = Counter()
        wanted = []
        for instance in instances:
            key = (instance.task_name, instance.doc_id, instance.idx, instance.args[0])
            wanted.append(build_request(instance, self, seen[key]))
            seen[key] += 1
        self.samplings.update(request.sampling for request in wanted)
        check_decoding(wanted, self)
        return wanted

    def _engine(self, requests: list[Request], observer: Observer, wanted: list[Request]) -> Engine:
        """For `requests`, which of all that are `wanted` are not there yet."""
        config = self.fly_config
        slots = max(1, min(self._rows_in_flight(requests), len(requests)))
        target = self._runner(self.model, slots, self.max_length)
        drafter = self._drafter(slots)
        if target.static is not None and not all(r.sampling.is_plain for r in requests):
            logger.info(
                "rows that sample or have a repetition penalty draft step by step, outside of the "
                "graphed draft loop"
            )
        return Engine(
            target,
            drafter,
            draft_length=self._draft_length(wanted, target, drafter),
            spd_k=config.spd_k if config.drafter_name else 0,
            relaxation=configured.relaxation(config),
            eos_ids=self.eos_ids,
            # cleaning up would take back characters that a stop string has matched
            decode=lambda ids: self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            ),
            observer=observer,
            reuse_prefixes=config.prefix_reuse,
            trace_entropy=config.entropy_kind if config.trace or self.observers else None,
        )

    def _runner(
        self, model: transformers.PreTrainedModel, slots: int, max_length: int
    ) -> ModelRunner:
        reuse = self.fly_config.prefix_reuse
        size = self.model.config.get_text_config().vocab_size
        runner = ModelRunner(model, slots, max_length, reuse_prefixes=reuse, vocabulary=size)
        if self.fly_config.compile == "auto" and runner.device.type == "cuda":
            if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
                logger.warning("compile=auto: eager passes: the model is spread over devices")
            else:
                runner.use_static_passes(capture=True)
        return runner

    def _rows_in_flight(self, requests: list[Request]) -> int:
        """`--batch_size`; for auto, as many rows as fit into memory at their longest."""
        if not requests:
            return 1
        if isinstance(self.batch_size, int):
            return self.batch_size
        config = self.fly_config
        width = config.spd_k + 1 if config.drafter_name else 1
        works = [memory.RowWork(ModelRunner(self.model, 1, self.max_length), width)]
        if (draft := self.draft_model) is not None:
            runner = ModelRunner(draft, 1, self.max_length)
            sampled = any(not request.sampling.is_greedy for request in requests)
            kept = config.spd_k if sampled else 0
            works.append(memory.RowWork(runner, config.num_ngram_pred_tokens + 2, kept))
        rows = memory.rows_that_fit(
            works,
            tokens_per_row=max(len(request.prompt) + request.budget for request in requests),
            at_most=min(len(requests), self.max_batch_size),
        )
        logger.info("batch_size=auto: %d rows in flight", rows)
        return rows

    def _drafter(self, slots: int) -> Drafter:
        config = self.fly_config
        sizes = (config.min_ngram_size, config.max_ngram_size, config.num_ngram_pred_tokens)
        if config.drafter_name is None:
            return NoDrafter()
        if config.drafter_name == "ngram":
            return NgramDrafter(slots, *sizes, self.eos_ids)
        assert self.draft_model is not None
        runner = self._runner(self.draft_model, slots, self._context_of(self.draft_model))
        if config.drafter_name == "cascade":
            return CascadeDrafter(runner, self.eos_ids, *sizes)
        return ModelDrafter(runner, self.eos_ids)

    def _draft_length(
        self, wanted: list[Request], target: ModelRunner, drafter: Drafter
    ) -> DraftLength:
        """`draft_policy`: by calibrated costs and counts where texts do not depend on it; else
        spd_k or nothing for the whole run, by a rule that is the same on every machine of a kind.

        All requests decide, not those that are left: a resumed run decides as it did before.
        """
        config, on_cpu = self.fly_config, self.device.type == "cpu"
        if config.draft_policy == "fixed" or config.drafter_name is None or not on_cpu:
            self.draft_length = {"policy": "fixed", "spd_k": config.spd_k}
            return FixedLength(config.spd_k)
        draft = drafter.runner if isinstance(drafter, ModelDrafter) else None
        if config.rule == "exact" and all(request.sampling.is_greedy for request in wanted):
            found = pass_costs.calibrate(target, draft, self._calibrated())
            self.draft_length = {"policy": "adaptive", "spd_k": config.spd_k, **found.as_dict()}
            return AdaptiveLength(config.spd_k, found)
        weight = self.preparation.draft_weight if draft is not None else 0.0
        of_draft = self.preparation.draft if draft is not None else None
        found = pass_costs.by_rule(self.preparation.target, of_draft, weight)
        # for auto not what memory has room for now: that differs from start to start
        most = self.batch_size if isinstance(self.batch_size, int) else self.max_batch_size
        sequences = max(1, min(most, len(wanted)))
        drafts = pays(config.spd_k, sequences, _LOSSY_ACCEPTANCE, found)
        length = config.spd_k if drafts else 0
        self.draft_length = {"policy": "rule", "spd_k": length, **found.as_dict()}
        if not drafts:
            logger.warning(
                "drafting %d tokens for %d sequences would be slower than the target alone "
                "(%s passes), so nothing is drafted: lower --batch_size or spd_k, or set "
                "draft_policy=fixed to draft all the same",
                config.spd_k,
                sequences,
                self.preparation.target,
            )
        return FixedLength(length)

    def _calibrated(self) -> dict[str, Any]:
        """What pass costs depend on, beside the machine."""
        shapes = [self.model.config.get_text_config().to_diff_dict()]
        if self.draft_model is not None:
            shapes.append(self.draft_model.config.get_text_config().to_diff_dict())
        prepared = (self.preparation.target, self.preparation.draft)
        return {"models": shapes, "passes": prepared, "drafter": self.fly_config.drafter_name}

    def _keep(
        self, instance: Instance, text: str, record: RequestRecord, log: context.JsonLines
    ) -> None:
        """A finished response goes to lm-eval's cache and to the per-request file at once."""
        self.cache_hook.add_partial("generate_until", instance.args, text)
        if self.fly_config.enable_statistics:
            log.write({**identity(record.request), **record.as_dict(), "text": text})

    def _report_interruption(self, log: context.JsonLines, total: int, earlier: int) -> None:
        if log.count or earlier:
            log.flush()
            logger.warning(
                "interrupted: %d of %d responses are kept in %s; %s",
                log.count + earlier,
                total,
                log.path,
                context.current().way_on,
            )

    # ---------------------------------------------------------------- reporting

    def results_entry(self) -> dict[str, Any]:
        """`config.fly` of the results file. Plain Python values: lm-eval drops what json cannot."""
        draft, run = self.draft_model, context.current()
        return {
            "started": run.started,
            "resumed": run.resumed,
            "mode": self.fly_config.mode,
            "drafter": self.fly_config.drafter_name,
            "config": self.fly_config.model_dump(),
            "config_hash": self.fly_config.hash(),
            "versions": summary.versions(),
            "device": summary.device_facts(self.device),
            "processes": self.world_size,
            "dtype": str(self.model.dtype),
            "draft_dtype": None if draft is None else str(draft.dtype),
            "draft_num_parameters": None if draft is None else self.preparation.draft_parameters,
            "preparation": self.preparation.as_dict(),
            "draft_length": self.draft_length,
            "eos_token_ids": sorted(self.eos_ids),
            "sampling": [asdict(sampling) for sampling in sorted(self.samplings, key=repr)],
            "sandbox": sandbox.used_isolation(),
            "stats": self.stats.as_dict(),
        }

    def get_model_info(self) -> dict[str, Any]:
        """HFLM's facts, of the target, plus `fly`: configuration, versions, device, statistics."""
        own = {"model_num_parameters": self._num_parameters, "fly": self.results_entry()}
        return {**super().get_model_info(), **own}


def _without_padding(requests: list[Instance]) -> list[int]:
    """Where each instance stands for the first `repeats` times."""
    seen: Counter[int] = Counter()
    own = []
    for index, instance in enumerate(requests):
        seen[id(instance)] += 1
        if seen[id(instance)] <= instance.repeats:
            own.append(index)
    return own
