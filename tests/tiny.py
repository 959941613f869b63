"""Tiny random models and a byte-level tokenizer, made in a moment."""

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from fly.execution.model_runner import ModelRunner
from fly.execution.pass_costs import PairCosts, PassCosts
from fly.settings import DrafterSettings, FlySettings, Settings
from fly.speculation.drafters.base import NoDrafter
from fly.speculation.drafters.cascade import CascadeDrafter
from fly.speculation.drafters.draft_model import ModelDrafter
from fly.speculation.drafters.from_texts import TextDrafter
from fly.speculation.drafters.lookup import Choice, Lookup
from fly.speculation.engine import Engine
from fly.speculation.rules.base import Rule
from fly.speculation.rules.exact import ExactRule
from fly.speculation.rules.fly import FlyRule
from fly.speculation.rules.gates import EntropyGate
from fly.speculation.sequence import Request

EOS = 2
TOKENIZER_VOCAB = 259  # 256 bytes, <s>, </s>, <pad>


def model(seed: int, vocab: int = 64, layers: int = 2, **kwargs):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=kwargs.pop("hidden_size", 32),
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=kwargs.pop("max_position_embeddings", 512),
        eos_token_id=257 if vocab == TOKENIZER_VOCAB else EOS,
        bos_token_id=256 if vocab == TOKENIZER_VOCAB else 1,
        tie_word_embeddings=kwargs.pop("tie_word_embeddings", False),
        initializer_range=0.25,  # at the usual 0.02 the context hardly changes the output
        **kwargs,
    )
    return Qwen2ForCausalLM(config).eval()


def noisy_copy(original, noise: float, seed: int = 7):
    torch.manual_seed(seed)
    result = copy.deepcopy(original)
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return result


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    vocab |= {"<s>": 256, "</s>": 257, "<pad>": 258}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template="{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
        model_max_length=512,
    )


def save_pair(root: Path) -> Path:
    """Folders `target` and `draft` with a tokenizer, as from_pretrained reads."""
    target = model(seed=1, vocab=TOKENIZER_VOCAB)
    tokenizer = byte_tokenizer()
    for name, saved in (("target", target), ("draft", noisy_copy(target, 0.01))):
        saved.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


def prompts(count: int = 5, vocab: int = 64, seed: int = 3) -> list[list[int]]:
    """Prompts of unequal length, the first of one token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 7, 20, 33, 5, 12, 2, 9][:count]
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]


def generate(model, prompt: list[int], budget: int, eos=EOS) -> list[int]:
    """transformers' own greedy generation: the reference that losslessness means."""
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=budget,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def slow(*case, **kwargs):
    """A case for CI alone: others test its parts daily."""
    return pytest.param(*case, marks=pytest.mark.slow, **kwargs)


def runner(model, slots: int, capture: bool | None = None, max_length=512, **kwargs):
    """capture: None is eager passes, else static ones, as CUDA graphs if it is true."""
    result = ModelRunner(model, slots, max_length, **kwargs)
    if capture is not None:
        result.use_static_passes(capture=capture)
    return result


def is_freed_at_once(made: list[ModelRunner]) -> bool:
    """Whether the K/V of the one runner in the list go with its last reference, without a cycle."""
    gone = weakref.ref(made[0].cache)
    gc.disable()
    try:
        made.clear()
        return gone() is None
    finally:
        gc.enable()


# Passes over many tokens cost little more than narrow ones, as on a large machine.
COSTS = PairCosts(PassCosts((1, 512), (1.0, 2.0)), PassCosts((1, 512), (0.3, 0.6)), "test")


def lookup(
    slots: int, names=("own",), *, eos=frozenset({EOS}), sequences=None, learns=False,
    has_model=False, **keys,
) -> Lookup:  # fmt: skip
    """Drafts from texts. sequences: of the run, else as many as slots. keys: of DrafterSettings."""
    settings = DrafterSettings(min_ngram_size=1, max_ngram_size=4, **keys)
    choice = Choice(COSTS, sequences or slots, learns=learns, has_model=has_model)
    return Lookup(settings, names, choice, eos)


def text_drafter(slots: int, names=("own",), **kwargs) -> TextDrafter:
    return TextDrafter(lookup(slots, names, **kwargs))


def drafter(
    name: str, slots: int, draft_model, eos=frozenset({EOS}), max_length=512, capture=None, **kwargs
):
    """kwargs: of the draft's runner."""
    if name == "none":
        return NoDrafter()
    if name == "ngram":
        return text_drafter(slots, eos=eos)
    draft = runner(draft_model, slots, capture, max_length, **kwargs)
    return CascadeDrafter(draft, eos, (1, 4, 6)) if name == "cascade" else ModelDrafter(draft, eos)


EXACT = ExactRule(Settings())


def fly_rule(gates=(), window=0, lookahead=0) -> FlyRule:
    """FLy's rule with any gates. lookahead: None lets the window stay open across rounds."""
    rule = FlyRule(FlySettings())
    rule.gates, rule.window, rule.lookahead = tuple(gates), window, lookahead
    return rule


def relaxed(window: int, threshold: float | None, across=False, kind="top3") -> FlyRule:
    """FLy's rule with its entropy gate alone."""
    gates = () if threshold is None else (EntropyGate(threshold, kind),)
    return fly_rule(gates, window, None if across else window)


def gated_rule(*gates) -> Rule:
    """Lets in every mismatch that passes, also when sampling."""
    rule = Rule(Settings())
    rule.gates = gates
    return rule


def engine(target, drafter_, k, rule=EXACT, slots=1, eos=frozenset({EOS}), decode=str, **kw):
    """target: a model, or a runner of its own (`slots` is the runner's then)."""
    own = target if isinstance(target, ModelRunner) else runner(target, slots)
    return Engine(own, drafter_, rule, spd_k=k, eos_ids=eos, decode=decode, **kw)


def decode_all(engine_, prompts_, budget=60, stops=()):
    """Records in the order of the prompts."""
    requests = [Request(tuple(p), budget, tuple(stops), tag=i) for i, p in enumerate(prompts_)]
    records = {record.request.tag: record for record in engine_.run(requests)}
    return [records[index] for index in range(len(prompts_))]


def total(records, name: str) -> int:
    return sum(getattr(record.counts, name) for record in records)
