"""Draft and target with different tokenizers: the tokens that both have (TLI, arXiv 2502.05202).

Two tokens are the same if they add the same bytes to a text, however their tokenizers write them,
and special tokens if they have the same name. The draft model drafts shared tokens only, each as
the one token that it is for the target. What it reads are all of the target's tokens: one that it
has no id for is spelled by the longest of its own tokens that the bytes begin with, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fly.errors import FlyError
from fly.models import token_bytes
from fly.models.draft_vocabulary import NONE, DraftVocabulary

_Spelling = tuple[bool, bytes]  # (is it a special token, the bytes that it adds to a text)


class TokenIntersection(DraftVocabulary):
    """The tokens that two tokenizers share, and how the draft reads those that they do not.

    spell: the draft ids, at least one, that stand for a target id without a draft id of its own.
    opening: what the draft's tokenizer puts before a text (BOS).
    """

    def __init__(
        self,
        to_target_D: Tensor,
        target_size: int,
        spell: Callable[[int], list[int]],
        opening: Iterable[int] = (),
    ) -> None:
        super().__init__(to_target_D, target_size)
        self._own_ids: list[int] = self.to_draft_V.tolist()
        self._spell = cache(spell)
        self._opening = [*opening]

    @classmethod
    def from_tokenizers(
        cls,
        draft: PreTrainedTokenizerBase,
        target: PreTrainedTokenizerBase,
        *,
        draft_size: int,
        target_size: int,
    ) -> TokenIntersection:
        """draft_size, target_size: how many ids each model's logits have.

        `share` is of the target's tokens; its logits may be padded. Where a tokenizer has several
        tokens of the same bytes, one is taken, a byte's stand-in last. The target's EOS is the
        draft's EOS if the draft has no token of its name. Raises FlyError if nothing is shared.
        """
        draft_ids, target_ids = _ids(draft, draft_size), _ids(target, target_size)
        shared = {draft_ids[key]: target_ids[key] for key in draft_ids.keys() & target_ids.keys()}
        if not shared:
            raise FlyError(
                f"dual_tok=true: the draft's {len(draft)} tokens and the target's {len(target)} "
                "have none in common: choose another draft"
            )
        ends = (draft.eos_token_id, target.eos_token_id)
        if None not in ends and ends[0] < draft_size and ends[1] not in shared.values():
            shared[ends[0]] = ends[1]
        to_target_D = torch.full((draft_size,), NONE)
        to_target_D[[*shared]] = torch.tensor([*shared.values()])
        begins = draft.bos_token_id is not None and draft.encode("")[:1] == [draft.bos_token_id]
        found = cls(
            to_target_D,
            target_size,
            _speller(draft, target, draft_ids),
            [draft.bos_token_id] if begins else [],
        )
        found.share = len(shared) / len(target)
        return found

    def speakable(self, tokens: Iterable[int]) -> list[int]:
        """The draft ids of these target tokens, up to the first that it cannot draft."""
        found = []
        for token in tokens:
            if (own := self._own_ids[token]) == NONE:
                break
            found.append(own)
        return found

    def read(self, token: int, *, first: bool = False) -> list[int]:
        """The draft ids, at least one, that stand for a target token; as the first of a text with
        what the draft's tokenizer puts there."""
        own = self._own_ids[token]
        ids = self._spell(token) if own == NONE else [own]
        opens = not first or ids[: len(self._opening)] == self._opening
        return ids if opens else [*self._opening, *ids]


def _speller(
    draft: PreTrainedTokenizerBase,
    target: PreTrainedTokenizerBase,
    draft_ids: dict[_Spelling, int],
) -> Callable[[int], list[int]]:
    """Reads a target token's bytes with the draft's tokens, always the longest that fits.

    Not by the draft's tokenizer itself: as a part of a text a token may be less than a character,
    and many tokenizers put a space before whatever they are given. draft_ids: by spelling.
    """

    bytes_of = token_bytes.reader(target)
    own = {piece: index for (special, piece), index in draft_ids.items() if not special}
    longest = max(map(len, own), default=0)
    start = _first(draft.bos_token_id, draft.eos_token_id, 0)
    unknown = _first(draft.unk_token_id, start)

    def spell(token: int) -> list[int]:
        if token == target.bos_token_id:  # a text's beginning, not a part of it
            return [start]
        rest, ids = bytes_of(token), list[int]()
        while rest:
            lengths = range(min(len(rest), longest), 0, -1)
            length = next((n for n in lengths if rest[:n] in own), 1)
            ids.append(own.get(rest[:length], unknown))
            rest = rest[length:]
        return ids or [unknown]

    return spell


def _first(*ids: int | None) -> int:
    return next(index for index in ids if index is not None)


def _ids(tokenizer: PreTrainedTokenizerBase, size: int) -> dict[_Spelling, int]:
    """The ids below `size` by spelling. Of several ids for one spelling, the first that is not a
    byte's stand-in."""
    added = tokenizer.added_tokens_decoder
    bytes_of = token_bytes.reader(tokenizer)
    found: dict[_Spelling, int] = {}
    pieces = tokenizer.get_vocab().items()
    for _, index in sorted((token_bytes.is_fallback(piece), index) for piece, index in pieces):
        if index < size:
            special = index in added and added[index].special
            found.setdefault((special, bytes_of(index)), index)
    return found
