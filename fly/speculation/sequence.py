"""One running sequence: its tokens, its budget, and what a round adds to it.

While a deferral's window is open, its token and all after it are provisional: they are decoded
from, but neither final, counted nor returned until the window closes. A rollback replaces the
deferred token by the recovered token, the target's own, and drops what followed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from fly.runs.records import (
    Counts,
    CountsBySource,
    Positions,
    RequestRecord,
    RoundRecord,
    zero_seconds,
)
from fly.speculation.rules.base import Rule
from fly.speculation.rules.judged import JudgedDraft, Resolution
from fly.speculation.running_text import RunningText
from fly.speculation.sampling import GREEDY, Noise, NoiseStream, Sampling
from fly.speculation.stop_strings import BROKEN, Decode, StopMatcher


@dataclass(frozen=True)
class Request:
    """What to decode."""

    prompt: tuple[int, ...]
    budget: int  # most new tokens (>= 1)
    stops: tuple[str, ...] = ()
    tag: Any = None  # the caller's own, handed back
    sampling: Sampling = GREEDY
    seed: int = 0  # where a sampled request's random numbers start; nothing else influences them
    repeat: int = 0  # how many equal requests of the same document came before it
    # token ids that earlier runs gave for the same document and prompt; they may be drafted from
    earlier: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt is empty: give at least one token")
        if self.budget < 1:
            raise ValueError(f"budget={self.budget}: must be at least 1")

    @property
    def size(self) -> int:
        """Most tokens that it may come to."""
        return len(self.prompt) + self.budget


class Source(Enum):
    """Why a token is in the output."""

    MATCH = "match"  # drafted, and the target's own
    DEFERRED = "deferred"  # drafted, not the target's own, let in
    RECOVERED = "recovered"  # the target's own, in place of a rejected draft token
    ROLLBACK = "rollback"  # the same, where a deferral was rolled back
    BONUS = "bonus"  # the target's own, after a draft that stands whole


@dataclass(frozen=True)
class Verdict:
    """What the target and the rule say of one sequence's draft."""

    draft: list[int]
    matches: list[bool]  # as long as the draft
    target_tokens: list[int]  # the target's own, one more than the draft
    resolution: Resolution
    by: str  # who drafted each token, a letter of fly.runs.records.SOURCES
    # of the target before every one of its tokens, for traces; None when nothing asks
    entropy: list[float] | None = None

    @property
    def leading_matches(self) -> int:
        return [*self.matches, False].index(False)

    @property
    def earned(self) -> int:
        """Draft tokens that speak for the draft: those that matched, where an earlier deferral took
        the round back, else those that stand."""
        resolution = self.resolution
        return self.leading_matches if resolution.rolls_back_earlier else resolution.accepted


@dataclass(frozen=True)
class OpenDeferral:
    """A deferral whose window later rounds fill."""

    at: int  # its index in the generated tokens
    recovered_token: int  # what replaces it in a rollback
    matches: int  # how many its window has seen


class Sequence:
    """The state of one request while it is decoded.

    stops: finds where its stop strings end it. decode_lines: token ids to text in which special
    tokens are line breaks, for rules that look at texts; `stops.decode` by default.
    """

    def __init__(
        self,
        request: Request,
        eos_ids: frozenset[int],
        stops: StopMatcher,
        decode_lines: Decode | None = None,
    ) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.finish_reason: str | None = None
        self.prompt_tokens_reused = 0
        self.is_reported = False
        self.counts = Counts()
        self.seconds = zero_seconds()
        self.prefilled_at = 0.0  # by the engine's clock, when its first prefill ended
        self.open: OpenDeferral | None = None
        self.by_source = CountsBySource()
        self.positions = Positions()
        self.sources: list[Source] = []  # one per generated token
        self._by = ""  # who drafted each generated token; a space for the target's own
        self._counted = 0  # generated tokens that are final
        self._provisional: list[tuple[int, int]] = []  # rounds: where each starts, what it drafted
        self._eos_ids = eos_ids
        self._stops = stops
        self._text = RunningText(decode_lines or stops.decode)
        self._whole_text = RunningText(stops.decode)
        self._prompt_text: str | None = None  # once a rule has asked
        self._stream = None if request.sampling.is_greedy else NoiseStream(request.seed)
        self._found: dict[tuple[int, ...], tuple[int, int | None]] = {}  # see `_last_of`
        self._rule_state: Any = None  # what the rule has kept of the last round
        self._skipped = 0  # places whose random numbers are not those of an output's token

    @property
    def is_open(self) -> bool:
        return self.finish_reason is None

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        return self.request.budget - (len(self.tokens) - len(self.request.prompt))

    @property
    def final_length(self) -> int:
        """How many of `tokens` no rollback can take back."""
        return len(self.request.prompt) + self._counted

    def draft_until_stop(self, draft: list[int]) -> int | None:
        """How many of the draft tokens complete the first stop string, if all of them stand."""
        provisional = self.generated[self._counted :]
        new = [*provisional, *draft]
        matched = self._stops.tokens_until_match(self.generated[: self._counted], new)
        if matched is None or matched <= len(provisional):
            return None
        return matched - len(provisional)

    def noise(self, count: int) -> Noise:
        """The random numbers of a round of `count` draft tokens of a request that samples.

        A round that failed (out of memory) is done again with the numbers it had.
        """
        assert self._stream is not None, "nothing is drawn for a greedy request"
        return self._stream.at(len(self.generated) + self._skipped, count)

    def judge(self, rule: Rule, judged: JudgedDraft, by: str | None = None) -> Verdict:
        """What the rule decides of a draft, given this sequence's ends and its open deferral.

        judged: what it says of the sequence is filled in here. by: who drafted each
        token; the draft model by default.
        """
        resolution = rule.resolve(
            replace(
                judged,
                eos_ids=self._eos_ids,
                stop_at=lambda: self.draft_until_stop(judged.draft),
                open_matches=None if self.open is None else self.open.matches,
                start=len(self.generated),
                texts=self._texts,
                whole_text=lambda new: self._whole_text.of([*self.tokens, *new], self.final_length),
                last_of=self._last_of,
                state=self._rule_state,
            )
        )
        by = "d" * len(judged.draft) if by is None else by
        targets = judged.target_tokens
        if resolution.recovered is not None:
            at = resolution.accepted
            targets = [*targets[:at], resolution.recovered, *targets[at + 1 :]]
        return Verdict(judged.draft, judged.matches, targets, resolution, by)

    def _texts(self, tokens: list[int]) -> tuple[str, str]:
        """Of the prompt, and of the output with these tokens behind it."""
        if self._prompt_text is None:
            prompt = self.request.prompt
            self._prompt_text = self._text.of(prompt, len(prompt)).rstrip(BROKEN)
        whole = self._text.of([*self.tokens, *tokens], self.final_length)
        return self._prompt_text, whole[len(self._prompt_text) :]

    def _last_of(self, ids: tuple[int, ...]) -> int | None:
        """The last of the tokens that is one of these. Final ones are looked at once."""
        count, last = self._found.get(ids, (0, None))
        for token in self.tokens[count : self.final_length]:
            last = token if token in ids else last
        self._found[ids] = (self.final_length, last)
        provisional = reversed(self.tokens[self.final_length :])
        return next((token for token in provisional if token in ids), last)

    def begin_with(self, token: int) -> None:
        """The output's first token where the prefill pass gives one: the target's own, of no round
        and in no count."""
        self._extend(Verdict([], [], [token], Resolution(0), ""))
        self._end()
        self._counted = len(self.generated)

    def commit(self, verdict: Verdict) -> Counts:
        """Append or roll back what the round decided; clip at EOS, stop and budget; its counts.

        Counts are of tokens that became final in this round.
        """
        counts = Counts(rounds=1, drafted=len(verdict.draft))
        self._rule_state, before = verdict.resolution.state, len(self.generated)
        if verdict.resolution.rolls_back_earlier:
            counts.discarded += self._roll_back(before)
        else:
            self._extend(verdict)
        if not self._end() and self.open is not None and self.remaining <= 0:
            counts.discarded += self._roll_back(before)  # the window cannot be filled any more
            self._end()
        self._count(counts, verdict.by)
        self._count_positions(before, len(verdict.draft))
        self.counts.add(counts)
        if self.sources[-1] is Source.ROLLBACK or verdict.resolution.spends_draft:
            # numbers of the tokens after it have decided, too: they are spent
            self._skipped += before + len(verdict.draft) + 1 - len(self.generated)
        return counts

    def round_record(self, verdict: Verdict, counts: Counts, start: int) -> RoundRecord:
        """The round that `commit` has just ended, for observers.

        start: how many tokens were generated before the round.
        """
        length = len(self.generated)
        rolled_back = length - 1 if self.sources[-1] is Source.ROLLBACK else None
        end = length if rolled_back is None else rolled_back
        deferred = [start + position for position in verdict.resolution.deferred]
        return RoundRecord(
            request=self.request,
            number=self.counts.rounds,
            counts=counts,
            draft=verdict.draft,
            matches=verdict.matches,
            target_tokens=verdict.target_tokens,
            drafted_by=verdict.by,
            start=start,
            length=length,
            deferred=[index for index in deferred if index < end],
            rolled_back=rolled_back,
            open_at=None if self.open is None else self.open.at,
            finish=self.finish_reason,
            entropy=verdict.entropy,
        )

    def _extend(self, verdict: Verdict) -> None:
        resolution, start = verdict.resolution, len(self.generated)
        block = [*verdict.draft[: resolution.accepted], verdict.target_tokens[resolution.accepted]]
        self.tokens += block
        self._by += verdict.by[: resolution.accepted] + " "
        self.sources += [
            Source.DEFERRED if position in resolution.deferred else Source.MATCH
            for position in range(resolution.accepted)
        ]
        if resolution.accepted == len(verdict.draft):
            self.sources.append(Source.BONUS)
        else:
            self.sources.append(Source.ROLLBACK if resolution.rolled_back else Source.RECOVERED)
        if resolution.open_at is None:
            self.open = None
            return
        assert resolution.open_matches is not None
        if resolution.open_at >= 0:
            recovered_token = verdict.target_tokens[resolution.open_at]
            at = start + resolution.open_at
        else:
            assert self.open is not None
            at, recovered_token = self.open.at, self.open.recovered_token
        self.open = OpenDeferral(at, recovered_token, resolution.open_matches)

    def _roll_back(self, before: int) -> int:
        """Put the recovered token in place of the open deferral.

        Returns how many of the `before` tokens of earlier rounds that drops.
        """
        assert self.open is not None
        at, dropped = self.open.at, max(0, before - self.open.at)
        self._truncate(at)
        self.tokens.append(self.open.recovered_token)
        self._by += " "
        self.sources.append(Source.ROLLBACK)
        self.open = None
        return dropped

    def _truncate(self, count: int) -> None:
        del self.tokens[len(self.request.prompt) + count :]
        del self.sources[count:]
        self._by = self._by[:count]

    def _end(self) -> bool:
        """Clip at the first EOS, stop or budget and set the finish reason, if there is one.

        An open deferral before that end stands: what ended the sequence was a match. Not so if the
        budget ended it, or a stop string that the deferred token itself completes.
        """
        end, reason = self._first_end()
        if self.open is not None and end is not None:
            if reason == "length" and self.open.at < end:
                return False
            if end - 1 == self.open.at and not self._eos_after(end):
                return False
        if end is None:
            return False
        self._truncate(end)
        self.open = None
        self.finish_reason = reason
        return True

    def _first_end(self) -> tuple[int | None, str | None]:
        """(count of generated tokens up to the first EOS, stop or budget, its name)."""
        generated, start = self.generated, self._counted
        end = min(len(generated), self.request.budget)
        reason = "length" if end == self.request.budget else None
        for index in range(start, end):
            if generated[index] in self._eos_ids:
                end, reason = index + 1, "eos"
                break
        matched = self._stops.tokens_until_match(generated[:start], generated[start:end])
        if matched is not None and (start + matched < end or reason != "eos"):
            end, reason = start + matched, "stop"
        return (end, reason) if reason is not None else (None, None)

    def _eos_after(self, start: int) -> bool:
        return not self._eos_ids.isdisjoint(self.generated[start:])

    def _count(self, counts: Counts, drafted: str) -> None:
        """Count the tokens that became final, by their sources. drafted: by whom in this round."""
        final = self.open.at if self.open is not None else len(self.sources)
        self.by_source.count(drafted, self._by[self._counted : final].replace(" ", ""))
        fresh = self.sources[self._counted : final]
        self._counted = final
        counts.native_accepted = fresh.count(Source.MATCH)
        counts.deferred_accepted = fresh.count(Source.DEFERRED)
        counts.deferred_rolled_back = fresh.count(Source.ROLLBACK)
        counts.corrections = fresh.count(Source.RECOVERED) + counts.deferred_rolled_back
        counts.bonus = fresh.count(Source.BONUS)
        counts.emitted = len(fresh)

    def _count_positions(self, start: int, drafted: int) -> None:
        """Count the rounds since a deferral opened once no rollback can shorten them."""
        self._provisional.append((start, drafted))
        if self.open is not None:
            return
        for start, drafted in self._provisional:  # of a dropped round nothing is left at its start
            self.positions.add_round(drafted, f"{self._by[start:]} ".index(" "))
        self._provisional.clear()

    def record(self, ended_at: float) -> RequestRecord:
        """ended_at: by the engine's clock."""
        assert self.finish_reason is not None
        return RequestRecord(
            request=self.request,
            tokens=self.generated,
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.request.prompt),
            prompt_tokens_reused=self.prompt_tokens_reused,
            counts=self.counts,
            seconds=self.seconds,
            sources=self.by_source,
            positions=self.positions,
            wall_seconds=ended_at - self.prefilled_at,
        )
