"""ServerLM: the engine that asks an OpenAI-compatible server (docs/server.md).

The prompts are those of every other engine; how the server decodes is its own affair, and what it
tells of it is recorded. What it does not tell is absent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import transformers
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from openai import AsyncOpenAI
from tqdm import tqdm

from fly import config as fly_config
from fly import launch, reading
from fly.config import FlyConfig
from fly.errors import FlyError, reason_of
from fly.harness.backend import Backend
from fly.harness.requests import place_of
from fly.harness.server_client import Answer, Endpoint, ServerArgs, Told
from fly.harness.server_scores import PROBE_TEXT, ask_scores, probe_scores
from fly.models import sources
from fly.runs.records import Counts, Observer, RequestRecord, zero_seconds
from fly.settings import OutputSettings, SamplingSettings
from fly.speculation.sequence import Request

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Found = TypeVar("Found")

_KEYS = {
    *SamplingSettings.model_fields,
    *OutputSettings.model_fields,
    "target_model_path",
    "use_sd",
}
_FEW = 4  # tokens that the probe asks for
_STOPS = 4  # stop strings that OpenAI's endpoints take
_UNTOLD = 2**31  # tokens of context, where neither the server nor the tokenizer tells


@register_model("server")
class ServerLM(Backend):
    """`fly --model server`. Keys of a pair's JSON that say how to sample and what to record may be
    given as well; the rest is the server's own affair."""

    engine_name = "server"
    generation_config: Any = None
    target_dtype = "not told"
    device = torch.device("cpu")  # of this process; the server's is not told
    max_gen_toks = 256

    def __init__(
        self,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if str(batch_size) not in ("None", "auto", "1") or max_batch_size:
            raise FlyError("--batch_size: a server batches by itself: give num_concurrent instead")
        config, arguments = fly_config.of_model_args(kwargs)
        self.check(config, arguments)
        self.use_config(config)
        args = ServerArgs(**arguments)
        self.api, self.num_concurrent = args.api, args.num_concurrent
        self.think_end_token = args.think_end_token
        self.server = Endpoint(args, config.target_model_path)
        self._load_tokenizer(args.tokenizer)
        told = self.server.facts.context or self.tokenizer.model_max_length
        self.max_length = args.max_length or min(told, _UNTOLD)
        self.eos_ids = frozenset({self.tokenizer.eos_token_id} - {None})
        self._counters = self.server.counters()
        self._fingerprints: set[str] = set()
        self._sends_ids = False  # where the server's tokenizer reads a prompt's text otherwise
        self._answers_as: str | None = None  # the model that its answers name, perhaps an alias
        self._is_plain = False  # the server takes OpenAI's sampling parameters only
        self._most_stops: int | None = None  # stop strings that the server takes; None is any
        self.join_run(arguments)

    @classmethod
    def check(cls, config: FlyConfig, model_args: dict[str, Any]) -> None:
        """Refuse arguments that a server's run does not have. Raises FlyError."""
        if launch.processes() > 1:
            raise FlyError("--model server: works in one process: raise num_concurrent instead")
        known = ServerArgs.model_fields
        if {"api_key", "key", "token"} & {*model_args}:
            raise FlyError("model_args: a key would be written down: give api_key_env=NAME of it")
        for key in model_args:
            if key not in known:
                hint = reading.hint(key, [*known, *SamplingSettings.model_fields], "remove it")
                raise FlyError(f"unknown model_args key {key!r} of --model server: {hint}")
        reading.check_shape(dict(model_args), ServerArgs, "model_args")
        given = config.model_fields_set - _KEYS
        given -= {"lookup_k"} if "spd_k" in given else set()  # which has come with it
        if config.trace:
            given |= {"trace"}
        if given:
            raise FlyError(
                f"model_args {min(given)}: how it decodes is up to the server: leave it out "
                "(config_path, too), and start the server so"
            )

    def _load_tokenizer(self, given: str | None) -> None:
        """Prompts are made of it. Raises FlyError if there is none."""
        facts = self.server.facts
        name = given or str(facts.about.get("root") or facts.model)
        try:
            source = sources.resolve_source(name, "tokenizer")
            more = {"gguf_file": source.gguf_file} if source.gguf_file else {}
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source.path, **more)
        except (OSError, ValueError) as error:
            raise FlyError(
                f"tokenizer={name}: cannot be loaded ({reason_of(error)}): give the served model's "
                "folder, GGUF file or hub id"
            ) from None
        try:
            self.generation_config = transformers.GenerationConfig.from_pretrained(source.path)
        except (OSError, ValueError):
            self.generation_config = None

    # ---------------------------------------------------------------- what requests are made of

    @property
    def tokenizer_name(self) -> str:
        """By which lm-eval keeps prompts (--cache_requests): an api's are messages or texts."""
        return f"{self.tokenizer.name_or_path}-{self.api}".replace("/", "__")

    @property
    def eot_token_id(self) -> int | None:  # type: ignore[override]
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        first = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if first is None else first

    def tok_encode(self, string: str, **_: Any) -> list[int]:
        """As HFLM's: a text that begins with BOS gets no second one."""
        special = not has_bos_prefix(string, self.tokenizer.bos_token)
        return self.tokenizer.encode(string, add_special_tokens=special)

    def encode_prompt(self, text: str, room: int) -> list[int]:
        """Raises FlyError for a text that the server's context has no room for: whether and where
        a server cuts it is not known."""
        ids = self.tok_encode(text)
        if len(ids) > room:
            raise self._too_long(len(ids), "its output")
        return ids

    def _too_long(self, tokens: int, output: str) -> FlyError:
        return FlyError(
            f"base_url={self.server.base_url}: a prompt of {tokens} tokens leaves no room for "
            f"{output} in the server's context of {self.max_length}: start the server with a "
            "longer context, or lower max_gen_toks"
        )

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt's text; for api=chat the messages as JSON, whose template is the server's."""
        if self.api == "chat":
            prompt = json.dumps(chat_history, ensure_ascii=False)
        elif getattr(self.tokenizer, "chat_template", None) is None:
            raise FlyError(
                "--apply_chat_template: the tokenizer has no chat template: use api=chat"
            )
        else:
            prompt = self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        self.note_system(chat_history, prompt)
        return prompt

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return "" if self.api == "chat" else super().chat_template(chat_template)

    # ---------------------------------------------------------------- log-likelihoods

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """requests: (lm-eval's key, ids of the context, ids of the continuation). Raises FlyError
        if the server gives no log-likelihoods that can be trusted."""
        if self.api == "chat":
            raise FlyError("api=chat: it has no log-likelihoods: use api=completions")
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)

        async def probe(client: AsyncOpenAI) -> None:
            await probe_scores(self.server, client, self.tok_encode(PROBE_TEXT))

        async def score(client: AsyncOpenAI, number: int) -> int:
            _, context, continuation = requests[number]
            ids = [*context, *continuation]
            if len(ids) >= self.max_length:
                raise self._too_long(len(ids), "the token that a server adds")
            where = f"log-likelihood {number}"
            scores = (await ask_scores(self.server, client, ids, where))[len(context) - 1 :]
            found[number] = sum(s for s, _ in scores), all(best for _, best in scores)
            return number

        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="log-likelihoods")
        for number in self._ask_all(range(len(requests)), probe, score):
            bar.update()
            if (key := requests[number][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", key, found[number])
        bar.close()
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows that the server's context has room for."""
        windows = [
            [(None, *make_disjoint_window(window)) for window in self._windows(request.args[0])]
            for request in requests
        ]
        each = iter(self._loglikelihood_tokens([w for of in windows for w in of], disable_tqdm))
        return [sum(next(each)[0] for _ in of) for of in windows]

    def _windows(self, text: str) -> Any:
        most = self.max_length - 2  # the prefix token, and the one that a server adds
        return get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, most, 1)

    # ---------------------------------------------------------------- decoding

    def decode(
        self, missing: list[Request], wanted: list[Request], observer: Observer
    ) -> Iterator[RequestRecord]:
        """Raises FlyError for what the server cannot do, and for faults that do not pass."""
        if missing:
            yield from self._ask_all(
                missing, lambda client: self._probe(client, missing), self._answer
            )

    def _ask_all(
        self,
        items: Sequence[Item],
        probe: Callable[[AsyncOpenAI], Coroutine[Any, Any, None]],
        answer: Callable[[AsyncOpenAI, Item], Coroutine[Any, Any, Found]],
    ) -> Iterator[Found]:
        """Every item's answer as it comes, `num_concurrent` of them under way. What had come before
        an error is given first."""
        answered: SimpleQueue[Found | BaseException] = SimpleQueue()
        running: list[tuple[asyncio.AbstractEventLoop, Any]] = []
        begun = threading.Event()
        left = iter(items)

        async def work(client: AsyncOpenAI) -> None:
            try:
                for item in left:
                    answered.put(await answer(client, item))
            except Exception as error:
                answered.put(error)

        async def ask() -> None:
            running.append((asyncio.get_running_loop(), asyncio.current_task()))
            begun.set()
            async with self.server.open() as client:
                await probe(client)
                await asyncio.gather(*(work(client) for _ in range(self.num_concurrent)))

        def run() -> None:
            try:
                asyncio.run(ask())
            except BaseException as error:
                answered.put(error)
            finally:
                begun.set()

        # a notebook has a loop that runs in this thread
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            for _ in items:
                found = answered.get()
                if isinstance(found, BaseException):
                    while not answered.empty():  # what came with it is not lost
                        if not isinstance(other := answered.get_nowait(), BaseException):
                            yield other
                    raise found
                yield found
            self.server.check_same()
        finally:
            begun.wait()  # an interruption may come before it
            for loop, task in running:
                with suppress(RuntimeError):  # it has ended
                    loop.call_soon_threadsafe(task.cancel)
            thread.join()

    async def _probe(self, client: AsyncOpenAI, requests: Iterable[Request]) -> None:
        """A few tokens for one request of each kind. Raises FlyError for what the server refuses,
        and where it reads other tokens than were meant."""
        kinds = {(request.sampling, request.stops): request for request in requests}
        for request in kinds.values():
            where = f"probe, {place_of(request.tag)}"
            answer = await self._try(client, request, where)
            if None in (answer.prompt_tokens, answer.completion_tokens):
                raise FlyError(
                    f"{where}: {self.server.base_url} tells no counts of tokens (usage): fly needs "
                    "a server that does so when it streams"
                )
            if self.api == "completions" and answer.prompt_tokens != len(request.prompt):
                self._sends_ids = True
                answer = await self._try(client, request, where)
                logger.info("prompts are sent as token ids: the server adds tokens to texts")
            self._check_prompt(answer, request, where)

    async def _try(self, client: AsyncOpenAI, request: Request, where: str) -> Answer:
        """With fewer stop strings, if the server refuses more than OpenAI's four: texts are cut at
        the others here. With fewer parameters, if it refuses those beyond OpenAI's and none is
        needed."""
        sampling = request.sampling
        needed = sampling.top_k or sampling.min_p or sampling.repetition_penalty != 1
        while True:
            try:
                payload = self._payload(request, min(_FEW, request.budget))
                return await self.server.ask(client, payload, where)
            except FlyError as error:
                if len(payload["stop"] or ()) > _STOPS and "stop" in str(error):
                    self._most_stops = _STOPS
                    logger.info(
                        "the server takes at most %d stop strings: texts are cut at the others "
                        "here, and their tokens past those are counted",
                        _STOPS,
                    )
                elif self._is_plain or needed:
                    raise
                else:
                    self._is_plain = True

    def _payload(self, request: Request, most: int) -> dict[str, Any]:
        """What is not said would be the server's default, or its model's."""
        sampling, context = request.sampling, request.tag.args[0]
        found: dict[str, Any] = {
            "max_tokens": most,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": request.seed % 2**31,
            "stop": [stop for stop in request.stops if stop][: self._most_stops] or None,
        }
        more: dict[str, Any] = {}
        if not self._is_plain:
            more = {
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "repetition_penalty": sampling.repetition_penalty,
                "repeat_penalty": sampling.repetition_penalty,  # llama.cpp's and mlx's name
                "return_spec_tokens_details": True,  # SGLang
            }
        if self.api == "chat":
            found["messages"] = messages = _messages(context)
            if messages[-1]["role"] == "assistant":
                more |= {"continue_final_message": True, "add_generation_prompt": False}
        else:
            found["prompt"] = list(request.prompt) if self._sends_ids or not context else context
        return {**found, "extra_body": more}

    async def _answer(self, client: AsyncOpenAI, request: Request) -> RequestRecord:
        where = place_of(request.tag)
        clock, started = self.server.clock, time.perf_counter()
        joined = clock.read(change=1)
        try:
            answer = await self.server.ask(client, self._payload(request, request.budget), where)
        finally:
            left = clock.read(change=-1)
        ended = time.perf_counter()
        self._check_answer(answer, request, where)
        told = Told.of(answer.extras, self.server.facts.kind)
        is_stopped = any(stop in answer.text for stop in request.stops if stop)  # and cut here
        seconds = zero_seconds()
        seconds["prefill"] = answer.first_share - joined
        seconds["verify"] = left - answer.first_share
        return RequestRecord(
            request,
            [],
            "length" if answer.finish == "length" and not is_stopped else "stop",
            prompt_tokens=len(request.prompt),
            prompt_tokens_reused=answer.cached_tokens,
            counts=Counts(
                rounds=told.rounds or 0,
                drafted=told.drafted or 0,
                native_accepted=told.accepted or 0,
                emitted=answer.completion_tokens or 0,
            ),
            seconds=seconds,
            positions=told.positions,
            wall_seconds=ended - answer.first,
            text=answer.text,
            server={
                "first_token_seconds": round(answer.first - started, 6),
                "seconds": round(ended - started, 6),
                "attempts": answer.attempts,
                "prompt_tokens": answer.prompt_tokens,
                "timings": told.timings,
            },
        )

    def _check_answer(self, answer: Answer, request: Request, where: str) -> None:
        """Raise FlyError for an answer that is none to this request."""
        if answer.fingerprint:
            self._fingerprints.add(answer.fingerprint)
        if answer.finish not in ("stop", "length"):
            raise FlyError(f"{where}: the server ended its answer with {answer.finish!r}")
        if answer.finish == "length" and (answer.completion_tokens or 0) < request.budget:
            raise FlyError(
                f"{where}: the server cut the answer at {answer.completion_tokens} tokens; the task"
                f" allows {request.budget}: raise the server's limit or its context"
            )
        self._check_prompt(answer, request, where)

    def _check_prompt(self, answer: Answer, request: Request, where: str) -> None:
        given, first = len(request.prompt), self._answers_as or answer.model
        self._answers_as = first
        if answer.model != first:
            raise FlyError(f"{where}: answered by the model {answer.model}, the first by {first}")
        if self.api == "completions" and answer.prompt_tokens != given:
            raise FlyError(
                f"{where}: the server read {answer.prompt_tokens} prompt tokens where the tokenizer"
                f" has {given}: give the served model's tokenizer=, or a longer context"
            )

    # ---------------------------------------------------------------- reporting

    def deciding_facts(self) -> dict[str, Any]:
        return {"server": asdict(self.server.facts)}

    def results_entry(self) -> dict[str, Any]:
        return {**super().results_entry(), "mode": "server", "drafter": None}

    def engine_facts(self) -> dict[str, Any]:
        before = self._counters
        counters = {
            name: value - before.get(name, 0.0) for name, value in self.server.counters().items()
        }
        return {
            **super().engine_facts(),
            "server": {
                "base_url": self.server.base_url,
                **asdict(self.server.facts),
                "api": self.api,
                "num_concurrent": self.num_concurrent,
                "prompts": "ids" if self._sends_ids else "text",
                "fingerprints": sorted(self._fingerprints),
                "counters": counters,  # while this process ran; other users' requests included
            },
        }


def _messages(context: str) -> list[dict[str, str]]:
    """Messages as `apply_chat_template` wrote them; any other prompt is the user's one message."""
    if context.startswith('[{"role": '):
        try:
            return json.loads(context)
        except ValueError:
            pass
    return [{"role": "user", "content": context}]
