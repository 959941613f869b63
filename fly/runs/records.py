"""Counts per round, per request and per run. Counts are kept; rates are divided once, at the end.

docs/compare.md: a round is one target verification pass; tau, the mean acceptance length, is
emitted tokens per round; emitted = native_accepted + deferred_accepted + corrections + bonus.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from statistics import fmean
from typing import Any

from typing_extensions import Self

DECODING = ("draft", "verify", "other")
TIMED = ("prefill", *DECODING)  # what an end-to-end speed is made of
# recording: traces and their entropies, progress and other observers
PHASES = (*TIMED, "recording", "compile")
# Where draft tokens come from: the letter in traces, the key in statistics.
SOURCES = {
    "d": "draft_model",
    "n": "own_text",  # the sequence's own prompt and output
    "e": "earlier_run",
    "s": "sibling",  # in old runs: another sample of the same prompt
    "o": "other_document",
}


@dataclass
class Sums:
    """Counts that add up, field by field."""

    def add(self, other: Self) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Counts(Sums):
    """Sums over rounds. Nothing past a rejection, EOS, stop string or budget counts.

    A token counts once it is final; while a deferral's window is open across rounds, the deferred
    token and all that follow it are not.
    """

    rounds: int = 0
    drafted: int = 0
    native_accepted: int = 0
    deferred_accepted: int = 0
    deferred_rolled_back: int = 0
    corrections: int = 0
    bonus: int = 0
    emitted: int = 0
    discarded: int = 0  # tokens of earlier rounds that a rollback dropped; in no other count


@dataclass
class SourceCounts(Sums):
    """Of one source of draft tokens."""

    drafted: int = 0
    # those that stand in the output, once they are final, as in `Counts`; deferred ones too
    accepted: int = 0


class CountsBySource(dict[str, SourceCounts]):
    """By the letter in `SOURCES`; a source that drafted nothing is not in it."""

    @classmethod
    def of_line(cls, line: Mapping[str, Mapping[str, int]]) -> CountsBySource:
        """From `as_dict`'s form."""
        letters = {key: letter for letter, key in SOURCES.items()}
        return cls({letters[key]: SourceCounts(**counts) for key, counts in line.items()})

    def count(self, drafted: str, accepted: str) -> None:
        """Both with one letter per token."""
        for letter in {*drafted, *accepted}:
            self._add(letter, SourceCounts(drafted.count(letter), accepted.count(letter)))

    def merge(self, other: CountsBySource) -> None:
        for letter, counts in other.items():
            self._add(letter, counts)

    def _add(self, letter: str, counts: SourceCounts) -> None:
        self.setdefault(letter, SourceCounts()).add(counts)

    def as_dict(self) -> dict[str, dict[str, int]]:
        return {key: self[letter].as_dict() for letter, key in SOURCES.items() if letter in self}


@dataclass
class Positions(Sums):
    """Rounds by the position in the draft, from the first; the lists may differ in length.

    A round counts once its tokens are final, as in `Counts`; a draft that the end of the output
    cuts short counts whole as drafted. sum(drafted) and sum(accepted) are the draft tokens of
    `Counts`.
    """

    drafted: list[int] = field(default_factory=list)  # whose draft reached this position
    # of those, where every earlier position was accepted
    reached: list[int] = field(default_factory=list)
    # where this one was, too: matches, and deferrals that stand
    accepted: list[int] = field(default_factory=list)

    def add_round(self, drafted: int, accepted: int, rounds: int = 1) -> None:
        """So many rounds of so many draft tokens, whose first `accepted` stand in the output."""
        if not 0 <= accepted <= drafted:
            raise ValueError(f"accepted={accepted} of {drafted} draft tokens: must be within them")
        reached = min(drafted, accepted + 1)
        self.add(Positions([rounds] * drafted, [rounds] * reached, [rounds] * accepted))

    def add(self, other: Self) -> None:
        for item in fields(self):
            pairs = zip_longest(getattr(self, item.name), getattr(other, item.name), fillvalue=0)
            setattr(self, item.name, [own + more for own, more in pairs])

    @property
    def drafts(self) -> int:
        """Rounds with a draft."""
        return self.drafted[0] if self.drafted else 0

    @property
    def unconditional(self) -> list[float]:
        """By position, the share of all drafts that were accepted up to it."""
        pairs = zip_longest(self.accepted, self.drafted, fillvalue=0)
        return [accepted / self.drafts for accepted, _ in pairs]

    @property
    def conditional(self) -> list[float]:
        """By position, the share of the drafts that reached it whose token there was accepted."""
        pairs = zip_longest(self.accepted, self.reached, fillvalue=0)
        return [accepted / reached for accepted, reached in pairs]


@dataclass
class Lengths(Sums):
    """What mean acceptance lengths are made of."""

    emitted: int = 0
    rounds: int = 0
    accepted: int = 0  # draft tokens
    drafts: int = 0  # rounds with one

    def add(self, other: Self) -> None:
        """Where one has tokens without rounds, which a server has not told, the sum has none."""
        is_told = all(each.rounds or not each.emitted for each in (self, other))
        super().add(other)
        self.rounds *= is_told

    @classmethod
    def of(cls, counts: Counts, positions: Positions) -> Lengths:
        return cls(counts.emitted, counts.rounds, sum(positions.accepted), positions.drafts)

    @property
    def tau(self) -> float | None:
        return self.emitted / self.rounds if self.rounds else None

    @property
    def al(self) -> float | None:
        return 1 + self.accepted / self.drafts if self.drafts else None


def mean_lengths(documents: Collection[Lengths]) -> dict[str, float | None]:
    """tau and AL of all documents together, to which long outputs add more rounds, and the means
    of the documents' own, in which all count the same. None where there is nothing to divide by."""
    whole = Lengths()
    for document in documents:
        whole.add(document)
    found: dict[str, float | None] = {}
    for name in ("tau", "al"):
        own = [getattr(document, name) for document in documents]
        own = [value for value in own if value is not None]
        found[name] = _round(getattr(whole, name))
        found[f"{name}_document_mean"] = _round(fmean(own)) if own else None
    return found


def by_position(shares: Sequence[float]) -> str:
    """Shares as in `0.86 0.74 0.62 ...`, at most 8."""
    shown = " ".join(f"{share:.2f}" for share in shares[:8])
    return f"{shown} ..." if len(shares) > 8 else shown


def zero_seconds() -> dict[str, float]:
    return dict.fromkeys(PHASES, 0.0)


@dataclass(frozen=True)
class RoundRecord:
    """One sequence's round, as values, for observers (progress, log, traces)."""

    request: Any  # what is decoded (fly.speculation.sequence.Request)
    number: int  # of the round, from 1
    counts: Counts
    # draft, matches, target_tokens, entropy: as in fly.speculation.sequence.Verdict
    draft: list[int]
    matches: list[bool]
    target_tokens: list[int]
    drafted_by: str  # one letter of `SOURCES` per draft token
    start: int  # tokens generated before the round, provisional ones included
    length: int  # and after it
    # places among the generated tokens of mismatches that stand, for now or for good
    deferred: list[int]
    rolled_back: int | None  # the place of a recovered token that replaces a deferral
    open_at: int | None  # the deferral still open
    finish: str | None  # why the request ended; None while it has not
    entropy: list[float] | None = None


Observer = Callable[[RoundRecord], None]


@dataclass
class RequestRecord:
    """One finished request."""

    request: Any
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    prompt_tokens_reused: int
    counts: Counts
    seconds: dict[str, float]  # its share of each pass that it took part in
    sources: CountsBySource = field(default_factory=CountsBySource)
    positions: Positions = field(default_factory=Positions)
    # from the end of its prefill to its own end, while others were decoded and prefilled beside it;
    # None if the engine does not say
    wall_seconds: float | None = None
    text: str | None = None  # of an engine that has no token ids
    server: dict[str, Any] | None = None  # what a server's answer took and told
    # whether a thought was not closed; None unless the rule asks where the model thinks
    unclosed_thinking: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        wall = self.wall_seconds
        told = {"server": self.server, "unclosed_thinking": self.unclosed_thinking}
        return {
            **{key: value for key, value in told.items() if value is not None},
            **self.counts.as_dict(),
            **rates(self.counts, self.seconds),
            "al": _round(Lengths.of(self.counts, self.positions).al),
            "sources": self.sources.as_dict(),
            "positions": self.positions.as_dict(),
            "wall_seconds": None if wall is None else round(wall, 6),
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_reused": self.prompt_tokens_reused,
            "seconds": {phase: round(value, 6) for phase, value in self.seconds.items()},
        }


@dataclass
class RunStats:
    """Sums over the requests of a run."""

    requests: int = 0
    prompt_tokens: int = 0
    prompt_tokens_reused: int = 0
    peak_memory_bytes: int = 0
    ended_at_limit: int = 0  # requests whose answers the budget cut off
    unclosed_thinking: int = 0  # see `RequestRecord`
    counts: Counts = field(default_factory=Counts)
    seconds: dict[str, float] = field(default_factory=zero_seconds)
    sources: CountsBySource = field(default_factory=CountsBySource)
    positions: Positions = field(default_factory=Positions)
    # by task and document id
    documents: dict[tuple[str, int], Lengths] = field(default_factory=dict)

    def add_request(self, record: RequestRecord) -> None:
        instance = record.request.tag
        asked = {"task": instance.task_name, "doc_id": instance.doc_id}
        self.merge(self.of_line({**asked, **record.as_dict()}))

    @classmethod
    def of_line(cls, record: Mapping[str, Any]) -> RunStats:
        """The share of one request, by its task, document and `RequestRecord.as_dict`."""
        counts = Counts(**{item.name: record[item.name] for item in fields(Counts)})
        positions = Positions(**record.get("positions", {}))
        return cls(
            requests=1,
            prompt_tokens=record["prompt_tokens"],
            prompt_tokens_reused=record["prompt_tokens_reused"],
            ended_at_limit=record.get("finish_reason") == "length",
            unclosed_thinking=bool(record.get("unclosed_thinking")),
            counts=counts,
            seconds=dict(record["seconds"]),
            sources=CountsBySource.of_line(record.get("sources", {})),
            positions=positions,
            documents={(record["task"], record["doc_id"]): Lengths.of(counts, positions)},
        )

    def merge(self, other: RunStats) -> None:
        """Add another share. Seconds of processes that ran side by side add up, too."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.prompt_tokens_reused += other.prompt_tokens_reused
        self.ended_at_limit += other.ended_at_limit
        self.unclosed_thinking += other.unclosed_thinking
        self.peak_memory_bytes = max(self.peak_memory_bytes, other.peak_memory_bytes)
        self.counts.add(other.counts)
        for phase, value in other.seconds.items():
            self.seconds[phase] += value
        self.sources.merge(other.sources)
        self.positions.add(other.positions)
        for document, lengths in other.documents.items():
            self.documents.setdefault(document, Lengths()).add(lengths)

    def as_dict(self) -> dict[str, Any]:
        """The `stats` of the results file."""
        tasks: dict[str, list[Lengths]] = defaultdict(list)
        for (task, _), lengths in self.documents.items():
            tasks[task].append(lengths)
        return {
            "requests": self.requests,
            "ended_at_limit": self.ended_at_limit,
            "unclosed_thinking": self.unclosed_thinking,
            **self.counts.as_dict(),
            **rates(self.counts, self.seconds),
            **mean_lengths(self.documents.values()),
            "tasks": {
                task: {"documents": len(documents), **mean_lengths(documents)}
                for task, documents in tasks.items()
            },
            "sources": self.sources.as_dict(),
            "positions": self.positions.as_dict(),
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_reused": self.prompt_tokens_reused,
            "peak_memory_bytes": self.peak_memory_bytes,
            "seconds": {phase: round(value, 3) for phase, value in self.seconds.items()},
        }


def rates(counts: Counts, seconds: dict[str, float]) -> dict[str, float | None]:
    """tau, decode_tok_s (without prefill) and end_to_end_tok_s; None where nothing was decoded."""
    decode = sum(seconds[phase] for phase in DECODING)
    return {
        "tau": _ratio(counts.emitted, counts.rounds),
        "decode_tok_s": _ratio(counts.emitted, decode),
        "end_to_end_tok_s": _ratio(counts.emitted, decode + seconds["prefill"]),
    }


def _ratio(numerator: float, denominator: float) -> float | None:
    return round(numerator / denominator, 4) if denominator > 0 else None


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
