"""Both models along the target's own text: every verdict that a simulation may ask for.

One pass of each model over a document gives, after every token, the draft's token and what the
target says of it. Where the two differ the draft's token is taken all the same and the draft goes
on alone for some tokens (a branch), which the target judges in one more pass: that is what a round
meets behind a mismatch, deferred or not. A branch ends in the text again, at the same offset: what
follows a deferral far away is taken to be like the text that it replaced.

Shapes: B branches, N positions, M mismatches among them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fly.errors import FlyError
from fly.execution.argmax import greedy
from fly.execution.model_runner import ModelRunner
from fly.speculation.drafters.ngram import until_eos
from fly.speculation.rules.gates import Gate, all_pass

_CHUNK = 32  # tokens per target pass along the text: more would only build larger logits
_NO_TOKEN = -1

Passed = frozenset[Gate]  # the gates that a mismatch passes


@dataclass(frozen=True)
class Answer:
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

    target, drafted: the two models' tokens there (-1: unknown, drafting ends there). after_target,
    after_draft: the state that such a token leads to. passed: the gates that the draft's token
    passes, of those that were recorded; none where it is the target's. No draft goes past one of
    `eos_ids`.
    """

    eos_ids: frozenset[int]
    target: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    after_target: list[int] = field(default_factory=list)
    after_draft: list[int] = field(default_factory=list)
    passed: list[Passed] = field(default_factory=list)
    _deferrable: dict[tuple[Gate, ...] | None, list[bool]] = field(
        default_factory=dict, init=False, repr=False
    )

    def add(self, target: int, drafted: int, passed: Passed = frozenset()) -> int:
        """A state whose successors are set later; returns its number."""
        self.target.append(target)
        self.drafted.append(drafted)
        self.after_target.append(0)
        self.after_draft.append(0)
        self.passed.append(passed)
        return len(self.target) - 1

    def deferrable(self, gates: tuple[Gate, ...] | None) -> list[bool]:
        """By state: does a mismatch there pass all of these recorded gates? None: nowhere."""
        if gates not in self._deferrable:
            wanted = None if gates is None else set(gates)
            self._deferrable[gates] = [
                wanted is not None and wanted <= passed for passed in self.passed
            ]
        return self._deferrable[gates]

    def draft(self, state: int, limit: int) -> tuple[list[int], list[int]]:
        """(at most `limit` drafted tokens, the states before each of them and after the last)."""
        chain, states = list[int](), [state]
        while len(chain) < limit and self.drafted[state] != _NO_TOKEN:
            chain.append(self.drafted[state])
            state = self.after_draft[state]
            states.append(state)
            if chain[-1] in self.eos_ids:
                break
        return chain, states


@dataclass(frozen=True)
class Recording:
    """One document with one draft. ties: positions where the wide pass disagrees with the text."""

    answer: Answer
    tree: Tree
    mismatches: int
    ties: int


class Recorder:
    """Makes recordings. Slots 0.. of both runners hold branches, the last one the text.

    gates: those that simulated rules may use. length: draft tokens in a branch, the mismatch
    included. width: tokens per draft pass along the text; a quantised draft may round passes of
    another width differently.
    """

    def __init__(
        self,
        target: ModelRunner,
        draft: ModelRunner,
        eos_ids: frozenset[int],
        gates: Collection[Gate],
        *,
        length: int,
        width: int = _CHUNK,
    ) -> None:
        if target.slots != draft.slots or target.slots < 2:
            raise ValueError(f"{target.slots} and {draft.slots} slots: give both the same, >= 2")
        self._target, self._draft = target, draft
        self._eos_ids, self._gates = eos_ids, gates
        self._length, self._width = length, width

    def record(self, answer: Answer) -> Recording:
        """Raises FlyError if the document does not fit into the draft's context."""
        tokens = [*answer.prompt, *answer.tokens]
        if len(tokens) + self._length > self._draft.max_length:
            raise FlyError(
                f"task {answer.task}, doc {answer.doc_id}: {len(tokens)} tokens are more than "
                f"the draft's context of {self._draft.max_length} leaves room for: lower "
                "--max_gen_toks, or tune on shorter documents"
            )
        drafted: list[int] = []
        for logits_NV in self._along(self._draft, answer, self._width):
            drafted += greedy(logits_NV).tolist()
        tree, ties = Tree(self._eos_ids), 0
        for logits_NV in self._along(self._target, answer, _CHUNK):
            start = len(tree.target)
            target = greedy(logits_NV).tolist()
            text = answer.tokens[start : start + len(target)]
            # the text decides: a pass of another width may break a tie the other way
            ties += sum(token != own for token, own in zip(text, target))
            target[: len(text)] = text
            proposed = drafted[start : start + len(target)]
            for state in zip(target, proposed, self._passed(logits_NV, target, proposed)):
                tree.add(*state)
        if len(tree.target) == len(answer.tokens):  # nothing is ever drafted past this end
            tree.add(_NO_TOKEN, _NO_TOKEN)
        return Recording(answer, tree, self._branches(answer, tree), ties)

    def _along(self, runner: ModelRunner, answer: Answer, width: int) -> Iterator[Tensor]:
        """Logits [N, V] after the prompt and after every token that a draft may follow."""
        runner.prefill(0, list(answer.prompt[:-1]))
        feed = [answer.prompt[-1], *answer.tokens]
        if answer.finish != "stop":  # behind EOS and budget there is no draft
            feed.pop()
        for start in range(0, len(feed), width):
            piece = feed[start : start + width]
            logits_BNV = runner.extend([piece])
            runner.truncate(0, runner.lengths[0] + len(piece))
            yield logits_BNV[0]

    def _passed(self, logits_NV: Tensor, target: list[int], drafted: list[int]) -> list[Passed]:
        """Of every position."""
        passed: list[Passed] = [frozenset()] * len(target)
        differ = [i for i in range(len(target)) if target[i] != drafted[i]]
        if differ:
            logits_MV = logits_NV[differ]
            token_M = torch.tensor([drafted[i] for i in differ], device=logits_NV.device)
            columns = [all_pass((gate,), logits_MV, token_M).tolist() for gate in self._gates]
            for place, index in enumerate(differ):
                found = zip(self._gates, columns)
                passed[index] = frozenset(gate for gate, column in found if column[place])
        return passed

    def _branches(self, answer: Answer, tree: Tree) -> int:
        """Link the states along the text, and branch off where the draft's token leaves it.

        Returns how many positions of the text that are.
        """
        end = len(answer.tokens)
        leaves = []
        for state in range(end + 1):
            tree.after_target[state] = tree.after_draft[state] = min(state + 1, end)
            token = tree.drafted[state]
            differs = state == end or token != tree.target[state]
            if differs and token != _NO_TOKEN and token not in self._eos_ids:
                leaves.append(state)
        slots = self._target.slots - 1
        for runner in (self._draft, self._target):
            runner.move(0, slots)
        for start in range(0, len(leaves), slots):
            self._branch(answer, tree, leaves[start : start + slots])
        return sum(tree.drafted[state] != tree.target[state] for state in range(end))

    def _branch(self, answer: Answer, tree: Tree, leaves: list[int]) -> None:
        """Let the draft go on alone from these states, and the target judge what it wrote."""
        before = [[*answer.prompt, *answer.tokens[:state]] for state in leaves]
        chains = self._rollout(before, [tree.drafted[state] for state in leaves])
        for slot, tokens in enumerate(before):
            self._target.prefill(slot, tokens)
        logits_BNV = self._target.extend([chain[:-1] or chain for chain in chains])
        target_BN = greedy(logits_BNV).tolist()
        for slot, (leaf, (_, *drafted)) in enumerate(zip(leaves, chains)):
            target = target_BN[slot][: len(drafted)]
            passed = self._passed(logits_BNV[slot], target, drafted)
            _graft(tree, leaf, len(answer.tokens), list(zip(target, drafted, passed)))

    def _rollout(self, before: list[list[int]], first: list[int]) -> list[list[int]]:
        """The draft's own continuation of each text by its first token; none goes past EOS."""
        chains = [[token] for token in first]
        for slot, tokens in enumerate(before):
            self._draft.prefill(slot, tokens)
        for _ in range(self._length - 1):
            drafted_B1 = greedy(self._draft.extend([chain[-1:] for chain in chains])).tolist()
            for slot, chain in enumerate(chains):
                self._draft.truncate(slot, self._draft.lengths[slot] + 1)
                chain.append(drafted_B1[slot][0])
        return [until_eos(chain, self._eos_ids) for chain in chains]


def _graft(tree: Tree, leaf: int, end: int, states: list[tuple[int, int, Passed]]) -> None:
    """Put a branch's states behind `leaf`; where it is left, the text goes on at that offset."""
    previous = leaf
    for offset, values in enumerate(states, start=leaf + 1):
        state = tree.add(*values)
        tree.after_draft[previous] = state
        if tree.target[previous] == tree.drafted[previous] and previous != leaf:
            tree.after_target[previous] = state
        tree.after_target[state] = tree.after_draft[state] = min(offset + 1, end)
        previous = state
