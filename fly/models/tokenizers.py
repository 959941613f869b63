"""What draft and target must share, and which tokens end a text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from fly.errors import FlyError

_REMEDY = (
    "choose a draft of the target's family, or set dual_tok=true to draft the tokens that both have"
)


def check_same_vocabulary(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Raise FlyError, naming the first difference, unless both map every id to the same token."""
    target_vocab, draft_vocab = target.get_vocab(), draft.get_vocab()
    if target_vocab == draft_vocab:
        return
    target_tokens = {index: token for token, index in target_vocab.items()}
    draft_tokens = {index: token for token, index in draft_vocab.items()}
    for index in range(max(*target_tokens, *draft_tokens) + 1):
        ours, theirs = target_tokens.get(index), draft_tokens.get(index)
        if ours != theirs:
            raise FlyError(
                f"draft and target have different vocabularies ({len(draft_vocab)} and "
                f"{len(target_vocab)} tokens): token {index} is {theirs!r} in the draft and "
                f"{ours!r} in the target: {_REMEDY}"
            )
    raise FlyError(f"draft and target have different vocabularies: {_REMEDY}")


def eos_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """EOS ids of both the model's generation_config and the tokenizer: some models name one only in
    either."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    found = {*(ids if isinstance(ids, (list, tuple)) else [ids]), tokenizer.eos_token_id}
    return frozenset(int(index) for index in found if index is not None)


class Texts:
    """Token ids as texts, for stop strings and for rules that look at texts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        """Text, special tokens kept."""
        # cleaning up would take back characters that a stop string has matched
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def decode_lines(self, ids: Sequence[int]) -> str:
        """Text with line breaks in place of special tokens, which chat templates put between a
        prompt's messages and before the answer."""
        parts = groupby(ids, self._special_ids.__contains__)
        return "".join("\n" if special else self.decode([*part]) for special, part in parts)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        own = {index for index, token in added.items() if token.special}
        return frozenset(own.union(self._tokenizer.all_special_ids))
