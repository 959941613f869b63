"""What `fly trace` prints below the text: every deferral with its outcome."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from fly.analysis.terminal.display import LiveGeneration
from fly.runs.replay import Token

_UNITS = {"top3": "nats", "full": "nats", "normalized": "0 to 1"}


def print_deferrals(
    console: Console,
    generation: LiveGeneration,
    bytes_of: Callable[[int], bytes],
    entropy_kind: str,
) -> None:
    """How the request ended, and every deferral: where, which tokens, the target's entropy there,
    and the outcome."""
    console.print(f"ended by {generation.finish or 'interruption'}")
    deferrals = [token for token in generation.shown if token.was_deferred]
    if not deferrals:
        console.print("no deferrals")
        return
    table = Table(title=f"{len(deferrals)} deferrals", title_justify="left")
    table.add_column("position", justify="right")
    for name in ("draft token", "target token"):
        table.add_column(name, overflow="fold")
    table.add_column(f"entropy ({_UNITS[entropy_kind]})", justify="right")
    table.add_column("outcome")
    for token in deferrals:
        texts = [_quote(console, bytes_of(number)) for number in (token.id, token.target_id)]
        outcome = "stood" if token.stands else "rolled back"
        table.add_row(str(token.index), *texts, _entropy(token), outcome)
    console.print(table, markup=False)


def _entropy(token: Token) -> str:
    return "-" if token.entropy is None else f"{token.entropy:.3f}"


def _quote(console: Console, piece: bytes) -> str:
    """The token's text; its bytes if it is only a part of a character."""
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return str(piece)[1:]
    return ascii(text) if console.encoding.startswith("ascii") else repr(text)
