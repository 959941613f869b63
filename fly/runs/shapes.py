"""What the files of a run hold, as far as fly reads it: whatever else is there is left alone."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    TypeAdapter,
    with_config,
)
from typing_extensions import NotRequired, TypedDict

from fly.reading import Name

_STRICT = ConfigDict(strict=True)
_Ids = list[NonNegativeInt]


@with_config(ConfigDict(strict=True, extra="forbid"))
class _Seconds(TypedDict):
    prefill: NonNegativeFloat
    draft: NonNegativeFloat
    verify: NonNegativeFloat
    other: NonNegativeFloat
    recording: NotRequired[NonNegativeFloat]
    compile: NotRequired[NonNegativeFloat]


@with_config(_STRICT)
class _Stats(TypedDict):
    requests: NonNegativeInt
    emitted: NonNegativeInt
    rounds: NonNegativeInt
    tau: float | None
    seconds: _Seconds


@with_config(_STRICT)
class _PairConfig(TypedDict):
    target_model_path: str
    total_gen_tok: int | None
    seed: int | None
    draft_model_path: NotRequired[str | None]
    spd_k: NotRequired[int]


@with_config(_STRICT)
class _Sampling(TypedDict):
    temperature: float


@with_config(_STRICT)
class _Entry(TypedDict):
    """`config.fly` of the results."""

    mode: str
    dtype: str
    config: _PairConfig
    started: NotRequired[Name]
    drafter: NotRequired[str | None]
    sampling: NotRequired[list[_Sampling] | None]
    device: NotRequired[dict[str, Any]]
    preparation: NotRequired[dict[str, Any] | None]
    stats: NotRequired[_Stats]
    resumed: NotRequired[dict[str, Any] | None]


@with_config(_STRICT)
class _Device(TypedDict):
    name: str
    threads: int | None


@with_config(_STRICT)
class _Drawn(TypedDict):
    """What `fly plot` needs of an entry, besides."""

    drafter: str | None
    device: _Device
    stats: _Stats


@with_config(_STRICT)
class _RunConfig(TypedDict):
    model: str
    model_args: NotRequired[dict[str, Any] | str | None]
    fly: NotRequired[_Entry]


_Results = TypedDict(
    "_Results",
    {
        "results": dict[str, dict[str, Any]],
        "configs": dict[Name, dict[str, Any]],
        "config": _RunConfig,
        "versions": NotRequired[dict[str, Any]],
        "n-shot": NotRequired[dict[str, int | None]],
        "higher_is_better": NotRequired[dict[str, dict[str, Any] | None]],
        "task_hashes": NotRequired[dict[str, str]],
    },
)


@with_config(_STRICT)
class _Sample(TypedDict):
    doc_id: NonNegativeInt
    doc: Any
    target: str
    arguments: dict[str, dict[str, Any]]
    resps: list[list[Any] | str]
    filtered_resps: list[Any]
    filter: str
    metrics: list[str]
    doc_hash: str
    prompt_hash: str
    target_hash: str


@with_config(_STRICT)
class _Request(TypedDict):
    task: str
    doc_id: NonNegativeInt
    emitted: NonNegativeInt
    rounds: NonNegativeInt
    seconds: _Seconds


@with_config(_STRICT)
class _Resumable(_Request):
    """A record from which a run goes on."""

    idx: int
    repeat: int
    prompt_tokens: int
    prompt_tokens_reused: int
    drafted: int
    native_accepted: int
    deferred_accepted: int
    deferred_rolled_back: int
    corrections: int
    bonus: int
    discarded: int


@with_config(_STRICT)
class _Traced(TypedDict):
    """Whose round it is."""

    task_name: str
    doc_id: NonNegativeInt
    idx: int
    repeat: int
    request: NonNegativeInt


@with_config(_STRICT)
class _Round(TypedDict):
    task_name: str
    doc_id: NonNegativeInt
    request: NonNegativeInt
    round: NonNegativeInt
    start: NonNegativeInt
    draft: _Ids
    by: Annotated[str, Field(pattern=r"^[nd]*$")]
    native: Annotated[str, Field(pattern=r"^[01]*$")]
    choice: Annotated[_Ids, Field(min_length=1)]
    entropy: NotRequired[list[float] | None]
    deferred: _Ids
    rolled_back: NonNegativeInt | None
    length: NonNegativeInt
    finish: str | None


@with_config(_STRICT)
class _Token(TypedDict):
    """`text`, or `bytes` in hexadecimal where they are no text."""

    id: NonNegativeInt
    text: NotRequired[str]
    bytes: NotRequired[Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$")]]


OBJECT: TypeAdapter[Any] = TypeAdapter(dict[str, Any])
RESULTS: TypeAdapter[Any] = TypeAdapter(_Results)
DRAWN: TypeAdapter[Any] = TypeAdapter(_Drawn)
NAME: TypeAdapter[Any] = TypeAdapter(Name)
SAMPLE: TypeAdapter[Any] = TypeAdapter(_Sample)
REQUEST: TypeAdapter[Any] = TypeAdapter(_Request)
RESUMABLE: TypeAdapter[Any] = TypeAdapter(_Resumable)
TRACED: TypeAdapter[Any] = TypeAdapter(_Traced)
ROUND: TypeAdapter[Any] = TypeAdapter(_Round)
TOKEN: TypeAdapter[Any] = TypeAdapter(_Token)
