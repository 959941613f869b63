"""The plugin's entry point: where vLLM is changed, and only if additional_config asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from fly.config import FlyConfig
from fly.errors import FlyError
from fly.models.tokenizers import Texts
from fly.speculation.rules import rule_of
from fly.vllm_plugin import options


def register() -> None:
    """Called by vLLM in each of its processes, and by `fly --model vllm`; again changes nothing."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    _wrap(EngineArgs, "create_engine_config", _prepare)
    _wrap(WorkerWrapperBase, "init_device", _install)


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    own = getattr(owner, name)
    if hasattr(own, "of_fly"):
        return

    @wraps(own)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, lambda: own(self, *args, **kwargs))

    wrapped.of_fly = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _prepare(arguments: Any, make: Callable[[], Any]) -> Any:
    """Before the engine's configuration is made: a rule's walk is the host's, so that vLLM's steps
    may not run ahead of it, and is known to its first model runner only."""
    if config := _read_config(
        arguments.additional_config, arguments.model, arguments.speculative_config
    ):
        if arguments.async_scheduling:
            raise FlyError(
                f"--async-scheduling: verification={config.rule} by fly decides on the host after "
                "each step: leave the flag out"
            )
        if str(arguments.logprobs_mode).startswith("processed"):
            raise FlyError(
                f"--logprobs-mode {arguments.logprobs_mode}: fly's plugin gives raw ones: leave "
                "the flag out"
            )
        arguments.async_scheduling = False
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    return make()


def _install(wrapper: Any, init_device: Callable[[], None]) -> None:
    """After a worker has made its model runner: the runner gets fly's verification."""
    init_device()
    found, runner = wrapper.vllm_config, wrapper.worker.model_runner
    model = found.model_config
    config = _read_config(found.additional_config, model.model, found.speculative_config)
    if config is None:
        return
    if not hasattr(runner, "input_batch") or found.scheduler_config.async_scheduling:
        raise FlyError(
            f"additional_config {options.KEY}: fly's rules need vLLM's first model runner and "
            "synchronous scheduling: set VLLM_USE_V2_MODEL_RUNNER=0, and --no-async-scheduling"
        )
    if not hasattr(runner, "rejection_sampler"):  # not the last of a pipeline's ranks
        wrapper.worker.take_fly_rounds = lambda name: []
        return
    from vllm.tokenizers import cached_tokenizer_from_config

    from fly.vllm_plugin.sampler import FlySampler
    from fly.vllm_plugin.verifier import Verifier

    record = found.additional_config.get(options.RECORD_KEY)
    tokenizer = cached_tokenizer_from_config(model)
    verifier = Verifier(
        rule_of(config, tokenizer),
        Texts(tokenizer),
        keeps_rounds=bool(record),
        traced=config.entropy_kind if config.trace else None,
    )
    runner.rejection_sampler = FlySampler(runner, verifier)
    wrapper.worker.take_fly_rounds = verifier.take_rounds


def _read_config(additional: Any, target: str, speculation: Any) -> FlyConfig | None:
    """speculation: None, a mapping, or vLLM's SpeculativeConfig."""
    from vllm import __version__

    if isinstance(speculation, dict):
        count = speculation.get("num_speculative_tokens", 128)  # a head may say it
    else:
        count = getattr(speculation, "num_speculative_tokens", None)
    return options.read(additional, target, count, __version__)
