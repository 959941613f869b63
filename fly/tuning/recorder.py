"""Both models along the target's own text: every verdict that a simulation may ask for.

One pass of each model over a document gives, after every token, the draft's choice and what the
target says of it. Where the two differ the draft's token is taken all the same and the draft goes
on alone for some tokens (a branch), which the target judges in one more pass: that is what a round
meets behind a mismatch, deferred or not. A branch ends in the text again, at the same offset: what
follows a deferral far away is taken to be like the text that it replaced.

Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fly.errors import FlyError
from fly.execution.argmax import greedy
from fly.execution.model_runner import ModelRunner
from fly.speculation.drafters.ngram import until_eos
from fly.speculation.rules.gates import (
    EntropyGate,
    Gate,
    MarginGate,
    RankGate,
    RatioGate,
    entropy,
    margin,
    rank,
    ratio,
)

_CHUNK = 32  # tokens per target pass along the text: more would only build larger logits
_NO_TOKEN = -1


@dataclass(frozen=True)
class Document:
    """A request and what the target alone answered. finish: `eos`, `stop` or `length`."""

    task: str
    doc_id: int
    prompt: tuple[int, ...]
    budget: int
    tokens: tuple[int, ...]
    finish: str


@dataclass
class Tree:
    """States of one document's decoding, by number; 0..n are those along the text.

    own, drafted: what target and draft choose there (-1: not known, as drafting ends there).
    after_own, after_draft: the state that such a token leads to. gates: what gates look at, [N]
    lists by name, for the drafted token.
    """

    own: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    after_own: list[int] = field(default_factory=list)
    after_draft: list[int] = field(default_factory=list)
    gates: dict[str, list[float]] = field(default_factory=dict)
    _known: dict[tuple[Gate, ...], list[bool]] = field(default_factory=dict, repr=False)

    def add(self, own: int, drafted: int, gates: dict[str, float]) -> int:
        """A state whose successors are set later; returns its number."""
        self.own.append(own)
        self.drafted.append(drafted)
        self.after_own.append(0)
        self.after_draft.append(0)
        for name in _GATES:
            self.gates.setdefault(name, []).append(gates.get(name, 0.0))
        return len(self.own) - 1

    def passes(self, gates: tuple[Gate, ...]) -> list[bool]:
        """By state: would its drafted token pass all gates? Raises TypeError for other rules'."""
        if gates not in self._known:
            each = [self._passes(gate) for gate in gates]
            self._known[gates] = [all(gate[i] for gate in each) for i in range(len(self.own))]
        return self._known[gates]

    def _passes(self, gate: Gate) -> list[bool]:
        if isinstance(gate, EntropyGate):
            return [value >= gate.threshold for value in self.gates[gate.kind]]
        if isinstance(gate, MarginGate):
            return [value <= gate.threshold for value in self.gates["margin"]]
        if isinstance(gate, RatioGate):
            return [value >= gate.threshold for value in self.gates["ratio"]]
        if isinstance(gate, RankGate):
            return [value <= gate.rank for value in self.gates["rank"]]
        raise TypeError(f"{type(gate).__name__} is not recorded")


_GATES = ("top3", "full", "normalized", "margin", "ratio", "rank")


@dataclass(frozen=True)
class Replay:
    """One document with one draft. ties: positions where the wide pass disagrees with the text."""

    document: Document
    tree: Tree
    mismatches: int
    ties: int


class Recorder:
    """Makes replays. Slots 0.. of both runners hold branches, the last one the text.

    length: draft tokens in a branch, the mismatch included. width: tokens per draft pass along the
    text; a quantised draft may round passes of another width differently.
    """

    def __init__(
        self,
        target: ModelRunner,
        draft: ModelRunner,
        eos_ids: frozenset[int],
        *,
        length: int,
        width: int = _CHUNK,
    ) -> None:
        if target.slots != draft.slots or target.slots < 2:
            raise ValueError(f"{target.slots} and {draft.slots} slots: give both the same, >= 2")
        self._target, self._draft = target, draft
        self._eos_ids = eos_ids
        self._length, self._width = length, width

    def record(self, document: Document) -> Replay:
        """Raises FlyError if the document does not fit into the draft's context."""
        tokens = [*document.prompt, *document.tokens]
        if len(tokens) + self._length > self._draft.max_length:
            raise FlyError(
                f"task {document.task}, doc {document.doc_id}: {len(tokens)} tokens are more than "
                f"the draft's context of {self._draft.max_length} leaves room for: lower "
                "--max_gen_toks, or tune on shorter documents"
            )
        drafted: list[int] = []
        for logits_NV in self._along(self._draft, document, self._width):
            drafted += greedy(logits_NV).tolist()
        tree, ties = Tree(), 0
        for logits_NV in self._along(self._target, document, _CHUNK):
            proposed = drafted[len(tree.own) :][: len(logits_NV)]
            choice = greedy(logits_NV).tolist()
            for own, token, gates in zip(choice, proposed, _looked_at(logits_NV, proposed)):
                # the text decides: a pass of another width may break a tie the other way
                index = len(tree.own)
                text = document.tokens[index] if index < len(document.tokens) else own
                ties += own != text
                tree.add(text, token, gates)
        if len(tree.own) == len(document.tokens):  # nothing is ever drafted past this end
            tree.add(_NO_TOKEN, _NO_TOKEN, {})
        return Replay(document, tree, self._branches(document, tree), ties)

    def _along(self, runner: ModelRunner, document: Document, width: int) -> Iterator[Tensor]:
        """Logits [N, V] after the prompt and after every token that a draft may follow."""
        runner.prefill(0, list(document.prompt[:-1]))
        feed = [document.prompt[-1], *document.tokens]
        if document.finish != "stop":  # behind EOS and budget there is no draft
            feed.pop()
        for start in range(0, len(feed), width):
            piece = feed[start : start + width]
            logits_BNV = runner.extend([piece])
            runner.keep(0, runner.lengths[0] + len(piece))
            yield logits_BNV[0]

    def _branches(self, document: Document, tree: Tree) -> int:
        """Link the states along the text, and branch off where the draft's choice leaves it."""
        end = len(document.tokens)
        leaves = []
        for state in range(end + 1):
            tree.after_own[state] = tree.after_draft[state] = min(state + 1, end)
            token = tree.drafted[state]
            differs = state == end or token != tree.own[state]
            if differs and token != _NO_TOKEN and token not in self._eos_ids:
                leaves.append(state)
        rows = self._target.slots - 1
        for runner in (self._draft, self._target):
            runner.move(0, rows)
        for start in range(0, len(leaves), rows):
            self._branch(document, tree, leaves[start : start + rows])
        return sum(tree.drafted[state] != tree.own[state] for state in range(end))

    def _branch(self, document: Document, tree: Tree, leaves: list[int]) -> None:
        """Let the draft go on alone from these states, and the target judge what it wrote."""
        before = [[*document.prompt, *document.tokens[:state]] for state in leaves]
        chains = self._rollout(before, [tree.drafted[state] for state in leaves])
        for slot, tokens in enumerate(before):
            self._target.prefill(slot, tokens)
        logits_BNV = self._target.extend([chain[:-1] or chain for chain in chains])
        for slot, (leaf, chain) in enumerate(zip(leaves, chains)):
            count = len(chain) - 1
            logits_NV = logits_BNV[slot, :count]
            gates = _looked_at(logits_NV, chain[1:])
            own = greedy(logits_NV).tolist() if count else []
            _graft(tree, leaf, len(document.tokens), list(zip(own, chain[1:], gates)))

    def _rollout(self, before: list[list[int]], first: list[int]) -> list[list[int]]:
        """The draft's own continuation of each text by its first token; none goes past EOS."""
        chains = [[token] for token in first]
        for slot, tokens in enumerate(before):
            self._draft.prefill(slot, tokens)
        for _ in range(self._length - 1):
            choice = greedy(self._draft.extend([chain[-1:] for chain in chains])).tolist()
            for slot, chain in enumerate(chains):
                self._draft.keep(slot, self._draft.lengths[slot] + 1)
                chain.append(choice[slot][0])
        return [until_eos(chain, self._eos_ids) for chain in chains]


def _graft(
    tree: Tree, leaf: int, end: int, states: list[tuple[int, int, dict[str, float]]]
) -> None:
    """Put a branch's states behind `leaf`; where it is left, the text goes on at that offset."""
    previous = leaf
    for offset, (own, token, gates) in enumerate(states, start=leaf + 1):
        state = tree.add(own, token, gates)
        tree.after_draft[previous] = state
        if tree.own[previous] == tree.drafted[previous] and previous != leaf:
            tree.after_own[previous] = state
        tree.after_own[state] = tree.after_draft[state] = min(offset + 1, end)
        previous = state


def _looked_at(logits_NV: Tensor, drafted: list[int]) -> list[dict[str, float]]:
    """What every gate looks at, one dict per position."""
    if not drafted:
        return []
    token_N = torch.tensor(drafted, device=logits_NV.device)
    columns: dict[str, list[float]] = {
        "top3": entropy(logits_NV, "top3").tolist(),
        "full": entropy(logits_NV, "full").tolist(),
        "normalized": entropy(logits_NV, "normalized").tolist(),
        "margin": margin(logits_NV).tolist(),
        "ratio": ratio(logits_NV, token_N).tolist(),
        "rank": rank(logits_NV, token_N).tolist(),
    }
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def record_all(
    recorder: Recorder, documents: list[Document], done: Callable[[int], None]
) -> list[Replay]:
    """A replay of every document; `done(count)` after each."""
    replays = []
    for count, document in enumerate(documents, start=1):
        replays.append(recorder.record(document))
        done(count)
    return replays
