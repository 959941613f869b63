"""Running sequences as the draft model reads them: in its own ids."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from fly.execution.model_runner import common_prefix
from fly.models.token_intersection import TokenIntersection
from fly.speculation.sequence import Sequence


class DraftView:
    """One sequence's tokens in the draft's ids, each token by itself.

    So the ids of a sequence's beginning stay what they are while it grows, and a rollback only
    shortens them. ids: of all tokens; ends: by token, how many ids there are up to its own.
    """

    def __init__(self, intersection: TokenIntersection) -> None:
        self._intersection = intersection
        self._tokens: list[int] = []
        self.ids: list[int] = []
        self.ends: list[int] = []

    def follow(self, tokens: list[int]) -> DraftView:
        """Brings it up to date with the sequence's tokens, which may be fewer; returns itself."""
        same = common_prefix(self._tokens, tokens)
        del self._tokens[same:], self.ends[same:]
        del self.ids[self.ends[-1] if self.ends else 0 :]
        for token in tokens[same:]:
            self.ids += self._intersection.read(token, first=not self._tokens)
            self.ends.append(len(self.ids))
            self._tokens.append(token)
        return self


class DraftViews:
    """The views of all sequences; without an intersection the draft's ids are the target's.

    They are kept by sequence, not by slot: nothing has to follow when a sequence moves.
    """

    def __init__(self, intersection: TokenIntersection | None) -> None:
        self._intersection = intersection
        self._views: WeakKeyDictionary[Sequence, DraftView] = WeakKeyDictionary()

    def ids(self, sequence: Sequence) -> list[int]:
        """The sequence's tokens in the draft's ids."""
        view = self._view(sequence)
        return sequence.tokens if view is None else view.ids

    def settled(self, sequence: Sequence) -> int:
        """How many of its ids stand for its tokens but the last."""
        view = self._view(sequence)
        before = len(sequence.tokens) - 1
        return before if view is None or not before else view.ends[before - 1]

    def speakable(self, tokens: list[int]) -> list[int]:
        """The draft's ids of these tokens, up to the first that it cannot draft."""
        return tokens if self._intersection is None else self._intersection.speakable(tokens)

    def _view(self, sequence: Sequence) -> DraftView | None:
        if self._intersection is None:
            return None
        view = self._views.setdefault(sequence, DraftView(self._intersection))
        return view.follow(sequence.tokens)
