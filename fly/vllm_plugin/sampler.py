"""What stands in for the rejection sampler of vLLM's first model runner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput

from fly.vllm_plugin.verifier import Verifier


class FlySampler:
    """Called as vLLM's RejectionSampler (vllm/v1/sample/rejection_sampler.py), which still applies
    penalties and finds log-probabilities.

    runner: vLLM's GPUModelRunner, which has the requests.
    """

    def __init__(self, runner: Any, verifier: Verifier) -> None:
        self._runner, self._verifier = runner, verifier
        self._own = runner.rejection_sampler

    def __call__(
        self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any
    ) -> SamplerOutput:
        counts = metadata.num_draft_tokens
        ids = self._runner.input_batch.req_ids
        if len(ids) != len(counts):  # a dummy run, to measure memory
            return self._own(metadata, draft_probs, logits, sampling_metadata)
        self._verifier.forget(self._runner.requests.keys())
        processed = self._processed(metadata, logits, sampling_metadata)
        requests = [self._runner.requests[name] for name in ids]
        blocks = self._verifier.verify(
            requests, counts, metadata.draft_token_ids, processed, draft_probs
        )
        width = metadata.max_spec_len + 1
        padded = [block + [-1] * (width - len(block)) for block in blocks]
        tokens = torch.tensor(padded, dtype=torch.int32).to(logits.device, non_blocking=True)
        return SamplerOutput(tokens, self._logprobs(metadata, logits, sampling_metadata, tokens))

    def _processed(self, metadata: Any, logits: Tensor, sampling_metadata: Any) -> Tensor:
        """All rows after what vLLM does before temperature; a draft of one token more has as many
        rows."""
        is_plain = sampling_metadata.all_greedy and sampling_metadata.no_penalties
        rows = logits if is_plain else logits.float()
        if sampling_metadata.max_num_logprobs is not None and rows is logits:
            rows = logits.clone()  # the log-probabilities are of what was there before
        drafts = sampling_metadata.spec_token_ids
        return self._own.apply_logits_processors(
            rows,
            replace(sampling_metadata, spec_token_ids=drafts and [[*own, 0] for own in drafts]),
            replace(metadata, num_draft_tokens=[count + 1 for count in metadata.num_draft_tokens]),
        )

    def _logprobs(
        self, metadata: Any, logits: Tensor, sampling_metadata: Any, tokens: Tensor
    ) -> Any:
        count = sampling_metadata.max_num_logprobs
        if count is None:
            return None
        of_drafts = logits[metadata.target_logits_indices].float()
        of_last = logits[metadata.bonus_logits_indices].float()
        return self._own._get_logprobs_tensors(count, metadata, logits, of_drafts, of_last, tokens)
