"""The only decode loop: draft, verify, commit, for the running sequences."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fly.errors import FlyError
from fly.execution.argmax import NotFiniteError, mask_nonfinite
from fly.execution.model_runner import ModelRunner
from fly.execution.oom import is_out_of_memory
from fly.runs.records import Observer, RequestRecord
from fly.settings import EntropyKind
from fly.speculation.chains import judge_chains
from fly.speculation.draft_length import DraftLength
from fly.speculation.drafters.base import Drafter
from fly.speculation.drafters.draft import Draft
from fly.speculation.phase_timer import PhaseTimer
from fly.speculation.rules.base import Rule
from fly.speculation.rules.gates import entropy
from fly.speculation.scheduler import Scheduler
from fly.speculation.sequence import Request, Sequence, Verdict
from fly.speculation.stop_strings import Decode, StopMatcher

logger = logging.getLogger(__name__)


def _room(size: int) -> int:
    """The size class of a sequence: powers of two, so that caches seldom grow."""
    return max(512, 1 << (size - 1).bit_length())


class Engine:
    """Decodes requests with a target, a drafter and a verification rule.

    spd_k: most draft tokens per round. draft_length: how many of them are drafted; all by default.
    decode: token ids to text with special tokens kept, for stop strings. decode_lines: with line
    breaks in their place, for rules that look at texts; `decode` by default.
    trace_entropy: also take the target's entropy before every draft token, for the observer.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter,
        rule: Rule,
        *,
        spd_k: int,
        eos_ids: frozenset[int],
        decode: Decode,
        observer: Observer = lambda record: None,
        reuse_prefixes: bool = True,
        trace_entropy: EntropyKind | None = None,
        draft_length: DraftLength | None = None,
        decode_lines: Decode | None = None,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._rule = rule
        self._spd_k = spd_k
        self._draft_length = draft_length or DraftLength(spd_k)
        self._longest = 0  # of the run's requests
        self._eos_ids = eos_ids
        self._decode, self._decode_lines = decode, decode_lines
        self._observer = observer
        self._reuse_prefixes = reuse_prefixes
        self._trace_entropy = trace_entropy
        used = {*target.devices}
        if drafter.runner is not None:
            used.add(drafter.runner.device)
        self._timer = PhaseTimer([device for device in used if device.type == "cuda"])
        drafter.prefilling = lambda sequence: self._timer.timed("prefill", [sequence])
        drafter.keeps_q = rule.judges == "all"
        target.hidden_layers = drafter.wants_features

    def run(self, requests: Iterable[Request]) -> Iterator[RequestRecord]:
        """Decode all requests; each record is yielded as soon as its sequence ends.

        Out of memory halves the running sequences; those that were interrupted go on from where
        they were. Raises FlyError if one sequence alone does not fit.
        """
        # long ones last, so that slots of the others stay as small as they may; of one size class
        # neighbours share the longest prefixes
        ordered = sorted(
            requests,
            key=lambda r: (_room(r.size), r.prompt if self._reuse_prefixes else ()),
        )
        self._longest = max((request.size for request in ordered), default=0)
        scheduler = Scheduler(
            Sequence(r, self._eos_ids, StopMatcher(r.stops, self._decode), self._decode_lines)
            for r in ordered
        )
        while scheduler.has_work:
            failure: Exception | None = None
            try:
                scheduler.fill(self._target.slots, self._admit, self._move)
                self._round(scheduler.running)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = error.with_traceback(None)  # it holds the tensors of the failed pass
            ended = list(scheduler.finished())
            for sequence in ended:
                yield sequence.record(self._timer.clock)
            if failure is not None:
                scheduler.interrupt()
                if scheduler.has_work:  # else it ran out behind the last token of all
                    self._halve(failure, alone=not ended)

    def _reserve(self, size: int) -> None:
        """Room in every slot for a sequence, at once: growing drops every graph."""
        longest = min(_room(size), self._longest)
        width = max(self._spd_k, self._drafter.longest) + 1
        self._target.reserve_rows(longest, width=width, spd_k=self._spd_k)
        self._drafter.reserve(longest, self._spd_k)

    def _admit(self, slot: int, sequence: Sequence, running: int) -> None:
        self._reserve(sequence.request.size)
        with self._timer.timed("prefill", [sequence]):
            # a drafter that reads features needs them of copied tokens, too: they are computed
            reuse = not self._target.hidden_layers
            reused = self._target.prefill(slot, sequence.tokens[:-1], reuse=reuse)
            soon = self._draft_length.choose(running) > 0
            self._drafter.admit(slot, sequence, self._target.take_hidden(), soon=soon)
        if not sequence.generated:
            sequence.prompt_tokens_reused = reused
            sequence.prefilled_at = self._timer.clock

    def _move(self, source: int, destination: int, sequence: Sequence) -> None:
        with self._timer.timed("other", [sequence]):
            self._target.move(source, destination)
            self._drafter.move(source, destination)

    def _halve(self, error: Exception, *, alone: bool) -> None:
        """Forget all K/V and go on with half of the slots.

        alone: no sequence ended before memory ran out, so that the same would happen again with the
        one slot that is left.
        """
        slots = self._target.slots // 2
        if slots < 1 and alone:
            raise FlyError(
                "out of memory with one running sequence: lower max_length or max_gen_toks, or use "
                "a smaller model or dtype"
            ) from error
        slots = max(1, slots)
        logger.warning("out of memory: going on with %d running sequences", slots)
        self._target.resize(slots)
        self._drafter.resize(slots)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _round(self, running: list[Sequence]) -> None:
        # The last token of the budget needs no draft, and no draft may reach past the budget.
        length = self._draft_length.choose(len(running))
        limits = [min(length, sequence.remaining - 1) for sequence in running]
        with self._timer.timed("draft", running):
            draft = self._drafter.propose(running, limits)
        with self._timer.timed("verify", running):
            verdicts, logits_BKV = self._verify(running, draft)
        if self._trace_entropy is not None:
            with self._timer.timed("recording", running):
                entropies = entropy(logits_BKV, self._trace_entropy).tolist()
                verdicts = [
                    replace(verdict, entropy=values[: len(verdict.draft) + 1])
                    for verdict, values in zip(verdicts, entropies)
                ]
        with self._timer.timed("other", running):
            starts = [len(sequence.generated) for sequence in running]
            counts = [sequence.commit(verdict) for sequence, verdict in zip(running, verdicts)]
        try:
            with self._timer.timed("other", running):
                for slot, sequence in enumerate(running):
                    self._target.commit(slot, sequence.tokens, len(sequence.tokens) - 1)
                self._drafter.commit(running, verdicts, self._target.take_hidden())
                paid = [v for slot, v in enumerate(verdicts) if not draft.is_free(slot)]
                if paid:
                    self._draft_length.observe((v.earned, len(v.draft)) for v in paid)
        finally:  # a drafter that runs out of memory does not undo the round
            with self._timer.timed("recording", running):
                for slot, (sequence, verdict) in enumerate(zip(running, verdicts)):
                    self._observer(sequence.round_record(verdict, counts[slot], starts[slot]))

    def _verify(self, running: list[Sequence], draft: Draft) -> tuple[list[Verdict], Tensor]:
        """One target pass over each sequence's last token and its draft; one wait of the host.

        Also the logits that were judged, [B, K + 1, V].
        """
        raw_BKV = draft.score(self._target, [sequence.tokens[-1] for sequence in running])
        judged, logits_BKV = judge_chains(running, draft, raw_BKV, self._rule)
        judged = replace(judged, target_BK1=mask_nonfinite(judged.target_BK1, raw_BKV))
        verdicts = []
        for slot, (sequence, of_sequence) in enumerate(zip(running, judged.split())):
            of_models = {"target": of_sequence.target_tokens, "draft": of_sequence.draft}
            for role, tokens in of_models.items():
                if -1 in tokens:
                    at = len(sequence.generated) + tokens.index(-1)
                    raise NotFiniteError(role, sequence.request, at)
            by = draft.drafted_by(slot, len(of_sequence.draft))
            verdicts.append(sequence.judge(self._rule, of_sequence, by))
        return verdicts, logits_BKV
