"""One OpenAI-compatible endpoint: what it says of itself, and its answers in spite of faults.

Passing faults (refused, dropped and stalled connections, 408, 429, 5xx, streams without an end) are
tried again, after the server's Retry-After or a growing pause; all others end the run in one line.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Annotated, Any, Literal

from openai import APIConnectionError, APIError, APIStatusError, AsyncOpenAI, Timeout
from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt

from fly.config import SERVED
from fly.errors import FlyError, reason_of
from fly.runs.records import Positions

_PASSING = (408, 409, 425, 429)  # and 5xx
_LONGEST_PAUSE = 30.0  # seconds, where the server does not say
_KINDS = {  # by who "owns" the model: its kind, and where it tells its version
    "llamacpp": ("llama.cpp", "/props", "build_info"),
    "vllm": ("vLLM", "/version", "version"),
    "sglang": ("SGLang", "/get_server_info", "version"),
}
_PASSES_BY = ("created", "permission")  # of a listed model: they differ from start to start
_EXTRAS = ("timings", "metrics", "sglext")  # of answers, where servers tell of speculation
_COUNTERS = ":spec_decode_"  # behind the server's name


class ServerArgs(BaseModel):
    """model_args of `--model server`; docs/server.md explains them."""

    base_url: Annotated[str, Field(pattern=r"^https?://[^@\s]+$")]
    model: str | None = None
    tokenizer: str | None = None
    api: Literal["completions", "chat"] = "completions"
    num_concurrent: PositiveInt = 8
    api_key_env: str | None = None
    timeout: PositiveFloat = 600.0
    retries: NonNegativeInt = 10
    max_length: PositiveInt | None = None
    think_end_token: str | None = None


@dataclass(frozen=True)
class Facts:
    """What a server says of itself and of the model that it serves."""

    kind: str  # llama.cpp, vLLM, SGLang; else `server`
    version: str | None
    model: str
    context: int | None  # tokens of prompt and output; None if the server does not tell
    about: dict[str, Any]  # the model's entry in /v1/models


@dataclass
class Told:
    """Speculation in one answer, as far as the server tells it; None is not told."""

    rounds: int | None = None  # verification passes
    drafted: int | None = None
    accepted: int | None = None
    positions: Positions = field(default_factory=Positions)  # empty is not told
    timings: dict[str, float] = field(default_factory=dict)  # the server's own, by its names

    @classmethod
    def of(cls, extras: Mapping[str, Any], kind: str) -> Told:
        """extras: what the answer holds beside OpenAI's fields."""
        timings = _inner(extras, "timings")
        of_vllm = _inner(_inner(extras, "metrics"), "speculative_decoding")
        of_sglang = _inner(_inner(extras, "sglext"), "spec_tokens_details")
        found = cls(timings={k: v for k, v in timings.items() if isinstance(v, (int, float))})
        if "draft_n" in timings or (timings and kind == "llama.cpp"):
            # its passes are not told: what is accepted past an output's end is counted, too
            found.drafted = timings.get("draft_n", 0)
            found.accepted = timings.get("draft_n_accepted", 0)
            if not found.drafted:
                found.rounds = timings.get("predicted_n")  # the prompt's pass gives the first
        elif of_vllm:
            found.drafted = of_vllm.get("num_draft_tokens")
            found.accepted = of_vllm.get("num_accepted_draft_tokens")
            per_step = [of_vllm.get(f"per_step_{key}") or () for key in ("drafted", "accepted")]
            for drafted, accepted in zip(*per_step):  # none without `detailed`
                found.positions.add_round(drafted, accepted)
        elif of_sglang:
            found.rounds = of_sglang.get("spec_verify_ct")
            found.drafted = of_sglang.get("spec_num_proposed_drafts")
            found.accepted = of_sglang.get("spec_num_correct_drafts")
            counts = of_sglang.get("spec_correct_drafts_histogram") or []
            length = len(counts) - 1
            if sum(counts) * length == found.drafted:  # else drafts were of several lengths
                for accepted, rounds in enumerate(counts):
                    found.positions.add_round(length, accepted, rounds)
        return found


def _inner(found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = found.get(key)
    return value if isinstance(value, Mapping) else {}


@dataclass
class Answer:
    """One answer. Seconds are of `time.perf_counter`; shares, of `SharedClock`."""

    text: str = ""
    finish: str | None = None
    model: str | None = None
    fingerprint: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int = 0
    attempts: int = 1
    first: float = 0.0  # when its first text came
    first_share: float = 0.0
    extras: dict[str, Any] = field(default_factory=dict)
    logprobs: dict[str, Any] | None = None  # of completions that were not streamed


class SharedClock:
    """Divides time equally among the requests under way, so that their shares add up to it."""

    def __init__(self) -> None:
        self._share, self._since, self._count = 0.0, time.perf_counter(), 0

    def read(self, change: int = 0) -> float:
        """The share until now of one that was always under way. change: how many join or leave."""
        now = time.perf_counter()
        self._share += (now - self._since) / self._count if self._count else 0.0
        self._since, self._count = now, self._count + change
        return self._share


class _CutError(Exception):
    """A stream that ended before its answer."""


class Endpoint:
    """The server at `base_url`, up to /v1. Its key is written nowhere."""

    def __init__(self, args: ServerArgs, model: str) -> None:
        self.base_url = args.base_url
        for end in ("/", "/completions", "/chat", "/"):
            self.base_url = self.base_url.removesuffix(end)
        self._args, self._asked_model = args, model
        self._key = os.environ.get(args.api_key_env, "") if args.api_key_env else ""
        if args.api_key_env and not self._key:
            raise FlyError(f"api_key_env={args.api_key_env}: no such environment variable: set it")
        self.facts = self.describe()
        self.clock = SharedClock()

    # ---------------------------------------------------------------- what it says of itself

    def describe(self) -> Facts:
        """Raises FlyError if no server answers, or if it does not have the model."""
        try:
            listed = self._get("/v1/models")["data"]
            names = [str(entry["id"]) for entry in listed]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise FlyError(
                f"base_url={self.base_url}: /v1/models gives no list of models "
                f"({self.redacted(reason_of(error))}): is the server up, and is this its address?"
            ) from None
        name = self._asked_model
        if name == SERVED and len(names) == 1:
            (name,) = names
        if name not in names:
            raise FlyError(
                f"model={name}: not served at {self.base_url}: give one of "
                f"{', '.join(names) or 'none'}"
            )
        entry = listed[names.index(name)]
        about = {key: value for key, value in entry.items() if key not in _PASSES_BY}
        kind, page, key = _KINDS.get(str(entry.get("owned_by")), ("server", "", ""))
        told = self._try_get(page) if page else {}
        version = told.get(key)
        slots = told.get("default_generation_settings") or {}
        context = slots.get("n_ctx") or entry.get("max_model_len")
        if told.get("model_path"):
            about["model_path"] = told["model_path"]
        return Facts(kind, version and str(version), name, context, about)

    def check_same(self) -> None:
        """Raise FlyError if another model is served by now."""
        now = self.describe()
        if now != self.facts:
            keys = [key for key in vars(now) if getattr(now, key) != getattr(self.facts, key)]
            raise FlyError(
                f"base_url={self.base_url}: the server was restarted as another one: its {keys[0]} "
                f"was {getattr(self.facts, keys[0])}, is now {getattr(now, keys[0])}: start a new "
                "run, or bring the server back as it was and resume"
            )

    def counters(self) -> dict[str, float]:
        """Counters of speculation by name (Prometheus; vLLM, llama.cpp); empty without any."""
        try:
            lines = self._read("/metrics").splitlines()
        except (OSError, ValueError):
            return {}
        found: dict[str, float] = {}
        for line in lines:
            if _COUNTERS in line and "#" not in line and "_created" not in line:
                name, _, value = line.partition(_COUNTERS)[2].rpartition(" ")
                place = name.partition('position="')[2].partition('"')[0]
                short = name.partition("{")[0].removesuffix("_total")
                key = f"{short}_{place}" if place else short
                found[key] = found.get(key, 0.0) + float(value)
        return found

    def _try_get(self, path: str) -> dict[str, Any]:
        try:
            found = self._get(path)
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _get(self, path: str) -> Any:
        return json.loads(self._read(path))

    def _read(self, path: str) -> str:
        request = urllib.request.Request(self.base_url.removesuffix("/v1") + path)
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        deadline = time.monotonic() + self._args.timeout
        while True:
            try:
                with urllib.request.urlopen(request, timeout=min(self._args.timeout, 30)) as answer:
                    return answer.read().decode()
            except urllib.error.HTTPError as error:  # such as a server that still loads its model
                if error.code not in (429, 503) or time.monotonic() > deadline:
                    raise
                time.sleep(min(self._args.timeout, 1.0))

    # ---------------------------------------------------------------- answers

    def open(self) -> AsyncOpenAI:
        """A client for the running event loop; its owner closes it."""
        return AsyncOpenAI(
            api_key=self._key or "none",
            base_url=self.base_url,
            timeout=Timeout(self._args.timeout, connect=min(self._args.timeout, 30.0)),
            max_retries=0,
        )

    async def ask(
        self, client: AsyncOpenAI, payload: dict[str, Any], where: str, *, stream: bool = True
    ) -> Answer:
        """The whole answer. Raises FlyError for what another attempt would not change, and after
        the last one. where: which document it is of."""
        ask_once = self._ask_once if stream else self._ask_whole
        attempts = 1
        while True:
            try:
                answer = await ask_once(client, payload)
            except (APIError, _CutError, ValueError) as error:
                if not _is_passing(error):
                    refused = f"{where}: {self.base_url} refuses it"
                    raise FlyError(f"{refused}: {self._reason(error)}") from None
                if attempts > self._args.retries:
                    raise FlyError(
                        f"{where}: no answer of {self.base_url} in {attempts} attempts; the last: "
                        f"{self._reason(error)}"
                    ) from None
                await asyncio.sleep(_pause(error, attempts))
                if not isinstance(error, APIStatusError):  # it may have been restarted
                    await self._check_restarted()
                attempts += 1
                continue
            answer.attempts = attempts
            return answer

    async def _check_restarted(self) -> None:
        try:
            await asyncio.to_thread(self._get, "/v1/models")
        except (OSError, ValueError):
            return  # not there yet: the next attempt will tell
        await asyncio.to_thread(self.check_same)

    async def _ask_once(self, client: AsyncOpenAI, payload: dict[str, Any]) -> Answer:
        is_chat = self._args.api == "chat"
        api: Any = client.chat.completions if is_chat else client.completions
        answer = Answer()
        parts: list[str] = []
        stream = await api.create(
            model=self.facts.model, stream=True, stream_options={"include_usage": True}, **payload
        )
        async with stream:
            async for chunk in stream:
                answer.model = chunk.model or answer.model
                answer.fingerprint = chunk.system_fingerprint or answer.fingerprint
                extras = chunk.model_extra or {}
                for choice in chunk.choices or ():
                    text = choice.delta.content if is_chat else choice.text
                    if text and not answer.first:  # vLLM begins with an empty one
                        answer.first, answer.first_share = time.perf_counter(), self.clock.read()
                    parts.append(text or "")
                    answer.finish = choice.finish_reason or answer.finish
                    extras = {**(choice.model_extra or {}), **extras}
                if chunk.usage:
                    answer.prompt_tokens = chunk.usage.prompt_tokens
                    answer.completion_tokens = chunk.usage.completion_tokens
                    details = chunk.usage.prompt_tokens_details
                    answer.cached_tokens = (details and details.cached_tokens) or 0
                answer.extras |= {key: extras[key] for key in _EXTRAS if extras.get(key)}
        if answer.finish is None:
            raise _CutError("the stream ended before its answer did")
        answer.text = "".join(parts)
        if not answer.first:
            answer.first, answer.first_share = time.perf_counter(), self.clock.read()
        return answer

    async def _ask_whole(self, client: AsyncOpenAI, payload: dict[str, Any]) -> Answer:
        """A completion with its log-probabilities: servers stream those in ways of their own."""
        found = await client.completions.create(model=self.facts.model, **payload)
        logprobs = found.choices[0].logprobs if found.choices else None
        return Answer(model=found.model, logprobs=logprobs and logprobs.model_dump())

    def _reason(self, error: Exception) -> str:
        """With the server's own words, if it has some."""
        message = reason_of(error)
        if isinstance(error, APIStatusError):
            body = error.body if isinstance(error.body, dict) else {}
            message = f"{error.status_code}: {body.get('message') or message}"
        elif isinstance(error.__cause__, Exception):
            message = f"{message} ({reason_of(error.__cause__)})"
        return self.redacted(" ".join(message.split())[:300])

    def redacted(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _is_passing(error: Exception) -> bool:
    if isinstance(error, APIStatusError):
        return error.status_code in _PASSING or error.status_code >= 500
    if isinstance(error, APIError) and not isinstance(error, APIConnectionError):
        # an error in the middle of a stream, which has a code in its body at best
        code = error.code or ""
        return not code.startswith("4") or int(code) in _PASSING if code.isdecimal() else True
    return True


def _pause(error: Exception, attempts: int) -> float:
    """Seconds until the next attempt: the server's Retry-After, else growing and random ones."""
    headers = error.response.headers if isinstance(error, APIStatusError) else {}
    asked = headers.get("retry-after") or ""
    try:
        return max(0.0, float(asked))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(asked).timestamp() - time.time())
    except (ValueError, TypeError):
        pass
    return min(_LONGEST_PAUSE, 0.25 * 2**attempts) * random.uniform(0.75, 1.25)
