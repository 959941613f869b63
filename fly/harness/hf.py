"""FlyLM: the engine that decodes in this process.

The target is the model that lm-eval sees; the draft is loaded beside it. loglikelihood, max_length,
chat template, tokenizer and reported sizes are HFLM's own, of the target. generate_until is
Backend's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from fly import config as fly_config
from fly import launch, registry
from fly.errors import FlyError
from fly.execution import packed_linear, self_check, weights
from fly.execution.argmax import NotFiniteError
from fly.execution.heads import layer_check
from fly.execution.heads.base import Head
from fly.execution.kernels import gguf as kernels_gguf
from fly.execution.model_runner import context_of, input_device
from fly.harness import progress
from fly.harness.backend import Backend
from fly.harness.engine_factory import EngineFactory, LoadedPair, captures_graphs
from fly.harness.ranks import Ranks
from fly.harness.requests import place_of
from fly.models import compatibility, gguf, loading, sources, tokenizers
from fly.models.heads.checkpoint import TargetShape, read
from fly.models.token_intersection import TokenIntersection
from fly.runs.records import Observer, RequestRecord
from fly.speculation.engine import Engine
from fly.speculation.sequence import Request

logger = logging.getLogger(__name__)

_FEW = 1 / 3  # of the target's tokens: a draft that knows fewer is warned of

# from_pretrained's arguments that hold for the draft as they do for the target
_OF_THE_HUB = (
    "token", "use_auth_token", "cache_dir", "local_files_only", "force_download", "proxies",
)  # fmt: skip
# those that do something to the weights
_CHANGE_WEIGHTS = (
    "peft", "delta", "parallelize", "device_map", "autogptq", "gptqmodel", "load_in_4bit",
    "load_in_8bit", "quantization_config",
)  # fmt: skip
_OF_MODELS = (*_OF_THE_HUB, "use_safetensors", "attn_implementation")


@register_model("fly")
class FlyLM(Backend, HFLM):
    """lm-eval's model backend that decodes by loosely verified speculative decoding.

    pretrained: the **draft** model (the reference's convention). config_path: the pair's JSON,
    which names the target; every key of it may also be given here. All other arguments are
    HFLM's and apply to the target. `model` only names the run in lm-eval's output path.
    """

    draft_length: dict[str, Any] | None = None  # how that of the last engine was decided

    def __init__(
        self,
        pretrained: str | None = None,
        config_path: str | None = None,
        model: str | None = None,
        **kwargs: Any,
    ) -> None:
        own, hf_args = fly_config.split_model_args({"pretrained": pretrained, **kwargs})
        config = fly_config.resolve(config_path, own)
        self.check(config, hf_args)
        self.use_config(config)
        if launch.processes() > 1 and (
            hf_args.get("device") == "cpu" or not torch.accelerator.is_available()
        ):
            os.environ["ACCELERATE_USE_CPU"] = "true"  # else accelerate sees one process only
        if (
            str(hf_args.get("device") or "cuda").startswith("cuda")
            and not torch.cuda.is_available()
        ):
            hf_args["device"] = "cpu"  # lm-eval's default is a CUDA device, present or not
        self.pair = self._load_pair(config_path, hf_args)
        self._decide_use_ngram()
        self.eos_ids = self.pair.eos_ids
        self.stats.seconds["compile"] = self.pair.packed.seconds
        self.join_run(hf_args)

    def use_config(self, config: fly_config.FlyConfig) -> None:
        super().use_config(config)
        if hasattr(self, "pair"):
            self._decide_use_ngram()

    def _decide_use_ngram(self) -> None:
        """null becomes what pays with these models, in the results file, too."""
        config, passes = self.fly_config, self.pair.packed.draft
        if config.use_ngram is None and config.drafter is None and config.drafter_name == "model":
            pays = str(passes).startswith("kernels")
            self.fly_config = config.model_copy(update={"use_ngram": pays})
            logger.info("use_ngram=null: %s for a draft of %s passes", str(pays).lower(), passes)

    def _load_pair(self, config_path: str | None, hf_args: dict[str, Any]) -> LoadedPair:
        """Load both models, check them, and make them fast to decode with."""
        config = self.fly_config
        target, draft = sources.sources(config, config_path)
        self_check.warn_if_memory_is_short(target, draft, str(hf_args.get("device") or ""))
        progress.tell("loading the models")
        with self._loading("target_model_path", config.target_model_path, target) as path:
            super().__init__(pretrained=path, **hf_args)
        self._check_token_ids()
        self.processes = self._processes()
        compatibility.refuse_unsupported(self.model, "target_model_path", self.max_length)
        self._num_parameters = self.model.num_parameters()
        self._loaded_dtype = str(self.model.dtype).split(".")[-1]  # packing may change what is seen
        draft_model: transformers.PreTrainedModel | None = None
        intersection = None
        if draft is not None:
            if config.head_class is not None:
                draft_model = self.load_head(registry.load(config.head_class), draft, hf_args)
            else:
                draft_model, tokenizer = self.load_draft(draft, hf_args)
                intersection = self._intersection(draft_model, tokenizer)
                if draft_model.device.type == "cpu":
                    # before quantisation, whose errors only cost speed
                    self_check.check_cache_agrees(draft_model, "pretrained")
        progress.tell("packing the weights")
        packed = weights.pack(self.model, draft_model, config)
        if (
            draft_model is not None
            and draft_model.device.type != "cpu"
            and not isinstance(draft_model, Head)
        ):
            capture = captures_graphs(config, draft_model)
            self_check.check_cache_agrees(draft_model, "pretrained", capture=capture)
        capture = captures_graphs(config, self.model)
        self_check.check_cache_agrees(
            self.model, "target_model_path", uniform=packed.uniform, capture=capture
        )
        if packed.uniform:
            self_check.check_places(self.model, "target_model_path", capture=capture)
        if isinstance(draft_model, Head):
            tokens = self.tokenizer.encode(layer_check.TEXT)
            layer_check.warn_if_layers_are_shifted(draft_model, self.model, tokens)
        eos_ids = tokenizers.eos_token_ids(self.model, self.tokenizer)
        return LoadedPair(
            self.model, draft_model, self.tokenizer, eos_ids, self.max_length, packed, intersection
        )

    @property
    def target_dtype(self) -> str:
        """Of the weights: on CPUs without bfloat16 instructions fly computes with these in float32,
        and the packed model says so of itself."""
        return f"torch.{self._loaded_dtype}"

    def _processes(self) -> Ranks:
        """The processes of the run, once torch has them connected; corrects what HFLM takes for
        this one's rank (on a CPU none, else the local one) and device (CPUs get a number)."""
        if hasattr(self, "accelerator"):
            if not hasattr(HFLM, "gather_object"):
                raise FlyError("several processes: need lm-eval 0.4.13 or newer")
            self._rank = self.accelerator.process_index
            self._world_size = self.accelerator.num_processes
            self._device = input_device(self.model)
            return Ranks(self._rank, self._world_size)
        if (count := launch.processes()) > 1:
            raise FlyError(
                f"{count} processes were launched, and accelerate connects none: use torchrun or "
                "accelerate launch"
            )
        return Ranks()

    def _check_token_ids(self) -> None:
        count = self.model.config.get_text_config().vocab_size
        given = {"prefix_token_id": self.custom_prefix_token_id}
        for key, token in {**given, "think_end_token": self.think_end_token}.items():
            if isinstance(token, int) and token >= count:
                raise FlyError(f"{key}={token}: the target's vocabulary has ids 0 to {count - 1}")

    @contextmanager
    def _loading(self, field: str, name: str, source: sources.ModelSource) -> Iterator[str]:
        """Gives the folder or hub id of configuration and tokenizer."""
        self._field, self._source = field, source
        with loading.naming_model(field, name):
            yield str(gguf.metadata_folder(source.file)) if source.file else source.path

    def load_draft(
        self, source: sources.ModelSource, hf_args: dict[str, Any]
    ) -> tuple[transformers.PreTrainedModel, Any]:
        """Load the draft with HFLM's own loader, then give the target its place back.

        Returns the model as loaded, neither packed nor in use, and its tokenizer.
        """
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
            with self._loading("pretrained", str(self.fly_config.draft_model_path), source) as path:
                transformers.AutoConfig.from_pretrained(path, **shared, **of_hub)
                tokenizer = transformers.AutoTokenizer.from_pretrained(path, **shared, **of_hub)
                if not self.fly_config.dual_tok:
                    tokenizers.check_same_vocabulary(self.tokenizer, tokenizer)
                self._create_model(
                    path,
                    dtype=self.fly_config.draft_dtype or self._loaded_dtype,
                    **shared,
                    **of_models,
                )
                draft: Any = self._model  # type: ignore[has-type]
                packed_linear.restore_weights(draft)  # int8 weights are made of bfloat16 ones
                draft.eval().to(self.fly_config.draft_device or self.device)
        finally:
            self._model = target_model
        compatibility.refuse_unsupported(draft, "pretrained", context_of(draft, self.max_length))
        return draft, tokenizer

    def load_head(
        self, kind: type[Head], source: sources.ModelSource, hf_args: dict[str, Any]
    ) -> Head:
        """Load a head of the target, whose tokenizer and context are the target's."""
        config = self.fly_config
        name = str(config.draft_model_path)
        with self._loading("pretrained", name, source):
            hub = {key: hf_args[key] for key in _OF_THE_HUB if key in hf_args}
            checkpoint = read(source, name, {"revision": config.draft_revision, **hub})
            head = kind.from_checkpoint(
                checkpoint, TargetShape.of(self.model.config), config.head_layer_ids
            )
        dtype = getattr(torch, config.draft_dtype or self._loaded_dtype)
        for parameter in head.parameters():  # not buffers: RoPE's frequencies stay exact
            parameter.data = parameter.data.to(dtype)
        return head.eval().to(config.draft_device or self.device)

    def _intersection(
        self, draft: transformers.PreTrainedModel, tokenizer: Any
    ) -> TokenIntersection | None:
        """The tokens that both models have, and logs their share; None where all are the same."""
        if tokenizer.get_vocab() == self.tokenizer.get_vocab():
            return None
        found = TokenIntersection.from_tokenizers(
            tokenizer,
            self.tokenizer,
            draft_size=draft.config.get_text_config().vocab_size,
            target_size=self.model.config.get_text_config().vocab_size,
        )
        few = found.share < _FEW
        logger.log(
            logging.WARNING if few else logging.INFO,
            "dual_tok: the draft can draft %.1f %% of the target's %d tokens%s",
            100 * found.share,
            len(self.tokenizer),
            ": few of its drafts can be what the target says" if few else "",
        )
        return found

    def _create_model(self, pretrained: str, *args: Any, **kwargs: Any) -> None:
        """Load the weights of the source that `_loading` was given."""
        auto_class: Any = self.AUTO_MODEL_CLASS  # type: ignore[has-type]
        file = self._source.file
        if file is None:
            self._load_weights(auto_class, pretrained, *args, **kwargs)
            return
        dtype = str(kwargs.get("dtype") or "auto").removeprefix("torch.")
        is_changed = any(kwargs.get(key) for key in _CHANGE_WEIGHTS)
        if not is_changed and dtype in ("auto", "bfloat16"):
            attention = {k: v for k, v in kwargs.items() if k == "attn_implementation" and v}
            self._model = gguf.load(file, auto_class, kernels_gguf.takes, **attention)
            if self.device.type != "cpu":
                packed_linear.restore_weights(self._model)
                self._model.to(self.device)
        else:
            dtype = "bfloat16" if dtype == "auto" else dtype
            kwargs |= {"gguf_file": file.name, "dtype": dtype}
            if hasattr(transformers, "GgufConfig"):
                kwargs["quantization_config"] = transformers.GgufConfig(dequantize=True)
            self._load_weights(auto_class, str(file.parent), *args, **kwargs)
        self._model.generation_config = transformers.GenerationConfig.from_pretrained(pretrained)

    def _load_weights(self, auto_class: Any, pretrained: str, *args: Any, **kwargs: Any) -> None:
        self.AUTO_MODEL_CLASS = loading.WithAllTensors(auto_class, self._field)
        try:
            super()._create_model(pretrained, *args, **kwargs)
        finally:
            self.AUTO_MODEL_CLASS = auto_class

    def decode(
        self, missing: list[Request], wanted: list[Request], observer: Observer
    ) -> Iterator[RequestRecord]:
        """Raises FlyError where a model's logits are not finite."""
        try:
            yield from self.engine(missing, wanted, observer).run(missing)
        except NotFiniteError as error:
            models = {
                "target": f"target_model_path={self.fly_config.target_model_path}",
                "draft": f"pretrained={self.fly_config.draft_model_path}",
            }
            raise FlyError(
                f"{models[error.role]}: its logits are not finite (NaN or infinite) in "
                f"{place_of(error.request.tag)}, after {error.at} new tokens: "
                f"{self_check.NOT_FINITE}"
            ) from error

    def engine(self, missing: list[Request], wanted: list[Request], observer: Observer) -> Engine:
        """The engine for these requests, as for `decode`."""
        factory = EngineFactory(
            self.pair,
            self.fly_config,
            missing,
            wanted,
            self.requests_of_run(wanted),
            self.batch_size,
            self.max_batch_size,
        )
        engine = factory.engine(observer)
        self.draft_length = factory.draft_length
        return engine

    def engine_facts(self) -> dict[str, Any]:
        draft, shared = self.pair.draft, self.pair.intersection
        models = [self.model, *([draft] if draft is not None else [])]
        used = {tensor.device for model in models for tensor in model.parameters()}
        gpus = sum(device.type != "cpu" for device in used)
        return {
            "devices": max(1, gpus),
            "draft_dtype": None
            if draft is None
            else f"torch.{self.fly_config.draft_dtype or self._loaded_dtype}",
            "draft_num_parameters": None if draft is None else self.pair.packed.draft_parameters,
            "preparation": self.pair.packed.as_dict(),
            "draft_vocabulary_share": None if shared is None else round(shared.share, 4),
            "draft_length": self.draft_length,
        }

    def get_model_info(self) -> dict[str, Any]:
        """HFLM's facts, of the target, plus `fly`."""
        return {
            **super().get_model_info(),
            "model_num_parameters": self._num_parameters,
            "model_dtype": getattr(torch, self._loaded_dtype),
        }
