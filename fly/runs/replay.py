"""A generation rebuilt from its trace: every token, where it came from, and what was rolled back.

Nothing is decoded again and no tokenizer is loaded. docs/report.md describes the lines.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fly.errors import FlyError
from fly.runs.shapes import RoundLine

# The source of a draft token that matches the target's, by who drafted it: the letters of
# fly.runs.records.SOURCES.
MATCHES = {"d": "draft", "n": "ngram", "e": "earlier", "s": "sibling", "o": "other"}


@dataclass(slots=True)
class Token:
    """One token of a generation.

    source: `draft`, `ngram`, `earlier`, `sibling` or `other` (MATCHES), a draft token that matches
    the target's; `deferred`, a mismatch that stands; `recovered`, the target's token in place of a
    draft token that was rejected or rolled back; `bonus`, the target's token after a draft that
    was accepted whole; `rolled_back`, accepted at first, then dropped.
    """

    id: int
    source: str
    index: int  # its place among the generated tokens, those dropped before it not counted
    round: int  # from 1
    target_id: int  # the target's token at this place
    matches_target: bool
    position: int | None = None  # in the round's draft; None for the target's own tokens
    by: str = ""  # who drafted it, a letter of fly.runs.records.SOURCES; empty for the target's
    entropy: float | None = None  # the target's before the token; None if the trace has none
    window: int | None = None  # index of the deferral whose window this token is in
    replaced: int | None = None  # of a recovered token, the draft token's id
    text: str = ""  # what it adds to the text; empty if only a later token completes a character
    target_text: str = ""
    replaced_text: str = ""

    @property
    def stands(self) -> bool:
        return self.source != "rolled_back"

    @property
    def was_deferred(self) -> bool:
        """A mismatch that was accepted, whether it stood or was rolled back."""
        return self.position is not None and not self.matches_target


@dataclass(frozen=True)
class Generation:
    """One request."""

    task: str
    doc_id: int
    request: int
    finish: str | None  # `eos`, `stop`, `length`, or None if the run was cut short in it
    rounds: list[RoundLine] = field(repr=False)
    # its tokens in order, the rolled back ones before what replaced them
    shown: list[Token] = field(repr=False)

    @property
    def tokens(self) -> list[Token]:
        """What was returned (the stop string included)."""
        return [token for token in self.shown if token.stands]


def generations(
    lines: Iterable[RoundLine], vocabulary: Mapping[int, bytes] | None = None, window: int = 0
) -> Iterator[Generation]:
    """Every request of a trace, whose lines may be interleaved, in the order in which they end.

    vocabulary: bytes by token id; without it there are no texts before `set_texts`. window: how
    many tokens after a deferral must match, which only the run's configuration says. Requests that
    were cut short by the run's end come last.
    """
    unfinished: dict[tuple[str, int, int], list[RoundLine]] = {}
    for line in lines:
        key = (line["task_name"], line["doc_id"], line["request"])
        if line["round"] == 1:  # a resumed run decodes a request that was cut short again
            unfinished[key] = []
        unfinished.setdefault(key, []).append(line)
        if line["finish"] is not None:
            yield replay(unfinished.pop(key), vocabulary, window)
    for rounds in unfinished.values():
        yield replay(rounds, vocabulary, window)


def replay(
    rounds: list[RoundLine], vocabulary: Mapping[int, bytes] | None = None, window: int = 0
) -> Generation:
    """One request from its lines, in order. Raises FlyError if they do not fit together."""
    first = rounds[0]
    shown: list[Token] = []
    try:
        for line in rounds:
            add_round(shown, line)
    except (ValueError, IndexError) as error:
        raise FlyError(
            f"task {first['task_name']}, doc {first['doc_id']}: its trace cannot be replayed "
            f"({error}): remove its lines, or run it again"
        ) from None
    _set_windows(shown, window)
    if vocabulary is not None:
        set_texts(shown, vocabulary)
    return Generation(
        task=first["task_name"],
        doc_id=first["doc_id"],
        request=first["request"],
        finish=rounds[-1]["finish"],
        rounds=rounds,
        shown=shown,
    )


def add_round(shown: list[Token], line: RoundLine) -> None:
    """Add a line's tokens to `shown` and mark those that it rolls back.

    Only a request's last line removes tokens. Raises ValueError or IndexError if the line does not
    follow, or its lists do not fit together.
    """
    if line["start"] != _length(shown):
        raise ValueError(f"request {line['request']}: round {line['round']} does not follow")
    if line["rolled_back"] is None:
        _accept(shown, line)
    else:
        _roll_back(shown, line, line["rolled_back"])
    if line["length"] < _length(shown):
        # a request's end cuts off what follows it, provisional tokens of earlier rounds included
        shown[:] = [token for token in shown if not token.stands or token.index < line["length"]]


def _length(shown: list[Token]) -> int:
    """How many tokens stand: their indexes count them."""
    return next((token.index + 1 for token in reversed(shown) if token.stands), 0)


def _accept(shown: list[Token], line: RoundLine) -> None:
    draft, start, entropy = line["draft"], line["start"], line.get("entropy")
    mismatches = (at for at, match in enumerate(line["native"]) if match == "0")
    accepted = next((at for at in mismatches if start + at not in line["deferred"]), len(draft))
    target_id, is_whole = line["choice"][accepted], accepted == len(draft)
    shown += _draft_tokens(line, accepted)
    shown.append(
        Token(
            id=target_id,
            source="bonus" if is_whole else "recovered",
            index=start + accepted,
            round=line["round"],
            target_id=target_id,
            matches_target=True,
            entropy=entropy[accepted] if entropy else None,
            replaced=None if is_whole else draft[accepted],
        )
    )


def _roll_back(shown: list[Token], line: RoundLine, at: int) -> None:
    """Mark what is rolled back with the deferral at `at`; append the recovered token."""
    # up to the mismatch that rolled the deferral back
    for token in _draft_tokens(line, len(line["draft"])):
        if token.index > at and not token.matches_target:
            break
        shown.append(token)
    deferral = next((token for token in shown if token.stands and token.index == at), None)
    if deferral is None:
        raise ValueError(f"token {at} is rolled back, but is not there")
    for token in shown:
        if token.index >= at:
            token.source = "rolled_back"
    recovered = replace(
        deferral, id=deferral.target_id, source="recovered", round=line["round"],
        matches_target=True, position=None, by="", replaced=deferral.id,
    )  # fmt: skip
    shown.append(recovered)


def _draft_tokens(line: RoundLine, count: int) -> list[Token]:
    """The first so many tokens of the draft, as if all of them were accepted."""
    draft = line["draft"]
    entropy: Sequence[float | None] = line.get("entropy") or [None] * (len(draft) + 1)
    if {*map(len, (line["by"], line["native"], line["choice"][1:], entropy[1:]))} != {len(draft)}:
        raise ValueError("its lists differ in length")
    columns = zip(draft[:count], line["by"], line["native"], line["choice"], entropy)
    return [
        Token(
            id=token,
            source=MATCHES[by] if match == "1" else "deferred",
            index=line["start"] + position,
            round=line["round"],
            target_id=target,
            matches_target=match == "1",
            position=position,
            by=by,
            entropy=uncertainty,
        )
        for position, (token, by, match, target, uncertainty) in enumerate(columns)
    ]


def _set_windows(shown: list[Token], window: int) -> None:
    deferral: int | None = None
    for token in shown:
        if deferral is not None and deferral < token.index <= deferral + window:
            token.window = deferral
        else:
            deferral = None
        if token.was_deferred:
            deferral = token.index


def set_texts(shown: list[Token], vocabulary: Mapping[int, bytes]) -> None:
    """Give every token its text; one that the vocabulary lacks gets its id. Standing tokens are
    decoded as one stream of bytes: a character may span several tokens."""

    def piece(token: int) -> bytes:
        return vocabulary.get(token, f"<{token}>".encode())

    def alone(token: int | None) -> str:
        return "" if token is None else piece(token).decode(errors="replace")

    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    last = max((number for number, token in enumerate(shown) if token.stands), default=-1)
    for number, token in enumerate(shown):
        token.text = decode(piece(token.id), number == last) if token.stands else alone(token.id)
        token.target_text = alone(token.target_id)
        token.replaced_text = alone(token.replaced)
