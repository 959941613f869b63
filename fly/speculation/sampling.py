"""How tokens are drawn: processed distributions, draws, and lossless rejection sampling.

Rejection sampling (arXiv 2211.17192, 2302.01318): a token drafted from q stands with probability
min(1, p/q); at the first one that does not, the target's token is drawn from max(0, p - q),
normalised; after the last one, from p. A token proposed without drawing (an n-gram's) is a q that
is all on that token: it stands with probability p(token), and the residual is p without it.

Shapes: K draft tokens of one sequence, N positions, V vocabulary. p is the target's distribution, q
the draft's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

_TIES = 64  # so many tokens may tie with the k-th largest before all of them are looked at


@dataclass(frozen=True)
class Sampling:
    """A request's decoding settings, in transformers' meaning and order.

    Greedy requests keep only the penalty.
    """

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off
    repetition_penalty: float = 1.0  # 1 is off

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            object.__setattr__(self, name, float(getattr(self, name)))  # transformers wants floats
        is_count = isinstance(self.top_k, int) and not isinstance(self.top_k, bool)
        checks = {
            # below, logits would overflow
            "temperature": (
                self.temperature == 0 or 1e-4 <= self.temperature < math.inf,
                "0 (greedy) or at least 0.0001",
            ),
            "top_k": (is_count and self.top_k >= 0, "a whole number, at least 0 (0 is off)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1 (1 is off)"),
            "min_p": (0 <= self.min_p <= 1, "between 0 (off) and 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0 (1 is off)"),
        }
        for name, (is_valid, wanted) in checks.items():
            if not is_valid:
                raise ValueError(f"{name}={getattr(self, name)}: must be {wanted}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_plain(self) -> bool:
        """Greedy on the model's own logits: nothing is to be done to them."""
        return self.is_greedy and self.repetition_penalty == 1

    @cached_property
    def _filters(self) -> list[LogitsProcessor]:
        """What follows temperature and top-k; none of them moves a larger logit out for a less."""
        filters: list[LogitsProcessor] = []
        if self.top_p < 1:
            filters.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            filters.append(MinPLogitsWarper(self.min_p))
        return filters

    def process(self, logits_NV: Tensor, before: Sequence[int], drafted: Sequence[int]) -> Tensor:
        """Processed logits, float32; excluded tokens are -inf. [N, V].

        Row i of the logits follows the tokens `before` and the first i of `drafted`.
        """
        scores_NV = logits_NV.float()
        if self.repetition_penalty != 1:
            drafted = drafted[: len(scores_NV) - 1]
            seen_NL = _histories(before, drafted, scores_NV.shape[-1]).to(scores_NV.device)
            penalty = RepetitionPenaltyLogitsProcessor(self.repetition_penalty)
            scores_NV = penalty(seen_NL, scores_NV) if seen_NL.numel() else scores_NV
        if self.is_greedy:
            return scores_NV
        if self.temperature != 1:
            scores_NV = TemperatureLogitsWarper(self.temperature)(None, scores_NV)
        if not 0 < self.top_k < scores_NV.shape[-1]:
            return self._filter(scores_NV)
        # What is left after top-k is little, and sorting a whole vocabulary is not. Tokens that tie
        # with the k-th are kept; in bfloat16 there are some more often than not.
        kept_NK, index_NK = scores_NV.topk(min(self.top_k + _TIES, scores_NV.shape[-1]))
        least_N1 = kept_NK[:, self.top_k - 1 : self.top_k]
        if (kept_NK[:, -1:] == least_N1).any():
            return self._filter(scores_NV.masked_fill(scores_NV < least_N1, -math.inf))
        kept_NK = kept_NK.masked_fill(kept_NK < least_N1, -math.inf)
        excluded_NV = torch.full_like(scores_NV, -math.inf)
        return excluded_NV.scatter(-1, index_NK, self._filter(kept_NK))

    def _filter(self, scores: Tensor) -> Tensor:
        for warper in self._filters:
            scores = warper(None, scores)  # none of them looks at the tokens
        return scores


GREEDY = Sampling()


def _histories(before: Sequence[int], drafted: Sequence[int], vocabulary: int) -> Tensor:
    """[N, L]: what each position follows, N = len(drafted) + 1. Gaps repeat a token, and so do ids
    past the `vocabulary`, which a draft of fewer rows than the target's does not have. L is 0 if
    `before` has no others."""
    filler = next((token for token in before if token < vocabulary), None)
    if filler is None:
        return torch.empty(len(drafted) + 1, 0, dtype=torch.long)
    tokens_L = torch.tensor([*before, *drafted])
    tokens_L = torch.where(tokens_L < vocabulary, tokens_L, filler)
    seen_NL = tokens_L.repeat(len(drafted) + 1, 1)
    for i in range(len(drafted) + 1):
        seen_NL[i, len(before) + i :] = filler
    return seen_NL


_BLOCK = 64  # places whose numbers are drawn at once


@dataclass(frozen=True)
class Noise:
    """One sequence's random numbers for one round, uniform on [0, 1), as many as a draft has."""

    draft: Tensor  # the draft model's draws
    accept: Tensor  # the rejection sampler's
    target: Tensor  # the target's own draws, one more


class NoiseStream:
    """A request's random numbers: three for every place, whatever is asked for and when.

    Where a place in the output always has the same numbers, a draft that was not drawn changes no
    token: it stands if it is what the target draws there. Float64: float32 has too few values to
    reach the tail of a large vocabulary.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._numbers = torch.empty(0, 3, dtype=torch.float64)

    def at(self, start: int, count: int) -> Noise:
        """For `count` draft tokens from place `start`, and the target's token after them."""
        end = start + count + 1
        while len(self._numbers) < end:
            block = torch.rand(_BLOCK, 3, dtype=torch.float64, generator=self._generator)
            self._numbers = torch.cat([self._numbers, block])
        draft, accept, target = self._numbers[start:end].T
        return Noise(draft[:count], accept[:count], target)


def draw(weights_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """The token at quantile `uniform` of its weights, which need not be normalised. [N].

    A token of weight zero is never drawn.
    """
    # float64: in float32 the tail of a large vocabulary would be lost in the sum
    cumulative_NV = weights_NV.double().cumsum(-1)
    total_N1 = cumulative_NV[:, -1:]
    at_N1 = uniform_N.to(weights_NV.device)[:, None] * total_N1
    at_N1 = torch.minimum(at_N1, total_N1 * (1 - 1e-15))  # the product may round up to the total
    return torch.searchsorted(cumulative_NV, at_N1, right=True)[:, 0]


@dataclass(frozen=True)
class Chain:
    """A sequence's draft, where it is judged by more than its largest logits."""

    sampling: Sampling
    before: Sequence[int]  # tokens before the draft; read for a repetition penalty, as the next
    drafted: Sequence[int]
    q_KV: Tensor | None  # what the draft was drawn from; None if it was not drawn
    noise: Noise | None  # None for greedy sequences


def judge_chains(
    logits_BKV: Tensor, draft_BK: Tensor, chains: Sequence[Chain | None], *, gates_decide: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(logits, matches_BK, target_BK1) with penalties and sampling applied, for `verify`.

    chains: None for a sequence that only takes the largest logit; if all are such, the last two are
    None. gates_decide: the rule does not ask the rejection sampler.
    """
    if not any(chains):
        return logits_BKV, None, None
    logits_BKV = logits_BKV.to(torch.float32, copy=True)
    target_BK1 = logits_BKV.argmax(dim=-1)
    matches_BK = draft_BK == target_BK1[:, :-1]
    for slot, chain in enumerate(chains):
        if chain is None:
            continue
        k = len(chain.drafted)
        draft_K = draft_BK[slot, :k]
        scores_NV = chain.sampling.process(logits_BKV[slot, : k + 1], chain.before, chain.drafted)
        logits_BKV[slot, : k + 1] = scores_NV
        own_N = scores_NV.argmax(dim=-1)
        matches_K = draft_K == own_N[:k]
        if chain.noise is not None:
            p_NV = torch.softmax(scores_NV, dim=-1)
            if gates_decide:
                own_N = draw(p_NV, chain.noise.target)
                # a match always stands, so that nothing is drawn in its place
                own_N[:k] = torch.where(matches_K, draft_K, own_N[:k])
            else:
                matches_K, own_N = rejection_sample(p_NV, chain.q_KV, draft_K, chain.noise)
        matches_BK[slot, :k], target_BK1[slot, : k + 1] = matches_K, own_N
    return logits_BKV, matches_BK, target_BK1


def rejection_sample(
    p_NV: Tensor, q_KV: Tensor | None, draft_K: Tensor, noise: Noise
) -> tuple[Tensor, Tensor]:
    """(matches [K], target tokens [K + 1]) of a chain drafted from q, or without q by a rule.

    A target token is drawn wherever the draft token does not match, and after the chain. N = K + 1.
    """
    k = len(draft_K)
    uniform_N = noise.target[: k + 1].to(p_NV.device)
    if q_KV is None:  # drawing first and comparing stands with probability p(token) just the same
        target_N = draw(p_NV, uniform_N)
        return target_N[:k] == draft_K, target_N
    # models of one tokenizer pad their vocabularies differently; runners cut what p does not have
    q_KV = pad(q_KV.to(p_NV.device), (0, p_NV.shape[-1] - q_KV.shape[-1]))
    token_K1 = draft_K[:, None]
    p_K, q_K = p_NV[:k].gather(-1, token_K1)[:, 0], q_KV.gather(-1, token_K1)[:, 0]
    matches_K = noise.accept[:k].to(p_NV.device) * q_K < p_K
    # only rejected positions and the last are drawn: a draw reads the whole vocabulary
    drawn = torch.cat([~matches_K, matches_K.new_ones(1)]).nonzero()[:, 0]
    rest_MV = p_NV[drawn]
    rest_MV[:-1] = _residual(rest_MV[:-1], q_KV[drawn[:-1]])
    target_N = torch.cat([draft_K, draft_K.new_zeros(1)])
    target_N[drawn] = draw(rest_MV, uniform_N[drawn])
    return matches_K, target_N


def _residual(p_MV: Tensor, q_MV: Tensor) -> Tensor:
    """max(0, p - q); where they agree everywhere but for rounding, p. Not normalised."""
    rest_MV = (p_MV - q_MV).clamp_(min=0)
    return torch.where(rest_MV.sum(-1, keepdim=True) > 0, rest_MV, p_MV)
