"""Passes of an EAGLE-3 head, and its K/V by slot.

The head reads pairs: pair i is the embedding of token i + 1 and the target's features at token i,
and predicts token i + 2. Where the features are not known yet, the head's own state takes their
place: that is how it drafts more than one token.

Shapes: B sequences, Q pairs of each (padded), F features of a token (hidden states side by side), H
the head's hidden size, D draft ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from fly.execution.grouped_attention import grouped_attention
from fly.execution.heads.base import Head
from fly.execution.kv_cache import SlotCache
from fly.execution.model_runner import causal_mask, padded
from fly.execution.slot_runner import SlotRunner
from fly.models.heads.checkpoint import Checkpoint, TargetShape
from fly.models.heads.eagle3 import Eagle3Files, files_of


class PairAttention(nn.Module):
    """Grouped-query attention whose inputs are twice as wide as its outputs."""

    def __init__(self, config: Any, tensors: Mapping[str, Any]) -> None:
        """tensors: of the checkpoint, by name: which norms and biases there are."""
        super().__init__()
        size = config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.num_key_value_groups, self.is_causal = size, heads // kv_heads, True
        q, k, v, o = (f"layer.self_attn.{name}_proj.bias" in tensors for name in "qkvo")
        self.q_proj = nn.Linear(2 * config.hidden_size, heads * size, bias=q)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_heads * size, bias=k)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_heads * size, bias=v)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=o)
        has_head_norms, eps = "layer.self_attn.q_norm.weight" in tensors, config.rms_norm_eps
        self.q_norm = LlamaRMSNorm(size, eps) if has_head_norms else nn.Identity()
        self.k_norm = LlamaRMSNorm(size, eps) if has_head_norms else nn.Identity()

    def forward(
        self, pairs: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, cache: SlotCache
    ) -> Tensor:
        """pairs: [B, Q, 2H]. mask: additive, [B, 1, Q, T]. Returns [B, Q, H]."""
        query, key, value = (
            projection(pairs).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (part.transpose(1, 2) for part in (self.q_norm(query), self.k_norm(key)))
        query, key = apply_rotary_pos_emb(query, key, *angles)
        keys, values = cache.update(key, value.transpose(1, 2), 0)
        mixed, _ = grouped_attention(self, query, keys, values, mask, scaling=self.head_dim**-0.5)
        return self.o_proj(mixed.flatten(-2))


class PairLayer(nn.Module):
    """The head's one layer: attention over [embedding; state], beside the state, then the MLP."""

    def __init__(self, files: Eagle3Files) -> None:
        super().__init__()
        config = files.llama
        self._norm_before_residual = files.norm_before_residual
        self.self_attn = PairAttention(config, files.tensors)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        embeddings_BQH: Tensor,
        states_BQH: Tensor,
        angles: tuple[Tensor, Tensor],
        mask: Tensor,
        cache: SlotCache,
    ) -> Tensor:
        normed_BQH = self.hidden_norm(states_BQH)
        residual_BQH = normed_BQH if self._norm_before_residual else states_BQH
        pairs = torch.cat([self.input_layernorm(embeddings_BQH), normed_BQH], dim=-1)
        hidden_BQH = residual_BQH + self.self_attn(pairs, angles, mask, cache)
        return hidden_BQH + self.mlp(self.post_attention_layernorm(hidden_BQH))


class Eagle3Head(Head):
    """An EAGLE-3 head; `vocabulary` maps its ids to the target's. embed_tokens: its own embeddings,
    None where it uses the target's."""

    config_class = LlamaConfig

    def __init__(self, files: Eagle3Files) -> None:
        super().__init__(files.llama)
        config, count = files.llama, len(files.layers)
        self.layers_read = files.layers
        self.numbers_kept = config.hidden_size  # a state, until its token is final
        self.vocabulary = files.vocabulary
        self._norm_output = files.norm_output
        eps = config.rms_norm_eps
        width = count * files.feature_size
        has_bias = "fc.bias" in files.tensors
        self.fc = nn.Linear(width, config.hidden_size, bias=has_bias)
        self.input_norm = LlamaRMSNorm(width, eps) if files.norm_before_fc else None
        norms = [LlamaRMSNorm(files.feature_size, eps) for _ in range(count)]
        self.fc_norm = nn.ModuleList(norms) if files.fc_norm else None
        self.layer = PairLayer(files)
        self.norm = LlamaRMSNorm(config.hidden_size, eps)
        self.lm_head = nn.Linear(config.hidden_size, len(files.vocabulary.to_target_D), bias=False)
        own = files.tensors.get("embed_tokens.weight")
        self.embed_tokens = None if own is None else nn.Embedding(len(own), config.hidden_size)
        self.rotary = LlamaRotaryEmbedding(config)

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, target: TargetShape, layers: tuple[int, ...] | None = None
    ) -> Eagle3Head:
        """See `fly.models.heads.eagle3.files_of`."""
        files = files_of(checkpoint, target, layers)
        return replace(checkpoint, tensors=files.tensors).build(lambda: cls(files))

    def runner(self, target: PreTrainedModel, slots: int, max_length: int) -> Eagle3Runner:
        return Eagle3Runner(self, target, slots, max_length)

    def next_tokens(
        self, target: PreTrainedModel, tokens: list[int], features_1NF: Tensor
    ) -> dict[int, int]:
        runner = self.runner(target, 1, len(tokens))
        logits_ND = runner.score(tokens[1:], runner.project(features_1NF[0, :-1]))
        to_target_D = self.vocabulary.to(logits_ND.device).to_target_D
        return dict(enumerate(to_target_D[logits_ND.argmax(dim=-1)].tolist(), start=1))

    def project(self, features: Tensor) -> Tensor:
        """The target's features [.., F] as states [.., H]."""
        features = features.to(self.device, self.dtype)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(features)

    def forward(
        self,
        embeddings_BQH: Tensor,
        states_BQH: Tensor,
        positions_BQ: Tensor,
        mask: Tensor,
        cache: SlotCache,
    ) -> Tensor:
        """[B, Q, H] after the layer; `predict` makes logits of it."""
        angles = self.rotary(states_BQH, positions_BQ)
        return self.layer(embeddings_BQH, states_BQH, angles, mask, cache)

    def predict(self, hidden_BH: Tensor) -> tuple[Tensor, Tensor]:
        """(logits [B, D], the state that is fed back, [B, H])."""
        normed_BH = self.norm(hidden_BH)
        return self.lm_head(normed_BH), normed_BH if self._norm_output else hidden_BH


class Eagle3Runner(SlotRunner):
    """A head with the K/V of the running sequences, whose `lengths` count pairs.

    target: its embeddings serve a head without its own.
    """

    def __init__(
        self, head: Eagle3Head, target: PreTrainedModel, slots: int, max_length: int
    ) -> None:
        super().__init__(head, slots, head.device)
        self.head = head
        self.max_length = max_length
        self._embed: Any = head.embed_tokens or target.get_input_embeddings()

    @torch.inference_mode()
    def project(self, features: Tensor) -> Tensor:
        """The target's features [.., F] as states [.., H]."""
        return self.head.project(features)

    @torch.inference_mode()
    def catch_up(self, slot: int, tokens: list[int], states_QH: Tensor) -> None:
        """Feed a slot pairs of which nothing is to be predicted; any number."""
        for start in range(0, len(tokens), self.chunk):
            piece = slice(start, start + self.chunk)
            self._pass(slot, [tokens[piece]], [states_QH[piece]])

    @torch.inference_mode()
    def extend(self, tokens: list[list[int]], states: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Feed sequence b (slot b) its pairs: tokens[b] with states[b], [Q, H].

        Returns (logits [B, D], the states that are fed back, [B, H]) after each sequence's last
        pair; those of sequences with an empty feed are undefined, their cache is unchanged.
        """
        hidden_BQH = self._pass(0, tokens, states)
        last_B = torch.tensor([max(0, len(row) - 1) for row in tokens])
        last_B = last_B.to(self.device, non_blocking=True)
        return self.head.predict(hidden_BQH[torch.arange(len(tokens), device=self.device), last_B])

    @torch.inference_mode()
    def extend_ids(
        self, ids_B: Tensor, states_BH: Tensor, stay: list[bool]
    ) -> tuple[Tensor, Tensor]:
        """`extend` by one pair for tokens that are on the device only; stay: of which sequences."""
        hidden_B1H = self._pass_of(0, ids_B[:, None], states_BH[:, None])
        for slot, stays in enumerate(stay):
            self.lengths[slot] += stays
        return self.head.predict(hidden_B1H[:, 0])

    @torch.inference_mode()
    def score(self, tokens: list[int], states_QH: Tensor) -> Tensor:
        """Logits [Q, D] after each pair fed to slot 0."""
        return self.head.predict(self._pass(0, [tokens], [states_QH])[0])[0]

    def _pass(self, first_slot: int, tokens: list[list[int]], states: list[Tensor]) -> Tensor:
        ids_BQ = padded(tokens).to(self._embed.weight.device, non_blocking=True)
        hidden_BQH = self._pass_of(first_slot, ids_BQ, pad_sequence(states, batch_first=True))
        for slot, row in enumerate(tokens, start=first_slot):
            self.lengths[slot] += len(row)
        return hidden_BQH

    def _pass_of(self, first_slot: int, ids_BQ: Tensor, states_BQH: Tensor) -> Tensor:
        positions_BQ = self._begin(first_slot, *ids_BQ.shape)
        embeddings_BQH = self._embed(ids_BQ.to(self._embed.weight.device))
        return self.head(
            embeddings_BQH.to(self.device, self.head.dtype),
            states_BQH,
            positions_BQ,
            causal_mask(positions_BQ, self.cache.read_length, self.head.dtype),
            self.cache,
        )
