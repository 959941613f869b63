"""What draft and target must share, and which tokens end a text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from fly.errors import FlyError


def check_same_vocabulary(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Raise FlyError, naming the first difference, unless both map every id to the same token."""
    ours, theirs = (
        {index: token for token, index in tokenizer.get_vocab().items()}
        for tokenizer in (target, draft)
    )
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            raise FlyError(
                f"draft and target have different vocabularies ({len(theirs)} and {len(ours)} "
                f"tokens): token {index} is {theirs.get(index)!r} in the draft and "
                f"{ours.get(index)!r} in the target: choose a draft of the target's family, or set "
                "dual_tok=true to draft the tokens that both have"
            )


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
        return self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

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
