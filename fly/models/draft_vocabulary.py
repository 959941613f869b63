"""Which target id each draft id stands for: heads with a reduced vocabulary, other tokenizers.

Verification sees target ids only: a drafter that speaks other ids takes its tokens, and what it
drew them from, from `spread_logits`.

Shapes: N positions, D draft ids, V target ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

NONE = -1  # no id of the other vocabulary
_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)


class DraftVocabulary:
    """A partial one-to-one map between a draft's ids and the target's.

    to_target_D: by draft id, the target's id of the same token, NONE where the target has none.
    target_size: V, how many ids the target's logits have. Raises ValueError for target ids that
    are named twice or do not exist.
    """

    def __init__(self, to_target_D: Tensor, target_size: int) -> None:
        known_D = to_target_D != NONE
        ids = to_target_D[known_D]
        if bool((to_target_D < NONE).any()) or bool((ids >= target_size).any()):
            raise ValueError(f"target ids must be from 0 to {target_size - 1}")
        if len(ids.unique()) != len(ids):
            raise ValueError("two draft ids stand for the same target id")
        self.to_target_D = to_target_D
        self.to_draft_V = torch.full((target_size,), NONE, dtype=torch.long)
        self.to_draft_V[ids] = known_D.nonzero().flatten()
        self.share = len(ids) / target_size

    @classmethod
    def from_offsets(cls, d2t_D: Tensor, target_size: int) -> DraftVocabulary:
        """From EAGLE-3's `d2t`, where draft id i stands for target id i + d2t[i]."""
        if d2t_D.dtype not in _WHOLE or d2t_D.dim() != 1:
            kind = str(d2t_D.dtype).removeprefix("torch.")
            raise ValueError(f"must be a row of whole numbers, is {kind} of {d2t_D.dim()} axes")
        d2t_D = d2t_D.long()
        return cls(torch.arange(len(d2t_D)) + d2t_D, target_size)

    def to(self, device: torch.device) -> DraftVocabulary:
        """The maps on `device`, in place."""
        self.to_target_D = self.to_target_D.to(device)
        self.to_draft_V = self.to_draft_V.to(device)
        return self

    def spread_logits(self, logits_ND: Tensor) -> Tensor:
        """[N, V]: the draft's logits over the target's ids, -inf where nothing is drafted."""
        index_NV = self.to_draft_V.clamp(min=0).expand(*logits_ND.shape[:-1], -1)
        logits_NV = logits_ND.gather(-1, index_NV)  # on CPUs faster than an index of one dimension
        return logits_NV.masked_fill_(self.to_draft_V == NONE, float("-inf"))
