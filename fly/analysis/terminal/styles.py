"""How each source of a token is shown: a style on terminals, a letter elsewhere."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rich.columns import Columns
from rich.text import Text


@dataclass(frozen=True)
class SourceStyle:
    """How tokens of one source are shown."""

    name: str
    letter: str  # below the token's first column, where there are no colours
    style: str  # rich's


STYLES = {  # by fly.runs.replay's sources; no two differ by red against green alone
    "draft": SourceStyle("draft", "d", "bright_blue"),
    "ngram": SourceStyle("n-gram", "n", "cyan"),
    "earlier": SourceStyle("earlier run", "e", "green"),
    "sibling": SourceStyle("sibling", "s", "black on cyan"),
    "other": SourceStyle("other document", "o", "white on blue"),
    "deferred": SourceStyle("deferred and stood", "w", "black on yellow"),
    "recovered": SourceStyle("recovered token", "r", "bold bright_red"),
    "bonus": SourceStyle("bonus", "b", "magenta"),
    "rolled_back": SourceStyle("rolled back", "x", "dim strike"),
}
PROVISIONAL = "dim underline"  # added while a window is open
CONTINUES, PROVISIONAL_LETTER = ".", "?"  # in the letters' row: the same token; not final yet


def legend(*, colours: bool, lasting_drops: bool, absent: Collection[str] = ()) -> Columns:
    """What the marks of tokens mean.

    lasting_drops: rolled-back tokens stay; without colours they are not shown otherwise. absent:
    sources that cannot occur, which are left out.
    """
    names = []
    for source, style in STYLES.items():
        if source in absent:
            continue
        if colours:
            names.append(Text(style.name, style=style.style))
        elif source != "rolled_back" or lasting_drops:
            names.append(Text(f"{style.letter} {style.name}"))
    if colours:
        names.append(Text("provisional", style=PROVISIONAL))
    else:
        names.append(Text(f"{CONTINUES} the same token"))
    return Columns(names, padding=(0, 3))
