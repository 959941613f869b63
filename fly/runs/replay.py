"""A generation rebuilt from its trace: every token, where it came from, and what was dropped.

Nothing is decoded again and no tokenizer is loaded: docs/traces.md describes the lines.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fly.errors import FlyError

SOURCES = {
    "ngram": "proposed by the n-gram lookup, the target's own choice",
    "draft": "proposed by the draft model, the target's own choice",
    "deferred": "proposed, not the target's choice, and let stand",
    "correction": "the target's own token, where a proposal was rejected or rolled back",
    "bonus": "the target's own token, after a draft that stood whole",
    "rolled_back": "let in for the time being, then taken back",
}


@dataclass(frozen=True)
class Token:
    """One token of a generation.

    source: a key of SOURCES. index: its place among the tokens that were there with it. round:
    from 1. position: in the round's draft; None for the target's own tokens. by: `n` n-gram, `d`
    draft model, empty for the target. choice: the target's own token there. native: it is the
    target's choice. entropy: the target's before it, None if the trace has none. window: index of
    the deferral whose window this token is in. replaced: the draft token it stands for, of a
    correction. text: what it adds to the text; empty where only a later token completes a
    character.
    """

    id: int
    source: str
    index: int
    round: int
    choice: int
    native: bool
    position: int | None = None
    by: str = ""
    entropy: float | None = None
    window: int | None = None
    replaced: int | None = None
    text: str = ""
    choice_text: str = ""
    replaced_text: str = ""

    @property
    def stands(self) -> bool:
        return self.source != "rolled_back"

    @property
    def was_deferred(self) -> bool:
        """A mismatch that was let in, whether it stood or fell."""
        return self.position is not None and not self.native


@dataclass(frozen=True)
class Generation:
    """One request. `shown`: its tokens in order, the ones taken back before what replaced them.

    finish: `eos`, `stop`, `length`, or None if the run was cut short in it.
    """

    task: str
    doc_id: int
    request: int
    finish: str | None
    rounds: list[dict[str, Any]] = field(repr=False)
    shown: list[Token] = field(repr=False)

    @property
    def tokens(self) -> list[Token]:
        """What was returned (the stop string included)."""
        return [token for token in self.shown if token.stands]


def generations(
    lines: Iterable[dict[str, Any]],
    vocabulary: Mapping[int, bytes] | None = None,
    window: int = 0,
) -> Iterator[Generation]:
    """Every request of a trace file's lines (rows in flight take turns in it), in order of ends.

    vocabulary: bytes by token id; without it texts are ids. window: how many tokens after a
    deferral must match, which only the run's configuration says. Requests that the run's end cut
    short come last.
    """
    open_rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        key = (line["task_name"], line["doc_id"], line["request"])
        # a run that goes on decodes a request that was cut short again
        if line["round"] == 1 or key not in open_rows:
            open_rows[key] = []
        open_rows[key].append(line)
        if line["finish"] is not None:
            yield _whole(open_rows.pop(key), vocabulary, window)
    for rounds in open_rows.values():
        yield _whole(rounds, vocabulary, window)


def _whole(
    rounds: list[dict[str, Any]], vocabulary: Mapping[int, bytes] | None, window: int
) -> Generation:
    try:
        return replay(rounds, vocabulary, window)
    except (ValueError, IndexError) as error:
        raise FlyError(
            f"task {rounds[0]['task_name']}, doc {rounds[0]['doc_id']}: its trace cannot be "
            f"replayed ({error}): remove its lines, or run it again"
        ) from None


def replay(
    rounds: list[dict[str, Any]],
    vocabulary: Mapping[int, bytes] | None = None,
    window: int = 0,
) -> Generation:
    """One request from its lines, in order. Raises ValueError if a line is missing."""
    shown: list[Token] = []
    for line in rounds:
        add_round(shown, line)
    first = rounds[0]
    return Generation(
        task=first["task_name"],
        doc_id=first["doc_id"],
        request=first["request"],
        finish=rounds[-1]["finish"],
        rounds=rounds,
        shown=_with_texts(_with_windows(shown, window), vocabulary),
    )


def add_round(shown: list[Token], line: dict[str, Any]) -> None:
    """Add a line's tokens to `shown` and mark those it takes back.

    Places in it do not change before the row's last line.
    """
    start = line["start"]
    if start != sum(token.stands for token in shown):
        raise ValueError(f"request {line['request']}: round {line['round']} does not follow")
    if line["rolled_back"] is None:
        _accept(shown, line)
    else:
        _roll_back(shown, line)
    # the row's end cuts off what came after it, provisional tokens of earlier rounds as well
    shown[:] = [token for token in shown if not token.stands or token.index < line["length"]]


def _accept(shown: list[Token], line: dict[str, Any]) -> None:
    draft = line["draft"]
    deferred = [index - line["start"] for index in line["deferred"]]
    stands = [native == "1" or at in deferred for at, native in enumerate(line["native"])]
    accepted = stands.index(False) if False in stands else len(draft)
    rejected = draft[accepted] if accepted < len(draft) else None
    shown += [_drafted(line, at) for at in range(accepted)]
    shown.append(_own(line, accepted, rejected))


def _roll_back(shown: list[Token], line: dict[str, Any]) -> None:
    """Mark what falls with the deferral; append the target's own token in its place."""
    start, at = line["start"], line["rolled_back"]
    # what was let in together with the deferral: up to the mismatch that felled it
    first = max(at + 1 - start, 0)
    end = line["native"].find("0", first)
    end = len(line["draft"]) if end < 0 else end
    shown += [_drafted(line, position) for position in range(end)]
    if at < start:
        # an earlier round's deferral: its own choice is the target's token there
        fallen = _standing(shown, at)
        own = replace(
            fallen, id=fallen.choice, round=line["round"], position=None, by="", native=True
        )
    else:
        own = _own(line, at - start, None)
        fallen = _standing(shown, at)
    for number, token in enumerate(shown):
        if token.stands and token.index >= at:
            shown[number] = replace(token, source="rolled_back")
    shown.append(replace(own, source="correction", replaced=fallen.id))


def _standing(shown: list[Token], at: int) -> Token:
    for token in shown:
        if token.stands and token.index == at:
            return token
    raise ValueError(f"token {at} is rolled back, but is not there")


def _drafted(line: dict[str, Any], position: int) -> Token:
    native, by = line["native"][position] == "1", line["by"][position]
    source = ("ngram" if by == "n" else "draft") if native else "deferred"
    return Token(
        id=line["draft"][position], source=source, position=position, by=by,
        native=native, **_place(line, position),
    )  # fmt: skip


def _own(line: dict[str, Any], position: int, rejected: int | None) -> Token:
    source = "bonus" if position == len(line["draft"]) else "correction"
    return Token(
        id=line["choice"][position], source=source, native=True, replaced=rejected,
        **_place(line, position),
    )  # fmt: skip


def _place(line: dict[str, Any], position: int) -> dict[str, Any]:
    entropy = line.get("entropy")
    return {
        "index": line["start"] + position,
        "round": line["round"],
        "choice": line["choice"][position],
        "entropy": entropy[position] if entropy else None,
    }


def _with_windows(shown: list[Token], window: int) -> list[Token]:
    deferral: int | None = None
    result = []
    for token in shown:
        if deferral is not None and not deferral < token.index <= deferral + window:
            deferral = None
        result.append(replace(token, window=deferral))
        if token.was_deferred:
            deferral = token.index
    return result


def _with_texts(shown: list[Token], vocabulary: Mapping[int, bytes] | None) -> list[Token]:
    """Texts of standing tokens come from one stream of bytes, which token borders may cut."""
    known = vocabulary or {}

    def piece(token: int) -> bytes:
        return known.get(token, f"<{token}>".encode())

    def alone(token: int | None) -> str:
        return "" if token is None else piece(token).decode(errors="replace")

    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    last = max((number for number, token in enumerate(shown) if token.stands), default=-1)
    return [
        replace(
            token,
            text=decode(piece(token.id), number == last) if token.stands else alone(token.id),
            choice_text=alone(token.choice),
            replaced_text=alone(token.replaced),
        )
        for number, token in enumerate(shown)
    ]
