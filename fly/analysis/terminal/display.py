"""The live display of `fly trace`: an observer of the engine.

Rows whose tokens are final are printed once and scroll away like any output. Below them, on a
terminal, lives what may still change: the last row, provisional tokens, and for one round the
tokens that a rollback has just taken back.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fly.analysis.terminal.rows import Layout, Row, coloured, lettered
from fly.runs.records import DECODING
from fly.runs.replay import Token, add_round
from fly.runs.trace_writer import decided
from fly.speculation.engine import RoundRecord
from fly.speculation.sequence import Sequence


class Generation:
    """One row of the engine as it grows. `shown`: replay's tokens, those taken back included."""

    def __init__(self, row: Sequence) -> None:
        self.row = row
        self.shown: list[Token] = []
        self.rounds = 0
        self._settled = 0  # of `shown`, those handed out
        self._fallen: set[int] = set()  # places in `shown` taken back in the last round
        self._open: int | None = None

    def add(self, record: RoundRecord) -> None:
        self.rounds += 1
        whose = {"request": 0, "round": self.rounds}
        before = [token.stands for token in self.shown]
        add_round(self.shown, {**whose, **decided(record)})
        before += [True] * (len(self.shown) - len(before))
        self._fallen = {
            place for place, token in enumerate(self.shown) if before[place] and not token.stands
        }
        self._open = None if record.row.open is None else record.row.open.at

    def settle(self, keep_dropped: bool) -> list[Token]:
        """Tokens that became final since the last call; of those taken back, only kept ones.

        Unless they are kept, those taken back in this very round wait for the next one.
        """
        end = len(self.shown)
        if self._fallen and not keep_dropped and self.row.is_open:
            end = min(self._fallen)
        if self._open is not None:
            end = min(end, self._first_provisional())
        tokens = self.shown[self._settled : end]
        self._settled = max(self._settled, end)
        return [token for token in tokens if token.stands or keep_dropped]

    def unsettled(self) -> list[tuple[Token, bool]]:
        """The rest, and whether each may still be taken back."""
        return [
            (token, self._open is not None and token.stands and token.index >= self._open)
            for place, token in enumerate(self.shown[self._settled :], self._settled)
            if token.stands or place in self._fallen
        ]

    def _first_provisional(self) -> int:
        return next(
            place
            for place, token in enumerate(self.shown)
            if token.stands and self._open is not None and token.index >= self._open
        )


class Display:
    """Give `on_round` to FlyLM.observers inside of a `with`. Rows come one after the other.

    colours: letters below the text instead if false. keep_dropped: what was rolled back stays,
    struck through. `generations`: all that were decoded, for the summary.
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
        self.generations: list[Generation] = []

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def on_round(self, record: RoundRecord) -> None:
        if not self.generations or self.generations[-1].row is not record.row:
            self.generations.append(Generation(record.row))
        generation = self.generations[-1]
        generation.add(record)
        rows = list(self._layout.add(generation.settle(self._keep_dropped)))
        if not record.row.is_open:
            rows += self._layout.finish()
            self._layout = self._new_layout()
        if self._live is not None:
            self._live.start()
            self._live.update(Group(*self._tail(generation)), refresh=False)
        for row in rows:
            self._console.print(self._drawn(row), soft_wrap=self._live is None)
        if self._live is not None:
            self._live.refresh()

    def _tail(self, generation: Generation) -> list[Text]:
        if not generation.row.is_open:
            return []
        layout = self._layout.ahead()
        rows: list[Row] = []
        for token, provisional in generation.unsettled():
            rows += layout.add([token], provisional)
        if layout.rest:
            rows.append(layout.rest)
        return [*map(self._drawn, rows), _status(generation)]

    def _drawn(self, row: Row) -> Text:
        return coloured(row) if self._colours else lettered(row)

    def _new_layout(self) -> Layout:
        return Layout(self._bytes_of, self._console.width, self._console.encoding)


def _status(generation: Generation) -> Text:
    counts, seconds = generation.row.counts, generation.row.seconds
    decoding = sum(seconds[phase] for phase in DECODING)
    speed = counts.emitted / decoding if decoding else 0.0
    tau = counts.emitted / max(1, counts.rounds)
    return Text(f"round {counts.rounds}, tau {tau:.2f}, {speed:.1f} tok/s", style="dim")
