"""The only decode loop: draft, verify, commit, for the rows in flight.

A finished row's slot goes to the next waiting request at once; rows always fill slots 0..n-1.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fly.decoding.graphs import StaticPasses
from fly.decoding.memory import is_out_of_memory
from fly.decoding.records import Counts, RequestRecord
from fly.decoding.runner import ModelRunner
from fly.decoding.sequence import Request, RowVerdict, Sequence
from fly.decoding.stopping import Decode
from fly.decoding.verification import Relaxation, verify_greedy
from fly.drafters.base import Draft, Drafter
from fly.errors import FlyError

logger = logging.getLogger(__name__)


def _row_verdict(values: list[int], width: int) -> RowVerdict:
    """From one row of the tensor that `Engine._verify` brings to the host."""
    length, accepted, next_token = values[:3]
    starts = (3, 3 + width, 3 + 2 * width)
    draft, native, rolled_back = (values[start : start + length] for start in starts)
    return RowVerdict(
        draft, accepted, next_token, [bool(n) for n in native], [bool(r) for r in rolled_back]
    )


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
        reuse_prefixes: bool = True,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._spd_k = spd_k
        self._relaxation = relaxation
        self._eos_ids = eos_ids
        self._decode = decode
        self._observer = observer
        self._reuse_prefixes = reuse_prefixes

    def run(self, requests: Iterable[Request]) -> Iterator[RequestRecord]:
        """Decode all requests; each record is yielded as soon as its row ends.

        Out of memory halves the rows in flight; rows that were interrupted go on from where they
        were. Raises FlyError if one row alone does not fit.
        """
        ordered = list(requests)
        if self._reuse_prefixes:  # neighbours share the longest prefixes
            ordered.sort(key=lambda request: request.prompt)
        waiting = deque(Sequence(request, self._eos_ids, self._decode) for request in ordered)
        rows: list[Sequence] = []
        self._reserve(ordered)
        while waiting or any(row.is_open for row in rows):
            failure: Exception | None = None
            try:
                self._fill(rows, waiting)
                self._round(rows)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = error.with_traceback(None)  # it holds the tensors of the failed pass
            for row in rows:
                if not row.is_open and not row.is_reported:
                    row.is_reported = True
                    yield row.record()
            if failure is not None:
                waiting.extendleft(row for row in reversed(rows) if row.is_open)
                rows.clear()
                self._halve(failure)

    def _reserve(self, requests: list[Request]) -> None:
        """Room for the longest row, at once: growing later would drop every captured graph."""
        if self._target.static is not None and requests:
            longest = max(len(request.prompt) + request.budget for request in requests)
            self._target.reserve(min(longest, self._target.max_length) + self._spd_k + 1)

    def _fill(self, rows: list[Sequence], waiting: deque[Sequence]) -> None:
        """Give the slots of finished rows, then free ones, to waiting rows; close other gaps."""
        for slot in range(self._target.slots):
            if not waiting or (slot < len(rows) and rows[slot].is_open):
                continue
            self._admit(slot, waiting[0])
            rows[slot : slot + 1] = [waiting.popleft()]
        for slot in reversed(range(len(rows))):
            if rows[slot].is_open:
                continue
            last = rows.pop()
            if slot < len(rows):
                self._target.move(len(rows), slot)
                self._drafter.move(len(rows), slot)
                rows[slot] = last

    def _admit(self, slot: int, row: Sequence) -> None:
        with self._timed("prefill", [row]):
            reused = self._target.prefill(slot, row.tokens[:-1])
            self._drafter.admit(slot, row)
        if not row.generated:
            row.prompt_tokens_reused = reused

    def _halve(self, error: Exception) -> None:
        """Forget all K/V and go on with half of the slots."""
        slots = self._target.slots // 2
        if slots < 1:
            raise FlyError(
                "out of memory with one row in flight: lower max_length or max_gen_toks, or use a "
                "smaller model or dtype"
            ) from error
        logger.warning("out of memory: going on with %d rows in flight", slots)
        self._target.resize(slots)
        self._drafter.resize(slots)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _round(self, rows: list[Sequence]) -> None:
        # The last token of the budget needs no draft, and no draft may reach past the budget.
        limits = [min(self._spd_k, row.remaining - 1) for row in rows]
        with self._timed("draft", rows):
            draft = self._drafter.propose(rows, limits)
        with self._timed("verify", rows):
            verdicts = self._verify(rows, draft)
        with self._timed("other", rows):
            all_counts = [row.commit(verdict) for row, verdict in zip(rows, verdicts)]
            for slot, row in enumerate(rows):
                self._target.settle(slot, row.tokens, len(row.tokens) - 1)
            self._drafter.commit(rows, verdicts)
            for row, counts in zip(rows, all_counts):
                self._observer(RoundRecord(row.request, counts))

    def _verify(self, rows: list[Sequence], draft: Draft) -> list[RowVerdict]:
        """One target pass over each row's last committed token and its draft; one host sync."""
        start = time.perf_counter()
        logits_BKV = self._score(rows, draft)
        draft_BK, length_B = draft.padded(logits_BKV.device)
        verdict = verify_greedy(draft_BK, length_B, logits_BKV, self._relaxation)
        columns = (
            length_B[:, None],
            verdict.accepted_B[:, None],
            verdict.next_token_B[:, None],
            draft_BK,
            verdict.native_BK,
            verdict.rolled_back_BK,
        )
        on_host: list[list[int]] = torch.cat([part.long() for part in columns], dim=1).tolist()
        self._target.costs.observe(logits_BKV.shape[:2].numel(), time.perf_counter() - start)
        return [_row_verdict(values, draft_BK.shape[1]) for values in on_host]

    def _score(self, rows: list[Sequence], draft: Draft) -> Tensor:
        """Logits [B, K + 1, V] after the last committed token and after each drafted one."""
        if draft.tokens is not None:
            return self._target.extend([[r.tokens[-1], *c] for r, c in zip(rows, draft.tokens)])
        draft_BK, _ = draft.padded(self._target.device)
        last_B = torch.tensor([row.tokens[-1] for row in rows]).to(draft_BK.device)
        return self._target.extend_ids(torch.cat([last_B[:, None], draft_BK.clamp(min=0)], dim=1))

    @contextmanager
    def _timed(self, phase: str, rows: list[Sequence]) -> Iterator[None]:
        """Share the block's wall time among the rows; capturing graphs counts as compile time."""
        start, captured = time.perf_counter(), StaticPasses.all_seconds
        yield
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)
        captured = StaticPasses.all_seconds - captured
        elapsed = time.perf_counter() - start - captured
        for row in rows:
            row.seconds[phase] += elapsed / len(rows)
            row.seconds["compile"] += captured / len(rows)
