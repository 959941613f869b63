"""The bytes of single tokens, whatever alphabet a tokenizer writes them in.

A token may be only a part of a UTF-8 character. Byte-level tokenizers have a printable stand-in for
every byte; others (sentencepiece) write a space as U+2581, and may have tokens of one byte, such as
`<0xE2>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_FALLBACK_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def reader(tokenizer: Any) -> Callable[[int], bytes]:
    """From a token id of this tokenizer to the bytes that it adds to a text."""
    added = tokenizer.added_tokens_decoder
    alphabet = _byte_alphabet() if _is_byte_level(tokenizer) else None

    def token_bytes(token: int) -> bytes:
        piece: str | None = tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # the model's vocabulary may be padded past the tokenizer's
            return f"<{token}>".encode()
        if token in added and (added[token].special or alphabet is not None):
            return piece.encode()
        if alphabet is not None and all(character in alphabet for character in piece):
            return bytes(alphabet[character] for character in piece)
        if found := _FALLBACK_BYTE.fullmatch(piece):
            return bytes.fromhex(found[1])
        return piece.replace("\u2581", " ").encode()

    return token_bytes


def is_fallback(piece: str) -> bool:
    """Whether a token stands for a byte that its tokenizer has no other token for."""
    return _FALLBACK_BYTE.fullmatch(piece) is not None


def _is_byte_level(tokenizer: Any) -> bool:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return hasattr(tokenizer, "byte_decoder")
    return b"ByteLevel" in decoder.__getstate__()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 as itself, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(rest)
    }
