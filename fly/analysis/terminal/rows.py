"""Tokens laid out in lines of a terminal: UTF-8 joined, control characters made harmless."""

from __future__ import annotations

import codecs
import copy
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.text import Text

from fly.analysis.terminal.styles import CONTINUES, PROVISIONAL, PROVISIONAL_LETTER, STYLES
from fly.runs.replay import Token

_TAB = "    "
_NEWLINE, _NEWLINE_IN_ASCII = "\u21b5", "$"
_new_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True)
class TokenCell:
    """One character."""

    text: str
    source: str
    starts: bool  # it is the first of its token
    provisional: bool  # it may be taken back

    @property
    def width(self) -> int:
        return cell_len(self.text)


Line = list[TokenCell]


@dataclass
class Layout:
    """Tokens in, full lines out.

    A character that several tokens share appears with the token that completes it; until then its
    bytes are held back.
    """

    bytes_of: Callable[[int], bytes]
    width: int
    encoding: str = "utf-8"  # of the output; a character that it lacks becomes `?`
    rest: Line = field(default_factory=list)  # the start of the next line

    def __post_init__(self) -> None:
        self._decoder: codecs.IncrementalDecoder = _new_decoder(errors="replace")
        self._rolled_back: codecs.IncrementalDecoder | None = None

    def add(self, tokens: Iterable[Token], provisional: bool = False) -> Iterator[Line]:
        for token in tokens:
            decoder = self._decoder
            if token.stands:
                self._rolled_back = None
            else:  # its bytes follow the text's, but the text does not go on from them
                self._rolled_back = decoder = self._rolled_back or copy.copy(self._decoder)
            text = decoder.decode(self.bytes_of(token.id))
            yield from self._append(text, token.source, provisional)

    def finish(self) -> Iterator[Line]:
        """The last line, with the bytes of a character that was never completed."""
        source = self.rest[-1].source if self.rest else "draft"
        yield from self._append(self._decoder.decode(b"", final=True), source, False)
        if self.rest:
            yield self._take()

    def ahead(self) -> Layout:
        """A copy, for laying out what may still change."""
        other = copy.copy(self)
        other._decoder = copy.copy(self._decoder)
        other.rest = list(self.rest)
        return other

    def _append(self, text: str, source: str, provisional: bool) -> Iterator[Line]:
        for place, character in enumerate(text):
            for number, shown in enumerate(self._printable(character)):
                cell = TokenCell(shown, source, place == number == 0, provisional)
                if self.rest and sum(c.width for c in self.rest) + cell.width > self.width:
                    yield self._take()
                self.rest.append(cell)
            if character == "\n":
                yield self._take()

    def _take(self) -> Line:
        line, self.rest = self.rest, []
        return line

    def _printable(self, character: str) -> str:
        if character == "\n":
            return _NEWLINE if self._has(_NEWLINE) else _NEWLINE_IN_ASCII
        if character == "\t":
            return _TAB
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):  # also escape codes
            return f"\\x{ord(character):02x}"
        return character if self._has(character) else "?"

    def _has(self, character: str) -> bool:
        return character.encode(self.encoding, errors="ignore") != b""


def draw_coloured(line: Line) -> Text:
    result = Text(no_wrap=True)
    for cell in line:
        style = STYLES[cell.source].style
        result.append(cell.text, f"{style} {PROVISIONAL}" if cell.provisional else style)
    return result


def draw_lettered(line: Line) -> Text:
    """The text, and in a second line below each token's first column the letter of its source."""
    letters = "".join(_letters(cell) for cell in line)
    return Text("".join(cell.text for cell in line) + "\n" + letters, no_wrap=True)


def _letters(cell: TokenCell) -> str:
    follows = PROVISIONAL_LETTER if cell.provisional else CONTINUES
    first = STYLES[cell.source].letter if cell.starts else follows
    return (first + follows * cell.width)[: cell.width]
