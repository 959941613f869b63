"""Drafts of sequences that sample or have penalties, judged by what the target draws."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fly.speculation.sampling import Noise, alike, draw, rejection_sample, seen_tokens
from fly.speculation.sequence import Sequence


class Chains(Protocol):
    """The drafted chains of the running sequences, by slot."""

    def width(self, slots: list[int]) -> int:
        """The longest of these chains, or more."""

    def is_drawn(self, slot: int) -> bool:
        """Whether its tokens were drawn from `probabilities`."""

    def probabilities(self, slots: list[int]) -> Tensor:
        """What the tokens of these chains were drawn from, if they were: [len(slots), K, V]."""


def judge_chains(
    running: list[Sequence],
    chains: Chains,
    draft_BK: Tensor,
    raw_BKV: Tensor,
    *,
    gates_decide: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(logits, matches_BK, target_BK1) with penalties and sampling applied, for `verify`.

    draft_BK: -1 past a chain's end. Sequences that only take the largest logit need nothing; if all
    are such, the last two are None. gates_decide: the rule does not ask the rejection sampler.
    """
    if all(sequence.request.sampling.is_plain for sequence in running):
        return raw_BKV, None, None
    logits_BKV = raw_BKV.to(torch.float32, copy=True)
    target_BK1 = logits_BKV.argmax(dim=-1)
    matches_BK = draft_BK == target_BK1[:, :-1]
    kinds = [(s.request.sampling, chains.is_drawn(slot)) for slot, s in enumerate(running)]
    for (sampling, is_drawn), slots, rows in alike(kinds, logits_BKV.device):
        if sampling.is_plain:
            continue
        k, seen_BNV = chains.width(slots), None
        scores_BNV, drafted_BK = raw_BKV[rows, : k + 1], draft_BK[rows, :k]
        if sampling.is_penalised:
            before = [running[slot].tokens for slot in slots]
            seen_BNV = seen_tokens(before, drafted_BK, scores_BNV.shape[-1])
        scores_BNV = sampling.process(scores_BNV, seen_BNV)
        own_BN = scores_BNV.argmax(dim=-1)
        equal_BK = drafted_BK == own_BN[:, :k]
        if not sampling.is_greedy:
            noise = Noise.together([running[slot].noise(k) for slot in slots], own_BN.device)
            p_BNV = torch.softmax(scores_BNV, dim=-1)
            if gates_decide:
                own_BN = draw(p_BNV, noise.target)
                # a match always stands, so that nothing is drawn in its place
                own_BN[:, :k] = torch.where(equal_BK, drafted_BK, own_BN[:, :k])
            else:
                q_BKV = chains.probabilities(slots) if is_drawn else None
                equal_BK, own_BN = rejection_sample(p_BNV, q_BKV, drafted_BK, noise)
        logits_BKV[rows, : k + 1], target_BK1[rows, : k + 1] = scores_BNV, own_BN
        matches_BK[rows, :k] = equal_BK
    return logits_BKV, matches_BK, target_BK1
