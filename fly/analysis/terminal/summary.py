"""What `fly trace` prints below the text: counts, and every deferral with its outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from fly.analysis.terminal.display import Generation
from fly.runs.records import rates
from fly.runs.replay import Token

_UNITS = {"top3": "nats", "full": "nats", "normalized": "0 to 1"}


def print_counts(console: Console, generation: Generation) -> None:
    """docs/definitions.md defines them."""
    row, sources = generation.row, Counter(token.source for token in generation.shown)
    counts, speed = row.counts, rates(row.counts, row.seconds)
    after_rollback = counts.deferred_rolled_back
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row(
        "tokens / rounds = tau", f"{counts.emitted} / {counts.rounds} = {_two(speed['tau'])}"
    )
    table.add_row(
        "draft tokens accepted",
        f"{counts.native_accepted + counts.deferred_accepted} of {counts.drafted}: "
        f"draft {sources['draft']}, n-gram {sources['ngram']}, "
        f"deferred and stood {counts.deferred_accepted}",
    )
    table.add_row(
        "the target's own",
        f"corrections {counts.corrections} ({after_rollback} after a rollback), "
        f"bonus {counts.bonus}",
    )
    table.add_row(
        "tokens rolled back",
        f"{sources['rolled_back']} ({counts.discarded} of them provisional for a round or more)",
    )
    table.add_row(
        "speed",
        f"{_two(speed['decode_tok_s'])} tok/s decoding, "
        f"{_two(speed['end_to_end_tok_s'])} tok/s end to end",
    )
    table.add_row("ended by", row.finish_reason or "interruption")
    console.print(table)


def print_deferrals(
    console: Console, generation: Generation, bytes_of: Callable[[int], bytes], entropy_kind: str
) -> None:
    """Every mismatch that was let in: where, which tokens, how unsure the target was, its fate."""
    deferrals = [token for token in generation.shown if token.was_deferred]
    if not deferrals:
        console.print("no deferrals")
        return
    table = Table(title=f"{len(deferrals)} deferrals", title_justify="left")
    table.add_column("position", justify="right")
    for name in ("draft token", "target's choice"):
        table.add_column(name, overflow="fold")
    table.add_column(f"entropy ({_UNITS[entropy_kind]})", justify="right")
    table.add_column("outcome")
    for token in deferrals:
        texts = [_quoted(console, bytes_of(number)) for number in (token.id, token.choice)]
        outcome = "stood" if token.stands else "rolled back"
        table.add_row(str(token.index), *texts, _entropy(token), outcome)
    console.print(table, markup=False)


def _entropy(token: Token) -> str:
    return "-" if token.entropy is None else f"{token.entropy:.3f}"


def _quoted(console: Console, piece: bytes) -> str:
    """The token's text; its bytes if it is only a part of a character."""
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return str(piece)[1:]
    return ascii(text) if console.encoding.startswith("ascii") else repr(text)


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
