"""What passes cost on this machine, measured beside an anchor.

A shared machine changes its pace from second to second. So every pass of either model is timed
next to an anchor, the target's narrowest pass: ratios of neighbours are steady where seconds are
not. The median ratio times the anchor's median is the pass's cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from fly.execution.argmax import greedy
from fly.execution.model_runner import ModelRunner
from fly.execution.pass_costs import PassCosts
from fly.speculation.rules.base import verify
from fly.tuning.simulate import Passes

TimedPass = Callable[[int, int], None]  # (width, context): one pass, waited for


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one model's pass over one sequence.

    by_width: for every measured width, the seconds at each of `contexts` (tokens in the cache).
    anchor: seconds of the anchor, in which all were measured.
    """

    contexts: tuple[int, ...]
    by_width: dict[int, tuple[float, ...]]
    anchor: float

    def at(self, width: int, context: float) -> float:
        """Interpolated; the last lines go on past what was measured."""
        if width in self.by_width:
            return self._at_context(self.by_width[width], context)
        widths = sorted(self.by_width)
        seconds = [self._at_context(self.by_width[each], context) for each in widths]
        return PassCosts(tuple(widths), tuple(seconds)).at(width)

    def _at_context(self, seconds: tuple[float, ...], context: float) -> float:
        low, high = self.contexts[0], self.contexts[-1]
        if low == high:
            return seconds[0]
        slope = max(0.0, (seconds[-1] - seconds[0]) / (high - low))
        return max(0.0, seconds[0] + slope * (context - low))

    def total(self, passes: Passes) -> float:
        """Of all these passes: costs are linear in the context, so sums of contexts suffice."""
        return sum(
            count * self.at(width, passes.context[width] / count)
            for width, count in passes.count.items()
        )


def timed(
    run: Callable[[], None], times: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of so many equal passes."""
    seconds = []
    for _ in range(times):
        start = clock()
        run()
        seconds.append(clock() - start)
    return seconds


@dataclass(frozen=True)
class Anchor:
    """The pass beside which others are timed, and what it takes: one pace for all costs."""

    run: Callable[[], None]
    seconds: float


def measure(
    run: TimedPass,
    widths: Sequence[int],
    contexts: Sequence[int],
    *,
    sweeps: int,
    anchor: Anchor | None = None,
    clock: Callable[[], float] = time.perf_counter,
    done: Callable[[int], None] = lambda sweep: None,
) -> PassSeconds:
    """Time every width at every context, `sweeps` times over, each pass next to an anchor.

    anchor: another model's; None takes this one's narrowest pass, and its median seconds here.
    """
    widths, contexts = sorted(set(widths)), sorted(set(contexts))
    for width in widths:  # the first pass of a shape also builds its kernels
        run(width, contexts[0])
    beside = anchor.run if anchor else lambda: run(widths[0], contexts[0])
    anchors: list[float] = []
    ratios: dict[tuple[int, int], list[float]] = {(w, c): [] for w in widths for c in contexts}
    for sweep in range(sweeps):
        for width, context in ratios:
            start = clock()
            beside()
            middle = clock()
            run(width, context)
            end = clock()
            anchors.append(middle - start)
            ratios[width, context].append((end - middle) / max(middle - start, 1e-9))
        done(sweep + 1)
    unit = anchor.seconds if anchor else median(anchors)
    by_width = {w: tuple(median(ratios[w, c]) * unit for c in contexts) for w in widths}
    return PassSeconds(tuple(contexts), by_width, unit)


def target_pass(runner: ModelRunner, tokens: list[int], longest: int) -> TimedPass:
    """One sequence's verification: the pass, the verdicts, and the host's wait for them."""
    text = _fill(runner, tokens, longest)

    def run(width: int, context: int) -> None:
        runner.truncate(0, context)
        fed = text[context : context + width]
        logits_BKV = runner.extend([fed])
        draft_BK = torch.tensor([fed[1:]], dtype=torch.long, device=runner.device)
        length_B = torch.tensor([width - 1], device=runner.device)
        verdicts = verify(draft_BK, length_B, logits_BKV, gates=None)
        torch.cat([verdicts.matches_BK.long(), verdicts.target_BK1], dim=1).tolist()

    return run


def draft_pass(runner: ModelRunner, tokens: list[int], longest: int) -> TimedPass:
    """One sequence's pass of the draft model, and the host's wait for its tokens."""
    text = _fill(runner, tokens, longest)

    def run(width: int, context: int) -> None:
        runner.truncate(0, context)
        greedy(runner.extend([text[context : context + width]])).tolist()

    return run


def _fill(runner: ModelRunner, tokens: list[int], longest: int) -> list[int]:
    """Have the cache hold `longest` tokens; a shorter text is repeated: only time is looked at."""
    text = tokens * -(-longest // len(tokens))
    runner.reserve(longest)
    runner.prefill(0, text[:longest])
    return text[:longest]


def typical_contexts(lengths: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """A short and a long context of sequences of (prompt, generated) tokens, most between them."""
    starts = sorted(max(1, prompt - 1) for prompt, _ in lengths)
    ends = sorted(prompt + generated for prompt, generated in lengths)
    tenth = len(lengths) // 10
    return starts[tenth], max(starts[tenth], ends[-1 - tenth])
