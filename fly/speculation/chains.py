"""Drafts of sequences that sample or have penalties, judged by what the target draws."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fly.speculation.drafters.draft import Draft
from fly.speculation.rules.base import JudgedBatch, Rule, verify
from fly.speculation.sampling import Noise, alike, certain, draw, like, seen_tokens
from fly.speculation.sequence import Sequence


def judge_chains(
    running: list[Sequence], draft: Draft, raw_BKV: Tensor, rule: Rule
) -> tuple[JudgedBatch, Tensor]:
    """(every position judged by itself, the logits that were judged, [B, K + 1, V]).

    Penalties and sampling are applied to the logits of the sequences that have any.
    """
    draft_BK, length_B = draft.padded(raw_BKV.device)
    judges_all = rule.judges == "all"
    if not judges_all and all(sequence.request.sampling.is_plain for sequence in running):
        return verify(draft_BK, length_B, raw_BKV, rule), raw_BKV
    logits_BKV = raw_BKV.to(torch.float32, copy=True)
    target_BK1 = logits_BKV.argmax(dim=-1)
    matches_BK = draft_BK == target_BK1[:, :-1]
    stands_BK, own_BK1, judged = matches_BK.clone(), target_BK1.clone(), set[int]()
    kinds = [(s.request.sampling, draft.is_drawn(slot)) for slot, s in enumerate(running)]
    for (sampling, is_drawn), slots, rows in alike(kinds, logits_BKV.device):
        is_judged = is_drawn if judges_all else rule.judges == "samples" and not sampling.is_greedy
        if sampling.is_plain and not is_judged:
            continue
        k, seen_BNV = draft.width(slots), None
        scores_BNV, drafted_BK = raw_BKV[rows, : k + 1], draft_BK[rows, :k]
        if sampling.is_penalised:
            before = [running[slot].tokens for slot in slots]
            seen_BNV = seen_tokens(before, drafted_BK, scores_BNV.shape[-1])
        scores_BNV = sampling.process(scores_BNV, seen_BNV)
        own_BN = scores_BNV.argmax(dim=-1)
        equal_BK, q_BKV = drafted_BK == own_BN[:, :k], None
        if is_drawn and (is_judged or not sampling.is_greedy):
            q_BKV = draft.probabilities(slots)
        if not sampling.is_greedy:
            p_BNV = torch.softmax(scores_BNV, dim=-1)
            noise = Noise.together([running[slot].noise(k) for slot in slots], own_BN.device)
            if rule.decides_alone:
                own_BN = draw(p_BNV, noise.target)
                # a match always stands, so that nothing is drawn in its place
                own_BN[:, :k] = torch.where(equal_BK, drafted_BK, own_BN[:, :k])
            else:
                equal_BK, own_BN = rule.sample(p_BNV, q_BKV, drafted_BK, noise)
        logits_BKV[rows, : k + 1], target_BK1[rows, : k + 1] = scores_BNV, own_BN
        matches_BK[rows, :k] = equal_BK
        if is_judged:
            q_BKV = certain(drafted_BK, scores_BNV) if q_BKV is None else like(scores_BNV, q_BKV)
            if sampling.is_greedy:
                stands, own = rule.judge_greedy(scores_BNV, q_BKV, drafted_BK, own_BN)
            else:
                stands, own = rule.judge(p_BNV, q_BKV, drafted_BK, noise)
            stands_BK[rows, :k], own_BK1[rows, : k + 1] = stands, own
            judged.update(slots)
    found = verify(draft_BK, length_B, logits_BKV, rule, matches_BK, target_BK1)
    if judged:
        found = replace(found, stands_BK=stands_BK, own_BK1=own_BK1, judged=frozenset(judged))
    return found, logits_BKV
