"""Tokenizers that differ in alphabet, size, order and special tokens, and drafts that use them."""

import copy
import json
import random
from pathlib import Path

import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from fly.models.draft_vocabulary import NONE
from fly.models.token_intersection import TokenIntersection
from tests import tiny

PROSE = [
    "The draft proposes some tokens and the target verifies them in a single pass.",
    "Every token that the target would have said itself is kept, and the first other one is not.",
    "What the answer is does not depend on the draft; how long it takes does.",
] * 4
CODE = [
    "def total(values):\n    result = 0\n    for value in values:\n        result += value\n",
    "    return {key: value for key, value in items.items() if value is not None}\n",
    "the answer = total([1, 2, 3])\nprint(f'the result is {answer}')\n",
] * 4


def _fast(core: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    core.add_special_tokens([AddedToken(name, special=True) for name in special.values()])
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=512, **special)


def byte_bpe(texts, size: int, eos: str = "<|end|>", bos: str | None = None):
    """A byte-level BPE tokenizer of `size` tokens and its special ones, trained on the texts, with
    ids in an order of its own."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    data = json.loads(core.to_str())
    pieces = sorted(data["model"]["vocab"])
    ids = random.Random(size).sample(range(len(pieces)), len(pieces))
    data["model"]["vocab"] = dict(zip(pieces, ids))
    core = Tokenizer.from_str(json.dumps(data))
    return _fast(core, eos_token=eos, **({"bos_token": bos} if bos else {}))


def words(*pieces: str, **special: str):
    """These tokens and no others; the first stands for what is none of them."""
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    return _fast(Tokenizer(models.WordLevel(vocabulary, unk_token=pieces[0])), **special)


def unigram(texts, size: int):
    """As sentencepiece makes them: a space is U+2581, missing characters are bytes, BOS is put
    before every text."""
    learner = Tokenizer(models.Unigram())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(
        texts, trainers.UnigramTrainer(vocab_size=size, show_progress=False, unk_token="<unk>")
    )
    pieces = sorted(piece for piece in learner.get_vocab() if piece != "<unk>")
    named = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    scored = [(name, 0.0) for name in named] + [(piece, -float(len(pieces))) for piece in pieces]
    core = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return _fast(core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def intersection(draft, target, draft_padding: int = 0, target_padding: int = 0):
    return TokenIntersection.from_tokenizers(
        draft,
        target,
        draft_size=len(draft) + draft_padding,
        target_size=len(target) + target_padding,
    )


def speaking(original, shared: TokenIntersection, seed: int = 11):
    """`original`, a target, with the ids of a draft: the rows of a shared token are the target's,
    those of the draft's other tokens random. All other weights are the original's own."""
    torch.manual_seed(seed)
    result = copy.deepcopy(original, {id(weight): weight for weight in original.parameters()})
    ids = shared.to_target_D
    result.config.vocab_size = len(ids)
    result.get_input_embeddings().padding_idx = None  # it may be past the rows that are left
    with torch.no_grad():
        for layer in (result.get_input_embeddings(), result.get_output_embeddings()):
            rows = torch.randn(len(ids), layer.weight.shape[1]) * original.config.initializer_range
            rows[ids != NONE] = layer.weight[ids[ids != NONE]]
            layer.weight = torch.nn.Parameter(rows)
    return result


def save(folder: Path, model, tokenizer) -> Path:
    """As from_pretrained reads."""
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.bos_token_id = model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_pair(root: Path, of_target, of_draft) -> Path:
    """Folders `target` and `draft`: a tiny target, and a noisy copy of it in the draft's ids."""
    target = tiny.model(seed=1, vocab=len(of_target))
    draft = speaking(tiny.noisy_copy(target, 0.01), intersection(of_draft, of_target))
    save(root / "target", target, of_target)
    save(root / "draft", draft, of_draft)
    return root
