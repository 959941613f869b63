"""ASD, approximate speculative decoding (arXiv 2608.03447; its code: Kissmetothemoon/ASD). For
greedy requests.

A mismatch d_i costs its regret r_i = max z - z(d_i), z the target's logits. It stands while (1) the
regrets of a request add up to at most B, (2) r_i / (K - i) <= g, K - i the tokens from it to the
draft's end, and (3) it is at most the m-th mismatch of its draft. The first that does not ends the
draft. B = 0 or m = 0 is exact verification. K is the draft's own length, so that the same mismatch
is dearer in a short draft; in the code it is the block's, and all blocks have one length.
"""

from __future__ import annotations

import math

from torch import Tensor

from fly.speculation.rules.base import Rule
from fly.speculation.rules.gates import AnyGate, values_of
from fly.speculation.rules.judged import JudgedDraft, Resolution
from fly.speculation.rules.settings import AsdSettings


def regret(logits_MV: Tensor, token_M: Tensor) -> Tensor:
    logits_MV = logits_MV.float()
    return logits_MV.amax(-1) - values_of(token_M, logits_MV)


class AsdRule(Rule):
    requests = "greedy"
    decides_alone = False
    cost = staticmethod(regret)
    gates = (AnyGate(),)
    settings: AsdSettings

    def resolve(self, judged: JudgedDraft) -> Resolution:
        """Its state is what the request has spent so far."""
        keys, spent, deferred = self.settings, judged.state or 0.0, list[int]()
        gap = math.inf if keys.asd_gap is None else keys.asd_gap
        for position, matches in enumerate(judged.matches):
            if matches:
                continue
            assert judged.cost is not None
            cost, left = judged.cost[position], len(judged.draft) - position
            is_too_dear = spent + cost > keys.asd_budget or cost > gap * left
            if (
                is_too_dear
                or len(deferred) >= keys.asd_max_mismatches
                or not judged.deferrable[position]
                or self.places.are_exact(judged, position)
            ):
                return Resolution(position, tuple(deferred), state=spent)
            spent += cost
            deferred.append(position)
        return Resolution(len(judged.draft), tuple(deferred), state=spent)
