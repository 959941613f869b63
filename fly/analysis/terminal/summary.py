"""What `fly trace` prints below the text: counts, and every deferral with its outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from fly.analysis.terminal.display import LiveGeneration
from fly.analysis.terminal.styles import STYLES
from fly.runs.records import rates
from fly.runs.replay import MATCHES, Token

_ALWAYS_NAMED = ("draft", "ngram")  # other sources of draft tokens only if they have any
_UNITS = {"top3": "nats", "full": "nats", "normalized": "0 to 1"}


def print_counts(console: Console, generation: LiveGeneration) -> None:
    """The request's counts; docs/definitions.md defines them."""
    sources = Counter(token.source for token in generation.shown)
    counts, speed = generation.counts, rates(generation.counts, generation.seconds)
    accepted = counts.native_accepted + counts.deferred_accepted
    matches = [
        f"{STYLES[source].name} {sources[source]}"
        for source in MATCHES.values()
        if source in _ALWAYS_NAMED or sources[source]
    ]
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in {
        "tokens / rounds = tau": f"{counts.emitted} / {counts.rounds} = {_two(speed['tau'])}",
        "draft tokens accepted": f"{accepted} of {counts.drafted}: {', '.join(matches)}, "
        f"deferred and stood {counts.deferred_accepted}",
        "target tokens": f"recovered {counts.corrections} ({counts.deferred_rolled_back} after a "
        f"rollback), bonus {counts.bonus}",
        "tokens rolled back": f"{sources['rolled_back']} ({counts.discarded} of them provisional "
        "for a round or more)",
        "speed": f"{_two(speed['decode_tok_s'])} tok/s decoding, "
        f"{_two(speed['end_to_end_tok_s'])} tok/s end to end",
        "ended by": generation.finish or "interruption",
    }.items():
        table.add_row(name, value)
    console.print(table)


def print_deferrals(
    console: Console,
    generation: LiveGeneration,
    bytes_of: Callable[[int], bytes],
    entropy_kind: str,
) -> None:
    """Every deferral: where, which tokens, the target's entropy there, and the outcome."""
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


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
