"""Which of the tokens that vLLM drafted stand: fly's `verify` and `Rule.resolve` on vLLM's logits.

Imports no vLLM. Shapes: B requests, K draft positions (padded), N draft tokens of all requests,
M = N + B rows (each request's draft tokens and the one after them), V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import Tensor

from fly.errors import FlyError
from fly.models.tokenizers import Texts
from fly.runs.records import Observer
from fly.settings import EntropyKind
from fly.speculation.chains import judge_chains
from fly.speculation.drafters.draft import DeviceDraft, Draft
from fly.speculation.drafters.ngram import until_eos
from fly.speculation.rules.base import Rule
from fly.speculation.rules.gates import entropy
from fly.speculation.rules.judged import JudgedDraft, Resolution
from fly.speculation.sampling import Sampling
from fly.speculation.sequence import Request, Sequence, Verdict
from fly.speculation.stop_strings import StopMatcher


class ServedRequest(Protocol):
    """What is read of vLLM's CachedRequestState."""

    req_id: str
    prompt_token_ids: list[int] | None
    output_token_ids: list[int]
    sampling_params: Any


class _ServedSequence(Sequence):
    """A request as rules ask about it. vLLM keeps its tokens and ends it."""

    def __init__(self, served: ServedRequest, texts: Texts) -> None:
        params = served.sampling_params
        request = Request(
            tuple(served.prompt_token_ids or [0]),  # a prompt of embeddings has no tokens
            budget=params.max_tokens or 2**31,
            sampling=_sampling(params),
            seed=_seed(params.seed, served.req_id),
        )
        ends = frozenset(params.all_stop_token_ids)
        super().__init__(request, ends, StopMatcher((), texts.decode), texts.decode_lines)

    def follow(self, output: list[int]) -> None:
        """Take over what vLLM has added to the output."""
        self.tokens += output[len(self.tokens) - len(self.request.prompt) :]
        self._counted = len(output)

    def until_end(self, judged: JudgedDraft) -> JudgedDraft:
        """As fly's drafters, which draft nothing past an EOS: it could fill a window."""
        return judged.first(len(until_eos(judged.draft, self._eos_ids)))

    def block(self, verdict: Verdict) -> list[int]:
        """The tokens that the round adds to the output."""
        accepted, self._rule_state = verdict.resolution.accepted, verdict.resolution.state
        if verdict.resolution.rolled_back or verdict.resolution.spends_draft:  # as in `commit`
            self._skipped += len(verdict.draft) - accepted
        return [*verdict.draft[:accepted], verdict.target_tokens[accepted]]


class Verifier:
    """Verifies the steps of one worker.

    keeps_rounds: for `take_rounds`. traced: with the target's entropies of this kind.
    """

    def __init__(
        self,
        rule: Rule,
        texts: Texts,
        *,
        keeps_rounds: bool = False,
        traced: EntropyKind | None = None,
    ) -> None:
        self._rule, self._texts = rule, texts
        self._keeps_rounds, self._traced = keeps_rounds, traced
        self._sequences: dict[str, _ServedSequence] = {}
        self._rounds: dict[str, list[list[Any]]] = {}

    def verify(
        self,
        requests: list[ServedRequest],
        counts: list[int],
        draft_N: Tensor,
        logits_MV: Tensor,
        q_NV: Tensor | None = None,
    ) -> list[list[int]]:
        """The tokens that each request gets; one wait of the host.

        counts: of draft tokens by request. logits_MV: penalties applied, temperature and filters
        not. q_NV: the draft's distributions; None if its tokens were not drawn.
        """
        sequences = [self._sequence(request) for request in requests]
        # as in the engine, no draft reaches past the budget
        lengths = [max(0, min(k, s.remaining - 1)) for k, s in zip(counts, sequences)]
        draft_BK, logits_BKV, q_BKV = _padded(counts, draft_N, logits_MV, q_NV)
        length_B = torch.tensor(lengths).to(draft_BK.device, non_blocking=True)
        draft: Draft = DeviceDraft(draft_BK, length_B, q_BKV, [q_NV is not None] * len(counts))
        if draft_BK.device.type == "cpu":  # each is judged by itself there, no wider than it is
            draft, logits_BKV = draft.on_host(), logits_BKV[:, : max(lengths) + 1]
        # vLLM has applied the penalties
        judged, logits_BKV = judge_chains([*sequences], draft, logits_BKV, self._rule)
        entropies = entropy(logits_BKV, self._traced).tolist() if self._traced else None
        blocks = []
        for slot, (request, sequence, own) in enumerate(zip(requests, sequences, judged.split())):
            verdict = sequence.judge(self._rule, sequence.until_end(own))
            blocks.append(sequence.block(verdict))
            if self._keeps_rounds and verdict.draft:
                found = entropies[slot][: len(verdict.draft) + 1] if entropies else None
                start = len(request.output_token_ids)
                self._rounds.setdefault(request.req_id, []).append(_line(start, verdict, found))
        return blocks

    def forget(self, running: Collection[str]) -> None:
        """Drop the state of all requests but these."""
        for gone in self._sequences.keys() - running:
            del self._sequences[gone]

    def take_rounds(self, name: str) -> list[list[Any]]:
        """The rounds of a finished request, for `verdict_of`. vLLM adds a hyphen and random
        characters to the name that it was given."""
        ids = [found for found in self._rounds if name in (found, found.rpartition("-")[0])]
        return [line for found in ids for line in self._rounds.pop(found)]

    def _sequence(self, request: ServedRequest) -> _ServedSequence:
        if request.req_id not in self._sequences:
            self._sequences[request.req_id] = _ServedSequence(request, self._texts)
        sequence = self._sequences[request.req_id]
        sequence.follow(request.output_token_ids)
        return sequence


def _line(start: int, verdict: Verdict, entropies: list[float] | None) -> list[Any]:
    """A round in what vLLM can send between its processes."""
    found = verdict.resolution
    resolution = [found.accepted, [*found.deferred], found.rolled_back]
    return [start, verdict.draft, verdict.matches, verdict.target_tokens, resolution, entropies]


def verdict_of(line: list[Any], drafted_by: str) -> Verdict:
    """A round of `Verifier.take_rounds`. drafted_by: a letter of fly.runs.records.SOURCES."""
    _, draft, matches, target_tokens, (accepted, deferred, rolled_back), entropies = line
    resolution = Resolution(accepted, tuple(deferred), rolled_back)
    by = drafted_by * len(draft)
    return Verdict(draft, matches, target_tokens, resolution, by, entropies)


def replay(
    sequence: Sequence,
    output: list[int],
    rounds: list[list[Any]],
    drafted_by: str,
    observer: Observer,
) -> None:
    """Commit the rounds of `Verifier.take_rounds` up to the end of the output, as fly's own engine
    does: so counts, positions and traces are made by the same code.

    output: vLLM's tokens, the first of which is the prefill's; a pass without a draft is in no
    round and gave one token. drafted_by: a letter of fly.runs.records.SOURCES. Raises FlyError if
    the rounds do not give the output.
    """
    sequence.begin_with(output[0])
    noted = {line[0]: verdict_of(line, drafted_by) for line in rounds}
    while sequence.is_open and (start := len(sequence.generated)) < len(output):
        bare = Verdict([], [], [output[start]], Resolution(0), "")
        verdict = noted.get(start, bare)
        counts = sequence.commit(verdict)
        observer(sequence.round_record(verdict, counts, start))
    if sequence.is_open or sequence.generated != output[: len(sequence.generated)]:
        raise FlyError(
            f"--model vllm: the {len(rounds)} rounds of fly's plugin do not give the output of "
            f"{len(output)} tokens: set vllm_verification=vllm, and report this"
        )


def _padded(
    counts: list[int], draft_N: Tensor, logits_MV: Tensor, q_NV: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(draft_BK, logits_BKV, q_BKV), past a request's own tokens filled with any."""
    k = max(counts)
    if min(counts) == k:  # views, no copies of logits or probabilities
        q_BKV = None if q_NV is None else q_NV.view(len(counts), k, -1)
        return draft_N.view(len(counts), k).long(), logits_MV.view(len(counts), k + 1, -1), q_BKV
    count_B = torch.tensor(counts)
    end_B = (count_B + 1).cumsum(0)
    row_BK1 = torch.minimum(
        (end_B - count_B - 1)[:, None] + torch.arange(k + 1), end_B[:, None] - 1
    )
    # a request's rows are one more than its draft tokens
    drafted_BK = (row_BK1[:, :k] - torch.arange(len(counts))[:, None]).clamp(max=len(draft_N) - 1)
    device = logits_MV.device
    rows, drafted = (index.to(device, non_blocking=True) for index in (row_BK1, drafted_BK))
    q_BKV = None if q_NV is None else q_NV[drafted]
    return draft_N[drafted].long(), logits_MV[rows], q_BKV


def _sampling(params: Any) -> Sampling:
    """vLLM takes temperatures below 0.00001 for greedy, and -1 for top-k that is off."""
    temperature = 0.0 if params.temperature < 1e-5 else max(params.temperature, 1e-4)
    return Sampling(temperature, max(0, params.top_k), params.top_p, params.min_p)


def _seed(seed: int | None, name: str) -> int:
    """Of other numbers than vLLM draws with the same seed; the same in all workers."""
    text = f"fly {name if seed is None else seed}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
