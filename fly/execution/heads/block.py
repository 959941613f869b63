"""Block heads: one pass over the last token and a row of masks drafts several tokens.

DFlash (arXiv 2602.06036): Qwen3-like layers whose keys and values come from the target's hidden
states for the context and from the block itself for the block; every position of the block sees
all of it. DSpark adds a bias by the token before, so that one drafted token follows from another,
and a confidence for every position.

Shapes: B sequences, N context tokens, P positions of the block, K drafted tokens, F features: the
target's hidden states side by side, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from fly.execution.grouped_attention import grouped_attention
from fly.execution.heads.base import Head
from fly.execution.kv_cache import SlotCache
from fly.execution.model_runner import causal_mask, input_device
from fly.execution.slot_runner import SlotRunner
from fly.models.heads.block import BlockSpec, own_tensors, parse
from fly.models.heads.checkpoint import Checkpoint, TargetShape

Rotary = tuple[Tensor, Tensor]  # cosines and sines of positions
_CONTEXT, _STRIDE = 8, 4  # of a text that is looked at: tokens before the first block, and between


class BlockAttention(nn.Module):
    """Attention to the context's keys and values, which are in a cache, and to the block's own."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.index, self.size = index, config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.size, bias=bias)
        self.kv_proj = nn.Linear(hidden, 2 * config.num_key_value_heads * self.size, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.size, hidden, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.size, config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.size, config.rms_norm_eps)

    def write(self, x_BND: Tensor, rotary: Rotary, cache: SlotCache) -> tuple[Tensor, Tensor]:
        """Keys and values of x into the cache; returns all that may be read."""
        keys, values = self.kv_proj(x_BND).unflatten(-1, (2, -1, self.size)).unbind(dim=2)
        keys = _rotated(self.k_norm(keys).transpose(1, 2), rotary)
        return cache.update(keys, values.transpose(1, 2), self.index)

    def forward(self, x_BPD: Tensor, rotary: Rotary, mask: Tensor, cache: SlotCache) -> Tensor:
        queries = self.q_norm(self.q_proj(x_BPD).unflatten(-1, (-1, self.size)))
        queries = _rotated(queries.transpose(1, 2), rotary)
        keys, values = self.write(x_BPD, rotary, cache)
        mixed, _ = grouped_attention(self, queries, keys, values, mask, scaling=self.size**-0.5)
        return self.o_proj(mixed.flatten(2))


class BlockLayer(nn.Module):
    def __init__(self, config: Qwen3Config, index: int) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config, index)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BPD: Tensor, rotary: Rotary, mask: Tensor, cache: SlotCache) -> Tensor:
        x_BPD = x_BPD + self.self_attn(self.input_layernorm(x_BPD), rotary, mask, cache)
        return x_BPD + self.mlp(self.post_attention_layernorm(x_BPD))


class MarkovHead(nn.Module):
    """A bias on a token's logits by the token before it, of low rank."""

    def __init__(self, vocabulary: int, draft_vocabulary: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocabulary, bias=False)

    def forward(self, previous_B: Tensor) -> Tensor:
        return self.markov_w2(self.markov_w1(previous_B))


class Probe(nn.Linear):
    """A linear that is too narrow to be packed."""


class ConfidenceHead(nn.Module):
    """The logit of the probability that a token is accepted, if all before it are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = Probe(width, 1)


class BlockHead(Head):
    """The head's own weights; the embedding and most often the output head are the target's.

    vocabulary: ids of the target.
    """

    config_class = Qwen3Config

    def __init__(self, spec: BlockSpec, vocabulary: int) -> None:
        config = spec.decoder
        super().__init__(config)
        self.spec, self.layers_read = spec, spec.layers
        hidden = config.hidden_size
        draft_vocabulary = len(spec.vocabulary.to_target_D) if spec.vocabulary else vocabulary
        self.fc = nn.Linear(len(spec.layers) * hidden, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(
            BlockLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = Qwen3RMSNorm(hidden, config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.lm_head = self.markov_head = self.confidence_head = None
        if spec.vocabulary is not None:
            self.lm_head = nn.Linear(hidden, draft_vocabulary, bias=False)
        if spec.markov_rank:
            self.markov_head = MarkovHead(vocabulary, draft_vocabulary, spec.markov_rank)
        if spec.confidence is not None:
            reads_markov = spec.confidence == "hidden and markov"
            self.confidence_head = ConfidenceHead(hidden + spec.markov_rank * reads_markov)

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, target: TargetShape, layers: tuple[int, ...] | None = None
    ) -> BlockHead:
        """See `fly.models.heads.block.parse`."""
        spec = parse(checkpoint, target, layers)
        return own_tensors(checkpoint).build(lambda: cls(spec, target.vocabulary))

    def runner(self, target: PreTrainedModel, slots: int, max_length: int) -> BlockRunner:
        return BlockRunner(self, target, slots)

    def next_tokens(
        self, target: PreTrainedModel, tokens: list[int], features_1NF: Tensor
    ) -> dict[int, int]:
        places = range(_CONTEXT, len(tokens), _STRIDE)
        last = [tokens[at] for at in places]
        runner = BlockRunner(self, target, len(places))
        runner.extend(0, features_1NF.expand(len(places), -1, -1), list(places))
        first_BD = runner.logits(runner.draft(last)[:, :1])[:, 0]
        logits_BV = runner.after(first_BD, torch.tensor(last, device=first_BD.device))
        return dict(zip(places, logits_BV.argmax(dim=-1).tolist()))

    def write_context(self, features_BNF: Tensor, positions_BN: Tensor, cache: SlotCache) -> None:
        """Keys and values of the target's hidden states at these positions."""
        x_BND = self.hidden_norm(self.fc(features_BNF))
        rotary = self.rotary_emb(x_BND, positions_BN)
        for layer in self.layers:
            layer.self_attn.write(x_BND, rotary, cache)  # type: ignore[union-attr, operator]

    def forward(
        self, x_BPD: Tensor, positions_BP: Tensor, mask: Tensor, cache: SlotCache
    ) -> Tensor:
        """A block of embeddings to its states, [B, P, D], for the output head.

        mask: additive, [B, 1, P, T], over what the cache holds, the block at its end.
        """
        rotary = self.rotary_emb(x_BPD, positions_BP)
        for layer in self.layers:
            x_BPD = layer(x_BPD, rotary, mask, cache)
        return self.norm(x_BPD)


def _rotated(x_BHND: Tensor, rotary: Rotary) -> Tensor:
    cos, sin = (part[:, None] for part in rotary)
    first, second = x_BHND.chunk(2, dim=-1)
    return x_BHND * cos + torch.cat([-second, first], dim=-1) * sin


class BlockRunner(SlotRunner):
    """A block head with its K/V of the running sequences' context.

    A block's own K/V are written behind the context's and overwritten by what comes next: nothing
    of a block stays, and `lengths` never count it.
    """

    def __init__(self, head: BlockHead, target: PreTrainedModel, slots: int) -> None:
        super().__init__(head, slots, head.device)
        self.head, self.spec, self.dtype = head, head.spec, head.dtype
        self.target, self.block = target, head.spec.block_size
        self.max_length: int = head.config.max_position_embeddings
        self._vocabulary = self.spec.vocabulary and self.spec.vocabulary.to(self.device)

    @torch.inference_mode()
    def extend(self, first_slot: int, features_BNF: Tensor, counts: list[int]) -> None:
        """Take in the first counts[b] features of slot first_slot + b: of the tokens that follow
        what it holds."""
        width = max(counts)
        if width == 0:
            return
        positions_BN = self._begin(first_slot, len(counts), width)
        features_BNF = features_BNF[:, :width].to(self.device, self.dtype).contiguous()
        self.head.write_context(features_BNF, positions_BN, self.cache)
        for slot, count in enumerate(counts, start=first_slot):
            self.lengths[slot] += count

    @torch.inference_mode()
    def draft(self, last: list[int]) -> Tensor:
        """States [B, most_drafts, D] that draft what follows the last tokens of slots 0..B-1."""
        width = self.spec.block_size
        positions_BP = self._begin(0, len(last), width)
        masks = [self.spec.mask_token_id] * (width - 1)
        ids_BP = torch.tensor([[token, *masks] for token in last])
        ids_BP = ids_BP.to(input_device(self.target), non_blocking=True)
        x_BPD = self.target.get_input_embeddings()(ids_BP)
        sees_all_BP = positions_BP[:, -1:].expand(-1, width)
        states_BPD = self.head(
            x_BPD.to(self.device, self.dtype),
            positions_BP,
            causal_mask(sees_all_BP, self.cache.read_length, self.dtype),
            self.cache,
        )
        return states_BPD[:, width - self.spec.most_drafts :]

    @torch.inference_mode()
    def logits(self, states_BKD: Tensor) -> Tensor:
        """Over the head's ids; `after` makes them the target's."""
        lm_head: Any = self.head.lm_head
        if lm_head is None:
            lm_head = self.target.get_output_embeddings()
            states_BKD = states_BKD.to(self.target.device, self.target.dtype)
        logits_BKD: Tensor = lm_head(states_BKD.contiguous())
        return logits_BKD.to(self.device)

    @torch.inference_mode()
    def after(self, logits_BD: Tensor, previous_B: Tensor) -> Tensor:
        """Logits [B, V] over the target's ids of a token that follows `previous`; ids that the head
        cannot draft are -inf."""
        if self.head.markov_head is not None:
            logits_BD = logits_BD + self.head.markov_head(previous_B)
        return logits_BD if self._vocabulary is None else self._vocabulary.spread_logits(logits_BD)

    @torch.inference_mode()
    def confidence(self, states_BD: Tensor, previous_B: Tensor) -> Tensor:
        """The probability, by the head, that a token which follows `previous` is accepted. [B]."""
        assert self.head.confidence_head is not None
        if self.spec.confidence == "hidden and markov":
            assert self.head.markov_head is not None
            embedded = self.head.markov_head.markov_w1(previous_B)
            states_BD = torch.cat([states_BD, embedded.to(states_BD.dtype)], dim=-1)
        return torch.sigmoid(self.head.confidence_head.proj(states_BD).float())[:, 0]
