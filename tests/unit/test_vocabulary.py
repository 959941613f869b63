"""Token bytes without a tokenizer at hand: byte-level, sentencepiece, special and unknown ids."""

import pytest
from tokenizers import AddedToken

from fly.models import token_bytes
from fly.runs import context, reader, trace_writer
from tests import tiny


class Pieces:
    """A sentencepiece-like tokenizer."""

    added_tokens_decoder = {3: AddedToken("</s>", special=True)}  # noqa: RUF012
    pieces = {0: "\u2581def", 1: "<0xE2>", 2: "a\u2581b", 3: "</s>"}  # noqa: RUF012

    def convert_ids_to_tokens(self, token):
        return self.pieces.get(token)


@pytest.mark.parametrize(
    ("token", "expected"), [(0, b" def"), (1, b"\xe2"), (2, b"a b"), (3, b"</s>"), (9, b"<9>")]
)
def test_sentencepiece(token, expected):
    assert token_bytes.reader(Pieces())(token) == expected


def test_byte_level_tokens_add_up_to_the_text(tmp_path):
    """Every byte survives, also halves of characters, and each id is written once per run."""
    tokenizer = tiny.byte_tokenizer()
    text = "é ü 中\n\tx\u00ad"
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    current = context.start(tmp_path)
    for _ in range(2):  # a second call of the run
        trace = trace_writer.Trace(current, tokenizer, 0, 1)
        trace.add_to_vocabulary(ids)
        trace.close()
    context.start(None)
    (path,) = tmp_path.glob("fly_vocabulary_*.jsonl")
    written = reader.read_lines(path, dict)
    assert len(written) == len(set(ids))
    known = {line["id"]: reader._bytes_of(line) for line in written}
    assert b"".join(known[token] for token in ids).decode() == text + "</s>"
