"""One model with its cache: ragged forward passes over running sequences.

Shapes: B sequences, Q new tokens of each (padded), V vocabulary, F features: the hidden states of
the layers asked for, side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from fly.errors import FlyError
from fly.execution.cuda_graphs import LIKELIEST, Chooser, CudaGraphRunner, Drafted, PassOutput
from fly.execution.grouped_attention import NAME, use_attention
from fly.execution.slot_runner import SlotRunner
from fly.execution.token_attention import of_tokens
from fly.execution.uniform_passes import UniformPasses
from fly.models.token_intersection import TokenIntersection

# for `logits_to_keep`, where 0 is all positions: transformers takes any index in place of a number,
# and a tensor would have to be moved
_NO_LOGITS = slice(0)


class ModelRunner(SlotRunner):
    """A causal language model and the K/V of the running sequences.

    A slot keeps what was written to it until something else is, so that a later prompt may share
    it (`reuse_prefixes`).

    hidden_layers: of these, every pass keeps the hidden states until `take_hidden`. Numbered as
    transformers numbers hidden_states: 0 is the embeddings, i the output of layer i - 1, before the
    final norm.

    vocabulary: of the target, for a draft model. Models of one tokenizer pad theirs differently
    (Qwen2.5 has 151936 rows up to 3B, 152064 from 7B on), and each must be able to read the other:
    logits past the target's are cut off, and ids that only the target has are fed as the draft's
    last one.

    intersection: for a draft model with another tokenizer. It is fed its own ids; logits, and what
    `chain` drafts, are over the target's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        max_length: int,
        *,
        reuse_prefixes: bool = True,
        vocabulary: int | None = None,
        intersection: TokenIntersection | None = None,
    ) -> None:
        self.static: CudaGraphRunner | None = None  # `resize` clears it, and `uniform`
        self.uniform: UniformPasses | None = None
        super().__init__(model, slots, input_device(model))
        self.model = model
        self._vocabulary = vocabulary
        embedding: Any = model.get_input_embeddings()
        known = int(embedding.weight.shape[0])
        self._last_id = known - 1 if intersection is None and known < (vocabulary or 0) else None
        self.intersection = intersection
        self.max_length = max_length
        self._reuse_prefixes = reuse_prefixes
        if intersection is not None:
            intersection.to(self.device)
        self.devices = tuple({parameter.device for parameter in model.parameters()})
        self._layers: tuple[int, ...] = ()
        self._hidden: list[Tensor] = []

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self._layers

    @hidden_layers.setter
    def hidden_layers(self, layers: tuple[int, ...]) -> None:
        decoder: Any = self.model.get_decoder() if layers else None
        if layers and not (hasattr(decoder, "layers") and hasattr(decoder, "embed_tokens")):
            raise FlyError(
                f"target_model_path ({self.model.config.model_type}): its hidden states cannot be "
                "read: choose another target, or a drafter that reads none"
            )
        if layers != self._layers:
            self._drop_graphs()
        self._layers = layers

    @contextmanager
    def _capturing(self) -> Iterator[dict[int, Tensor]]:
        """Collects the hidden states asked for, by layer, of the pass within.

        Hooks last as long as the pass: a model outlives its runners, and may serve several.
        """
        decoder: Any = self.model.get_decoder() if self._layers else None
        found: dict[int, Tensor] = {}
        handles = []
        for layer in self._layers:

            def note(module: Any, inputs: Any, output: Any, layer: int = layer) -> None:
                found[layer] = output[0] if isinstance(output, tuple) else output

            module = decoder.layers[layer - 1] if layer else decoder.embed_tokens
            handles.append(module.register_forward_hook(note))
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def take_hidden(self) -> Tensor | None:
        """Hidden states of the passes since the last call, [B, Q, F]; None without hidden_layers.

        After `prefill` those of all tokens that were computed, B = 1; there may be none, Q = 0.
        """
        taken, self._hidden = self._hidden, []
        if not taken and self._layers:
            width = len(self._layers) * self.model.config.get_text_config().hidden_size
            taken = [torch.empty(1, 0, width, dtype=self.model.dtype, device=self.device)]
        return torch.cat(taken, dim=1) if taken else None

    def resize(self, slots: int) -> None:
        super().resize(slots)
        self._written: list[list[int]] = [[] for _ in range(slots)]  # tokens whose K/V lie there
        self._drop_graphs()

    def _drop_graphs(self) -> None:
        for passes in (self.static, self.uniform):
            if passes is not None:
                passes.clear()

    @torch.inference_mode()
    def prefill(
        self, slot: int, tokens: list[int], chunk: int | None = None, *, reuse: bool = True
    ) -> int:
        """Fill a slot; returns how many of its tokens were copied rather than computed.

        No logits are built.
        """
        self._hidden = []
        reused = self._copy_prefix(slot, tokens) if reuse and self._reuse_prefixes else 0
        self.lengths[slot] = reused
        self.catch_up(slot, tokens, chunk)
        return reused

    @torch.inference_mode()
    def catch_up(self, slot: int, tokens: list[int], chunk: int | None = None) -> None:
        """Feed a slot what it lacks of `tokens`, whose first `lengths[slot]` it holds."""
        chunk = chunk or self.chunk
        for start in range(self.lengths[slot], len(tokens), chunk):
            piece = tokens[start : start + chunk]
            self._forward(slot, [piece], with_logits=False)
            self.lengths[slot] += len(piece)

    def _copy_prefix(self, slot: int, tokens: list[int]) -> int:
        """Bring the longest prefix of `tokens` that any slot holds into `slot`; its length."""
        shared = [common_prefix(written, tokens) for written in self._written]
        source = max(range(self.slots), key=lambda other: (shared[other], other == slot))
        if source != slot and shared[source]:
            self.cache.copy_slot(source, slot, shared[source])
            self._written[slot] = tokens[: shared[source]]
        return shared[source]

    def reserve_rows(self, longest: int, *, width: int, spd_k: int) -> None:
        """Reserve memory at once for sequences of up to `longest` tokens, passes over `width` and
        drafts of `spd_k`: growing later drops all captured graphs, and takes more of an
        accelerator's memory than `--batch_size auto` counted. On a CPU caches grow with their
        sequences."""
        if self.static is None and self.device.type == "cpu":
            self.expect(min(longest, self.max_length) + width)
            return
        past = width + spd_k
        if self.static is not None:
            self.static.usual = spd_k
            past = self.static.reach(width, spd_k)
        self.reserve(min(longest, self.max_length) + past, spare=False)

    def reserve(self, tokens: int, *, spare: bool = True) -> None:
        if self.cache.reserve(tokens, spare=spare):
            self._drop_graphs()

    def use_static_passes(self, *, capture: bool, **how: Any) -> None:
        """From now on run `extend` in fixed shapes, with `capture` as CUDA graphs. how: as
        `CapturedPasses` takes it."""
        self.static = CudaGraphRunner(self, capture=capture, **how)

    def use_uniform_passes(self, *, capture: bool | None, **how: Any) -> None:
        """From now on a token's bits do not depend on what shares its pass, with `capture` by CUDA
        graphs (see fly.execution.uniform_passes)."""
        self.static = None
        self.uniform = UniformPasses(self, capture=capture, **how)

    @torch.inference_mode()
    def extend(self, tokens: list[list[int]]) -> Tensor:
        """Feed sequence b (slot b) its `tokens[b]`; returns logits [B, Q, V], Q the longest feed.

        Position i answers what follows a sequence's i-th new token; past its own feed the values
        are undefined. Lengths do not move: the caller says how many tokens stay, by `truncate` or
        `commit`. The tensor may be a graph's own: it is valid until the next pass.
        """
        self._hidden = []
        return self._forward(0, tokens, with_logits=True)

    @torch.inference_mode()
    def extend_ids(self, ids_BQ: Tensor) -> Tensor:
        """`extend` for tokens that are on the device only; `commit` names them afterwards."""
        if self.uniform is not None:
            return self.extend(ids_BQ.tolist())
        self._hidden = []
        return self._forward(0, [[]] * len(ids_BQ), ids_BQ, with_logits=True)

    @property
    def chains(self) -> bool:
        """Whether `chain` pays: on a CPU only passes that are needed are worth computing."""
        return self.static is not None or self.device.type != "cpu"

    @torch.inference_mode()
    def chain(self, feeds: list[list[int]], steps: int, choose: Chooser = LIKELIEST) -> Drafted:
        """Feed every sequence, then draft `steps` tokens of each, without a word from the host.

        Rows with an empty feed return undefined tokens; their cache is unchanged. Lengths move past
        all that was fed; `commit` names the tokens afterwards.
        """
        counts = [len(feed) for feed in feeds]
        counts_B = torch.tensor(counts).to(self.device, non_blocking=True)
        before, drafted = self.lengths.copy(), None
        if self.static is not None:
            drafted = self.static.chain(self._ids(feeds), counts_B, steps, choose)
        if drafted is None:
            drafted = self._chain_in_passes(feeds, counts_B, steps, choose)
        else:
            self._note_written(0, feeds)
        for slot, count in enumerate(counts):
            self.lengths[slot] = before[slot] + (count + steps - 1 if count else 0)
        return drafted

    def _chain_in_passes(
        self, feeds: list[list[int]], counts_B: Tensor, steps: int, choose: Chooser
    ) -> Drafted:
        logits_BQV = self.extend(feeds)
        rows_B, last_B = torch.arange(len(feeds), device=self.device), (counts_B - 1).clamp(min=0)
        logits_BV, drafted = logits_BQV[rows_B, last_B], list[Drafted]()
        for step in range(steps):
            if step:
                logits_BV = self.extend_ids(self.own_ids(drafted[-1].tokens)[:, None])[:, 0]
            drafted.append(choose(logits_BV, step, *choose.inputs))
            for slot, feed in enumerate(feeds):
                self.lengths[slot] += 1 if step else len(feed)
        return Drafted.together(drafted)

    def _ids(self, tokens: list[list[int]]) -> Tensor:
        return padded(tokens).to(self.device, non_blocking=True)

    def commit(self, slot: int, tokens: list[int], length: int) -> None:
        """`truncate(slot, length)`, and name those tokens (after passes on the device)."""
        written = self._written[slot]
        written += tokens[len(written) : length]
        self.lengths[slot] = length

    def _note_written(self, first_slot: int, tokens: list[list[int]]) -> None:
        """A pass overwrites what lies past each slot's length, with a graph's padding, too."""
        for slot in range(first_slot, self.slots if self.static else first_slot + len(tokens)):
            del self._written[slot][self.lengths[slot] :]
        for slot, row in enumerate(tokens, start=first_slot):
            self._written[slot] += row

    def static_pass(
        self, ids_BQ: Tensor, lengths_B: Tensor, read_length: int, slot_1: Tensor | None = None
    ) -> PassOutput:
        """One pass over slots 0..B-1 whose shapes do not depend on any value. slot_1: over this
        slot alone, and without logits."""
        positions_BQ = lengths_B[:, None] + torch.arange(ids_BQ.shape[1], device=self.device)
        first_slot = 0 if slot_1 is None else slot_1
        self.cache.begin(first_slot, positions_BQ, read_length, is_static=True)
        return self._call(ids_BQ, positions_BQ, with_logits=slot_1 is None)

    def token_pass(
        self,
        ids_T: Tensor,
        slots_T: Tensor,
        positions_T: Tensor,
        read_length: int,
        *,
        with_logits: bool,
    ) -> PassOutput:
        """One pass in which each token is a row of its own: logits [T, V] or empty, hidden [T, F].
        Its shapes do not depend on any value."""
        self.cache.begin_tokens(slots_T, positions_T, read_length)
        with of_tokens(self.model, slots_T, positions_T):
            output = self._call(ids_T[:, None], positions_T[:, None], with_logits=with_logits)
        return output.map(lambda part_T1: part_T1.flatten(0, 1))

    def own_ids(self, token_B: Tensor) -> Tensor:
        """What it is fed for tokens that were taken from its logits; -1 stands for any."""
        token_B = token_B.clamp(min=0)
        if self.intersection is None:
            return token_B
        return self.intersection.to_draft_V[token_B].clamp(min=0)  # logits may all be -inf

    def move(self, source: int, destination: int) -> None:
        super().move(source, destination)
        self._written[destination] = self._written[source][: self.lengths[source]]

    def _forward(
        self,
        first_slot: int,
        tokens: list[list[int]],
        ids_BQ: Tensor | None = None,
        *,
        with_logits: bool,
    ) -> Tensor:
        """Feed these rows, by a graph where one serves; returns the logits. ids_BQ: on the device,
        for tokens that the host does not know."""
        self._note_written(first_slot, tokens)
        output = None
        if self.uniform is not None:
            output = self._in_uniform_passes(self.uniform, first_slot, tokens, with_logits)
        else:
            ids_BQ = self._ids(tokens) if ids_BQ is None else ids_BQ
            if self.static is not None and with_logits:
                output = self.static.extend(ids_BQ)
            elif self.static is not None:
                output = self.static.feed(first_slot, ids_BQ)
            if output is None:
                positions_BQ = self._begin(first_slot, *ids_BQ.shape)
                output = self._call(ids_BQ, positions_BQ, with_logits=with_logits)
        if output.hidden is not None:
            self._hidden.append(output.hidden)
        return output.logits

    def _in_uniform_passes(
        self, passes: UniformPasses, first_slot: int, tokens: list[list[int]], with_logits: bool
    ) -> PassOutput:
        fed = [
            (token, slot, self.lengths[slot] + index)
            for slot, row in enumerate(tokens, start=first_slot)
            for index, token in enumerate(row)
        ]
        logits_NV, hidden_NF = passes.run(torch.tensor(fed), with_logits=with_logits)
        widths = [len(row) for row in tokens]

        def by_row(values: Tensor) -> Tensor:
            return pad_sequence(values.split(widths), batch_first=True)

        return PassOutput(
            by_row(logits_NV) if with_logits else logits_NV,
            None if hidden_NF is None else by_row(hidden_NF),
        )

    def _call(self, ids_BQ: Tensor, positions_BQ: Tensor, *, with_logits: bool) -> PassOutput:
        """The pass that the cache has begun."""
        if self._last_id is not None:
            ids_BQ = ids_BQ.clamp(max=self._last_id)
        mask = causal_mask(positions_BQ, self.cache.read_length, self.model.dtype)
        with use_attention(self.model, NAME), self._capturing() as hidden:
            output = self.model(
                input_ids=ids_BQ,
                # padding may lie past the context, where position tables have no entry
                position_ids=positions_BQ.clamp(max=self.max_length - 1),
                attention_mask=mask,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=0 if with_logits else _NO_LOGITS,
            )
        logits: Tensor = output.logits
        if self.intersection is not None:
            logits = self.intersection.spread_logits(logits)
        # layers may lie on several devices (parallelize=True)
        parts = [hidden[layer].to(self.device) for layer in self._layers]
        return PassOutput(
            logits[..., : self._vocabulary], torch.cat(parts, dim=-1) if parts else None
        )


def causal_mask(positions_BQ: Tensor, read_length: int, dtype: torch.dtype) -> Tensor:
    """[B, 1, Q, T], additive: a query sees every position up to its own."""
    keys_T = torch.arange(read_length, device=positions_BQ.device)
    hidden_BQT = keys_T > positions_BQ[:, :, None]
    mask_BQT = torch.zeros(hidden_BQT.shape, dtype=dtype, device=positions_BQ.device)
    return mask_BQT.masked_fill_(hidden_BQT, torch.finfo(dtype).min)[:, None]


def padded(tokens: list[list[int]]) -> Tensor:
    """[B, Q] on the host, zeros after each row's own tokens."""
    width = max(len(row) for row in tokens)
    return torch.tensor([row + [0] * (width - len(row)) for row in tokens])


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its token ids."""
    embedding: Any = model.get_input_embeddings()
    return embedding.weight.device


def context_of(model: PreTrainedModel, most: int) -> int:
    """Tokens that a model's positions reach, at most `most`."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(int(limit or most), most)


def common_prefix(left: list[int], right: list[int]) -> int:
    """How many leading tokens two lists share."""
    count = min(len(left), len(right))
    if left[:count] == right[:count]:
        return count
    return next(index for index in range(count) if left[index] != right[index])
