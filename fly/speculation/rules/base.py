"""What the engine asks of a verification rule, and what it tells the rule.

The target's pass over a draft is looked at in two steps. `verify` judges every position by itself,
in tensors: is the draft token the target's own, and if not, may it be deferred? `Rule.resolve` then
walks one sequence's draft in order, on the host, and says how much of it stands.

Shapes: B sequences, K draft positions (padded), V vocabulary, M any positions. Positions count from
0; position j is judged by the target's distribution before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fly.execution.argmax import greedy
from fly.settings import Settings
from fly.speculation.rules.gates import Gate, all_pass


@dataclass(frozen=True)
class JudgedDraft:
    """One sequence's draft, every position judged by itself. On the host."""

    draft: list[int]
    # the draft token is what the target's own decoding accepts there: its argmax (greedy), or what
    # the rejection sampler accepts (sampling)
    matches: list[bool]
    deferrable: list[bool]  # a mismatch that the rule's gates let in
    target_tokens: list[int]  # the target's own, one more than the draft
    eos_ids: frozenset[int] = frozenset()  # of the target
    # finds how many draft tokens complete the first stop string, if all stand; None without
    stop_at: Callable[[], int | None] = lambda: None
    # matches that the window of a deferral left open by earlier rounds has seen; None without one
    open_matches: int | None = None
    start: int = 0  # tokens of the output before the draft
    # of the prompt and of the output, if these tokens follow; special tokens are line breaks there
    texts: Callable[[list[int]], tuple[str, str]] = lambda tokens: ("", "")


@dataclass(frozen=True)
class Resolution:
    """What becomes of one sequence's draft."""

    accepted: int  # leading draft tokens that stay, provisional ones included
    deferred: tuple[int, ...] = ()  # positions among them that are deferred mismatches
    rolled_back: bool = False  # the position at `accepted` was deferred first
    # the open deferral of an earlier round is rolled back, and with it this whole draft
    rolls_back_earlier: bool = False
    # the deferral still open: its position in this draft; -1: it is the earlier round's
    open_at: int | None = None
    open_matches: int | None = None  # how many matches its window has seen; both None without one


class Rule:
    """Which draft tokens stand. This one: those that match, and mismatches that pass all gates.

    A rule is made from its settings, which fly/registry.py names with it.
    gates: what a mismatch must pass; None lets no mismatch in. decides_alone: under sampling the
    gates alone decide, and the rejection sampler is not asked.
    """

    decides_alone = True

    def __init__(self, settings: Settings) -> None:
        self.gates: tuple[Gate, ...] | None = ()

    def resolve(self, judged: JudgedDraft) -> Resolution:
        """Walk one draft in order."""
        accepted = 0
        while accepted < len(judged.draft) and (
            judged.matches[accepted] or judged.deferrable[accepted]
        ):
            accepted += 1
        deferred = [position for position in range(accepted) if not judged.matches[position]]
        return Resolution(accepted, tuple(deferred))


@dataclass(frozen=True)
class JudgedBatch:
    """Every position of a batch judged by itself, on the device; `JudgedDraft` has the meanings."""

    draft_BK: Tensor  # padded past length_B
    length_B: Tensor
    matches_BK: Tensor  # bool
    deferrable_BK: Tensor  # bool
    target_BK1: Tensor  # K + 1 tokens

    def split(self) -> list[JudgedDraft]:
        """One judged draft per sequence, on the host, in one copy from the device."""
        parts = (
            self.length_B[:, None], self.draft_BK, self.matches_BK, self.deferrable_BK,
            self.target_BK1,
        )  # fmt: skip
        on_host = torch.cat([part.long() for part in parts], dim=1).cpu()
        columns = on_host.split([part.shape[1] for part in parts], dim=1)
        return [
            JudgedDraft(
                draft[:k],
                [bool(match) for match in matches[:k]],
                [bool(passes) for passes in deferrable[:k]],
                targets[: k + 1],
            )
            for (k,), draft, matches, deferrable, targets in zip(*(c.tolist() for c in columns))
        ]


def verify(
    draft_BK: Tensor,
    length_B: Tensor,
    logits_BKV: Tensor,
    gates: tuple[Gate, ...] | None,
    matches_BK: Tensor | None = None,
    target_BK1: Tensor | None = None,
) -> JudgedBatch:
    """Judge every position by itself.

    draft_BK: padded past `length_B`. logits_BKV: K + 1 positions. gates: None lets nothing be
    deferred. matches_BK, target_BK1: given where sequences sample; else `draft == argmax` and the
    argmax.
    """
    k = draft_BK.shape[1]
    if target_BK1 is None:
        target_BK1 = greedy(logits_BKV)
    valid_BK = torch.arange(k, device=draft_BK.device) < length_B[:, None]
    if matches_BK is None:
        matches_BK = draft_BK == target_BK1[:, :k]
    matches_BK = matches_BK & valid_BK
    deferrable_BK = torch.zeros_like(matches_BK)
    if gates is not None and k > 0:
        deferrable_BK = _gate(logits_BKV[:, :k], draft_BK, valid_BK & ~matches_BK, gates)
    return JudgedBatch(draft_BK, length_B, matches_BK, deferrable_BK, target_BK1)


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
