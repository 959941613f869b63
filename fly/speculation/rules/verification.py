"""Verification: which draft tokens stand. Pure functions, no model.

`judge` looks at each position by itself, in tensors: is the draft token the target's own choice,
and if not, may it wait? `resolve` then walks one row's chain with its deferral windows. Positions
count from 0; position j is judged by the target's distribution before it.

Shapes: B rows, K draft positions (padded), V vocabulary.

native match   the token is what the target's own decoding accepts there: its argmax (greedy), or
               what the rejection sampler accepts (sampling).
deferred       a native mismatch that every gate lets wait for its window.
stood          a deferred mismatch whose next W tokens are all native matches: accepted.
rolled back    a deferred mismatch whose window met a native mismatch: rejected after all.
open           a deferred mismatch whose window the round's draft did not fill. Within a round it is
               rejected at once; across rounds it and all after it are provisional.
correction     the target's own token at the first rejection; bonus: its token after K acceptances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fly.execution.argmax import greedy
from fly.speculation.rules.gates import Gate, all_pass


@dataclass(frozen=True)
class Relaxation:
    """A rule that lets in some native mismatches (FLy: arXiv 2511.22972, section 3.2).

    gates: what a mismatch must pass to be deferred. window: W, how many following tokens must all
    be native matches; 0 accepts at once. room: how many draft tokens must follow in the same
    round; None lets the window stay open across rounds. by_gates_alone: under sampling the gates
    alone decide, and the rejection sampler is not asked (typical acceptance and its like).
    """

    gates: tuple[Gate, ...]
    window: int
    room: int | None
    by_gates_alone: bool = False


@dataclass(frozen=True)
class Judgement:
    """native_BK: native matches. passes_BK: native mismatches that all gates let wait.

    choice_BK1: the target's own token at every position.
    """

    native_BK: Tensor
    passes_BK: Tensor
    choice_BK1: Tensor


def judge(
    draft_BK: Tensor,
    length_B: Tensor,
    logits_BKV: Tensor,
    gates: Sequence[Gate] | None,
    native_BK: Tensor | None = None,
    choice_BK1: Tensor | None = None,
) -> Judgement:
    """Judge every position by itself. `draft_BK` is padded past `length_B`; logits have K+1.

    gates None: no mismatch may wait. native_BK, choice_BK1: what stands natively and the target's
    own tokens where rows sample; without them `draft == argmax` and the argmax.
    """
    k = draft_BK.shape[1]
    if choice_BK1 is None:
        choice_BK1 = greedy(logits_BKV)
    valid_BK = torch.arange(k, device=draft_BK.device) < length_B[:, None]
    if native_BK is None:
        native_BK = draft_BK == choice_BK1[:, :k]
    native_BK = native_BK & valid_BK
    passes_BK = torch.zeros_like(native_BK)
    if gates is not None and k > 0:
        passes_BK = _gate(logits_BKV[:, :k], draft_BK, valid_BK & ~native_BK, gates)
    return Judgement(native_BK, passes_BK, choice_BK1)


def _gate(
    logits_BKV: Tensor, draft_BK: Tensor, candidates_BK: Tensor, gates: Sequence[Gate]
) -> Tensor:
    """Candidates that pass all gates.

    On a CPU only their rows of logits are read; on an accelerator picking them would make the
    host wait.
    """
    if not gates:
        return candidates_BK
    if logits_BKV.device.type != "cpu":
        passed_N = all_pass(gates, logits_BKV.flatten(0, 1), draft_BK.flatten())
        return candidates_BK & passed_N.view_as(candidates_BK)
    passed_BK = torch.zeros_like(candidates_BK)
    passed_BK[candidates_BK] = all_pass(gates, logits_BKV[candidates_BK], draft_BK[candidates_BK])
    return passed_BK


@dataclass(frozen=True)
class Resolution:
    """What becomes of one row's draft.

    accepted: leading draft tokens that stay, provisional ones included. deferred: positions among
    them that are deferred mismatches. rolled_back: the position at `accepted` was deferred first.
    reopened: the row's open deferral of an earlier round is rolled back, and with it this whole
    draft. open_at, open_matches: the deferral still open, its position in this draft (-1: it is the
    earlier round's) and how many matches its window has seen; both None without one.
    """

    accepted: int
    deferred: tuple[int, ...] = ()
    rolled_back: bool = False
    reopened: bool = False
    open_at: int | None = None
    open_matches: int | None = None


def resolve(
    native: Sequence[bool],
    may_wait: Sequence[bool],
    relaxation: Relaxation | None,
    open_matches: int | None = None,
) -> Resolution:
    """Walk one row's draft in order; `may_wait` are the mismatches that passed the gates.

    open_matches: matches that the window of a deferral left open by earlier rounds has seen. The
    token that follows an accepted draft is the target's own, so it counts as a match.
    """
    window = relaxation.window if relaxation else 0
    open_at = None if open_matches is None else -1
    matches = open_matches or 0
    deferred: list[int] = []
    for position, matched in enumerate([*native, True]):
        if matched:
            matches += 1
            if open_at is not None and matches >= window:
                open_at = None
        elif open_at == -1:
            return Resolution(accepted=0, reopened=True)
        elif open_at is not None:  # always the last one deferred
            return Resolution(open_at, tuple(deferred[:-1]), rolled_back=True)
        elif relaxation and may_wait[position]:
            if relaxation.room is not None and position + 1 + relaxation.room > len(native):
                return Resolution(position, tuple(deferred))
            deferred.append(position)
            open_at, matches = (position, 0) if window else (None, 0)
        else:
            return Resolution(position, tuple(deferred))
    if open_at is None:
        return Resolution(len(native), tuple(deferred))
    return Resolution(len(native), tuple(deferred), open_at=open_at, open_matches=matches)
