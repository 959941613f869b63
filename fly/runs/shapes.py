"""What fly reads in the files of a run, as types; `reading.check_shape` refuses others.

Keys that no type here names are ignored, so that files of other versions can be read.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    with_config,
)
from typing_extensions import NotRequired, TypedDict

from fly.reading import Name, TaskName
from fly.runs import output_ids
from fly.runs.records import SOURCES

_Ids = list[NonNegativeInt]


def _encodable(text: str) -> str:
    """JSON can spell half of a surrogate pair, which no tokenizer and no file takes."""
    text.encode()
    return text


Text = Annotated[str, AfterValidator(_encodable)]


@with_config(ConfigDict(extra="forbid"))
class Seconds(TypedDict):
    prefill: NonNegativeFloat
    draft: NonNegativeFloat
    verify: NonNegativeFloat
    other: NonNegativeFloat
    recording: NotRequired[NonNegativeFloat]
    compile: NotRequired[NonNegativeFloat]


@with_config(ConfigDict(extra="forbid"))
class DraftedFrom(TypedDict):
    """Of one source of draft tokens: how many it drafted, and how many stood in the output."""

    drafted: NonNegativeInt
    accepted: NonNegativeInt


# by the names in fly.runs.records.SOURCES
Sources = dict[Annotated[str, Field(pattern=f"^({'|'.join(SOURCES.values())})$")], DraftedFrom]


@with_config(ConfigDict(extra="forbid"))
class ByPosition(TypedDict):
    """fly.runs.records.Positions. Runs of earlier versions have none."""

    drafted: list[NonNegativeInt]
    reached: list[NonNegativeInt]
    accepted: list[NonNegativeInt]


class _Stats(TypedDict):
    requests: NonNegativeInt
    emitted: NonNegativeInt
    rounds: NonNegativeInt
    tau: float | None
    seconds: Seconds
    sources: NotRequired[Sources]
    positions: NotRequired[ByPosition]


class _PairConfig(TypedDict):
    target_model_path: str
    total_gen_tok: int | None
    seed: int | None
    draft_model_path: NotRequired[str | None]
    spd_k: NotRequired[int]


class _Sampling(TypedDict):
    temperature: float


class DraftRuns(TypedDict):
    """Earlier runs that were drafted from. docs/compare.md defines the keys."""

    runs: list[str]
    matched: NonNegativeInt
    changed: NonNegativeInt
    missing: NonNegativeInt
    untokenized: NonNegativeInt
    same_target: bool | None


class _Entry(TypedDict):
    """`config.fly` of the results."""

    mode: str
    dtype: str
    config: _PairConfig
    started: NotRequired[Name]
    engine: NotRequired[str]
    drafter: NotRequired[str | None]
    sampling: NotRequired[list[_Sampling] | None]
    device: NotRequired[dict[str, Any]]
    devices: NotRequired[PositiveInt]
    preparation: NotRequired[dict[str, Any] | None]
    stats: NotRequired[_Stats]
    draft_runs: NotRequired[DraftRuns | None]
    vllm: NotRequired[dict[str, Any]]
    server: NotRequired[dict[str, Any]]


class _RunConfig(TypedDict):
    model: str
    model_args: NotRequired[dict[str, Any] | str | None]
    fly: NotRequired[_Entry]


Results = TypedDict(
    "Results",
    {
        "results": dict[str, dict[str, Any]],
        "configs": dict[TaskName, dict[str, Any]],
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


class _ServerAnswer(TypedDict):
    seconds: NonNegativeFloat


class RequestLine(TypedDict):
    """fly's record of a finished request. docs/compare.md defines the keys."""

    task: str
    doc_id: NonNegativeInt
    emitted: NonNegativeInt
    rounds: NonNegativeInt
    seconds: Seconds
    wall_seconds: NotRequired[NonNegativeFloat | None]
    finish_reason: NotRequired[str]
    unclosed_thinking: NotRequired[bool]
    sources: NotRequired[Sources]
    positions: NotRequired[ByPosition]
    server: NotRequired[_ServerAnswer]


def _decodable(ids: str) -> str:
    output_ids.decode(ids)
    return ids


_Encoded = Annotated[str, AfterValidator(_decodable)]


class _Output(TypedDict):
    ids: _Encoded
    tokenizer: str


class OutputLine(TypedDict):
    """The part of a request's record that a later run drafts from."""

    task: str
    doc_id: NonNegativeInt
    prompt_hash: str
    text: Text
    repeat: NotRequired[NonNegativeInt]
    output: NotRequired[_Output]


class StoredOutputs(TypedDict):
    """Outputs of a task in a baseline file, by document id; one per request."""

    tokenizer: str
    ids: dict[str, list[_Encoded]]


class _StoredTask(TypedDict):
    documents: dict[str, dict[str, str]]
    outputs: NotRequired[StoredOutputs | None]


class Baseline(TypedDict):
    """The part of a baseline file that a later run drafts from."""

    target: dict[str, str | None]
    tasks: dict[str, _StoredTask]


class ResumableLine(RequestLine):
    """A record that `--resume` goes on from."""

    idx: int
    repeat: int
    text: Text
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
    """Which request a line of a trace is of, and the tokens that it names, for `--resume`."""

    idx: int
    repeat: int
    draft: NotRequired[_Ids]
    choice: NotRequired[_Ids]


class RoundLine(_TraceLine):
    """One round of a request. docs/report.md defines the keys."""

    idx: NotRequired[int]
    repeat: NotRequired[int]
    round: NonNegativeInt
    start: NonNegativeInt
    draft: _Ids
    by: Annotated[str, Field(pattern=f"^[{''.join(SOURCES)}]*$")]
    native: Annotated[str, Field(pattern=r"^[01]*$")]
    choice: Annotated[_Ids, Field(min_length=1)]
    entropy: NotRequired[list[float] | None]
    deferred: _Ids
    rolled_back: NonNegativeInt | None
    open: NotRequired[NonNegativeInt | None]
    length: NonNegativeInt
    finish: str | None


class TokenLine(TypedDict):
    """The text of a token in a trace, so that it can be read without the tokenizer. A token may be
    only a part of a UTF-8 character: then its `bytes` in hexadecimal instead of `text`."""

    id: NonNegativeInt
    text: NotRequired[Text]
    bytes: NotRequired[Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$")]]


class Arguments(TypedDict):
    """lm-eval's; key=value flags are kept as pairs."""

    output_path: str
    model_args: NotRequired[dict[str, Any]]
    gen_kwargs: NotRequired[dict[str, Any]]
    metadata: NotRequired[dict[str, Any]]
    hf_hub_log_args: NotRequired[dict[str, Any]]
    wandb_args: NotRequired[dict[str, Any]]
    wandb_config_args: NotRequired[dict[str, Any]]
    trackio_args: NotRequired[dict[str, Any]]


class _Model(TypedDict):
    """fly.models.fingerprint.hash_model."""

    path: str
    files: NotRequired[dict[str, str]]
    commit: NotRequired[str | None]


class ManifestShape(TypedDict):
    started: Name
    finished: bool
    results: str | None
    resumed: list[str]
    working_directory: str
    below: bool
    arguments: Arguments
    models: NotRequired[dict[str, _Model]]
