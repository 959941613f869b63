"""How tokens are drawn: processed distributions, draws, and lossless rejection sampling.

Rejection sampling (arXiv 2211.17192, 2302.01318): a token drafted from q stands with probability
min(1, p/q); at the first one that does not, the target's token is drawn from max(0, p - q),
normalised; after the last one, from p. A token proposed without drawing (an n-gram's) is a q that
is all on that token: it stands with probability p(token), and the residual is p without it.

Everything is tensor work on the device, for many sequences at once. Shapes: B sequences, K draft
tokens (padded), N = K + 1 positions, V vocabulary. p is the target's distribution, q the draft's.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.generation.logits_process import TopPLogitsWarper

_SUMMED = 128  # tokens of a block whose weights are summed first; divides most vocabularies
_ALL = 1 - 1e-15  # of a sum of weights
_TIES = 64  # so many tokens may tie with the k-th largest before all of them are looked at
K = TypeVar("K", bound=Hashable)


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

    @property
    def is_penalised(self) -> bool:
        return self.repetition_penalty != 1

    def process(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Processed logits, float32; excluded tokens are -inf. [..., V].

        seen: which tokens each position follows, bool of the same shape, for the penalty.
        """
        scores = logits.float()
        if self.is_penalised:
            assert seen is not None
            penalty = self.repetition_penalty
            lower = torch.where(scores < 0, scores * penalty, scores / penalty)
            scores = torch.where(seen, lower, scores)
        if self.is_greedy:
            return scores
        scores_NV = scores.reshape(-1, scores.shape[-1])  # transformers' filters want two axes
        if self.temperature != 1:
            scores_NV = scores_NV / self.temperature
        if not 0 < self.top_k < scores_NV.shape[-1]:
            return self._filter(scores_NV).view(scores.shape)
        # What is left after top-k is little, and sorting a whole vocabulary is not. Tokens that tie
        # with the k-th are kept; in bfloat16 there are some more often than not.
        kept_NK, index_NK = scores_NV.topk(min(self.top_k + _TIES, scores_NV.shape[-1]))
        least_N1 = kept_NK[:, self.top_k - 1 : self.top_k]
        # to know whether more than these tie, the host would wait: without filters all are kept
        # anyhow, with them an accelerator keeps _TIES
        is_cut = self.top_p < 1 or self.min_p > 0
        if not is_cut or (scores.device.type == "cpu" and (kept_NK[:, -1:] == least_N1).any()):
            masked_NV = scores_NV.masked_fill(scores_NV < least_N1, -math.inf)
            return self._filter(masked_NV).view(scores.shape)
        kept_NK = kept_NK.masked_fill(kept_NK < least_N1, -math.inf)
        excluded_NV = torch.full_like(scores_NV, -math.inf)
        return excluded_NV.scatter(-1, index_NK, self._filter(kept_NK)).view(scores.shape)

    def _filter(self, scores_NV: Tensor) -> Tensor:
        """What follows temperature and top-k; it never excludes a token and keeps a less likely."""
        if self.top_p < 1:
            scores_NV = keep_top_p(scores_NV, self.top_p)
        if self.min_p:
            least_N1 = scores_NV.amax(dim=-1, keepdim=True) + math.log(self.min_p)
            scores_NV = scores_NV.masked_fill(scores_NV < least_N1, -math.inf)
        return scores_NV


def keep_top_p(scores_NV: Tensor, top_p: float) -> Tensor:
    """-inf but for the fewest tokens that hold a probability of `top_p`; at least one is kept. Of
    tokens that tie at the edge the first ones are (transformers' processor keeps any of them). Rows
    that are not finite stay as they are.

    transformers' processor sorts the whole vocabulary, which on a CPU takes longer than a step of a
    small draft model. All tokens below (1 - top_p) / V together hold less than 1 - top_p, so they
    are outside; of the others, few, those are kept before which less than `top_p` lies.
    """
    if scores_NV.device.type != "cpu":  # how many are left, the host would wait to know
        return TopPLogitsWarper(top_p)(None, scores_NV)
    kept_NV = torch.full_like(scores_NV, -math.inf)
    p_NV = torch.softmax(scores_NV, dim=-1)
    for scores_V, p_V, kept_V in zip(scores_NV, p_NV, kept_NV):
        at_M = (p_V >= (1 - top_p) / len(p_V)).nonzero()[:, 0]
        p_M, order_M = p_V[at_M].double().sort(descending=True, stable=True)
        index = at_M[order_M[p_M.cumsum(0) - p_M < top_p]] if len(at_M) else slice(None)
        kept_V[index] = scores_V[index]
    return kept_NV


GREEDY = Sampling()


def seen_tokens(before: Sequence[Sequence[int]], drafted_BK: Tensor, vocabulary: int) -> Tensor:
    """[B, N, V] bool: the tokens that each position follows, those of `before` and the drafted ones
    before it. Ids past the vocabulary, which a draft of fewer rows does not have, are left out."""
    rows, k = drafted_BK.shape
    device = drafted_BK.device
    histories = [torch.tensor(tokens, dtype=torch.long) for tokens in before]
    before_BL = torch.nn.utils.rnn.pad_sequence(histories, True, vocabulary)
    before_BL = before_BL.clamp_(max=vocabulary).to(device, non_blocking=True)
    seen_BV = torch.zeros(rows, vocabulary + 1, dtype=torch.bool, device=device)  # one for gaps
    seen_BNV = seen_BV.scatter_(1, before_BL, True)[:, None].repeat(1, k + 1, 1)
    is_later_NK = torch.ones(k + 1, k, dtype=torch.bool, device=device).triu()
    is_gap_BNK = is_later_NK | (drafted_BK < 0)[:, None]
    drafted_BNK = drafted_BK[:, None].clamp(max=vocabulary).masked_fill(is_gap_BNK, vocabulary)
    return seen_BNV.scatter_(2, drafted_BNK, True)[..., :vocabulary]


def alike(keys: Sequence[K], device: torch.device) -> Iterator[tuple[K, list[int], Any]]:
    """(key, slots, the index of these rows) of the sequences whose keys are equal, to be computed
    together. On a CPU each is alone: what all together take does not stay in its caches."""
    slots = range(len(keys))
    if device.type == "cpu":
        yield from ((keys[slot], [slot], slice(slot, slot + 1)) for slot in slots)
        return
    for _, group in groupby(sorted(slots, key=lambda s: hash(keys[s])), key=lambda s: keys[s]):
        found = [*group]
        rows: Any = slice(None)
        if len(found) < len(keys):
            rows = torch.tensor(found).to(device, non_blocking=True)
        yield keys[found[0]], found, rows


_BLOCK = 64  # places whose numbers are drawn at once


@dataclass(frozen=True)
class Noise:
    """A sequence's random numbers for one round, uniform on [0, 1), as many as a draft has; or
    those of several sequences, [B, ..]."""

    draft: Tensor  # the draft model's draws
    accept: Tensor  # the rejection sampler's
    target: Tensor  # the target's own draws, one more

    @classmethod
    def together(cls, noises: Sequence[Noise], device: torch.device) -> Noise:
        """Of equally long drafts, on the device."""
        rows = [torch.cat([noise.draft, noise.accept, noise.target]) for noise in noises]
        k = len(noises[0].draft)
        return cls(*torch.stack(rows).to(device, non_blocking=True).split([k, k, k + 1], dim=1))


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


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token at quantile `uniform` [...] of its weights [..., V], which need not be normalised.
    [...]; V, which is no token, for weights that are not finite.

    A token of weight zero is never drawn.
    """
    if weights.device.type == "cpu" and weights.shape[-1] % _SUMMED == 0:
        return _draw_by_blocks(weights, uniform)
    # float64: in float32 the tail of a large vocabulary would be lost in the sum
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulative, _place(uniform, cumulative), right=True)[..., 0]


def _draw_by_blocks(weights: Tensor, uniform: Tensor) -> Tensor:
    """`draw` from blocks of tokens, then within one: a third of the time on a CPU, where an
    accelerator would launch three times as many kernels."""
    blocks = weights.unflatten(-1, (-1, _SUMMED))  # [..., M, _SUMMED]
    before = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    at = _place(uniform, before)
    block = torch.searchsorted(before, at, right=True).clamp_(max=blocks.shape[-2] - 1)
    rest = at - pad(before, (1, 0)).gather(-1, block)
    own = blocks.take_along_dim(block[..., None], -2)[..., 0, :].cumsum(-1, dtype=torch.float64)
    rest = torch.minimum(rest, own[..., -1:] * _ALL)
    return (block * _SUMMED + torch.searchsorted(own, rest, right=True))[..., 0]


def _place(uniform: Tensor, cumulative: Tensor) -> Tensor:
    """The sum at a quantile, [..., 1]; it may be rounded up to the whole, which is past all."""
    total = cumulative[..., -1:]
    return torch.minimum(uniform[..., None] * total, total * _ALL)


def like(p: Tensor, q: Tensor) -> Tensor:
    """q on p's device and as wide. Models of one tokenizer pad their vocabularies differently;
    runners cut what p does not have."""
    return pad(q.to(p.device), (0, p.shape[-1] - q.shape[-1]))


def certain(draft: Tensor, p: Tensor) -> Tensor:
    """The distributions of a draft [..., K] that was not drawn, as wide as p: all on its tokens."""
    q = p.new_zeros(*draft.shape, p.shape[-1])
    return q.scatter_(-1, draft.clamp(min=0)[..., None], 1.0)


def rejection_sample(
    p: Tensor, q: Tensor | None, draft: Tensor, noise: Noise
) -> tuple[Tensor, Tensor]:
    """(matches [..., K], target tokens [..., N]) of chains drafted from q, or without q by a rule.

    p [..., N, V], q [..., K, V], draft [..., K], which ends at -1. A target token is drawn wherever
    the draft token does not match, and after the chain.
    """
    k = draft.shape[-1]
    if q is None:  # drawing first and comparing stands with probability p(token) just the same
        target = draw(p, noise.target)
        return target[..., :k] == draft, target
    q = pad(like(p, q), (0, 0, 0, 1))
    own, token = pad(draft, (0, 1), value=-1), draft.clamp(min=0)[..., None]
    p_token, q_token = (each[..., :k, :].gather(-1, token)[..., 0] for each in (p, q))
    matches = (noise.accept * q_token < p_token) & (draft >= 0)
    is_drawn, uniform = ~pad(matches, (0, 1)), noise.target
    # a draw reads the whole vocabulary; an accelerator would wait to know where none is needed
    at = is_drawn if p.device.type == "cpu" else ...
    q_at = q[at].masked_fill((own[at] < 0)[..., None], 0)  # after a chain's end p itself is left
    drawn = draw(_residual(p[at], q_at), uniform[at])
    if at is ...:
        return matches, torch.where(is_drawn, drawn, own)
    return matches, own.masked_scatter_(is_drawn, drawn)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """max(0, p - q); where they agree everywhere but for rounding, p. Not normalised."""
    rest = (p - q).clamp_(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
