"""What a forward pass costs, measured while the run goes on.

Tokens decide the cost of a pass more than their split over rows and positions: weights are read
once, then arithmetic grows with the tokens. So costs are kept by tokens in the pass.
"""

from __future__ import annotations

from bisect import bisect_left

_SMOOTHING = 0.1
_OUTLIER = 3.0  # a pass this many times slower than usual met something else on the machine


class PassCosts:
    """Running seconds per pass of one model, by tokens in the pass (padding included)."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._seconds: dict[int, float] = {}
        self._count: dict[int, int] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        if tokens not in self._seconds:
            self._sizes.insert(bisect_left(self._sizes, tokens), tokens)
            self._seconds[tokens], self._count[tokens] = seconds, 1
            return
        usual = self._seconds[tokens]
        self._count[tokens] += 1
        if seconds < usual / 2:  # what was kept so far was the outlier
            self._seconds[tokens] = seconds
            return
        weight = max(_SMOOTHING, 1 / self._count[tokens])
        self._seconds[tokens] = usual + weight * (min(seconds, _OUTLIER * usual) - usual)

    def seconds(self, tokens: int) -> float:
        """Expected seconds of a pass over `tokens` tokens: interpolated, flat or on the last
        slope outside what was seen; 0 before anything was."""
        if not self._sizes:
            return 0.0
        at = bisect_left(self._sizes, tokens)
        if at < len(self._sizes) and self._sizes[at] == tokens:
            return self._seconds[tokens]
        if at == 0:
            return self._seconds[self._sizes[0]]
        if at == len(self._sizes):
            return self._extrapolate(tokens)
        return self._line(self._sizes[at - 1], self._sizes[at], tokens)

    def _extrapolate(self, tokens: int) -> float:
        last = self._sizes[-1]
        if len(self._sizes) == 1:
            return self._seconds[last]
        return max(self._seconds[last], self._line(self._sizes[0], last, tokens))

    def _line(self, low: int, high: int, tokens: int) -> float:
        share = (tokens - low) / (high - low)
        return self._seconds[low] + share * (self._seconds[high] - self._seconds[low])
