"""What fly reads in the files of a run, as types; `check` refuses what is of another shape.

Keys that no type here names are ignored, so that files of other versions can be read.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
    with_config,
)
from typing_extensions import NotRequired, TypedDict

from fly import reading
from fly.errors import FlyError
from fly.reading import Name

_Ids = list[NonNegativeInt]


@with_config(ConfigDict(extra="forbid"))
class Seconds(TypedDict):
    prefill: NonNegativeFloat
    draft: NonNegativeFloat
    verify: NonNegativeFloat
    other: NonNegativeFloat
    recording: NotRequired[NonNegativeFloat]
    compile: NotRequired[NonNegativeFloat]


class _Stats(TypedDict):
    requests: NonNegativeInt
    emitted: NonNegativeInt
    rounds: NonNegativeInt
    tau: float | None
    seconds: Seconds


class _PairConfig(TypedDict):
    target_model_path: str
    total_gen_tok: int | None
    seed: int | None
    draft_model_path: NotRequired[str | None]
    spd_k: NotRequired[int]


class _Sampling(TypedDict):
    temperature: float


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


class _RunConfig(TypedDict):
    model: str
    model_args: NotRequired[dict[str, Any] | str | None]
    fly: NotRequired[_Entry]


Results = TypedDict(
    "Results",
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


class SampleLine(TypedDict):
    """One document in lm-eval's samples; its scores are there too, by the metric's name."""

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


class RequestLine(TypedDict):
    """fly's record of a finished request. docs/definitions.md defines the keys."""

    task: str
    doc_id: NonNegativeInt
    emitted: NonNegativeInt
    rounds: NonNegativeInt
    seconds: Seconds


class ResumableLine(RequestLine):
    """A record that `--resume` goes on from."""

    idx: int
    repeat: int
    text: str
    prompt_tokens: int
    prompt_tokens_reused: int
    drafted: int
    native_accepted: int
    deferred_accepted: int
    deferred_rolled_back: int
    corrections: int
    bonus: int
    discarded: int


class _TraceLine(TypedDict):
    task_name: str
    doc_id: NonNegativeInt
    request: NonNegativeInt


class TracedLine(_TraceLine):
    """Which request a line of a trace is of, for `--resume`."""

    idx: int
    repeat: int


class RoundLine(_TraceLine):
    """One round of a request. docs/traces.md defines the keys."""

    idx: NotRequired[int]
    repeat: NotRequired[int]
    round: NonNegativeInt
    start: NonNegativeInt
    draft: _Ids
    by: Annotated[str, Field(pattern=r"^[nd]*$")]
    native: Annotated[str, Field(pattern=r"^[01]*$")]
    choice: Annotated[_Ids, Field(min_length=1)]
    entropy: NotRequired[list[float] | None]
    deferred: _Ids
    rolled_back: NonNegativeInt | None
    open: NotRequired[NonNegativeInt | None]
    length: NonNegativeInt
    finish: str | None


class TokenLine(TypedDict):
    """`text`, or `bytes` in hexadecimal if they are not valid UTF-8."""

    id: NonNegativeInt
    text: NotRequired[str]
    bytes: NotRequired[Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$")]]


class _Arguments(TypedDict):
    output_path: str


class Manifest(TypedDict):
    started: Name
    finished: bool
    results: str | None
    resumed: list[str]
    working_directory: str
    below: bool
    arguments: _Arguments


def check(value: Any, shape: Any, where: str) -> None:
    """Raise FlyError if the value is of another shape; it is not changed. Types are strict."""
    try:
        _adapter(shape).validate_python(value, strict=True)
    except ValidationError as error:
        raise FlyError(reading.problem(error, where)) from None


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)
