"""Stop strings are found at the token that completes them, whatever the tokenizer's bytes do."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fly.speculation.stop_strings import StopMatcher

WORDS = ["▁a", "b", "stop", "▁", "x"]


def fallback():
    """Llama 2's way: what is no word is bytes, and a broken run of bytes is lost as a whole."""
    tokens = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer, len(WORDS)


def byte_level():
    """Qwen's and Llama 3's way: every byte is a letter."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    table = {tokenizer.decode([i]): i for i in range(256)}
    return tokenizer, table


TOKENIZER, FIRST_BYTE = fallback()


def decode(ids):
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


def as_bytes(text):
    return [FIRST_BYTE + byte for byte in text.encode()]


def by_definition(stops, tokens, decode=decode):
    """The first prefix whose text holds a stop."""
    for count in range(1, len(tokens) + 1):
        text = decode(tokens[:count])
        if any(stop in text for stop in stops):
            return count
    return None


def in_blocks(stops, tokens, sizes, decode=decode):
    matcher, at = StopMatcher(stops, decode), 0
    for size in sizes:
        found = matcher.tokens_until_match(tokens[:at], tokens[at : at + size])
        if found is not None:
            return at + found
        at += size
    return None


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("before", ["😀", "กขคง", "ab😀😀😀😀", "กข" * 20])
def test_a_stop_behind_bytes_of_a_character_is_found_at_once(before, size):
    """Token by token a tail began within the emoji, and the newlines were lost with it."""
    tokens = [*as_bytes(before), *as_bytes("\n\n"), *as_bytes("ก"), 1]
    sizes = [size] * (len(tokens) // size + 1)
    expected = len(as_bytes(before)) + 2
    assert in_blocks(["\n\n"], tokens, sizes) == expected == by_definition(["\n\n"], tokens)


pieces = st.lists(
    st.one_of(
        st.sampled_from(range(len(WORDS))).map(lambda index: [index]),
        st.sampled_from(["😀", "ก", "é", "\n", "s", "to"]).map(as_bytes),
    ),
    max_size=14,
)


@given(pieces, st.lists(st.integers(1, 6), min_size=60, max_size=60))
@example(  # a block that ends in three of an emoji's four bytes
    [as_bytes("😀"), as_bytes("ก"), *[as_bytes("\n")] * 3, as_bytes("😀")],
    [1, 1, 1, 1, 3, 6, *[1] * 54],
)
@settings(max_examples=300, deadline=None)
def test_blocks_find_what_the_definition_says(parts, sizes):
    tokens = [token for part in parts for token in part]
    for stops in (["\n\n"], ["stop"], ["ก\n", "😀"], ["stop", ""]):
        assert in_blocks(stops, tokens, sizes) == by_definition(stops, tokens)


@given(st.text("ก😀\nas", max_size=12), st.lists(st.integers(1, 6), min_size=60, max_size=60))
@settings(max_examples=100, deadline=None)
def test_byte_level_tokenizers_too(text, sizes):
    tokenizer, _ = byte_level()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = "".join(word for word, _ in letters.pre_tokenize_str(text)) if text else ""
    tokens = [tokenizer.token_to_id(letter) for letter in words]

    def own(ids):
        return tokenizer.decode(list(ids))

    for stops in (["\n\n"], ["ก\n", "😀"]):
        assert in_blocks(stops, tokens, sizes, own) == by_definition(stops, tokens, own)


@pytest.mark.parametrize("within", [0, 1, 2])
def test_the_cost_does_not_grow_with_the_text(within):
    """Not where it ends within a character, either."""
    seen = []

    def counting(ids):
        seen.append(len(ids))
        return decode(ids)

    matcher = StopMatcher(["\n\n"], counting)
    tokens = [*(as_bytes("กข") * 200), *as_bytes("ก")[:within]]
    assert matcher.tokens_until_match(tokens, as_bytes("ก")[within : within + 1]) is None
    assert max(seen) < 30
    assert len(seen) < 20


def test_a_long_stop_string_of_long_characters():
    """One token a byte: as many tokens are looked at as the stop string may have bytes."""
    ids = list(("\u4e2d" * 8).encode())
    matcher = StopMatcher(["\u4e2d" * 8], lambda tokens: bytes(tokens).decode(errors="replace"))
    assert matcher.tokens_until_match(ids[:-1], ids[-1:]) == 1
