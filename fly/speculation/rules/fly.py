"""FLy (arXiv 2511.22972, section 3.2): a mismatch is accepted where the target was unsure, if
the target matches the tokens that follow.

deferred       a mismatch that passes every gate; its window opens behind it.
stood          a deferred mismatch whose next W tokens all match: accepted.
rolled back    a deferred mismatch whose window met a mismatch: rejected after all.
open           a deferred mismatch whose window the round's draft did not fill. Within a round it is
               rejected at once; across rounds it and all that follows are provisional.
"""

from __future__ import annotations

from fly.settings import FlySettings
from fly.speculation.rules.base import Rule
from fly.speculation.rules.gates import (
    AnyGate,
    EntropyGate,
    Gate,
    MarginGate,
    RankGate,
    RatioGate,
)
from fly.speculation.rules.judged import JudgedDraft, Resolution


class FlyRule(Rule):
    """window: W, how many following tokens must all match; 0 accepts at once. lookahead: how many
    draft tokens must follow a deferral in its round; None lets the window stay open across rounds.
    """

    decides_alone = False

    def __init__(self, settings: FlySettings) -> None:
        self.gates = gates(settings)
        self.window = settings.window
        self.lookahead = None if settings.defer_across_rounds else self.window
        if settings.window_rule == "reference" and self.window:
            self.window -= 1  # the reference code checks one token less than it waits for

    def resolve(self, judged: JudgedDraft) -> Resolution:
        """Walk one draft with its deferral windows.

        The token after an accepted draft is the target's own, so it counts as a match.
        """
        count = self._judged_length(judged)
        open_at = None if judged.open_matches is None else -1
        matches = judged.open_matches or 0
        deferred: list[int] = []
        for position, matched in enumerate([*judged.matches[:count], True]):
            if matched:
                matches += 1
                if open_at is not None and matches >= self.window:
                    open_at = None
            elif open_at == -1:
                return Resolution(accepted=0, rolls_back_earlier=True)
            elif open_at is not None:  # always the last one deferred
                return Resolution(open_at, tuple(deferred[:-1]), rolled_back=True)
            elif self._may_be_deferred(judged, position):
                if self.lookahead is not None and position + 1 + self.lookahead > count:
                    # how many tokens follow is their own numbers' doing, which are spent by that
                    return Resolution(position, tuple(deferred), spends_draft=True)
                deferred.append(position)
                open_at, matches = (position, 0) if self.window else (None, 0)
            else:
                return Resolution(position, tuple(deferred))
        if open_at is None:
            return Resolution(count, tuple(deferred))
        return Resolution(count, tuple(deferred), open_at=open_at, open_matches=matches)

    def _may_be_deferred(self, judged: JudgedDraft, position: int) -> bool:
        if not judged.deferrable[position]:
            return False
        if self.window and judged.draft[position] in judged.eos_ids:
            return False  # nothing can follow a deferred EOS, so its window could not be filled
        return not self.places.are_exact(judged, position)

    def _judged_length(self, judged: JudgedDraft) -> int:
        """Draft tokens that count. Across rounds, what is drafted past the end of the output must
        not take a window back."""
        end = judged.stop_at() if self.lookahead is None else None
        return len(judged.draft) if end is None or not judged.matches[end - 1] else end


def gates(settings: FlySettings) -> tuple[Gate, ...]:
    """The gates that are switched on; a mismatch must pass all of them. Without any, only what
    sampling filters exclude is kept out."""
    found: list[Gate] = []
    if settings.entropy_thre is not None:
        found.append(EntropyGate(settings.entropy_thre, settings.entropy_kind))
    if settings.margin_thre is not None:
        found.append(MarginGate(settings.margin_thre))
    if settings.draft_ratio_thre is not None:
        found.append(RatioGate(settings.draft_ratio_thre))
    if settings.draft_rank_max is not None:
        found.append(RankGate(settings.draft_rank_max))
    return tuple(found) or (AnyGate(),)
