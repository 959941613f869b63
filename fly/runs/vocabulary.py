"""The texts of single tokens in a file, so that traces can be read without the tokenizer.

A token may be only a part of a UTF-8 character; its bytes are then kept in hexadecimal.
"""

from __future__ import annotations

from fly.runs.shapes import TokenLine


def line_of(token: int, piece: bytes) -> TokenLine:
    try:
        return {"id": token, "text": piece.decode()}
    except UnicodeDecodeError:
        return {"id": token, "bytes": piece.hex()}


def bytes_of(line: TokenLine) -> bytes:
    return bytes.fromhex(line["bytes"]) if "bytes" in line else line.get("text", "").encode()
