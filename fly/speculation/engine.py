"""The only decode loop: draft, verify, commit, for the rows in flight.

A finished row's slot goes to the next waiting request at once; rows always fill slots 0..n-1.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fly.errors import FlyError
from fly.execution.argmax import NotFiniteError, marked
from fly.execution.cuda_graphs import StaticPasses
from fly.execution.memory import is_out_of_memory
from fly.execution.model_runner import ModelRunner
from fly.runs.records import Counts, RequestRecord
from fly.speculation.draft_length import DraftLength, FixedLength
from fly.speculation.drafters.base import Draft, Drafter
from fly.speculation.rules.gates import Gate, entropy
from fly.speculation.rules.verification import Relaxation, judge, resolve
from fly.speculation.sampling import draw, rejection_sample
from fly.speculation.sequence import Request, RowVerdict, Sequence
from fly.speculation.stop_strings import Decode

if TYPE_CHECKING:
    from fly.config import EntropyKind

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoundRecord:
    """One row's round, for observers (progress, log, traces).

    start: how many tokens the row had generated before it, provisional ones included. length: the
    same after it. drafted_by: one letter per draft token, see `Draft`.
    """

    row: Sequence
    counts: Counts
    verdict: RowVerdict
    drafted_by: str
    start: int
    length: int


Observer = Callable[[RoundRecord], None]


class Engine:
    """Decodes requests with a target, a drafter and a verification rule.

    spd_k: most draft tokens per round. draft_length: how many of them are drafted; all by default.
    relaxation: None is exact verification.
    decode: token ids to text with special tokens kept, for stop strings.
    trace_entropy: also take the target's entropy before every draft token, for the observer.
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
        trace_entropy: EntropyKind | None = None,
        draft_length: DraftLength | None = None,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._spd_k = spd_k
        self._draft_length = draft_length or FixedLength(spd_k)
        self._relaxation = relaxation
        self._eos_ids = eos_ids
        self._decode = decode
        self._observer = observer
        self._reuse_prefixes = reuse_prefixes
        self._trace_entropy = trace_entropy
        used = {*target.devices, *drafter.devices}
        self._devices = [device for device in used if device.type == "cuda"]

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
        longest = max((len(r.prompt) + r.budget for r in ordered), default=0)
        while waiting or any(row.is_open for row in rows):
            failure: Exception | None = None
            try:
                self._reserve(longest)
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

    def _reserve(self, longest: int) -> None:
        """Room for the longest row, at once: growing later would drop every captured graph."""
        self._target.reserve_rows(longest, width=self._spd_k + 1)
        self._drafter.reserve(longest, self._spd_k)

    def _fill(self, rows: list[Sequence], waiting: deque[Sequence]) -> None:
        """Give the slots of finished rows, then free ones, to waiting rows; close other gaps."""
        for slot in range(self._target.slots):
            if not waiting or (slot < len(rows) and rows[slot].is_open):
                continue
            running = min(self._target.slots, len(waiting) + sum(row.is_open for row in rows))
            self._admit(slot, waiting[0], soon=self._draft_length.choose(running) > 0)
            rows[slot : slot + 1] = [waiting.popleft()]
        for slot in reversed(range(len(rows))):
            if rows[slot].is_open:
                continue
            last = rows.pop()
            if slot < len(rows):
                with self._timed("other", [last]):
                    self._target.move(len(rows), slot)
                    self._drafter.move(len(rows), slot)
                rows[slot] = last

    def _admit(self, slot: int, row: Sequence, *, soon: bool) -> None:
        with self._timed("prefill", [row]):
            reused = self._target.prefill(slot, row.tokens[:-1])
            self._drafter.admit(slot, row, soon=soon)
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
        length = self._draft_length.choose(len(rows))
        limits = [min(length, row.remaining - 1) for row in rows]
        for row, limit in zip(rows, limits):
            row.begin_round(limit)
        with self._timed("draft", rows):
            draft = self._drafter.propose(rows, limits)
        with self._timed("verify", rows):
            verdicts, logits_BKV = self._verify(rows, draft)
        if self._trace_entropy is not None:
            with self._timed("recording", rows):
                verdicts = _with_entropies(verdicts, entropy(logits_BKV, self._trace_entropy))
        with self._timed("other", rows):
            starts = [len(row.generated) for row in rows]
            all_counts = [row.commit(verdict) for row, verdict in zip(rows, verdicts)]
            for slot, row in enumerate(rows):
                self._target.settle(slot, row.tokens, len(row.tokens) - 1)
            self._drafter.commit(rows, verdicts)
            self._draft_length.observe(
                # what matched tells of the draft, though an earlier deferral took the round back
                (v.native_run if v.resolution.reopened else v.accepted, len(v.draft))
                for v in verdicts
            )
        with self._timed("recording", rows):
            for slot, row in enumerate(rows):
                by = draft.drafted_by(slot, len(verdicts[slot].draft))
                end = len(row.generated)
                self._observer(
                    RoundRecord(row, all_counts[slot], verdicts[slot], by, starts[slot], end)
                )

    def _verify(self, rows: list[Sequence], draft: Draft) -> tuple[list[RowVerdict], Tensor]:
        """One target pass over each row's last token and its draft; one wait of the host.

        Also the logits that were judged, [B, K + 1, V].
        """
        logits_BKV = self._score(rows, draft)
        draft_BK, length_B = draft.padded(logits_BKV.device)
        raw_BKV = logits_BKV
        logits_BKV, native_BK, choice_BK1 = self._choose(rows, draft, draft_BK, logits_BKV)
        judged = judge(draft_BK, length_B, logits_BKV, self._gates, native_BK, choice_BK1)
        columns = (
            length_B[:, None],
            draft_BK,
            judged.native_BK,
            judged.passes_BK,
            marked(judged.choice_BK1, raw_BKV),
        )
        on_host: list[list[int]] = torch.cat([part.long() for part in columns], dim=1).tolist()
        return [self._resolve(*row) for row in zip(rows, on_host)], logits_BKV

    @property
    def _gates(self) -> tuple[Gate, ...] | None:
        return None if self._relaxation is None else self._relaxation.gates

    def _choose(
        self, rows: list[Sequence], draft: Draft, draft_BK: Tensor, logits_BKV: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(logits, native_BK, choice_BK1) with the rows' penalties and sampling applied.

        Rows that only take the largest logit need nothing; without others, both are None.
        """
        if all(row.request.sampling.is_plain for row in rows):
            return logits_BKV, None, None
        logits_BKV = logits_BKV.to(torch.float32, copy=True)
        choice_BK1 = logits_BKV.argmax(dim=-1)
        native_BK = draft_BK == choice_BK1[:, :-1]
        for slot, row in enumerate(rows):
            if row.request.sampling.is_plain:
                continue
            tokens = draft.row(slot)
            k = len(tokens)
            scores_NV = row.request.sampling.process(logits_BKV[slot, : k + 1], row.tokens, tokens)
            logits_BKV[slot, : k + 1] = scores_NV
            choice_BK1[slot, : k + 1] = scores_NV.argmax(dim=-1)
            native_BK[slot, :k] = draft_BK[slot, :k] == choice_BK1[slot, :k]
            if row.noise is None:
                continue
            p_NV = torch.softmax(scores_NV, dim=-1)
            if self._relaxation is not None and self._relaxation.by_gates_alone:
                own_N = draw(p_NV, row.noise.choose[: k + 1])
                # a native match always stands, so that nothing is drawn in its place
                own_N[:k] = torch.where(native_BK[slot, :k], draft_BK[slot, :k], own_N[:k])
                choice_BK1[slot, : k + 1] = own_N
                continue
            native_BK[slot, :k], choice_BK1[slot, : k + 1] = rejection_sample(
                p_NV, draft.probabilities(slot), draft_BK[slot, :k], row.noise
            )
        return logits_BKV, native_BK, choice_BK1

    def _resolve(self, row: Sequence, values: list[int]) -> RowVerdict:
        """Walk one row's judged draft; `values` as `_verify` lays them out."""
        length, width = values[0], (len(values) - 2) // 4
        draft, native, passes = (values[1 + part * width :][:length] for part in range(3))
        choice = values[1 + 3 * width :][: length + 1]
        if -1 in choice:
            raise NotFiniteError("target", row.request, len(row.generated) + choice.index(-1))
        windowed = self._relaxation is not None and self._relaxation.window > 0
        may_wait = [
            # nothing can follow a deferred EOS, so its window could not be filled
            bool(passed) and not (windowed and token in self._eos_ids)
            for token, passed in zip(draft, passes)
        ]
        matches = None if row.open is None else row.open.matches
        matched = [bool(match) for match in native]
        if self._relaxation is not None and self._relaxation.room is None:
            # what is drafted past a natively matched end must not take a window back
            end = row.draft_until_stop(draft)
            judged = end if end is not None and matched[end - 1] else length
        else:
            judged = length
        resolution = resolve(matched[:judged], may_wait[:judged], self._relaxation, matches)
        return RowVerdict(draft, matched, choice, resolution)

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
        try:
            yield
            for device in self._devices:  # else the next phase waits for this one's work
                torch.cuda.synchronize(device)
        finally:  # a pass that fails has taken its time, too
            captured = StaticPasses.all_seconds - captured
            elapsed = time.perf_counter() - start - captured
            for row in rows:
                row.seconds[phase] += elapsed / len(rows)
                row.seconds["compile"] += captured / len(rows)


def _with_entropies(verdicts: list[RowVerdict], entropies_BK1: Tensor) -> list[RowVerdict]:
    """With the target's entropy before every draft token and after the last, for traces."""
    return [
        replace(verdict, entropy=row[: len(verdict.draft) + 1])
        for verdict, row in zip(verdicts, entropies_BK1.tolist())
    ]
