"""The bytes of single tokens, so that traces can be read without the tokenizer.

A token may be only a part of a UTF-8 character; its bytes are then kept in hexadecimal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from fly.runs.shapes import TokenLine

_FALLBACK_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def reader(tokenizer: Any) -> Callable[[int], bytes]:
    """From a token id of this tokenizer to its bytes."""
    alphabet = _byte_alphabet() if _is_byte_level(tokenizer) else None
    return lambda token: token_bytes(tokenizer, token, alphabet)


def token_bytes(tokenizer: Any, token: int, alphabet: dict[str, int] | None) -> bytes:
    """What the token adds to a text, as bytes.

    alphabet: the bytes by character of byte-level tokenizers. Others (sentencepiece) write a space
    as U+2581, and may have tokens of one byte, such as `<0xE2>`.
    """
    piece: str | None = tokenizer.convert_ids_to_tokens(token)
    if piece is None:  # the model's vocabulary may be padded past the tokenizer's
        return f"<{token}>".encode()
    if token in tokenizer.added_tokens_decoder:
        return piece.encode()
    if alphabet is not None and all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    if found := _FALLBACK_BYTE.fullmatch(piece):
        return bytes.fromhex(found[1])
    return piece.replace("\u2581", " ").encode()


def line_of(token: int, piece: bytes) -> TokenLine:
    try:
        return {"id": token, "text": piece.decode()}
    except UnicodeDecodeError:
        return {"id": token, "bytes": piece.hex()}


def bytes_of(line: TokenLine) -> bytes:
    return bytes.fromhex(line["bytes"]) if "bytes" in line else line.get("text", "").encode()


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
