"""One row in flight: its tokens, its budget, and what a round adds to it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from fly.decoding.records import Counts, RequestRecord, zero_seconds
from fly.decoding.stopping import Decode, StopMatcher


@dataclass(frozen=True)
class Request:
    """What to decode. `budget`: most new tokens (>= 1). `tag`: the caller's own, handed back."""

    prompt: tuple[int, ...]
    budget: int
    stops: tuple[str, ...] = ()
    tag: Any = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt is empty: give at least one token")
        if self.budget < 1:
            raise ValueError(f"budget={self.budget}: must be at least 1")


@dataclass(frozen=True)
class RowVerdict:
    """One row of a Verdict, on the host. Lists are as long as the row's draft."""

    draft: list[int]
    accepted: int
    next_token: int
    native: list[bool]
    rolled_back: list[bool]


class Sequence:
    """The state of one request while it is decoded."""

    def __init__(self, request: Request, eos_ids: frozenset[int], decode: Decode) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.finish_reason: str | None = None
        self.prompt_tokens_reused = 0
        self.is_reported = False
        self.counts = Counts()
        self.seconds = zero_seconds()
        self._eos_ids = eos_ids
        self._stops = StopMatcher(request.stops, decode)

    @property
    def is_open(self) -> bool:
        return self.finish_reason is None

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        return self.request.budget - (len(self.tokens) - len(self.request.prompt))

    def commit(self, verdict: RowVerdict) -> Counts:
        """Append what the round decided, clipped at EOS, stop string and budget; its counts."""
        block = [*verdict.draft[: verdict.accepted], verdict.next_token]
        kept = self._clip(block)
        self.tokens.extend(block[:kept])
        from_draft = min(kept, verdict.accepted)
        native = sum(verdict.native[:from_draft])
        has_next = kept > verdict.accepted
        rejected = verdict.accepted < len(verdict.draft)
        counts = Counts(
            rounds=1,
            drafted=len(verdict.draft),
            native_accepted=native,
            deferred_accepted=from_draft - native,
            deferred_rolled_back=sum(verdict.rolled_back) if has_next else 0,
            corrections=int(has_next and rejected),
            bonus=int(has_next and not rejected),
            emitted=kept,
        )
        self.counts.add(counts)
        return counts

    def _clip(self, block: Seq[int]) -> int:
        """How many tokens of the block are kept; sets the finish reason if the row ends."""
        kept = min(len(block), self.remaining)
        reason = "length" if kept == self.remaining else None
        for index, token in enumerate(block[:kept]):
            if token in self._eos_ids:
                kept, reason = index + 1, "eos"
                break
        matched = self._stops.tokens_until_match(self.generated, block[:kept])
        if matched is not None and (matched < kept or reason != "eos"):
            kept, reason = matched, "stop"
        self.finish_reason = reason
        return kept

    def record(self) -> RequestRecord:
        assert self.finish_reason is not None
        return RequestRecord(
            request=self.request,
            tokens=self.generated,
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.request.prompt),
            prompt_tokens_reused=self.prompt_tokens_reused,
            counts=self.counts,
            seconds=self.seconds,
        )
