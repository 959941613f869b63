"""What two tokenizers share, and how a draft reads what they do not."""

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from fly.errors import FlyError
from fly.models import token_bytes
from fly.models.draft_vocabulary import NONE
from fly.models.token_intersection import TokenIntersection
from tests.two_tokenizers import CODE, PROSE, byte_bpe, intersection, unigram, words

TEXT = "def naïve(values):\n\treturn the 中文 answer 🎉  # not None"


@pytest.fixture(scope="module")
def prose():
    return byte_bpe(PROSE, 330)


@pytest.fixture(scope="module")
def code():
    return byte_bpe(CODE, 300, eos="</s>", bos="<s>")


@pytest.fixture(scope="module")
def pieces():
    return unigram(PROSE, 60)


@pytest.fixture(params=["bytes-bytes", "bytes-pieces", "pieces-bytes"])
def two(request, prose, code, pieces):
    """(draft's, target's)"""
    return {
        "bytes-bytes": (code, prose),
        "bytes-pieces": (pieces, prose),
        "pieces-bytes": (prose, pieces),
    }[request.param]


def test_shared_tokens_have_the_same_bytes_and_all_of_those_are_shared(two):
    draft, target = two
    shared = intersection(*two)
    of_draft, of_target = (token_bytes.reader(tokenizer) for tokenizer in two)
    pairs = {
        index: other for index, other in enumerate(shared.to_target_D.tolist()) if other != NONE
    }
    ends = (draft.eos_token_id, target.eos_token_id)
    assert pairs.pop(ends[0]) == ends[1]
    assert all(of_draft(index) == of_target(other) for index, other in pairs.items())
    ordinary = [
        {bytes_of(i) for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids}
        for bytes_of, tokenizer in ((of_draft, draft), (of_target, target))
    ]
    assert {of_draft(index) for index in pairs} == ordinary[0] & ordinary[1]
    assert 0 < shared.share == (len(pairs) + 1) / len(target) < 1


def test_spellings_of_spaces_newlines_and_single_bytes_are_one(prose, pieces):
    shared = intersection(pieces, prose)
    to_target = shared.to_target_D.tolist()
    of_pieces, of_prose = pieces.get_vocab(), prose.get_vocab()
    assert to_target[of_pieces["\u2581the"]] == of_prose["\u0120the"]
    assert to_target[of_pieces["<0x0A>"]] == of_prose["\u010a"]
    assert to_target[of_pieces["<0xE4>"]] == of_prose["\u00e4"]  # not the character of that name
    # a letter is said as itself, and never as the byte's stand-in
    assert to_target[of_pieces["e"]] == of_prose["e"]
    assert to_target[of_pieces["<0x65>"]] == NONE


def test_a_text_is_read_as_the_same_bytes(two):
    """Every token by itself, halves of characters too."""
    shared = intersection(*two)
    of_draft, of_target = (token_bytes.reader(tokenizer) for tokenizer in two)
    tokens = two[1].encode(TEXT, add_special_tokens=False)
    parts = [shared.read(token) for token in tokens]
    assert [b"".join(map(of_draft, ids)) for ids in parts] == [of_target(t) for t in tokens]
    own = shared.to_draft_V[tokens].tolist()
    assert all([index] == ids for index, ids in zip(own, parts) if index != NONE)
    assert any(len(ids) > 1 for ids in parts) == any(index == NONE for index in own)


def test_the_longest_tokens_are_read(prose, code):
    """`result` is a token of the code's tokenizer only: it is not read letter by letter."""
    shared = intersection(prose, code)
    token = code.get_vocab()["\u0120result"]
    assert shared.to_draft_V[token] == NONE
    ids = shared.read(token)
    assert 1 < len(ids) < len(" result")
    assert prose.decode(ids) == " result"


def test_eos_is_mapped_by_its_role_and_by_its_name_first(prose, code):
    shared = intersection(code, prose)
    assert shared.to_target_D[code.eos_token_id] == prose.eos_token_id
    named = byte_bpe(CODE, 280, eos="</s>")
    named.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    shared = intersection(named, prose)
    assert shared.to_target_D[named.eos_token_id] == NONE
    assert shared.to_target_D[named.get_vocab()["<|end|>"]] == prose.eos_token_id


def test_a_special_token_is_not_the_text_of_its_name(prose, code):
    plain = words("<unk>", "<|end|>", "t", eos_token="</s>")
    assert intersection(plain, prose).to_target_D[:2].tolist() == [NONE, NONE]
    # a special token that the draft does not have is read as that text
    target = byte_bpe(PROSE, 300, eos="</s>")
    target.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    shared = intersection(code, target)
    ids = shared.read(target.get_vocab()["<|turn|>"])
    assert len(ids) > 1
    assert code.decode(ids) == "<|turn|>"


def test_texts_begin_as_the_drafts_tokenizer_begins_them(prose, code, pieces):
    """Once: the target's own BOS is read as it."""
    token = prose.encode("the")[0]
    shared = intersection(pieces, prose)
    assert shared.read(token, first=True) == [pieces.bos_token_id, *shared.read(token)]
    assert intersection(code, prose).read(token, first=True) == [
        *intersection(code, prose).read(token)
    ]
    shared = intersection(pieces, code)
    assert shared.read(code.bos_token_id, first=True) == [pieces.bos_token_id]
    # a draft without BOS begins a text as after the end of another
    assert intersection(prose, code).read(code.bos_token_id, first=True) == [prose.eos_token_id]


def test_bytes_that_the_draft_cannot_write_are_unknown_to_it(prose):
    """Also in a tokenizer without a token for that: something must stand for them."""
    named = {"unk_token": "<unk>", "eos_token": "</s>"}
    for special, filler in ((named, 0), ({"eos_token": "</s>"}, 3), ({}, 0)):
        shared = intersection(words("<unk>", "t", "h", **special), prose)
        assert shared.read(prose.get_vocab()["\u0120the"]) == [filler, 1, 2, filler]


def test_padding_is_nobodys_token(prose, code):
    """Logits past the tokenizers' ids are suppressed, and do not lower the share."""
    shared = intersection(code, prose, draft_padding=9, target_padding=20)
    assert shared.share == intersection(code, prose).share
    logits_NV = shared.spread_logits(torch.randn(2, len(code) + 9))
    assert logits_NV.shape == (2, len(prose) + 20)
    assert logits_NV[:, len(prose) :].eq(float("-inf")).all()
    assert logits_NV.isfinite().sum(dim=-1).tolist() == [(shared.to_target_D != NONE).sum()] * 2


def test_logits_go_to_the_targets_ids():
    shared = TokenIntersection(torch.tensor([4, NONE, 0]), 5, spell=lambda token: [1])
    logits_NV = shared.spread_logits(torch.tensor([[1.0, 9.0, 2.0]]))
    low = float("-inf")
    assert logits_NV.tolist() == [[2.0, low, low, low, 1.0]]
    assert shared.speakable([0, 4, 1, 0]) == [2, 0]
    assert [shared.read(token) for token in (0, 1, 4)] == [[2], [1], [0]]


def test_tokenizers_without_a_common_token_are_refused(prose):
    with pytest.raises(FlyError, match=r"dual_tok=true: .* none in common: choose another draft"):
        intersection(words("\u4e2d"), prose)


def test_added_tokens_of_spaces():
    """Gemma's runs of spaces are added tokens; its decoder replaces U+2581 in them, too."""
    vocabulary = {"<unk>": 0, "</s>": 1, "\u2581": 2, "a": 3}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    core.add_tokens([AddedToken("\u2581" * 4, normalized=True)])
    core.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    ids = tokenizer.encode("a    a")
    assert ids == [3, 4, 3]
    read = token_bytes.reader(tokenizer)
    assert b"".join(map(read, ids)).decode() == tokenizer.decode(ids) == "a    a"
    assert read(1) == b"</s>"
