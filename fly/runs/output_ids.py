"""Token ids of an output as text in a record, and the tokenizer that they belong to.

Ids mean something under one tokenizer only, so a record names its tokenizer by a hash, and another
run uses the ids only if its own tokenizer has the same one.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fly.models.fingerprint import hash_json

_MOST = 1 << 20  # ids of an output: a few bytes may decompress to gigabytes


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


def tokenizer_hash(tokenizer: Any) -> str:
    """Of the vocabulary and the special tokens' ids."""
    return hash_json([sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_ids)])
