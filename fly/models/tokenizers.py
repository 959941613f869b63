"""What draft and target must share, and which tokens end a text."""

from __future__ import annotations

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
