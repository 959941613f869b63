"""How likely a draft token is to be accepted if all before it were: a prior that counts correct."""

from __future__ import annotations

from collections import defaultdict

Speaker = tuple[str, int]  # a letter of fly.runs.records.SOURCES; how many tokens spoke for a draft

DRAFT_MODEL: Speaker = ("d", 0)
START = -1  # size of a draft for a text's first tokens
_OF_MODEL = 0.8  # of a draft model's tokens
_AT_START = 8  # what a text's beginning is taken for: as if so many tokens spoke for it


class AcceptanceEstimate:
    """Chances by who drafted.

    weight: judged tokens that the prior is worth. kept: share of the counts that is left after a
    round, so that what was earned lately counts, and what earned nothing is tried again.
    """

    def __init__(self, weight: float = 4.0, kept: float = 0.99, prior: float | None = None) -> None:
        """`prior`: of all alike, instead of `prior_of`."""
        self._weight, self._kept, self._prior = weight, kept, prior
        self._accepted: dict[Speaker, float] = defaultdict(float)
        self._judged: dict[Speaker, float] = defaultdict(float)

    def chance(self, speaker: Speaker) -> float:
        key = _bucket(speaker)
        prior = prior_of(speaker) if self._prior is None else self._prior
        accepted = self._accepted[key] + self._weight * prior
        return accepted / (self._judged[key] + self._weight)

    def observe(self, speaker: Speaker, drafted: int, accepted: int) -> None:
        """Of a draft the first `accepted` tokens were accepted; what follows a rejection was not
        judged."""
        key = _bucket(speaker)
        self._accepted[key] += accepted
        self._judged[key] += min(accepted + 1, drafted)

    def forget(self) -> None:
        """A round has ended."""
        for counts in (self._accepted, self._judged):
            for key in counts:
                counts[key] *= self._kept


def prior_of(speaker: Speaker) -> float:
    """The chance before there are counts: a place in a text that was right `size` times in a row is
    right once more by the rule of succession."""
    if speaker == DRAFT_MODEL:
        return _OF_MODEL
    _, size = speaker
    size = _AT_START if size == START else size
    return (size + 1) / (size + 2)


def _bucket(speaker: Speaker) -> Speaker:
    letter, size = speaker
    return letter, size if size <= 4 else 3 + (size - 1).bit_length()
