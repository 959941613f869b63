"""Token ids of an output as text in a record, and the tokenizer that they belong to.

Ids mean something under one tokenizer only, so a record names its tokenizer by a hash, and another
run uses the ids only if its own tokenizer has the same one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

_HASH_DIGITS = 16  # hex digits that are kept of a SHA-256
_MOST = 1 << 20  # ids of an output: a few bytes may decompress to gigabytes


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that outputs are kept and read with."""

    @property
    def all_special_ids(self) -> list[int]: ...

    def get_vocab(self) -> dict[str, int]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], **kwargs: Any) -> str: ...


def encode(ids: Sequence[int]) -> str:
    """The ids as little-endian 32-bit numbers, compressed (zlib), in base64."""
    return base64.b64encode(zlib.compress(np.asarray(ids, "<u4").tobytes(), 9)).decode("ascii")


def decode(text: str) -> tuple[int, ...]:
    """The ids of `encode`'s text. Raises ValueError if it is damaged, or of too many ids."""
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(base64.b64decode(text, validate=True), 4 * _MOST + 4)
        numbers = np.frombuffer(data, "<u4")
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"no token ids ({error})") from None
    if len(numbers) > _MOST:
        raise ValueError(f"more than {_MOST} token ids")
    if not stream.eof:
        raise ValueError("no token ids (incomplete)")
    return tuple(numbers.tolist())


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """The first 16 hex digits of the SHA-256 of the vocabulary and the special tokens' ids."""
    named = [sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_ids)]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:_HASH_DIGITS]
