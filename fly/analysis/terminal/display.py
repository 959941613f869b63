"""The live display of `fly trace`: an observer of the engine.

Lines whose tokens are final are printed once and scroll away like any output. Below them, a
terminal shows what may still change: the last line, provisional tokens, and for one round the
tokens that have just been rolled back.
"""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fly.analysis.terminal.rows import Layout, Line, draw_coloured, draw_lettered
from fly.runs.records import Counts, RoundRecord, rates
from fly.runs.replay import Token, add_round
from fly.runs.trace_writer import line_of


class LiveGeneration:
    """One request as it grows. `shown`: replay's tokens, those taken back included.

    counts, seconds: of its rounds so far. finish: why it ended, None while it has not.
    """

    def __init__(self) -> None:
        self.shown: list[Token] = []
        self.counts = Counts()
        self.seconds: dict[str, float] = {}
        self.finish: str | None = None
        self._printed = 0  # of `shown`, those handed out
        self._fallen: set[int] = set()  # places in `shown` taken back in the last round
        self._open: int | None = None

    def add(self, record: RoundRecord) -> None:
        self.counts.add(record.counts)
        self.seconds, self.finish = record.seconds, record.finish
        before = [token.stands for token in self.shown]
        add_round(self.shown, line_of(record, number=0))
        before += [True] * (len(self.shown) - len(before))
        self._fallen = {
            place for place, token in enumerate(self.shown) if before[place] and not token.stands
        }
        self._open = record.open_at

    def take_final(self, keep_dropped: bool) -> list[Token]:
        """Tokens that became final since the last call; of those taken back, only kept ones.

        Unless they are kept, those taken back in this very round wait for the next one.
        """
        end = len(self.shown)
        if self._fallen and not keep_dropped and self.finish is None:
            end = min(self._fallen)
        provisional = (at for at, token in enumerate(self.shown) if self._is_provisional(token))
        end = min(end, next(provisional, end))
        tokens = self.shown[self._printed : end]
        self._printed = max(self._printed, end)
        return [token for token in tokens if token.stands or keep_dropped]

    def provisional(self) -> list[tuple[Token, bool]]:
        """The rest, and whether each may still be taken back."""
        return [
            (token, self._is_provisional(token))
            for place, token in enumerate(self.shown[self._printed :], self._printed)
            if token.stands or place in self._fallen
        ]

    def _is_provisional(self, token: Token) -> bool:
        return self._open is not None and token.stands and token.index >= self._open


class Display:
    """Add `on_round` to FlyLM.observers inside of a `with`. Requests come one after the other.

    colours: if false, letters below the text instead. keep_dropped: tokens that were rolled back
    stay, struck through. `generations`: everything that was decoded, for the summary.
    """

    def __init__(
        self,
        console: Console,
        bytes_of: Callable[[int], bytes],
        *,
        colours: bool,
        keep_dropped: bool = False,
    ) -> None:
        self._console = console
        self._bytes_of = bytes_of
        self._colours = colours
        self._keep_dropped = keep_dropped
        self._layout = self._new_layout()
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self.generations: list[LiveGeneration] = []

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def on_round(self, record: RoundRecord) -> None:
        if record.number == 1:
            self.generations.append(LiveGeneration())
        generation = self.generations[-1]
        generation.add(record)
        lines = list(self._layout.add(generation.take_final(self._keep_dropped)))
        if record.finish is not None:
            lines += self._layout.finish()
            self._layout = self._new_layout()
        if self._live is not None:
            self._live.start()
            self._live.update(Group(*self._tail(generation)), refresh=False)
        for line in lines:
            self._console.print(self._drawn(line), soft_wrap=self._live is None)
        if self._live is not None:
            self._live.refresh()

    def _tail(self, generation: LiveGeneration) -> list[Text]:
        if generation.finish is not None:
            return []
        layout = self._layout.ahead()
        lines: list[Line] = []
        for token, provisional in generation.provisional():
            lines += layout.add([token], provisional)
        if layout.rest:
            lines.append(layout.rest)
        return [*map(self._drawn, lines), _status(generation)]

    def _drawn(self, line: Line) -> Text:
        return draw_coloured(line) if self._colours else draw_lettered(line)

    def _new_layout(self) -> Layout:
        return Layout(self._bytes_of, self._console.width, self._console.encoding)


def _status(generation: LiveGeneration) -> Text:
    speed = rates(generation.counts, generation.seconds)
    return Text(
        f"round {generation.counts.rounds}, tau {speed['tau'] or 0:.2f}, "
        f"{speed['decode_tok_s'] or 0:.1f} tok/s",
        style="dim",
    )
