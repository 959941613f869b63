"""Tokens laid out in rows of a terminal: UTF-8 put together, control characters made harmless."""

from __future__ import annotations

import codecs
import copy
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.text import Text

from fly.analysis.terminal.styles import CONTINUES, LOOKS, PROVISIONAL, PROVISIONAL_LETTER
from fly.runs.replay import Token

_TAB = "    "
_NEWLINE, _NEWLINE_IN_ASCII = "\u21b5", "$"


@dataclass(frozen=True)
class Cell:
    """One character. starts: it is the first of its token. provisional: it may be taken back."""

    text: str
    source: str
    starts: bool
    provisional: bool

    @property
    def width(self) -> int:
        return cell_len(self.text)


Row = list[Cell]


def _decoder(other: codecs.IncrementalDecoder | None = None) -> codecs.IncrementalDecoder:
    """A new one, in the state of another."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    if other is not None:
        decoder.setstate(other.getstate())
    return decoder


@dataclass
class Layout:
    """Tokens in, whole rows out; what is left of the last row stays in `rest`.

    A character that several tokens share appears with the token that completes it; until then its
    bytes are held back. encoding: the output's; what it lacks becomes `?`.
    """

    bytes_of: Callable[[int], bytes]
    width: int
    encoding: str = "utf-8"
    rest: Row = field(default_factory=list)

    def __post_init__(self) -> None:
        self._decoder = _decoder()
        self._fallen: codecs.IncrementalDecoder | None = None

    def add(self, tokens: Iterable[Token], provisional: bool = False) -> Iterator[Row]:
        for token in tokens:
            decoder = self._decoder
            if token.stands:
                self._fallen = None
            else:  # what fell is no part of the text's bytes, though it went on from them
                self._fallen = decoder = self._fallen or _decoder(self._decoder)
            text = decoder.decode(self.bytes_of(token.id))
            yield from self._append(text, token.source, provisional)

    def finish(self) -> Iterator[Row]:
        """The last row, and what was held back for a character that never got complete."""
        last = self.rest[-1].source if self.rest else "draft"
        yield from self._append(self._decoder.decode(b"", final=True), last, False)
        if self.rest:
            yield self.rest
            self.rest = []

    def ahead(self) -> Layout:
        """A copy, for laying out what may still change."""
        other = copy.copy(self)
        other._decoder = _decoder(self._decoder)
        other.rest = list(self.rest)
        return other

    def _append(self, text: str, source: str, provisional: bool) -> Iterator[Row]:
        starts = True
        for character in text:
            ends = character == "\n"
            for shown in self._printable(character):
                cell = Cell(shown, source, starts, provisional)
                if self.rest and sum(c.width for c in self.rest) + cell.width > self.width:
                    yield self._take()
                self.rest.append(cell)
                starts = False
            if ends:
                yield self._take()

    def _take(self) -> Row:
        row, self.rest = self.rest, []
        return row

    def _printable(self, character: str) -> str:
        if character == "\n":
            return _NEWLINE if self._has(_NEWLINE) else _NEWLINE_IN_ASCII
        if character == "\t":
            return _TAB
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):  # also escape codes
            return f"\\x{ord(character):02x}"
        return character if self._has(character) else "?"

    def _has(self, character: str) -> bool:
        try:
            character.encode(self.encoding)
        except UnicodeEncodeError:
            return False
        return True


def coloured(row: Row) -> Text:
    result = Text(no_wrap=True)
    for cell in row:
        style = LOOKS[cell.source].style
        result.append(cell.text, f"{style} {PROVISIONAL}" if cell.provisional else style)
    return result


def lettered(row: Row) -> Text:
    """Two lines: the text, and below each token's first column the letter of its source."""
    letters = "".join(_letters(cell) for cell in row)
    return Text("".join(cell.text for cell in row) + "\n" + letters, no_wrap=True)


def _letters(cell: Cell) -> str:
    follows = PROVISIONAL_LETTER if cell.provisional else CONTINUES
    first = LOOKS[cell.source].letter if cell.starts else follows
    return (first + follows * cell.width)[: cell.width]
