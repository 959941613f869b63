"""What the engine asks of a verification rule, and what it tells the rule.

The target's pass over a draft is looked at in two steps. `verify` judges every position by itself,
in tensors: is the draft token the target's own, and if not, may it be deferred? `Rule.resolve` then
walks one sequence's draft in order, on the host, and says how much of it stands.

Shapes: B sequences, K draft positions (padded), V vocabulary, M any positions. Positions count from
0; position j is judged by the target's distribution before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fly.errors import FlyError
from fly.execution.argmax import greedy
from fly.settings import Settings
from fly.speculation.rules.gates import Gate, all_pass
from fly.speculation.rules.judged import JudgedDraft, Resolution
from fly.speculation.rules.places import Places
from fly.speculation.sampling import Noise, Sampling, rejection_sample


class Rule:
    """Which draft tokens stand: those that match, and mismatches that pass all gates. This one has
    no gates, so that whatever is drafted stands (verification=accept_all).

    settings: the rule's keys, of the class that fly/registry.py names with it; a rule with an
    `__init__` of its own takes from them what it needs.
    gates: what a mismatch must pass; None lets no mismatch in. decides_alone: under sampling the
    gates alone decide, and the rejection sampler is not asked. judges: which requests' drafts
    `judge` is asked about; `all`: `judge_greedy`, too, which needs the probabilities of greedy
    drafts. places: where it decides as exact verification does.
    """

    gates: tuple[Gate, ...] | None = ()
    decides_alone = True
    judges: Literal["none", "samples", "all"] = "none"
    requests: Literal["all", "greedy", "samples"] = "all"  # that it is made for
    cost: Callable[[Tensor, Tensor], Tensor] | None = None  # (logits_MV, token_M) -> [M], counted
    name = ""
    places = Places()

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def check(self, sampling: Sampling) -> None:
        """Raise FlyError if requests that are decoded so are not what the rule is made for."""
        is_greedy, where = sampling.is_greedy, f"temperature={sampling.temperature:g}"
        if self.requests == ("samples" if is_greedy else "greedy"):
            wanted, flags = "temperature 0", "do_sample=false"
            if is_greedy:
                wanted, flags = "a temperature above 0", "do_sample=true,temperature=0.7"
            raise FlyError(
                f"verification={self.name} with {where}: it is defined for {wanted}: set "
                f"--gen_kwargs {flags}, or another rule"
            )
        if self.decides_alone and not is_greedy and not self.places.are_all_relaxed:
            raise FlyError(
                f"verification={self.name} with {where}: it has no exact places when sampling: "
                "leave exact_first_tokens, exact_pattern and relax_in out, or set temperature 0"
            )

    def sample(
        self, p_BNV: Tensor, q_BKV: Tensor | None, draft_BK: Tensor, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        """(matches_BK, target_BN): exact verification of drafts that were drawn from q; without q,
        by a rule."""
        return rejection_sample(p_BNV, q_BKV, draft_BK, noise)

    def judge(
        self, p_BNV: Tensor, q_BKV: Tensor, draft_BK: Tensor, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        """(stands_BK, own_BN): which draft tokens the rule lets stand, and its own tokens in the
        place of the others. q_BKV: all on the draft's token where nothing was drawn.
        """
        raise NotImplementedError

    def judge_greedy(
        self, scores_BNV: Tensor, q_BKV: Tensor, draft_BK: Tensor, target_BN: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same of greedy drafts, the likeliest tokens of q. target_BN: the likeliest of the
        target's logits, scores_BNV."""
        raise NotImplementedError

    def resolve(self, judged: JudgedDraft) -> Resolution:
        """Walk one draft in order."""
        deferred: list[int] = []
        for position, matches in enumerate(judged.matches):
            if judged.stands is None:
                stands = matches or judged.deferrable[position]
            else:
                stands = judged.stands[position]
            is_exact = not (matches and stands) and self.places.are_exact(judged, position)
            if not (matches if is_exact else stands):
                own = None if is_exact or judged.own_tokens is None else judged.own_tokens[position]
                return Resolution(position, tuple(deferred), recovered=own)
            if not matches:
                deferred.append(position)
        return Resolution(len(judged.draft), tuple(deferred))


@dataclass(frozen=True)
class JudgedBatch:
    """Every position of a batch judged by itself, on the device; `JudgedDraft` has the meanings."""

    draft_BK: Tensor  # padded past length_B
    length_B: Tensor
    matches_BK: Tensor  # bool
    deferrable_BK: Tensor  # bool
    target_BK1: Tensor  # K + 1 tokens
    stands_BK: Tensor | None = None  # both None unless the rule judges some of these drafts by
    own_BK1: Tensor | None = None  # itself: those of the rows in `judged`
    judged: frozenset[int] = frozenset()
    cost_BK: Tensor | None = None

    def split(self) -> list[JudgedDraft]:
        """One judged draft per sequence, on the host, in one copy from the device."""
        cost = None if self.cost_BK is None else self.cost_BK.float().view(torch.int32)
        parts = {
            "draft": self.draft_BK, "matches": self.matches_BK, "deferrable": self.deferrable_BK,
            "target_tokens": self.target_BK1, "stands": self.stands_BK, "own_tokens": self.own_BK1,
            "cost": cost, "length": self.length_B[:, None],
        }  # fmt: skip
        there = {name: part for name, part in parts.items() if part is not None}
        on_host = torch.cat([part.long() for part in there.values()], dim=1).cpu()
        columns = on_host.split([part.shape[1] for part in there.values()], dim=1)
        as_was = {"cost": lambda column: column.int().view(torch.float32)}
        as_was |= dict.fromkeys(("matches", "deferrable", "stands"), Tensor.bool)
        values = [as_was.get(n, Tensor.long)(c).tolist() for n, c in zip(there, columns)]
        found = []
        for row, (*own, (length,)) in enumerate(zip(*values)):
            draft = JudgedDraft(**dict(zip(there, own))).first(length)
            is_own = row in self.judged
            found.append(draft if is_own else replace(draft, stands=None, own_tokens=None))
        return found


def verify(
    draft_BK: Tensor,
    length_B: Tensor,
    logits_BKV: Tensor,
    rule: Rule,
    matches_BK: Tensor | None = None,
    target_BK1: Tensor | None = None,
) -> JudgedBatch:
    """Judge every position by itself, with the rule's gates and cost.

    draft_BK: padded past `length_B`. logits_BKV: K + 1 positions. matches_BK, target_BK1: given
    where sequences sample; else `draft == argmax` and the argmax.
    """
    k = draft_BK.shape[1]
    if target_BK1 is None:
        target_BK1 = greedy(logits_BKV)
    valid_BK = torch.arange(k, device=draft_BK.device) < length_B[:, None]
    if matches_BK is None:
        matches_BK = draft_BK == target_BK1[:, :k]
    matches_BK = matches_BK & valid_BK
    deferrable_BK = torch.zeros_like(matches_BK)
    if rule.gates is not None and k > 0:
        deferrable_BK = _gate(logits_BKV[:, :k], draft_BK, valid_BK & ~matches_BK, rule.gates)
    cost_BK = None
    if rule.cost is not None and k > 0:
        logits_MV = logits_BKV[:, :k].flatten(0, 1)
        cost_BK = rule.cost(logits_MV, draft_BK.flatten()).view(draft_BK.shape)
    return JudgedBatch(draft_BK, length_B, matches_BK, deferrable_BK, target_BK1, cost_BK=cost_BK)


def _gate(
    logits_BKV: Tensor, draft_BK: Tensor, candidates_BK: Tensor, gates: tuple[Gate, ...]
) -> Tensor:
    """Candidates that pass all gates.

    On a CPU only their logits are read; on an accelerator picking them would make the host wait.
    """
    if logits_BKV.device.type != "cpu":
        passed_N = all_pass(gates, logits_BKV.flatten(0, 1), draft_BK.flatten())
        return candidates_BK & passed_N.view_as(candidates_BK)
    passed_BK = torch.zeros_like(candidates_BK)
    passed_BK[candidates_BK] = all_pass(gates, logits_BKV[candidates_BK], draft_BK[candidates_BK])
    return passed_BK
