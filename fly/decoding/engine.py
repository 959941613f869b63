"""The only decode loop: draft, verify, commit, for the rows in flight.

A finished row's slot goes to the next waiting request at once; rows always fill slots 0..n-1.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fly.decoding.records import Counts, RequestRecord
from fly.decoding.runner import ModelRunner
from fly.decoding.sequence import Request, RowVerdict, Sequence
from fly.decoding.stopping import Decode
from fly.decoding.verification import Relaxation, verify_greedy
from fly.drafters.base import Draft, Drafter


@dataclass(frozen=True)
class RoundRecord:
    """One row's round, for observers (progress, log, later traces)."""

    request: Request
    counts: Counts


Observer = Callable[[RoundRecord], None]


class Engine:
    """Decodes requests greedily with a target, a drafter and a verification rule.

    spd_k: most draft tokens per round. relaxation: None is exact verification.
    decode: token ids to text with special tokens kept, for stop strings.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter,
        *,
        spd_k: int,
        relaxation: Relaxation | None,
        eos_ids: frozenset[int],
        decode: Decode,
        observer: Observer = lambda record: None,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._spd_k = spd_k
        self._relaxation = relaxation
        self._eos_ids = eos_ids
        self._decode = decode
        self._observer = observer

    def run(self, requests: Iterable[Request]) -> Iterator[RequestRecord]:
        """Decode all requests; each record is yielded as soon as its row ends."""
        waiting = deque(requests)
        rows: list[Sequence] = []
        while waiting or rows:
            while waiting and len(rows) < len(self._target.lengths):
                self._admit(len(rows), waiting.popleft(), rows)
            self._round(rows)
            for slot in reversed(range(len(rows))):
                if rows[slot].finish_reason is not None:
                    yield self._retire(slot, rows).record()

    def _admit(self, slot: int, request: Request, rows: list[Sequence]) -> None:
        row = Sequence(request, self._eos_ids, self._decode)
        with self._timed("prefill", [row]):
            self._target.prefill(slot, row.tokens[:-1])
            self._drafter.admit(slot, row)
        rows.append(row)

    def _round(self, rows: list[Sequence]) -> None:
        # The last token of the budget needs no draft, and no draft may reach past the budget.
        limits = [min(self._spd_k, row.remaining - 1) for row in rows]
        with self._timed("draft", rows):
            draft = self._drafter.propose(rows, limits)
        with self._timed("verify", rows):
            verdicts = self._verify(rows, draft)
        with self._timed("other", rows):
            for slot, (row, verdict) in enumerate(zip(rows, verdicts)):
                counts = row.commit(verdict)
                self._target.keep(slot, len(row.tokens) - 1)
                self._drafter.commit(slot, row)
                self._observer(RoundRecord(row.request, counts))

    def _verify(self, rows: list[Sequence], draft: Draft) -> list[RowVerdict]:
        """One target pass over each row's last committed token and its draft."""
        feeds = [[row.tokens[-1], *chain] for row, chain in zip(rows, draft.tokens)]
        logits_BKV = self._target.extend(feeds)
        draft_BK, length_B = draft.padded(logits_BKV.device)
        verdict = verify_greedy(draft_BK, length_B, logits_BKV, self._relaxation)
        accepted, next_tokens, native, rolled_back = (
            tensor.tolist()
            for tensor in (
                verdict.accepted_B,
                verdict.next_token_B,
                verdict.native_BK,
                verdict.rolled_back_BK,
            )
        )
        return [
            RowVerdict(chain, accepted[b], next_tokens[b], native[b], rolled_back[b])
            for b, chain in enumerate(draft.tokens)
        ]

    def _retire(self, slot: int, rows: list[Sequence]) -> Sequence:
        """Take a finished row out; the last row moves into its slot."""
        finished = rows[slot]
        last = rows.pop()
        if last is not finished:
            self._target.move(len(rows), slot)
            self._drafter.move(len(rows), slot)
            rows[slot] = last
        return finished

    @contextmanager
    def _timed(self, phase: str, rows: list[Sequence]) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        share = (time.perf_counter() - start) / len(rows)
        for row in rows:
            row.seconds[phase] += share
