"""How each source of a token looks: a colour on terminals, a letter elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from rich.columns import Columns
from rich.text import Text


@dataclass(frozen=True)
class Look:
    """style: rich's. letter: below the token's first column where there are no colours."""

    name: str
    letter: str
    style: str


LOOKS = {  # by fly.runs.replay's sources; no two differ by red against green alone
    "draft": Look("draft", "d", "bright_blue"),
    "ngram": Look("n-gram", "n", "cyan"),
    "deferred": Look("deferred and stood", "w", "black on yellow"),
    "correction": Look("target correction", "c", "bold bright_red"),
    "bonus": Look("bonus", "b", "magenta"),
    "rolled_back": Look("rolled back", "x", "dim strike"),
}
PROVISIONAL = "dim underline"  # added while a window is open
CONTINUES, PROVISIONAL_LETTER = ".", "?"  # in the letters' row: the same token; not final yet


def legend(*, colours: bool, lasting_drops: bool) -> Columns:
    """lasting_drops: whether rolled-back tokens stay; without colours they are not seen else."""
    names = []
    for source, look in LOOKS.items():
        if colours:
            names.append(Text(look.name, style=look.style))
        elif source != "rolled_back" or lasting_drops:
            names.append(Text(f"{look.letter} {look.name}"))
    if colours:
        names.append(Text("provisional", style=PROVISIONAL))
    else:
        names.append(Text(f"{CONTINUES} the same token"))
    return Columns(names, padding=(0, 3))
